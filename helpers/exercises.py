"""The checks of the notebooks' exercises: a wrong answer is told which usual mistake gives just this answer.

A check asks `untouched` first, calls the answer through `answered`, has its type compared by `assert_kind`, and its
value by `assert_right`. All of them fail with an AssertionError whose message says what to do.
"""

from collections.abc import Mapping

import torch


def assert_right(answer, right, mistakes, rtol=0.0, atol=0.0):
    """Raises AssertionError unless `answer` is `right`, with the sentence of the first mistake that would give it.

    answer, right  tensors of equal dims, numbers, or tuples, lists and dicts of these, in each other too; anything else
                   is compared with ==. Dtypes, devices, and tuple or list don't matter. NaN is never right.
    mistakes       {sentence: what this mistake would have given}, the likeliest first. A value that is not known, or
                   that is right as well, does no harm: whether an answer is right depends on `right` alone. NaN where
                   the answer has it counts as equal.
    rtol, atol     |answer - value| <= atol + rtol * |value| for each element, for `right` as for the mistakes.
    """
    if _same(answer, right, rtol, atol):
        return
    found = (sentence for sentence, value in mistakes.items() if _same(answer, value, rtol, atol, equal_nan=True))
    raise AssertionError(next(found, None) or _difference(answer, right, rtol, atol))


def untouched(function):
    """Whether a function is still the stub of its exercise: a docstring and `return None`."""
    code, stub = getattr(function, "__code__", None), _stub.__code__
    return code is not None and code.co_code == stub.co_code and code.co_consts[-1:] == stub.co_consts[-1:]


def _stub():
    """As every stub is."""
    return None


def answered(function, *arguments, told=None):
    """What an answer returns for `arguments`.

    told  {part of a message: sentence}: what to say in the place of an error with such a message.

    Raises AssertionError for an answer that is no function or takes other arguments, and where `told` has a sentence;
    other errors of the answer's own code pass, with their traceback.
    """
    if not callable(function):
        raise AssertionError(f"the answer is {in_words(function)}: define the function of the stub")
    try:
        return function(*arguments)
    except Exception as error:
        sentence = next((sentence for part, sentence in (told or {}).items() if part in str(error)), None)
        if sentence is None and isinstance(error, TypeError) and error.__traceback__.tb_next is None:  # not called
            sentence = f"keep the arguments that the stub has: {error}"
        if sentence is None:
            raise
        raise AssertionError(sentence) from error


def assert_kind(answer, kinds, wanted, length=None):
    """Raises AssertionError unless `answer` is of the type `kinds` (or one of them), a bool being no number.

    wanted  what to return, in words: "return {wanted}" ends the message.
    length  so many parts it has to have.
    """
    a_bool = isinstance(answer, bool) and bool not in (kinds if isinstance(kinds, tuple) else (kinds,))
    if a_bool or not isinstance(answer, kinds):
        hint = ": is `return` missing? Return" if answer is None else ": return"
        raise AssertionError(f"{in_words(answer)} was returned{hint} {wanted}")
    if length is not None and len(answer) != length:
        raise AssertionError(f"{in_words(answer)} was returned: return {wanted}")


def in_words(value):
    """What a value is: "None", "a tensor with dims (2, 3)", "a tuple of 2", "an int"."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor with dims {tuple(value.shape)}"
    kind = type(value)
    name = f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{size}"


def _numbers(value):
    """`value` as an int64, float64 or complex128 tensor on the CPU, or None."""
    try:
        kind = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        wide = torch.complex128 if kind.is_complex() else torch.float64 if kind.is_floating_point() else torch.int64
    except (TypeError, ValueError, RuntimeError):
        wide = torch.float64  # where an int is larger than int64
    try:
        found = torch.as_tensor(value, dtype=wide, device="cpu").detach()
        return found if found.layout is torch.strided else found.to_dense()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _parts(value):
    """{key or place: part} of a dict, tuple or list, else None."""
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, tuple | list) else None


def _same(a, b, rtol, atol, equal_nan=False):
    if isinstance(a, int) and isinstance(b, int) and not (rtol or atol):
        return a == b  # exact at any size
    p, q = _parts(a), _parts(b)
    if p is not None and q is not None:
        alike = isinstance(a, Mapping) == isinstance(b, Mapping) and p.keys() == q.keys()
        return alike and all(_same(p[key], q[key], rtol, atol, equal_nan) for key in q)
    x, y = _numbers(a), _numbers(b)
    if x is None and y is None:
        return _equal(a, b)
    return x is not None and y is not None and x.shape == y.shape and bool(_close(x, y, rtol, atol, equal_nan).all())


def _equal(a, b):
    try:
        return bool(a == b)
    except Exception:  # whatever an answer's own comparison raises, it isn't right
        return False


def _close(x, y, rtol, atol, equal_nan=False):
    """Elementwise, exact for two of integers."""
    if not (x.dtype.is_floating_point or x.is_complex() or y.dtype.is_floating_point or y.is_complex() or rtol or atol):
        return x == y
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    close = (x == y) | ((x - y).abs() <= atol + rtol * y.abs()) & y.isfinite()
    return close | (x.isnan() & y.isnan()) if equal_nan else close


def _difference(answer, right, rtol, atol):
    """What is wrong, for an answer that none of the mistakes explains."""
    x, y = _numbers(answer), _numbers(right)
    if x is None or y is None or not isinstance(right, torch.Tensor):
        p, q = _parts(answer), _parts(right)
        if q is not None and any(isinstance(part, torch.Tensor | Mapping | tuple | list) for part in q.values()):
            return _difference_of_parts(answer, p, q, rtol, atol)
        return f"{_short(answer)} is wrong, and no usual mistake gives it: read the hint again"
    if x.shape != y.shape:
        return f"dims {tuple(x.shape)} instead of {tuple(y.shape)}"
    if x.isnan().any():
        return f"{int(x.isnan().sum()):,} of {x.numel():,} elements are NaN"
    off = ~_close(x, y, rtol, atol)
    first = tuple(off.nonzero()[0].tolist())
    places = f"{int(off.sum()):,} of {x.numel():,} elements are wrong, and no usual mistake gives them"
    return f"{places}; the first is {list(first)}: {_digits(x[first])} instead of {_digits(y[first])}"


def _difference_of_parts(answer, parts, right, rtol, atol):
    """The first part that differs, for a right answer with tensors in it."""
    if parts is None:
        return f"{_short(answer)} instead of {len(right)} parts: {', '.join(map(repr, right))}"
    if parts.keys() != right.keys():
        return f"parts {', '.join(map(repr, parts))} instead of {', '.join(map(repr, right))}"
    key = next((key for key in right if not _same(parts[key], right[key], rtol, atol)), None)
    if key is None:
        return f"{_short(answer)} is wrong: of another type"
    return f"[{key!r}]: {_difference(parts[key], right[key], rtol, atol)}"


def _short(answer):
    """An answer in a few words; a tensor by its dims, since its elements would fill the page."""
    if isinstance(answer, torch.Tensor) and answer.numel() > 1:
        return in_words(answer)
    try:
        text = " ".join(repr(answer).split())
    except Exception:  # an int of 5,000 digits, for one
        text = f"your {type(answer).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"


def _digits(number):
    """A number in six digits; all of an integer's, which may differ in the last one."""
    value = number.item()
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
