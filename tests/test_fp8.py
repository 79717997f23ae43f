"""The FP8 cast, the scale rule, and a matmul that uses both kinds of scale: CASES fp8-cast, amax-edges, scale-mixup."""

import json
import math

import cudnn
import pytest
import torch

from helpers import build, describe, fp8, new_graph, target

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAST = [0.5, 448.0, 464.0, 465.0, 1000.0, -1000.0, math.inf, math.nan]
needs_fp8 = pytest.mark.skipif(target.sm < 89, reason=target.lacks("sm89"))


def check(got, expected):
    torch.testing.assert_close(got.float().cpu(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


# --- fp8-cast ---------------------------------------------------------------------------------------------------------


def test_cast_saturates_and_counts_clipped_finite_values():
    """Inf becomes 448 and isn't counted: only finite values are. 464 lies beyond 448, wherever it would be rounded."""
    values, clipped = fp8.cast(torch.tensor(CAST, device=target.device))
    assert values.dtype == E4M3
    check(values, [0.5, 448, 448, 448, 448, -448, 448, math.nan])
    assert clipped.item() == 4


def test_cast_to_e5m2():
    values, clipped = fp8.cast(torch.tensor([*CAST, 57344.0, 57345.0, -1e30]), E5M2)
    check(values, [0.5, 448, 448, 448, 1024, -1024, 57344, math.nan, 57344, 57344, -57344])
    assert clipped.item() == 2


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_rounds_to_nearest_even(dtype):
    """Halfway between two neighbours the one with an even last bit is taken, normal or subnormal; every value is kept.

    Neighbours in one sign have neighbouring bit patterns, and an even pattern is an even last bit.
    """
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = every.float()[every.float().isfinite() & (every.float() >= 0) & ~every.float().signbit()]
    assert torch.equal(fp8.cast(finite, dtype).values.float(), finite)
    below, above = finite[:-1], finite[1:]
    middle = (below + above) / 2
    expected = torch.where(torch.arange(len(middle)) % 2 == 0, below, above)
    assert torch.equal(fp8.cast(middle, dtype).values.float(), expected)
    step = above - below
    assert torch.equal(fp8.cast(middle + step / 16, dtype).values.float(), above)
    assert torch.equal(fp8.cast(-middle - step / 16, dtype).values.float(), -above)


def test_cast_multiplies_by_the_scale():
    x = torch.tensor([1.0, -3.0, 100.0])
    for scale in (10.0, torch.tensor(10.0)):
        values, clipped = fp8.cast(x, E4M3, scale)
        check(values, [10.0, -30.0, 448.0])
        assert clipped.item() == 1
    values, clipped = fp8.cast(torch.tensor([3e38]), E4M3, 10.0)  # finite, though the product is not
    check(values, [448.0])
    assert clipped.item() == 1


def test_cast_keeps_dtype_range_and_layout():
    x = torch.linspace(-8, 8, 2 * 3 * 5, dtype=torch.float16).reshape(2, 5, 3).transpose(1, 2)
    values, clipped = fp8.cast(x, E4M3, 2.0**-3)
    assert values.shape == x.shape and values.stride() == x.stride() and clipped.item() == 0
    assert torch.equal(values.float(), (x.float() / 8).to(E4M3).float())


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"e5m2, got torch\.float16"):
        fp8.cast(torch.ones(1), torch.float16)
    with pytest.raises(TypeError, match=r"e5m2, got torch\.int8"):
        fp8.next_scale(1.0, dtype=torch.int8)


# --- amax-edges -------------------------------------------------------------------------------------------------------

EDGES = [  # amax, last, expected scale, flagged
    (448.0, 1.0, 1.0, False),
    (7.0, 1.0, 64.0, False),
    (0.0, 1.0, 1.0, False),
    (0.0, 32.0, 32.0, False),
    (1e-36, 32.0, 2.0**126, False),
    (1e-45, 32.0, 2.0**126, False),
    (math.nan, 32.0, 32.0, True),
    (math.inf, 32.0, 32.0, True),
    (-math.inf, 32.0, 32.0, True),
    (-1.0, 32.0, 32.0, True),
    (math.nan, 1.0, 1.0, True),
]


@pytest.mark.parametrize(("amax", "last", "expected", "flagged"), EDGES)
def test_next_scale_at_the_edges(amax, last, expected, flagged):
    for given in (amax, torch.tensor(amax, device=target.device)):
        scale, flag = fp8.next_scale(given, last)
        assert scale.dtype == torch.float32 and scale.dim() == 0
        assert (scale.item(), flag.item()) == (expected, flagged)


def test_one_bad_element_flags_its_tensor():
    x = torch.linspace(-3, 5, 24)
    for bad in (math.nan, math.inf, -math.inf):
        x[7] = bad
        scale, flagged = fp8.next_scale(x.abs().amax(), last=12.0)
        assert scale.item() == 12.0 and flagged.item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_finite_positive_and_never_clip(dtype):
    """Over every fp32 exponent: scale and descale are normal numbers, and amax itself is not counted as clipped."""
    generator = torch.Generator().manual_seed(0)
    amax = torch.ldexp(1 + torch.rand(40, 280, generator=generator), torch.arange(-152, 128))
    amax = amax[amax.isfinite() & (amax > 0)]
    scale, flagged = fp8.next_scale(amax, dtype=dtype)
    smallest = torch.finfo(torch.float32).tiny
    assert not flagged.any()
    assert scale.isfinite().all() and (scale >= smallest).all() and (1 / scale >= smallest).all()
    largest = torch.finfo(dtype).max
    assert fp8.cast(amax, dtype).clipped > 0  # without its scale
    assert (amax * scale <= largest).all()
    used = amax * scale / largest
    assert (used[scale < fp8.LARGEST_SCALE] > 1 - 1e-6).all()  # and the range is used


def test_next_scale_of_e5m2():
    assert fp8.next_scale(3.5, dtype=E5M2).value.item() == 57344 / 3.5


# --- scale-mixup ------------------------------------------------------------------------------------------------------


def scale_mixup():
    """[[stored, its value, amax], ...] of A = 2, 1, 0 times B = 1 in one graph and one amax buffer, first 1e9."""
    device = target.device
    a, b = (torch.full((1, 32, 32), value, device=device).to(E4M3) for value in (2.0, 1.0))
    scales = [torch.tensor(value, device=device) for value in (0.5, 0.25, 10.0)]
    y, amax = torch.empty(1, 32, 32, device=device, dtype=E4M3), torch.tensor(1e9, device=device)

    graph = new_graph("scale_mixup", io=E4M3)
    A, B = describe(graph, a, "A"), describe(graph, b.transpose(1, 2), "B")
    names = ("descale_A", "descale_B", "scale")
    descale_a, descale_b, scale = (describe(graph, s, n) for s, n in zip(scales, names, strict=True))
    product = graph.mul(graph.mul(graph.matmul(A, B), descale_a), descale_b)
    M = graph.reduction(product, mode=cudnn.reduction_mode.AMAX).set_output(True).set_name("amax")
    M.set_data_type(cudnn.data_type.FLOAT).set_dim([1, 1, 1]).set_stride([1, 1, 1])
    Y = graph.mul(product, scale).set_output(True).set_name("Y")
    run = build(graph).bind({A: a, B: b.transpose(1, 2), Y: y, M: amax} | dict(zip(names, scales, strict=True)))

    seen = []
    for value in (2.0, 1.0, 0.0):
        a.copy_(torch.full((1, 32, 32), value))
        run()
        stored = y.float().unique().tolist()
        seen.append([*stored, *(s / scales[2].item() for s in stored), amax.item()])
    return seen


EXPECTED = [[80.0, 8.0, 8.0], [40.0, 4.0, 4.0], [0.0, 0.0, 0.0]]


def test_scale_mixup_built_for_the_recorded_h200(python):
    code = "import helpers, json, sys; sys.path.insert(0, 'tests'); import test_fp8; "
    result = python(code + "print(json.dumps(test_fp8.scale_mixup()))")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == EXPECTED


@pytest.mark.gpu
@needs_fp8
def test_scale_mixup_on_cudnn():
    assert scale_mixup() == EXPECTED


@pytest.mark.parametrize("last", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("amax", [0.0, math.nan])
def test_amax_edges_last_is_no_scale(amax, last):
    """amax-edges: where neither amax nor the last scale says anything, the scale is 1."""
    assert fp8.next_scale(amax, last).value == 1
