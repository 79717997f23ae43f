"""helpers/reference.py against numpy loops and formulas of its own, and against PyTorch's fused calls.

No two dims of a shape are equal and batches are at least 2, so that a swapped axis shows.
"""

import itertools
import json
import math
from pathlib import Path

import cudnn
import numpy as np
import pytest
import torch
from torch.nn import functional

from helpers import reference

DT = cudnn.data_type
DATA_TYPE = {
    torch.float64: DT.DOUBLE,
    torch.float32: DT.FLOAT,
    torch.float16: DT.HALF,
    torch.bfloat16: DT.BFLOAT16,
    torch.float8_e4m3fn: DT.FP8_E4M3,
    torch.float8_e5m2: DT.FP8_E5M2,
    torch.int8: DT.INT8,
    torch.int32: DT.INT32,
    torch.bool: DT.BOOLEAN,
}
CONVOLUTION = cudnn._compiled_module.convolution_mode.CONVOLUTION
MODE = cudnn.reduction_mode
# Some device's properties, so that validate() asks neither for a GPU nor for a driver.
H200 = json.loads((Path(reference.__file__).parent / "devices" / "h200.json").read_text())["properties"]


def new_graph(io=DT.FLOAT, intermediate=DT.FLOAT, compute=DT.FLOAT):
    return cudnn.pygraph(
        "reference_test",
        io_data_type=io,
        intermediate_data_type=intermediate,
        compute_data_type=compute,
        device_property=cudnn.create_device_properties(json.dumps(H200)),
        sm_version=90,
    )


def describe(graph, tensor, name, **kwargs):
    return graph.tensor(
        dim=list(tensor.shape), stride=list(tensor.stride()), data_type=DATA_TYPE[tensor.dtype], name=name, **kwargs
    )


def values(build, *inputs, dtype=None, **types):
    """Outputs of the graph that `build(graph, *descriptions)` makes, as reference_values gives them."""
    graph = new_graph(**types)
    descriptions = [describe(graph, t, f"in{i}") for i, t in enumerate(inputs)]
    outputs = build(graph, *descriptions)
    outputs = [t for t in (outputs if isinstance(outputs, list | tuple) else [outputs]) if t is not None]
    for t in outputs:
        t.set_output(True)
    graph.validate()
    result = reference.reference_values(graph, dict(zip(descriptions, inputs, strict=True)), dtype=dtype)
    return [result[t] for t in outputs]


def check(actual, expected, **tolerance):
    expected = torch.as_tensor(np.asarray(expected))
    torch.testing.assert_close(actual.to(torch.float64), expected.to(torch.float64), equal_nan=True, **tolerance)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# --- convolution and matmul ------------------------------------------------------------------------------------------


def conv_taps(x, w_spatial, y_spatial, pre, post, stride, dilation):
    """x padded, and for each filter tap the part of it that the tap multiplies, as an index."""
    padded = np.pad(x, [(0, 0), (0, 0), *zip(pre, post, strict=True)])
    taps = []
    for tap in itertools.product(*(range(n) for n in w_spatial)):
        index = [
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, dilation, y_spatial, stride, strict=True)
        ]
        taps.append((tap, (slice(None), slice(None), *index)))
    return padded, taps


def conv_numpy(x, w, pre, post, stride, dilation):
    groups = x.shape[1] // w.shape[1]
    out = [
        (n + a + b - (r - 1) * d - 1) // s + 1
        for n, a, b, r, d, s in zip(x.shape[2:], pre, post, w.shape[2:], dilation, stride, strict=True)
    ]
    padded, taps = conv_taps(x, w.shape[2:], out, pre, post, stride, dilation)
    y = np.zeros((x.shape[0], w.shape[0], *out))
    k, c = w.shape[0] // groups, w.shape[1]
    for tap, index in taps:
        for g in range(groups):
            part, rows = padded[index][:, g * c : (g + 1) * c], slice(g * k, (g + 1) * k)
            y[:, rows] += np.einsum("nc...,kc->nk...", part, w[(rows, slice(None), *tap)])
    return y


CONVS = {
    "plain": ((2, 3, 8, 7), (5, 3, 3, 2), dict(padding=[0, 0], stride=[1, 1], dilation=[1, 1])),
    "padded": ((2, 3, 8, 7), (5, 3, 3, 2), dict(padding=[2, 1], stride=[1, 1], dilation=[1, 1])),
    "asymmetric": (
        (2, 3, 9, 7),
        (5, 3, 3, 2),
        dict(pre_padding=[0, 3], post_padding=[2, 1], stride=[2, 3], dilation=[2, 1]),
    ),
    "groups": ((2, 6, 8, 7), (4, 3, 3, 2), dict(padding=[1, 0], stride=[1, 2], dilation=[1, 1])),
    "depthwise": ((2, 3, 8, 7), (6, 1, 3, 2), dict(padding=[1, 0], stride=[1, 1], dilation=[1, 2])),
    "3d": ((2, 3, 6, 5, 7), (4, 3, 2, 1, 3), dict(padding=[1, 0, 2], stride=[1, 2, 1], dilation=[2, 1, 1])),
    "flipped": (
        (2, 3, 8, 7),
        (5, 3, 3, 2),
        dict(padding=[1, 0], stride=[1, 1], dilation=[1, 1], convolution_mode=CONVOLUTION),
    ),
}


def conv_case(name):
    x_shape, w_shape, attributes = CONVS[name]
    pre = attributes.get("pre_padding", attributes.get("padding"))
    post = attributes.get("post_padding", attributes.get("padding"))
    return rand(*x_shape), rand(*w_shape), attributes, (pre, post, attributes["stride"], attributes["dilation"])


@pytest.mark.parametrize("name", CONVS)
def test_conv_fprop(name):
    x, w, attributes, geometry = conv_case(name)
    (y,) = values(lambda g, X, W: g.conv_fprop(X, W, **attributes), x, w)
    flipped = np.flip(w.numpy(), (2, 3)) if name == "flipped" else w.numpy()
    expected = conv_numpy(x.numpy(), flipped, *geometry)
    check(y, expected, rtol=1e-5, atol=1e-5)
    if name in ("padded", "groups", "depthwise"):
        by_torch = functional.conv2d(x, w, None, geometry[2], geometry[0], geometry[3], x.shape[1] // w.shape[1])
        check(y, by_torch, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["padded", "asymmetric", "3d"])
def test_conv_gradients(name):
    x, w, attributes, geometry = conv_case(name)
    y = conv_numpy(x.numpy(), w.numpy(), *geometry)
    loss = rand(*y.shape, seed=9)
    padded, taps = conv_taps(x.numpy(), w.shape[2:], y.shape[2:], *geometry)
    dx, dw = np.zeros_like(padded, dtype=np.float64), np.zeros(w.shape)
    for tap, index in taps:
        dx[index] += np.einsum("nk...,kc->nc...", loss.numpy(), w.numpy()[(slice(None), slice(None), *tap)])
        pairs = (a.reshape(*a.shape[:2], -1) for a in (loss.numpy(), padded[index]))
        dw[(slice(None), slice(None), *tap)] = np.einsum("nkp,ncp->kc", *pairs)
    dx = dx[(slice(None), slice(None), *(slice(a, a + n) for a, n in zip(geometry[0], x.shape[2:], strict=True)))]
    (DX,) = values(lambda g, L, W: g.conv_dgrad(L, W, **attributes).set_dim(list(x.shape)), loss, w)
    (DW,) = values(lambda g, X, L: g.conv_wgrad(X, L, **attributes).set_dim(list(w.shape)), x, loss)
    check(DX, dx, rtol=1e-5, atol=1e-5)
    check(DW, dw, rtol=1e-5, atol=1e-4)


def test_integer_conv_is_exact():
    """1024 products of 127 * 127 in int32: float32 could not hold the odd sums."""
    x = torch.full((2, 1021, 3, 4), 127, dtype=torch.int8)
    w = torch.full((5, 1021, 1, 2), 127, dtype=torch.int8)
    w[0, 0, 0, 0] = 126
    (y,) = values(
        lambda g, X, W: g.conv_fprop(X, W, padding=[0, 0], stride=[1, 1], dilation=[1, 1]).set_data_type(DT.INT32),
        x,
        w,
        compute=DT.INT32,
    )
    assert y.dtype == torch.int32
    assert y[0, 1, 0, 0].item() == 1021 * 2 * 127 * 127
    assert y[1, 0, 2, 1].item() == 1021 * 2 * 127 * 127 - 127


def test_matmul_broadcasts_batches():
    a, b = rand(2, 1, 5, 7), rand(1, 3, 7, 4)
    (c,) = values(lambda g, A, B: g.matmul(A, B), a, b)
    check(c, np.einsum("bimk,ahkn->bhmn", a.numpy(), b.numpy()), rtol=1e-5, atol=1e-5)


def test_matmul_reads_strides():
    """A weight stored (N, K) and described as (1, K, N), here with N = K: only the strides tell."""
    x, weight = rand(2, 5, 6), rand(6, 6)
    graph = new_graph()
    X = describe(graph, x, "X")
    W = graph.tensor(dim=[1, 6, 6], stride=[36, 1, 6], data_type=DT.FLOAT, name="W")
    Y = graph.matmul(X, W).set_output(True)
    graph.validate()
    y = reference.reference_values(graph, {X: x, W: weight})[Y]
    check(y, np.einsum("bmk,nk->bmn", x.numpy(), weight.numpy()), rtol=1e-5, atol=1e-5)


# --- pointwise -------------------------------------------------------------------------------------------------------

erf = np.vectorize(math.erf)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


UNARY = {
    "abs": np.abs,
    "ceil": np.ceil,
    "cos": np.cos,
    "elu": lambda x: np.where(x > 0, x, np.exp(x) - 1),
    "erf": erf,
    "exp": np.exp,
    "floor": np.floor,
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_approx_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "identity": lambda x: x,
    "log": np.log,
    "logical_not": lambda x: x == 0,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: x**-0.5,
    "sigmoid": sigmoid,
    "sin": np.sin,
    "softplus": lambda x: np.log(1 + np.exp(x)),
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "relu": lambda x: x * (x > 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.25 * x),
    "swish": lambda x: x * sigmoid(x),
}
BINARY = {
    "add": lambda a, b: a + b,
    "add_square": lambda a, b: a + b * b,
    "bias": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "logical_and": lambda a, b: (a != 0) & (b != 0),
    "logical_or": lambda a, b: (a != 0) | (b != 0),
    "max": np.maximum,
    "min": np.minimum,
    "mod": np.vectorize(math.fmod),
    "mul": lambda a, b: a * b,
    "pow": lambda a, b: np.exp(b * np.log(a)),
    "scale": lambda a, b: a * b,
    "sub": lambda a, b: a - b,
    "cmp_eq": lambda a, b: a == b,
    "cmp_ge": lambda a, b: a >= b,
    "cmp_gt": lambda a, b: a > b,
    "cmp_le": lambda a, b: a <= b,
    "cmp_lt": lambda a, b: a < b,
    "cmp_neq": lambda a, b: a != b,
}
BACKWARD = ("elu", "gelu", "gelu_approx_tanh", "sigmoid", "softplus", "tanh", "relu", "leaky_relu", "swish")
OPTIONS = {"leaky_relu": dict(negative_slope=0.25)}
POSITIVE = ("log", "rsqrt", "sqrt", "pow")


def test_every_pointwise_op_of_the_frontend_is_here():
    ours = {*UNARY, *BINARY, "binary_select", *(f"{name}_backward" for name in BACKWARD)}
    assert set(cudnn.pygraph._POINTWISE_TENSOR_ARGS) <= ours


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    x = rand(2, 3, 5, 7)
    x[0, 0, 0, :3] = 0.5 if op == "reciprocal" else 0
    x = x.abs() + 0.1 if op in POSITIVE else x
    (y,) = values(lambda g, X: getattr(g, op)(X, **OPTIONS.get(op, {})), x)
    assert y.dtype == torch.float32
    check(y, UNARY[op](x.double().numpy()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", BINARY)
def test_binary_broadcasts(op):
    a, b = rand(2, 3, 5, 7), rand(1, 3, 1, 1, seed=3)
    a[:, :, 2, 3] = b[:, :, 0, 0]  # equal values, so that >= and > differ
    a[0, :, 0, 0] = 0
    if op in POSITIVE:
        a, b = a.abs() + 0.1, b.abs() + 0.1
    (y,) = values(lambda g, A, B: getattr(g, op)(A, B), a, b)
    assert tuple(y.shape) == (2, 3, 5, 7)
    check(y, BINARY[op](a.double().numpy(), b.double().numpy()).astype(np.float64), rtol=1e-5, atol=1e-6)


def test_binary_select_takes_the_first_where_the_mask_is_set():
    a, b = rand(2, 3, 5), rand(2, 3, 5, seed=4)
    (y,) = values(lambda g, A, B: g.binary_select(A, B, g.cmp_gt(A, B).set_data_type(DT.BOOLEAN)), a, b)
    check(y, np.where(a > b, a, b), rtol=0, atol=0)
    assert not torch.equal(y, torch.minimum(a, b))


def test_comparison_may_be_stored_as_bool():
    a, b = rand(2, 3, 5), rand(2, 3, 5, seed=4)
    (y,) = values(lambda g, A, B: g.cmp_lt(A, B).set_data_type(DT.BOOLEAN), a, b)
    assert y.dtype == torch.bool
    assert torch.equal(y, a < b)
    assert 0 < y.sum() < y.numel()


def test_relu_options_and_swish_beta():
    x = rand(2, 3, 5, 7) * 3
    n = x.double().numpy()
    (y,) = values(lambda g, X: g.relu(X, lower_clip=-0.5, upper_clip=2.0), x)
    check(y, np.clip(n, -0.5, 2.0), rtol=1e-6, atol=0)
    (y,) = values(lambda g, X: g.relu(X, negative_slope=0.2, upper_clip=2.0), x)
    check(y, np.minimum(np.where(n > 0, n, 0.2 * n), 2.0), rtol=1e-6, atol=0)
    (y,) = values(lambda g, X: g.swish(X, swish_beta=1.7), x)
    check(y, n * sigmoid(1.7 * n), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"'clipped'.*lower_clip"):
        values(lambda g, X: g.relu(X, negative_slope=0.2, lower_clip=-0.5, name="clipped"), x)
    (y,) = values(lambda g, X: g.relu(X), torch.tensor([[[math.nan, -math.inf, math.inf]]]))
    check(y, [[[math.nan, 0, math.inf]]])


@pytest.mark.parametrize("op", BACKWARD)
def test_backward_is_the_slope_of_the_forward(op):
    x, loss, h = rand(2, 3, 5, 7, dtype=torch.float64), rand(2, 3, 5, 7, seed=5, dtype=torch.float64), 1e-5
    assert x.abs().min() > h  # no sample sits on the kink
    n = x.numpy()
    slope = (UNARY[op](n + h) - UNARY[op](n - h)) / (2 * h)
    (y,) = values(
        lambda g, L, X: getattr(g, f"{op}_backward")(L, X, **OPTIONS.get(op, {})), loss, x, dtype=torch.float64
    )
    check(y, loss.numpy() * slope, rtol=1e-7, atol=1e-8)


def test_clipped_relu_backward():
    x, loss = torch.tensor([[[-2.0, 0.0, 0.5, 3.0]]]), torch.tensor([[[5.0, 6.0, 7.0, 8.0]]])
    (y,) = values(lambda g, L, X: g.relu_backward(L, X, upper_clip=2.0), loss, x)
    check(y, [[[0.0, 0.0, 7.0, 0.0]]])


@pytest.mark.parametrize("axis", [0, 2, 3])
def test_gen_index(axis):
    x = rand(2, 3, 5, 7)
    (y,) = values(lambda g, X: g.gen_index(X, axis=axis).set_data_type(DT.INT32), x)
    assert y.dtype == torch.int32
    assert np.array_equal(y.numpy(), np.indices(x.shape)[axis])


# --- reduction and normalisation -------------------------------------------------------------------------------------

REDUCE = {
    "ADD": np.sum,
    "AVG": np.mean,
    "MUL": np.prod,
    "MAX": np.max,
    "MIN": np.min,
    "AMAX": lambda x, **k: np.max(np.abs(x), **k),
    "NORM1": lambda x, **k: np.sum(np.abs(x), **k),
    "NORM2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    "MUL_NO_ZEROS": lambda x, **k: np.prod(np.where(x == 0, 1, x), **k),
}


@pytest.mark.parametrize("axes", [(0, 2, 3), (1,), (0, 1, 2, 3), (2, 3)])
@pytest.mark.parametrize("mode", REDUCE)
def test_reduction(mode, axes):
    x = -rand(2, 3, 5, 7).abs()  # MAX and AMAX differ
    if mode == "MUL_NO_ZEROS":
        x[:, :, 1, 2] = 0
    dim = [1 if i in axes else n for i, n in enumerate(x.shape)]
    (y,) = values(lambda g, X: g.reduction(X, mode=getattr(MODE, mode)).set_dim(dim), x, dtype=torch.float64)
    check(y, REDUCE[mode](x.double().numpy(), axis=axes, keepdims=True), rtol=1e-12, atol=0)


def test_reduction_over_a_dim_of_one():
    x = rand(2, 3, 1)
    (y,) = values(lambda g, X: g.reduction(X, mode=MODE.AMAX).set_dim([2, 3, 1]), x)
    check(y, np.abs(x.numpy()), rtol=0, atol=0)


def norm_case():
    x, scale, bias = rand(2, 6, 3, 5), rand(1, 6, 1, 5, seed=1), rand(1, 6, 1, 5, seed=2)
    return x, scale, bias, torch.full((1, 1, 1, 1), 0.125)


@pytest.mark.parametrize("phase", ["TRAINING", "INFERENCE"])
def test_rmsnorm(phase):
    x, scale, bias, eps = norm_case()
    phase = getattr(cudnn.norm_forward_phase, phase)
    out = values(lambda g, X, S, B, E: g.rmsnorm(X, S, B, E, norm_forward_phase=phase), x, scale, bias, eps)
    n = x.double().numpy()
    inv = 1 / np.sqrt((n**2).mean(axis=(1, 3), keepdims=True) + 0.125)
    check(out[0], n * inv * scale.numpy() + bias.numpy(), rtol=1e-5, atol=1e-5)
    assert len(out) == (2 if phase == cudnn.norm_forward_phase.TRAINING else 1)
    if len(out) == 2:
        check(out[1], inv, rtol=1e-5, atol=1e-6)


def test_rmsnorm_without_bias_matches_torch():
    x, scale, eps = rand(6, 8, 1, 1), rand(1, 8, 1, 1, seed=1), torch.full((1, 1, 1, 1), 1e-3)
    phase = cudnn.norm_forward_phase.INFERENCE
    y, *_ = values(lambda g, X, S, E: g.rmsnorm(X, S, epsilon=E, norm_forward_phase=phase), x, scale, eps)
    check(y.flatten(1), functional.rms_norm(x.flatten(1), (8,), scale.flatten(), 1e-3), rtol=1e-5, atol=1e-5)


def test_layernorm():
    x, scale, bias, eps = norm_case()
    phase = cudnn.norm_forward_phase.TRAINING
    y, mean, inv_var = values(
        lambda g, X, S, B, E: g.layernorm(X, S, B, E, norm_forward_phase=phase), x, scale, bias, eps
    )
    n = x.double().numpy()
    centred = n - n.mean(axis=(1, 3), keepdims=True)
    inv = 1 / np.sqrt((centred**2).mean(axis=(1, 3), keepdims=True) + 0.125)
    check(y, centred * inv * scale.numpy() + bias.numpy(), rtol=1e-5, atol=1e-5)
    check(mean, n.mean(axis=(1, 3), keepdims=True), rtol=1e-5, atol=1e-6)
    check(inv_var, inv, rtol=1e-5, atol=1e-6)


# --- attention -------------------------------------------------------------------------------------------------------

TOP_LEFT, BOTTOM_RIGHT = cudnn.diagonal_alignment.TOP_LEFT, cudnn.diagonal_alignment.BOTTOM_RIGHT
S_Q, S_KV = 5, 9
Q, K, V = (rand(*s, dtype=torch.float16) for s in ((2, 6, S_Q, 8), (2, 3, S_KV, 8), (2, 2, S_KV, 16)))


def attention_loops(q, k, v, kept, scale, bias=None):
    """O and the log of the sum of exponentials, element by element; kept(b, i, j) says whether row i sees key j."""
    q, k, v = (t.double().numpy() for t in (q, k, v))
    out, stats = np.zeros((*q.shape[:3], v.shape[3])), np.full((*q.shape[:3], 1), -np.inf)
    for b, h, i in np.ndindex(*q.shape[:3]):
        kh, vh = h * k.shape[1] // q.shape[1], h * v.shape[1] // q.shape[1]
        keys = [j for j in range(k.shape[2]) if kept(b, i, j)]
        weights = []
        for j in keys:
            s = scale * sum(q[b, h, i, d] * k[b, kh, j, d] for d in range(q.shape[3]))
            weights.append(math.exp(s + (0 if bias is None else bias[0, h, i, j])))
        for j, w in zip(keys, weights, strict=True):
            out[b, h, i] += w / sum(weights) * v[b, vh, j]
        if keys:
            stats[b, h, i, 0] = math.log(sum(weights))
    return out, stats


def sdpa(g, q, k, v, **options):
    options.setdefault("generate_stats", True)
    out = g.sdpa(q, k, v, **options)
    out[0].set_data_type(DT.FLOAT)
    return out


MASKS = {
    "none": ({}, lambda b, i, j: True),
    "top-left": (dict(use_causal_mask=True), lambda b, i, j: j <= i),
    "bottom-right": (dict(use_causal_mask_bottom_right=True), lambda b, i, j: j <= i + 4),
    "top-left band": (dict(diagonal_alignment=TOP_LEFT, diagonal_band_right_bound=0), lambda b, i, j: j <= i),
    "bottom-right band": (
        dict(diagonal_alignment=BOTTOM_RIGHT, diagonal_band_right_bound=0),
        lambda b, i, j: j <= i + 4,
    ),
    "right bound": (dict(diagonal_band_right_bound=2), lambda b, i, j: j <= i + 2),
    "window": (
        dict(diagonal_band_left_bound=3, diagonal_band_right_bound=0),
        lambda b, i, j: i - 3 < j <= i,
    ),
    "window, bottom-right": (
        dict(diagonal_alignment=BOTTOM_RIGHT, diagonal_band_left_bound=2, diagonal_band_right_bound=1),
        lambda b, i, j: i + 4 - 2 < j <= i + 4 + 1,
    ),
    "causal window": (dict(use_causal_mask=True, sliding_window_length=2), lambda b, i, j: i - 2 < j <= i),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_masks(name):
    options, kept = MASKS[name]
    o, stats = values(lambda g, q, k, v: sdpa(g, q, k, v, attn_scale=0.3, **options), Q, K, V, dtype=torch.float64)
    expected, expected_stats = attention_loops(Q, K, V, kept, np.float64(0.3))
    check(o, expected, rtol=1e-9, atol=1e-9)
    check(stats, expected_stats, rtol=1e-9, atol=1e-9)


LENGTHS = ([5, 3], [4, 9])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, lambda b, i, j: True),
        (dict(use_causal_mask=True), lambda b, i, j: j <= i),
        (dict(use_causal_mask_bottom_right=True), lambda b, i, j: j <= i + LENGTHS[1][b] - LENGTHS[0][b]),
    ],
    ids=["padding", "causal", "bottom-right"],
)
def test_attention_lengths(options, kept):
    """What lies past a sequence's end does not matter, not even NaN; with 5 rows for 4 keys, row 0 sees none."""
    q, k, v = Q.clone(), K.clone(), V.clone()
    lengths = [torch.tensor(n, dtype=torch.int32).view(2, 1, 1, 1) for n in LENGTHS]
    for b in range(2):
        q[b, :, LENGTHS[0][b] :] = k[b, :, LENGTHS[1][b] :] = v[b, :, LENGTHS[1][b] :] = math.nan
    o, stats = values(
        lambda g, q, k, v, n, m: sdpa(
            g, q, k, v, attn_scale=0.3, use_padding_mask=True, seq_len_q=n, seq_len_kv=m, **options
        ),
        *(q, k, v, *lengths),
        dtype=torch.float64,
    )
    expected, expected_stats = attention_loops(
        Q, K, V, lambda b, i, j: i < LENGTHS[0][b] and j < LENGTHS[1][b] and kept(b, i, j), 0.3
    )
    check(o, expected, rtol=1e-6, atol=1e-7)
    check(stats, expected_stats, rtol=1e-6, atol=1e-7)
    empty_rows = torch.isneginf(stats[..., 0])
    assert empty_rows[1, :, 3:].all()
    assert (o[empty_rows] == 0).all()
    assert empty_rows[0, :, 0].all() == ("use_causal_mask_bottom_right" in options)


def test_attention_bias_and_default_scale():
    bias = rand(1, 6, S_Q, S_KV, dtype=torch.float16)
    o, stats = values(lambda g, q, k, v, b: sdpa(g, q, k, v, bias=b), Q, K, V, bias, dtype=torch.float64)
    expected, expected_stats = attention_loops(Q, K, V, lambda b, i, j: True, 1.0, bias.double().numpy())
    check(o, expected, rtol=1e-9, atol=1e-9)
    check(stats, expected_stats, rtol=1e-9, atol=1e-9)


def test_attention_scale_as_a_tensor_and_stored_in_bf16():
    q, k, v, scale = Q.bfloat16(), K.bfloat16(), V.bfloat16(), torch.full((1, 1, 1, 1), 0.3)

    def build(g, q, k, v, scale):
        return g.sdpa(q, k, v, attn_scale=scale, generate_stats=False)[0]

    (o,) = values(build, q, k, v, scale, io=DT.BFLOAT16)
    assert o.dtype == torch.bfloat16
    expected, _ = attention_loops(q, k, v, lambda b, i, j: True, 0.3)
    check(o, expected, rtol=2**-8, atol=1e-6)  # half a bf16 spacing: only O is rounded, and once


def test_attention_matches_torch():
    q, k, v = rand(2, 4, 64, 16), rand(2, 2, 64, 16), rand(2, 2, 64, 16, seed=1)
    q, k, v = q.half(), k.half(), v.half()
    o, _ = values(
        lambda g, q, k, v: sdpa(g, q, k, v, attn_scale=0.25, use_causal_mask=True), q, k, v, dtype=torch.float64
    )
    expected = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    check(o, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("alignment", "first", "last"),
    [(TOP_LEFT, 1.0, 32.5), (BOTTOM_RIGHT, 33.0, 64.5)],
    ids=["top-left", "bottom-right"],
)
def test_causal_corner(alignment, first, last):
    """Uniform weights over V[j] = j + 1: each row is the mean of 1 .. (number of keys that it sees)."""
    q, k = torch.zeros(2, 3, 64, 8, dtype=torch.float16), torch.zeros(2, 3, 128, 8, dtype=torch.float16)
    v = torch.arange(1.0, 129).view(1, 1, 128, 1).expand(2, 3, 128, 8).half().contiguous()
    options = dict(diagonal_alignment=alignment, diagonal_band_right_bound=0)
    o, _ = values(lambda g, q, k, v: sdpa(g, q, k, v, **options), q, k, v)
    torch.testing.assert_close(o[:, :, 0], torch.full_like(o[:, :, 0], first))
    torch.testing.assert_close(o[:, :, 63], torch.full_like(o[:, :, 63], last))


def test_interleaved_qkv():
    """Q, K and V as slices of one (B, S, 3, H, D) buffer give what contiguous tensors give; query heads share V."""
    buffer = rand(2, 64, 3, 4, 64, dtype=torch.float16)
    buffer[:, :, 2, :2] = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    q, k, v = (buffer[:, :, n].transpose(1, 2) for n in range(3))
    k, v = k[:, :2], v[:, :2]
    assert not q.is_contiguous()

    def build(g, q, k, v):
        return sdpa(g, q, k, v, attn_scale=0.125, use_causal_mask=True)[0]

    (o,) = values(build, q, k, v)
    (contiguous,) = values(build, q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(o, contiguous)
    torch.testing.assert_close(o, torch.tensor([1.0, 1.0, 2.0, 2.0]).view(1, 4, 1, 1).expand_as(o))


@pytest.mark.parametrize("options", [{}, dict(use_causal_mask_bottom_right=True), dict(use_padding_mask=True)], ids=str)
def test_attention_backward(options):
    """Against PyTorch's autograd through its own attention, with the mask spelled out."""
    q, k, v = (t.double().requires_grad_() for t in (Q, K, V))
    lengths = [torch.tensor(n, dtype=torch.int32).view(2, 1, 1, 1) for n in LENGTHS]
    mask = torch.zeros(2, 1, S_Q, S_KV, dtype=torch.bool)
    for b, _, i, j in np.ndindex(*mask.shape):
        inside = i < LENGTHS[0][b] and j < LENGTHS[1][b]
        mask[b, 0, i, j] = {0: True, 1: j <= i + 4 if "use_padding_mask" not in options else inside}[len(options)]
    with_bias = "use_causal_mask_bottom_right" not in options  # cuDNN has no such combination
    bias = (rand(1, 6, S_Q, S_KV, seed=3, dtype=torch.float64) * with_bias).requires_grad_()
    scores = 0.3 * q @ k.repeat_interleave(2, 1).mT + bias
    p = scores.masked_fill(~mask, -1e30).softmax(-1) * mask
    o = p @ v.repeat_interleave(3, 1)
    stats = scores.masked_fill(~mask, -math.inf).logsumexp(-1, keepdim=True)
    loss = rand(*o.shape, seed=4, dtype=torch.float64)
    expected = torch.autograd.grad(o, (q, k, v, bias), loss)

    more = dict(zip(("seq_len_q", "seq_len_kv"), lengths, strict=True)) if "use_padding_mask" in options else {}
    more |= {"bias": bias.detach()} if with_bias else {}

    def build(g, *tensors):
        named = dict(zip(more, tensors[6:], strict=True))
        if with_bias:
            named["dBias"] = g.tensor(dim=list(bias.shape), data_type=DT.DOUBLE, name="dBias")
        grads = g.sdpa_backward(*tensors[:6], attn_scale=0.3, **options, **named)
        return [*grads, named.get("dBias")]

    inputs = [t.detach().clone() for t in (q, k, v, o, loss, stats)]
    if "use_padding_mask" in options:  # what lies past a sequence's end does not matter
        for b, (n, m) in enumerate(zip(*LENGTHS, strict=True)):
            for t, length in zip(inputs, (n, m, m, n, n, n), strict=True):
                t[b, :, length:] = math.nan
    actual = values(build, *inputs, *more.values(), dtype=torch.float64)
    assert len(actual) == 3 + with_bias
    for a, e in zip(actual, expected[: len(actual)], strict=True):
        assert e.abs().max() > 0.01
        check(a, e, rtol=1e-9, atol=1e-9)


# --- storing and reading tensors -------------------------------------------------------------------------------------


def test_virtual_tensor_is_rounded_to_its_type():
    x = rand(2, 3, 5, 7)
    s, t = torch.full((1, 1, 1, 1), 1.1), torch.full((1, 1, 1, 1), 100.0)

    def build(g, X, S, T):
        return g.mul(g.mul(X, S), T)

    (rounded,) = values(build, x, s, t, intermediate=DT.BFLOAT16)
    (kept,) = values(build, x, s, t, intermediate=DT.FLOAT)
    assert torch.equal(rounded, (x * s).bfloat16().float() * t)
    assert torch.equal(kept, (x * s) * t)
    assert not torch.equal(rounded, kept)
    (exact,) = values(build, x, s, t, intermediate=DT.BFLOAT16, dtype=torch.float64)
    check(exact, x.double().numpy() * s.double().numpy() * 100.0, rtol=1e-14, atol=0)


FP8_INPUT = [0.5, 448.0, 464.0, 465.0, 1000.0, -1000.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float8_e4m3fn, [0.5, 448, 448, 448, 448, -448, 448, -448, math.nan]),
        (torch.float8_e5m2, [0.5, 448, 448, 448, 1024, -1024, 57344, -57344, math.nan]),
        (torch.float16, [0.5, 448, 464, 465, 1000, -1000, math.inf, -math.inf, math.nan]),
        (torch.int8, [0, 127, 127, 127, 127, -128, 127, -128, 0]),
        (torch.int32, [0, 448, 464, 465, 1000, -1000, 2**31 - 1, -(2**31), 0]),
        (torch.bool, [1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_stores(dtype, expected):
    x = torch.tensor([[FP8_INPUT]])
    (y,) = values(lambda g, X: g.identity(X).set_data_type(DATA_TYPE[dtype]), x)
    assert y.dtype == dtype
    check(y, [[expected]])


def test_stores_round_to_nearest_even():
    x = torch.tensor([[[0.5, 1.5, 2.5, -0.5, -1.5, 70000.0, 1e5]]])
    (y,) = values(lambda g, X: g.identity(X).set_data_type(DT.INT8), x[..., :5].contiguous())
    assert y.flatten().tolist() == [0, 2, 2, 0, -2]
    (y,) = values(lambda g, X: g.identity(X).set_data_type(DT.HALF), x)
    assert y.flatten().tolist()[5:] == [math.inf, math.inf]
    (y,) = values(lambda g, X: g.identity(X).set_data_type(DT.FP8_E5M2), x)
    assert y.float().flatten().tolist()[5:] == [57344, 57344]


def test_fp8_scaling_example():
    """CASES scale-mixup: a stored 80 and a value of 8, whatever the amax buffer held before."""
    graph = new_graph()
    a, b = torch.full((1, 32, 32), 2.0).to(torch.float8_e4m3fn), torch.ones(1, 32, 32).to(torch.float8_e4m3fn)
    scales = [torch.full((1, 1, 1), s) for s in (0.5, 0.25, 10.0)]
    A, B = describe(graph, a, "A"), describe(graph, b, "B")
    descale_a, descale_b, scale = (describe(graph, s, n) for s, n in zip(scales, ("dA", "dB", "s"), strict=True))
    value = graph.mul(graph.mul(graph.matmul(A, B), descale_a), descale_b)
    amax = graph.reduction(value, mode=MODE.AMAX).set_dim([1, 1, 1]).set_output(True).set_data_type(DT.FLOAT)
    Y = graph.mul(value, scale).set_output(True).set_data_type(DT.FP8_E4M3)
    graph.validate()
    y, amax_buffer = torch.empty(1, 32, 32, dtype=torch.float8_e4m3fn), torch.full((1,), 1e9)
    for filled, expected in ((2.0, 8.0), (1.0, 4.0), (0.0, 0.0)):
        a.copy_(torch.full_like(a.float(), filled))
        given = dict(zip((descale_a, descale_b, scale), scales, strict=True))
        reference.evaluate(graph, {A: a, B: b, **given, Y: y, amax: amax_buffer})
        assert amax_buffer.item() == expected
        assert (y.float() == 10 * expected).all()


def bias_graph(bias_stride=(3, 1, 3, 3)):
    """A validated graph Y = X + B with channels-last X (2, 3, 5, 7) and B (1, 3, 1, 1); its tensors, and x."""
    graph = new_graph()
    x = rand(2, 3, 5, 7).to(memory_format=torch.channels_last)
    X = describe(graph, x, "X")
    B = graph.tensor(dim=[1, 3, 1, 1], stride=list(bias_stride), data_type=DT.FLOAT, name="B")
    Y = graph.bias(X, B).set_output(True).set_name("Y")
    graph.validate()
    return graph, X, B, Y, x


def test_evaluate_writes_in_place_and_nowhere_else():
    graph, X, B, Y, x = bias_graph()
    buffer = torch.full((2, 9, 7, 5), -7.0)
    y = buffer[:, 2:7, :, 1:4].permute(0, 3, 1, 2)  # channels-last, with neighbours on all sides
    reference.evaluate(graph, {X: x, B: torch.tensor([0.0, 9.0, 1.0]), Y: y})
    assert torch.equal(y, x + torch.tensor([0.0, 9.0, 1.0]).view(1, 3, 1, 1))
    y.fill_(-7)
    assert (buffer == -7).all()


def test_evaluate_reads_a_strided_bias():
    """The second of two interleaved biases, given as a slice of rank 1."""
    graph, X, B, Y, x = bias_graph(bias_stride=(6, 2, 6, 6))
    y = torch.empty_like(x)
    reference.evaluate(graph, {X: x, B: torch.tensor([0.0, 5.0, 1.0, 6.0, 2.0, 7.0])[1::2], Y: y})
    assert torch.equal(y, x + torch.tensor([5.0, 6.0, 7.0]).view(1, 3, 1, 1))


def test_scalars_by_value():
    x = rand(2, 3, 5)
    graph = new_graph()
    X = describe(graph, x, "X")
    S = graph.tensor(dim=[1, 1, 1], stride=[1, 1, 1], data_type=DT.FLOAT, is_pass_by_value=True, name="S")
    Y = graph.mul(X, S).set_output(True)
    graph.validate()
    y = reference.reference_values(graph, {X: x, S: torch.tensor(3.0)})[Y]
    assert torch.equal(y, x * 3)
    with pytest.raises(ValueError, match="'S'"):
        reference.reference_values(graph, {X: x})


def test_constants_of_the_graph():
    x = rand(2, 3, 5, 7)
    constant = cudnn._compiled_module.scalar_type.COMPILE_TIME_CONST
    (y,) = values(lambda g, X: g.add(X, g.tensor_scalar(0.1, constant)), x)
    assert torch.equal(y, x + torch.tensor(0.1))


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="needs PyTorch 2.9")
def test_tf32_is_off_inside_and_restored(monkeypatch):
    matmul, conv, seen = torch.backends.cuda.matmul, torch.backends.cudnn.conv, []
    before = matmul.fp32_precision, conv.fp32_precision
    monkeypatch.setitem(
        reference._POINTWISE, "neg", lambda x: seen.append((matmul.fp32_precision, conv.fp32_precision)) or -x
    )
    try:
        matmul.fp32_precision, conv.fp32_precision = "tf32", "tf32"
        values(lambda g, X: g.neg(X), rand(2, 3, 5))
        assert seen == [("ieee", "ieee")]
        assert (matmul.fp32_precision, conv.fp32_precision) == ("tf32", "tf32")
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


# --- what is refused -------------------------------------------------------------------------------------------------


def test_wrong_tensors_are_named_and_nothing_is_written():
    graph, X, B, Y, x = bias_graph()
    y = torch.full_like(x, -7.0)
    good = {X: x, B: torch.arange(3.0), Y: y}
    for change, error, words in [
        ({B: None}, ValueError, "no tensor was given for 'B'"),
        ({Y: None}, ValueError, "no tensor was given for 'Y'"),
        ({B: torch.arange(4.0)}, ValueError, r"'B'.*\(1, 3, 1, 1\).*\(4,\)"),
        ({B: torch.arange(3.0).double()}, TypeError, "'B'.*FLOAT.*float64"),
    ]:
        with pytest.raises(error, match=words):
            reference.evaluate(graph, {t: v for t, v in (good | change).items() if v is not None})
        assert (y == -7).all()
    reference.evaluate(graph, good)
    assert (y != -7).all()


def test_no_output_is_written_when_a_later_one_is_missing():
    x = rand(2, 3, 5)
    graph = new_graph()
    X = describe(graph, x, "X")
    first = graph.neg(X).set_output(True).set_name("first")
    graph.exp(first).set_output(True).set_name("second")
    graph.validate()
    buffer = torch.full_like(x, -7.0)
    with pytest.raises(ValueError, match="'second'"):
        reference.evaluate(graph, {X: x, first: buffer})
    assert (buffer == -7).all()


@pytest.mark.parametrize("dim", [[2, 3, 4], [3, 5], [2, 3, 10]])
def test_reduction_to_other_dims_is_refused(dim):
    with pytest.raises(NotImplementedError, match="'sum'"):
        values(lambda g, X: g.reduction(X, mode=MODE.ADD, name="sum").set_dim(dim), rand(2, 3, 5))


def test_unknown_node_is_named():
    x = rand(2, 3, 5, 7)
    with pytest.raises(NotImplementedError, match=r"'sums' \(GENSTATS\)"):
        values(lambda g, X: g.genstats(X, name="sums"), x)


def refused(make):
    """A function that builds attention with the extra arguments that make(graph) gives."""
    return lambda g, q, k, v: sdpa(g, q, k, v, name="attention", **make(g))


def integers(g, *dim):
    return g.tensor(dim=list(dim), data_type=DT.INT32, name=f"integers{len(g.tensors)}")


def lengths_of(g):
    return dict(use_padding_mask=True, seq_len_q=integers(g, 2, 1, 1, 1), seq_len_kv=integers(g, 2, 1, 1, 1))


REFUSED = {
    "dropout": refused(lambda g: dict(dropout=(0.1, integers(g, 1, 1, 1, 1), integers(g, 1, 1, 1, 1)))),
    "paged_attention_k_table": refused(
        lambda g: (
            dict(paged_attention_k_table=integers(g, 2, 1, 3, 1), paged_attention_max_seq_len_kv=S_KV) | lengths_of(g)
        )
    ),
    "use_alibi_mask": refused(lambda g: dict(use_alibi_mask=True, use_causal_mask=True)),
    "score_mod": refused(lambda g: dict(score_mod=lambda graph, score: score)),
    "stats_use_log2": refused(lambda g: dict(stats_use_log2=True)),
    "use_causal_mask": refused(lambda g: dict(use_causal_mask=True, diagonal_band_right_bound=2)),
    "score_max": refused(lambda g: dict(score_max=g.tensor(dim=[2, 6, S_Q, 1], data_type=DT.FLOAT, name="m"))),
}


@pytest.mark.parametrize("attribute", REFUSED)
def test_attributes_that_are_not_honoured_are_named(attribute):
    with pytest.raises(NotImplementedError, match=rf"'attention' \(SDPA\).*'{attribute}'"):
        values(REFUSED[attribute], Q, K, V)


@pytest.mark.parametrize("packed", ["in0", "O"])
def test_ragged_tensors_are_refused(packed):
    def build(g, q, k, v):
        out = sdpa(g, q, k, v, **lengths_of(g))
        {"in0": q, "O": out[0].set_name("O")}[packed].set_ragged_offset(integers(g, 3, 1, 1, 1))
        return out

    with pytest.raises(NotImplementedError, match=f"'{packed}'.*ragged_offset"):
        values(build, Q, K, V)


def test_unknown_data_types_are_refused():
    graph = new_graph()
    X = graph.tensor(dim=[2, 3, 8], data_type=DT.FP4_E2M1, name="X")
    graph.identity(X).set_output(True)
    graph.validate()
    with pytest.raises(NotImplementedError, match=r"'X'.*FP4"):
        reference.reference_values(graph, {X: torch.zeros(2, 3, 8)})


def test_matmul_padding_value_is_refused():
    with pytest.raises(NotImplementedError, match="'padding'"):
        values(lambda g, A, B: g.matmul(A, B, padding=1.0), rand(2, 3, 5), rand(2, 5, 7))
