"""The checks of the notebooks' exercises: a wrong answer is told which usual mistake gives just this answer."""

import torch


def assert_right(answer, right, mistakes, rtol=0.0, atol=0.0):
    """Raises AssertionError unless `answer` is `right`, with the sentence of the first mistake that would give it.

    answer, right  tensors of equal dims, numbers, or tuples and lists of numbers; anything else is compared with ==.
    mistakes       {sentence: what this mistake would have given}, the likeliest first. A value that is not known, or
                   that is right as well, does no harm: whether an answer is right depends on `right` alone.
    rtol, atol     |answer - value| <= atol + rtol * |value| for each element, for `right` as for the mistakes.
    """
    if _same(answer, right, rtol, atol):
        return
    found = (sentence for sentence, value in mistakes.items() if _same(answer, value, rtol, atol))
    raise AssertionError(next(found, None) or _difference(answer, right, rtol, atol))


def _numbers(value):
    """`value` as a float64 tensor on the CPU, or None."""
    try:
        return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        return None


def _same(a, b, rtol, atol):
    x, y = _numbers(a), _numbers(b)
    if x is None or y is None:
        return x is y and a == b
    return x.shape == y.shape and torch.allclose(x, y, rtol=rtol, atol=atol)


def _difference(answer, right, rtol, atol):
    """What is wrong, for an answer that none of the mistakes explains."""
    x, y = _numbers(answer), _numbers(right)
    if x is None or not isinstance(right, torch.Tensor):
        return f"{answer!r:.80} is wrong, and no usual mistake gives it: read the hint again"
    if x.shape != y.shape:
        return f"dims {tuple(x.shape)} instead of {tuple(y.shape)}"
    if x.isnan().any():
        return f"{int(x.isnan().sum()):,} of {x.numel():,} elements are NaN"
    off = ~torch.isclose(x, y, rtol=rtol, atol=atol)
    first = tuple(off.nonzero()[0].tolist())
    places = f"{int(off.sum()):,} of {x.numel():,} elements are wrong, and no usual mistake gives them"
    return f"{places}; the first is {list(first)}: {x[first]:.6g} instead of {y[first]:.6g}"
