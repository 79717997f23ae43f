"""Attention as users write it, through build and Plan: masks, layouts and grouped heads, by the reference and by cuDNN.

Without a GPU, plans are compiled for the recorded H200 and evaluated by the reference. On a GPU each test runs twice,
with the reference and, marked `gpu`, with cuDNN itself.
"""

import math

import cudnn
import pytest
import torch

from helpers import build, describe, new_graph, reference, target

TOP_LEFT, BOTTOM_RIGHT = cudnn.diagonal_alignment.TOP_LEFT, cudnn.diagonal_alignment.BOTTOM_RIGHT
FLOAT = cudnn.data_type.FLOAT

pytestmark = pytest.mark.skipif(bool(target.lacks("sm80")), reason=target.lacks("sm80"))
by_each = pytest.mark.parametrize("executed_by", ["reference", pytest.param("cuDNN", marks=pytest.mark.gpu)])


def execute(plan, pack, executed_by):
    """Plan.run; on a GPU, the reference in its place where that is asked for."""
    if executed_by == "reference" and target.live:
        reference.evaluate(plan.graph, pack)
    else:
        plan.run(pack)


def attention(q, k, v, executed_by, corner=None, scale=None):
    """O (B, H_q, S_q, D_v) of one sdpa node; corner is None (no mask) or a diagonal_alignment (causal)."""
    g = new_graph("attention")
    Q, K, V = (describe(g, t, n) for t, n in ((q, "Q"), (k, "K"), (v, "V")))
    causal = {} if corner is None else dict(diagonal_alignment=corner, diagonal_band_right_bound=0)
    O, _ = g.sdpa(Q, K, V, attn_scale=scale or q.shape[3] ** -0.5, generate_stats=False, **causal)  # noqa: E741
    o = torch.full((*q.shape[:3], v.shape[3]), math.nan, device=q.device, dtype=q.dtype)
    O.set_output(True).set_name("O").set_dim(list(o.shape)).set_stride(list(o.stride()))
    execute(build(g), {Q: q, K: k, V: v, O: o}, executed_by)
    return o


@by_each
@pytest.mark.parametrize(
    ("corner", "first", "last"),
    [(TOP_LEFT, 1.0, 32.5), (BOTTOM_RIGHT, 33.0, 64.5)],
    ids=["top-left", "bottom-right"],
)
def test_causal_corner(corner, first, last, executed_by):
    """CASES causal-corner: equal weights over V[j] = j + 1, so each row is the mean of 1 .. (keys that it sees).

    All of it is exact in bf16: the weights, V up to 128, and every mean, a multiple of 0.5 up to 64.5.
    """
    q = torch.zeros(2, 3, 64, 64, device=target.device, dtype=target.dtype)
    k = torch.zeros(2, 3, 128, 64, device=target.device, dtype=target.dtype)
    v = (
        torch.arange(1, 129, device=target.device)
        .view(1, 1, 128, 1)
        .expand(2, 3, 128, 64)
        .to(target.dtype)
        .contiguous()
    )
    o = attention(q, k, v, executed_by, corner)
    means = torch.linspace(first, last, 64, device=target.device).view(1, 1, 64, 1).expand_as(o)
    torch.testing.assert_close(o.float(), means, rtol=0, atol=0)


def interleaved():
    """One (B, S, 3, H, D) buffer, and Q (4 heads), K and V (2 heads) as its slices with dims (B, H, S, D)."""
    torch.manual_seed(0)
    buffer = torch.randn(2, 64, 3, 4, 64, device=target.device).to(target.dtype)
    q, k, v = (buffer[:, :, n].transpose(1, 2) for n in range(3))
    return buffer, q, k[:, :2], v[:, :2]


@by_each
@pytest.mark.parametrize("corner", [None, TOP_LEFT, BOTTOM_RIGHT], ids=["no mask", "top-left", "bottom-right"])
def test_interleaved_slices_give_what_contiguous_tensors_give(corner, executed_by):
    """CASES interleaved-qkv: bit for bit, in both batches; the slices are read where they lie."""
    buffer, *slices = interleaved()
    assert all(t.data_ptr() >= buffer.data_ptr() and not t.is_contiguous() for t in slices)
    got = attention(*slices, executed_by, corner)
    expected = attention(*(t.contiguous() for t in slices), executed_by, corner)
    assert got.isfinite().all()
    assert not torch.equal(got[0], got[1])
    assert torch.equal(got, expected)


@by_each
def test_grouped_heads_share_keys_and_values(executed_by):
    """CASES interleaved-qkv: with V of head h equal to h + 1, the four query heads give 1, 1, 2, 2."""
    _, q, k, v = interleaved()
    v.copy_(torch.tensor([1.0, 2.0]).view(1, 2, 1, 1))
    o = attention(q, k, v, executed_by)
    heads = torch.tensor([1.0, 1.0, 2.0, 2.0], device=target.device).view(1, 4, 1, 1).expand_as(o)
    torch.testing.assert_close(o.float(), heads, rtol=2**-8, atol=0)  # the rounded probabilities may not add up to 1


@by_each
def test_the_scale_counts_once(executed_by):
    """Two keys with scores s and 0, and V of 1 and 0: O is the sigmoid of s."""
    for scale in (0.25, 0.5):
        q = torch.ones(2, 3, 8, 16, device=target.device, dtype=target.dtype)
        k = torch.zeros(2, 3, 2, 16, device=target.device, dtype=target.dtype)
        k[:, :, 0] = 0.5
        v = torch.zeros(2, 3, 2, 16, device=target.device, dtype=target.dtype)
        v[:, :, 0] = 1
        o = attention(q, k, v, executed_by, scale=scale)
        expected = torch.sigmoid(torch.tensor(16 * 0.5 * scale, device=target.device)).expand_as(o)
        torch.testing.assert_close(o.float(), expected, rtol=2**-7, atol=0)


@by_each
@pytest.mark.skipif(bool(target.lacks("sm90")), reason=target.lacks("sm90"))
@pytest.mark.parametrize("causal", [False, True])
def test_fp8_attention(causal, executed_by):
    """Every scale has its place: O, Stats and Amax_O against the float64 reference.

    O and Amax_O: the probabilities are rounded to e4m3, 2^-4 of each at most, which moves O by no more than 2^-4 of the
    largest |v|; storing O rounds once more. Stats: FP8 tensor cores keep fewer bits of a sum than fp32 has.
    """
    torch.manual_seed(0)
    e4m3, device = torch.float8_e4m3fn, target.device
    q, k = (torch.randn(2, h, s, 64, device=device).to(e4m3) for h, s in ((4, 80), (2, 144)))
    v = (8 * torch.rand(2, 2, 144, 64, device=device) + 4).to(e4m3)
    scales = dict(descale_q=0.5, descale_k=0.75, descale_v=0.25, descale_s=2.0**-8, scale_s=256.0, scale_o=64.0)
    g, pack = new_graph("fp8_attention", io=e4m3), {}
    for name, t in (("q", q), ("k", k), ("v", v), *scales.items()):
        t = t if isinstance(t, torch.Tensor) else torch.full((1, 1, 1, 1), t, device=device)
        pack[describe(g, t, name)] = t
    ports = dict(zip(("q", "k", "v", *scales), pack, strict=True))
    outputs = g.sdpa_fp8(**ports, attn_scale=0.125, generate_stats=True, use_causal_mask=causal)
    likes = [torch.empty(2, 4, 80, 64, device=device, dtype=e4m3), torch.empty(2, 4, 80, 1, device=device)]
    likes += [torch.full((1, 1, 1, 1), 1e9, device=device) for _ in range(2)]
    for tensor, like, name in zip(outputs, likes, ("O", "Stats", "amax_s", "amax_o"), strict=True):
        tensor.set_output(True).set_name(name).set_dim(list(like.shape)).set_stride(list(like.stride()))
        tensor.set_data_type(cudnn.data_type.FP8_E4M3 if name == "O" else FLOAT)
    plan = build(g)
    execute(plan, pack | dict(zip(outputs, likes, strict=True)), executed_by)

    exact = list(reference.reference_values(g, pack, dtype=torch.float64).values())
    o, stats, amax_s, amax_o = (t.double() for t in likes)
    bound = 2**-4 * v.double().max() * scales["descale_v"]
    torch.testing.assert_close(o / 64, exact[0] / 64, rtol=2**-4, atol=float(bound))
    torch.testing.assert_close(stats, exact[1], rtol=0, atol=0.02)
    torch.testing.assert_close(amax_o, exact[3], rtol=0, atol=float(bound))
    assert 0 < amax_s <= 1.001
    if causal:  # row 0 has one key
        torch.testing.assert_close(amax_s, exact[2], rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "lengths",
    [torch.tensor([5, 7]).view(2, 1, 1, 1), torch.tensor([5, 7], dtype=torch.int32)],
    ids=["int64", "a vector"],
)
def test_wrong_bytes_sequence_lengths(lengths):
    """wrong-bytes: int64 where cuDNN reads int32, and a vector where it wants (B, 1, 1, 1), are refused."""
    lengths = lengths.to(target.device)
    g = new_graph("padded")
    q = torch.zeros(2, 3, 8, 64, device=target.device, dtype=target.dtype)
    Q, K, V = (describe(g, q, n) for n in "QKV")
    rest = dict(
        use_padding_mask=True, seq_len_q=describe(g, lengths, "len_q"), seq_len_kv=describe(g, lengths, "len_kv")
    )
    O, _ = g.sdpa(Q, K, V, attn_scale=0.125, generate_stats=False, **rest)  # noqa: E741
    O.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
    with pytest.raises(ValueError, match=r"len_q.*int32 length.*view\(-1, 1, 1, 1\)"):
        build(g)


@pytest.mark.skipif(target.live, reason="on a GPU, each launch would have to wait for the lengths")
@pytest.mark.parametrize(("port", "wrong"), [("len_q", [9, 3]), ("len_kv", [-1, 3]), ("len_kv", [3, 17])])
def test_wrong_bytes_lengths_past_the_end(port, wrong):
    """wrong-bytes: an engine would read what lies there; also where they are changed after `bind`."""
    g = new_graph("padded")
    q, k = (torch.zeros(2, 3, n, 64, dtype=target.dtype) for n in (8, 16))
    lengths = {"len_q": torch.tensor([8, 0]), "len_kv": torch.tensor([16, 0])}
    lengths = {name: value.to(torch.int32).view(2, 1, 1, 1) for name, value in lengths.items()}
    Q, K, V = (describe(g, t, n) for t, n in ((q, "Q"), (k, "K"), (k, "V")))
    LQ, LKV = (describe(g, t, name) for name, t in lengths.items())
    O, _ = g.sdpa(  # noqa: E741
        Q, K, V, attn_scale=0.125, generate_stats=False, use_padding_mask=True, seq_len_q=LQ, seq_len_kv=LKV
    )
    o = torch.full_like(q, -7)
    O.set_output(True).set_name("O").set_dim(list(o.shape)).set_stride(list(o.stride()))
    run = build(g).bind({"Q": q, "K": k, "V": k + 1, "O": o, **lengths})
    run()
    assert bool((o[0] == 1).all())
    right = lengths[port].clone()
    lengths[port].copy_(torch.tensor(wrong, dtype=torch.int32).view(2, 1, 1, 1))
    o.fill_(-7)
    with pytest.raises(ValueError, match=rf"{port}: .* takes lengths from 0 to (8|16), got \[{wrong[0]}, {wrong[1]}\]"):
        run()
    assert bool((o == -7).all())
    lengths[port].copy_(right)
    run()
    assert bool((o[0] == 1).all())
