"""The reference's FP8 attention against numpy loops with a rounding to FP8 of their own.

No two dims of a shape are equal, the batch is 2, and no two scales are equal or reciprocal to each other, so that a
scale that is missing, doubled or in another's place shows.
"""

import itertools
import json
import math
from pathlib import Path

import cudnn
import numpy as np
import pytest
import torch

from helpers import reference

DT, TOP_LEFT = cudnn.data_type, cudnn.diagonal_alignment.TOP_LEFT
H200 = json.loads((Path(reference.__file__).parent / "devices" / "h200.json").read_text())["properties"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {E4M3: DT.FP8_E4M3, E5M2: DT.FP8_E5M2}
SCALES = {
    "descale_q": 0.5,
    "descale_k": 0.125,
    "descale_v": 0.25,
    "descale_s": 0.015625,
    "scale_s": 48.0,
    "scale_o": 6.0,
}
S_Q, S_KV, SCALE = 5, 9, 0.7


def rand(*shape, seed, dtype=E4M3, size=3.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


Q, K, V = rand(2, 6, S_Q, 16, seed=1), rand(2, 3, S_KV, 16, seed=2), rand(2, 2, S_KV, 32, seed=3)


def run(q=Q, k=K, v=V, scales=(), dtype=None, o_type=None, **options):
    """(O, Stats, Amax_S, Amax_O) of one sdpa_fp8 node, as reference_values gives them."""
    graph = cudnn.pygraph(
        "fp8_attention",
        io_data_type=FP8[q.dtype],
        intermediate_data_type=DT.FLOAT,
        compute_data_type=DT.FLOAT,
        device_property=cudnn.create_device_properties(json.dumps(H200)),
        sm_version=90,
    )
    given = {}

    def add(tensor, name):
        data_type = {torch.float32: DT.FLOAT, torch.int32: DT.INT32}.get(tensor.dtype) or FP8[tensor.dtype]
        described = graph.tensor(dim=tensor.shape, stride=tensor.stride(), data_type=data_type, name=name)
        given[described] = tensor
        return described

    tensors = [add(t, n) for t, n in ((q, "q"), (k, "k"), (v, "v"))]
    numbers = {n: torch.full((1, 1, 1, 1), value) for n, value in (SCALES | dict(scales)).items()}
    scalars = {n: add(t, n) for n, t in numbers.items()}
    options = {n: add(o, n) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    outputs = graph.sdpa_fp8(*tensors, **scalars, attn_scale=SCALE, generate_stats=True, **options)
    for output, data_type in zip(outputs, (FP8[o_type or q.dtype], DT.FLOAT, DT.FLOAT, DT.FLOAT), strict=True):
        output.set_output(True).set_data_type(data_type)
    graph.validate()
    result = reference.reference_values(graph, given, dtype=dtype)
    return [result[t] for t in outputs]


def round_fp8(values, dtype):
    """To the nearest FP8 value, to the even code where two are equally near, and not beyond the largest."""
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double().numpy()  # the non-negative ones, in order
    codes = codes[np.isfinite(codes)]
    magnitude = np.abs(values)[..., None]
    distance = np.abs(codes - magnitude)
    nearest = distance.argmin(-1)
    above = np.minimum(nearest + 1, len(codes) - 1)
    tie = (np.take_along_axis(distance, above[..., None], -1)[..., 0] == distance.min(-1)) & (nearest % 2 == 1)
    return np.sign(values) * codes[np.where(tie, above, nearest)]


def loops(kept=lambda b, i, j: True, scales=(), q=Q, k=K, v=V, s_type=E4M3):
    """O before it is stored, Stats, Amax_S and Amax_O, element by element; s_type None: S is not rounded."""
    s = SCALES | dict(scales)
    q, k, v = (t.double().numpy() * s[f"descale_{n}"] for t, n in ((q, "q"), (k, "k"), (v, "v")))
    out, stats, largest_p = np.zeros((*q.shape[:3], v.shape[3])), np.full((*q.shape[:3], 1), -np.inf), 0.0
    for b, h, i in np.ndindex(*q.shape[:3]):
        keys = [j for j in range(k.shape[2]) if kept(b, i, j)]
        if not keys:
            continue
        kh, vh = h * k.shape[1] // q.shape[1], h * v.shape[1] // q.shape[1]
        weights = np.array([math.exp(SCALE * (q[b, h, i] @ k[b, kh, j])) for j in keys])
        stats[b, h, i, 0] = math.log(weights.sum())
        p = weights / weights.sum()
        largest_p = max(largest_p, p.max())
        p = p * s["scale_s"] if s_type is None else round_fp8(p * s["scale_s"], s_type)
        out[b, h, i] = s["descale_s"] * (p @ v[b, vh, keys])
    return out, stats, largest_p, np.abs(out).max()


def check(actual, expected, **tolerance):
    torch.testing.assert_close(actual.double(), torch.as_tensor(np.asarray(expected)), **tolerance)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


CAUSAL = lambda b, i, j: j <= i  # noqa: E731
MASKS = {
    "none": ({}, lambda b, i, j: True),
    "causal": (dict(use_causal_mask=True), CAUSAL),
    "right bound": (dict(diagonal_alignment=TOP_LEFT, right_bound=0), CAUSAL),
    "window": (dict(left_bound=2, right_bound=0), lambda b, i, j: i - 2 < j <= i),
    "sliding window": (dict(sliding_window=2, use_causal_mask=True), lambda b, i, j: i - 2 < j <= i),
    "bottom-right": (dict(use_causal_mask_bottom_right=True), lambda b, i, j: j <= i + S_KV - S_Q),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_output(name):
    """Amax_O is of O before scale_o; O is rounded to FP8 after it."""
    options, kept = MASKS[name]
    o, stats, amax_s, amax_o = run(**options)
    expected, expected_stats, largest_p, largest_o = loops(kept)
    check(stats, expected_stats, rtol=1e-5, atol=1e-5)
    check(amax_s, np.full((1, 1, 1, 1), largest_p), rtol=1e-5, atol=0)
    check(amax_o, np.full((1, 1, 1, 1), largest_o), rtol=1e-5, atol=0)
    # An fp32 sum near the middle of two FP8 values may fall to the other side, a step of 2^-3 at most.
    stored = round_fp8(expected * SCALES["scale_o"], E4M3)
    check(o, stored, rtol=2**-3, atol=2**-9)
    assert (o.double().numpy() == stored).mean() > 0.99


@pytest.mark.parametrize("name", MASKS)
def test_in_float64_nothing_is_rounded(name):
    options, kept = MASKS[name]
    o, _, amax_s, amax_o = run(dtype=torch.float64, **options)
    expected, _, largest_p, largest_o = loops(kept, s_type=None)
    check(o, expected * SCALES["scale_o"], rtol=1e-9, atol=1e-12)
    check(amax_s, np.full((1, 1, 1, 1), largest_p), rtol=1e-9, atol=0)
    check(amax_o, np.full((1, 1, 1, 1), largest_o), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", SCALES)
def test_each_scale_counts_once(name):
    """Doubled, each scale changes O, Stats and the amaxes as the formula says, and no two do it alike."""
    base, doubled = (
        run(scales={name: SCALES[name] * factor}, dtype=torch.float64, use_causal_mask=True) for factor in (1, 2)
    )
    expected = loops(CAUSAL, scales={name: SCALES[name] * 2}, s_type=None)
    check(doubled[0], expected[0] * SCALES["scale_o"] * (2 if name == "scale_o" else 1), rtol=1e-9, atol=1e-12)
    changed = [not torch.equal(a, b) for a, b in zip(base, doubled, strict=True)]
    # The first causal row has one key, so the largest probability is 1 whatever the scores are.
    assert changed == {
        "descale_q": [True, True, False, True],
        "descale_k": [True, True, False, True],
        "scale_o": [True, False, False, False],
    }.get(name, [True, False, False, True])


def test_probabilities_are_rounded_to_the_type_of_q():
    """e5m2 keeps two bits of the fraction where e4m3 keeps three."""
    q, k, v = (rand(*t.shape, seed=i, dtype=E5M2) for i, t in enumerate((Q, K, V), 1))
    o, *_, amax_o = run(q, k, v)
    expected, *_, largest_o = loops(q=q, k=k, v=v, s_type=E5M2)
    check(amax_o, np.full((1, 1, 1, 1), largest_o), rtol=1e-5, atol=0)
    assert (o.double().numpy() == round_fp8(expected * SCALES["scale_o"], E5M2)).mean() > 0.99
    *_, other = loops(q=q, k=k, v=v, s_type=E4M3)
    assert abs(other - largest_o) > 1e-3 * largest_o


def test_scale_s_saturates_and_underflows():
    """One key, so a probability of 1: beyond 448 it is cut, below half of 2^-9 it is lost."""
    one = [torch.ones(2, 1, 1, 16).to(E4M3)] * 3
    ones = {n: 1.0 for n in SCALES}
    for scale, expected in ((1.0, 1.0), (448.0, 448.0), (500.0, 448.0), (2.0**-9, 2.0**-9), (2.0**-11, 0.0)):
        o, stats, amax_s, amax_o = run(*one, scales=ones | {"scale_s": scale})
        check(o, np.full((2, 1, 1, 16), expected))
        check(amax_o, np.full((1, 1, 1, 1), expected))
        check(amax_s, np.ones((1, 1, 1, 1)))
        check(stats, np.full((2, 1, 1, 1), 16 * SCALE), rtol=1e-6, atol=0)


def test_output_saturates_and_amax_does_not():
    one = [torch.ones(2, 1, 1, 16).to(E4M3)] * 3
    o, *_, amax_o = run(*one, scales={n: 1.0 for n in SCALES} | {"descale_v": 100.0, "scale_o": 10.0})
    check(o, np.full((2, 1, 1, 16), 448.0))
    check(amax_o, np.full((1, 1, 1, 1), 100.0))


def test_lengths():
    """What lies past a sequence's end does not matter, not even NaN, for the amaxes either."""
    lengths = ([5, 3], [4, 9])
    q, k, v = (t.float() for t in (Q, K, V))
    for b, (n, m) in enumerate(zip(*lengths, strict=True)):
        q[b, :, n:] = k[b, :, m:] = v[b, :, m:] = math.nan
    tensors = [torch.tensor(n, dtype=torch.int32).view(2, 1, 1, 1) for n in lengths]
    given = dict(use_padding_mask=True, seq_len_q=tensors[0], seq_len_kv=tensors[1], dtype=torch.float64)
    o, stats, amax_s, amax_o = run(q.to(E4M3), k.to(E4M3), v.to(E4M3), **given)
    expected = loops(lambda b, i, j: i < lengths[0][b] and j < lengths[1][b], s_type=None)
    check(o, expected[0] * SCALES["scale_o"], rtol=1e-9, atol=1e-12)
    check(stats, expected[1], rtol=1e-9, atol=0)
    for amax, value in zip((amax_s, amax_o), expected[2:], strict=True):
        check(amax, np.full((1, 1, 1, 1), value), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        dict(use_alibi_mask=True, use_causal_mask=True),
        dict(stats_use_log2=True),
        dict(diagonal_band_right_bound=0),  # sdpa's name for right_bound: cuDNN refuses it, and 0 is not 'not given'
        dict(use_causal_mask=True, right_bound=2),
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_not_honoured_is_refused(options):
    with pytest.raises(NotImplementedError, match=next(iter(options))):
        run(**options)


def test_round_fp8_itself():
    """The loops' rounding against PyTorch's cast, over values between, at and in the middle of FP8 values."""
    for dtype in (E4M3, E5M2):
        codes = torch.arange(128, dtype=torch.uint8).view(dtype).double().numpy()
        codes = codes[np.isfinite(codes)]
        middles = (codes[1:] + codes[:-1]) / 2
        near = [middles * f for f in (1 - 1e-6, 1, 1 + 1e-6)]
        values = np.concatenate([codes, *near])
        values = np.concatenate([values, -values])
        assert np.array_equal(round_fp8(values, dtype), torch.tensor(values).to(dtype).double().numpy())


def test_scales_are_no_reciprocals():
    pairs = itertools.combinations(SCALES.values(), 2)
    assert all(a != b and a * b != 1 for a, b in pairs)
