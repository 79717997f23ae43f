"""What a graph means: evaluates the nodes of a cudnn.pygraph in plain PyTorch, on any device.

It stands in for a plan where there is no GPU, and is the yardstick for one where there is. Each node computes in
float32 (float64 where the node asks for DOUBLE or for an integer type), with TF32 off. Each tensor that a node writes,
virtual or not, is rounded to the data type of its description before the next node reads it:

    float types     round to nearest even; fp16 overflows to Inf
    FP8             the same, and saturates: beyond +-448 (e4m3) or +-57344 (e5m2), Inf included, the largest finite
                    value is stored; NaN stays NaN (__NV_SATFINITE of __nv_cvt_float_to_fp8, CUDA Math API)
    integers        round to nearest even, saturate, NaN becomes 0; bool: not equal to 0

Where cuDNN rounds inside one fused kernel and says nothing about it (attention stores its probabilities as bf16 or
fp16 before the second matmul), the reference stays in float32. FP8 attention says it, by a scale for the probabilities,
so there they are rounded. NaN propagates through max, min and ReLU as in PyTorch.
Whatever it can't evaluate, a node type or an attribute, raises NotImplementedError with the node's name; nothing that
changes a result is skipped.
"""

import contextlib
import math

import cudnn
import torch
from torch.nn import functional

from .dtypes import to_torch

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Integer arithmetic is done in float64, exact up to 2^53: PyTorch's convolutions and matmuls on a GPU take floats only.
_FLOAT64_COMPUTE = (torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)


# --- the two calls ---------------------------------------------------------------------------------------------------


def evaluate(graph, tensors):
    """Evaluates `graph` and writes the results into the given output tensors, as executing a plan does.

    graph    a validated (or built) cudnn.pygraph.
    tensors  {cudnn.Tensor: torch.Tensor} with every input and output that is not virtual, of the described dtype. A
             tensor of the described shape is taken as it is, whatever its strides. One of another shape (a (C,) bias
             described as (1, C, 1, 1)) is read by the described dims and strides, as cuDNN does.

    Raises ValueError (a tensor is missing or has another element count), TypeError (another dtype) or
    NotImplementedError (see the module); no output has been touched then.
    """
    outputs = {t: _view(t, tensors) for t in _real_outputs(graph)}
    for tensor, value in reference_values(graph, tensors).items():
        outputs[tensor].copy_(value)


@torch.no_grad()
def reference_values(graph, tensors, dtype=None):
    """{cudnn.Tensor: new torch.Tensor with the described dims} for every output that is not virtual.

    dtype=None rounds as described above: what cuDNN should store. dtype=torch.float64 computes in float64 throughout
    and rounds (and saturates) nothing: the value to measure errors against. `tensors` needs only the inputs.
    """
    values = {}
    produced = {t for node in graph.nodes for t in node.outputs.values()}
    device = next((t.device for t in tensors.values() if t.device.type != "cpu"), torch.device("cpu"))
    for node in graph.nodes:
        compute = dtype or (torch.float64 if _dtype_of(node.compute_data_type) in _FLOAT64_COMPUTE else torch.float32)
        function = _checked_function(node)
        for tensor in node.inputs.values():
            if tensor not in values and tensor not in produced:
                values[tensor] = _read(tensor, tensors, device)
        inputs = {port: values[tensor].to(compute) for port, tensor in node.inputs.items()}
        with _full_float32():
            results = function(node, inputs)
        for port, tensor in node.outputs.items():
            if results[port].shape != torch.Size(tensor.dim or ()):
                raise ValueError(f"{_label(node)} gives {tuple(results[port].shape)}, {tensor.name} has {tensor.dim}")
            values[tensor] = results[port] if dtype else _store(results[port], _dtype_of(tensor.data_type))
    return {t: values[t] for t in _real_outputs(graph)}


def _real_outputs(graph):
    return [t for node in graph.nodes for t in node.outputs.values() if not t.is_virtual]


# --- reading and storing tensors -------------------------------------------------------------------------------------


def _dtype_of(data_type):
    """torch dtype of a description's data type, float32 where none is set; None for a type that PyTorch lacks."""
    if data_type in (None, cudnn.data_type.NOT_SET):
        return torch.float32
    try:
        return to_torch(data_type)
    except TypeError:
        return None


def _view(tensor, tensors):
    """The tensor given for a description, with the described dims; shares its memory."""
    if tensor not in tensors:
        raise ValueError(f"no tensor was given for '{tensor.name}'")
    given = tensors[tensor]
    if given.dtype != _dtype_of(tensor.data_type):
        raise TypeError(f"'{tensor.name}' is described as {tensor.data_type}, got {given.dtype}")
    if given.numel() != math.prod(tensor.dim):
        raise ValueError(f"'{tensor.name}' is described with dims {tuple(tensor.dim)}, got {tuple(given.shape)}")
    if tuple(given.shape) == tuple(tensor.dim):
        return given
    return given.as_strided(tensor.dim, tensor.stride)


def _read(tensor, tensors, device):
    if tensor.pass_by_value is not None and tensor not in tensors:  # a constant that is part of the graph
        kind = torch.int64 if isinstance(tensor.pass_by_value, int) else torch.float32
        return torch.full(tuple(tensor.dim), tensor.pass_by_value, dtype=kind, device=device)
    return _view(tensor, tensors).to(device)  # a pass-by-value scalar comes from the CPU


def _store(value, dtype):
    """`value` rounded to `dtype` as the module describes it."""
    if dtype in _FP8:  # clamp() keeps NaN; torch's own cast saturates in some versions and gives NaN in others
        limit = torch.finfo(dtype).max
        return value.clamp(-limit, limit).to(dtype)
    if dtype == torch.bool or dtype.is_floating_point:
        return value.to(dtype)
    limits = torch.iinfo(dtype)
    largest = min(limits.max, 2**63 - 1024)  # the largest int64 that a float64 holds
    return value.double().nan_to_num(0.0, math.inf, -math.inf).round().clamp(limits.min, largest).to(dtype)


@contextlib.contextmanager
def _full_float32():
    """Switches TF32 off for convolutions and matmuls inside."""
    places = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


# --- which nodes can be evaluated ------------------------------------------------------------------------------------

_NODES = {}  # node type name -> (function, names of the ports and attributes that it honours)


def _evaluates(node_type, *honoured):
    """Registers a function (node, {port: value}) -> {port: value}; other ports or attributes that are set raise."""

    def register(function):
        _NODES[node_type] = (function, frozenset(honoured))
        return function

    return register


def _label(node):
    return f"node '{node.name}' ({node.node_type.name})"


def _checked_function(node):
    if node.node_type.name not in _NODES:
        raise NotImplementedError(f"{_label(node)}: this node type is not evaluated by the reference")
    function, honoured = _NODES[node.node_type.name]
    # None, False and 0.0 are how the frontend records 'not used'; a bound of 0 is a mask.
    given = (k for k, v in node.params.items() if v is not None and (v != 0 or k.endswith("_bound")))
    used = [*node.inputs, *node.outputs, *given]
    refused = ["dropout" if "dropout" in name else name for name in used if name not in honoured]
    if refused:
        raise NotImplementedError(f"{_label(node)}: '{refused[0]}' is not evaluated by the reference")
    for tensor in (*node.inputs.values(), *node.outputs.values()):
        for attribute in ("ragged_offset", "reordering_type"):
            if getattr(tensor, attribute) is not None:
                raise NotImplementedError(f"{_label(node)}: '{tensor.name}' has a {attribute}; it is not evaluated")
        if _dtype_of(tensor.data_type) is None:
            raise NotImplementedError(f"{_label(node)}: '{tensor.name}' is {tensor.data_type}; it is not evaluated")
    return function


# --- convolution and matmul ------------------------------------------------------------------------------------------

_CONV = ("padding", "pre_padding", "post_padding", "stride", "dilation", "convolution_mode")


def _conv(node, image, weight):
    """Image (N, C, *spatial) and filter (K, C / groups, *spatial), one to three spatial dims, to (N, K, *spatial)."""
    spatial = image.dim() - 2
    symmetric = node.params.get("padding") or [0] * spatial
    pre = node.params.get("pre_padding") or symmetric
    post = node.params.get("post_padding") or symmetric
    # functional.pad takes (before, after) pairs from the last dim to the first.
    image = functional.pad(image, [p for pair in zip(reversed(pre), reversed(post), strict=True) for p in pair])
    if getattr(node.params.get("convolution_mode"), "name", "") == "CONVOLUTION":  # default: CROSS_CORRELATION
        weight = weight.flip(list(range(2, weight.dim())))
    return (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1](
        image,
        weight,
        stride=node.params.get("stride") or 1,
        dilation=node.params.get("dilation") or 1,
        groups=image.shape[1] // weight.shape[1],
    )


@_evaluates("CONV_FPROP", "image", "weight", "Y", *_CONV)
def _conv_fprop(node, x):
    return {"Y": _conv(node, x["image"], x["weight"])}


@_evaluates("CONV_DGRAD", "loss", "filter", "DX", *_CONV)
def _conv_dgrad(node, x):
    image = x["loss"].new_zeros(tuple(node.outputs["DX"].dim))  # the convolution is linear: any image will do
    return {"DX": _gradient(lambda image: _conv(node, image, x["filter"]), image, x["loss"])}


@_evaluates("CONV_WGRAD", "image", "loss", "DW", *_CONV)
def _conv_wgrad(node, x):
    weight = x["loss"].new_zeros(tuple(node.outputs["DW"].dim))
    return {"DW": _gradient(lambda weight: _conv(node, x["image"], weight), weight, x["loss"])}


def _gradient(function, x, loss):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, loss)[0]


@_evaluates("MATMUL", "A", "B", "C")  # a padding value other than 0 is refused: it fills ragged tiles
def _matmul(node, x):
    """A (..., M, K) and B (..., K, N) to (..., M, N); batch dims of 1 are broadcast."""
    return {"C": x["A"] @ x["B"]}


# --- pointwise -------------------------------------------------------------------------------------------------------


def _relu(x, negative_slope=None, lower_clip=None, upper_clip=None):
    slope, low = negative_slope or 0.0, lower_clip or 0.0
    y = torch.where(x <= low, slope * x if slope else torch.full_like(x, low), x)  # a NaN stays
    return y if upper_clip is None else torch.where(y >= upper_clip, upper_clip, y)


def _index(x, axis):
    shape = [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
    return torch.arange(x.shape[axis], dtype=x.dtype, device=x.device).view(shape).expand(x.shape)


_SAME_NAME = ("abs", "ceil", "cos", "div", "erf", "exp", "floor", "log", "logical_and", "logical_not", "logical_or")
_SAME_NAME += ("mul", "neg", "pow", "reciprocal", "rsqrt", "sigmoid", "sin", "sqrt", "sub", "tan", "tanh")
# Keyed by the pygraph method's name. Formulas: cudnnPointwiseMode_t in the cuDNN API reference, torch.nn.functional.
_POINTWISE = {name: getattr(torch, name) for name in _SAME_NAME} | {
    "identity": lambda x: x,
    "add": torch.add,
    "bias": torch.add,
    "scale": torch.mul,
    "add_square": lambda a, b: a + b * b,
    "max": torch.maximum,
    "min": torch.minimum,
    "mod": torch.fmod,  # floating-point remainder: the sign of the dividend, as C's fmod
    "relu": _relu,
    "leaky_relu": _relu,
    "elu": functional.elu,  # alpha 1
    "gelu": functional.gelu,
    "gelu_approx_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "swish": lambda x, swish_beta=1.0: x * torch.sigmoid(swish_beta * x),
    "gen_index": _index,
    "cmp_eq": torch.eq,
    "cmp_neq": torch.ne,
    "cmp_gt": torch.gt,
    "cmp_ge": torch.ge,
    "cmp_lt": torch.lt,
    "cmp_le": torch.le,
    "binary_select": lambda a, b, mask: torch.where(mask != 0, a, b),
}


@_evaluates("POINTWISE", "IN_0", "IN_1", "IN_2", "OUT_0", "mode", *cudnn.pygraph._POINTWISE_EXTRA_PARAMS)
def _pointwise(node, x):
    """Inputs of equal rank, broadcast as in numpy. A *_backward mode takes (loss, input of the forward op)."""
    options = {k: v for k, v in node.params.items() if k != "mode"}
    mode = node.params["mode"]
    function = _POINTWISE.get(mode.removesuffix("_backward"))
    if function is None:
        raise NotImplementedError(f"{_label(node)}: mode '{mode}' is not evaluated by the reference")
    if options.get("negative_slope") and options.get("lower_clip"):  # no document says where the slope starts
        raise NotImplementedError(f"{_label(node)}: 'negative_slope' together with 'lower_clip' is not evaluated")
    inputs = [x[f"IN_{i}"] for i in range(len(x))]
    if mode.endswith("_backward"):
        return {"OUT_0": _gradient(lambda value: function(value, **options), inputs[1], inputs[0])}
    return {"OUT_0": function(*inputs, **options).to(inputs[0].dtype)}


# --- reduction and normalisation -------------------------------------------------------------------------------------

_REDUCTION = {  # each reduces the last dim
    "ADD": lambda x: x.sum(-1),
    "AVG": lambda x: x.mean(-1),
    "MUL": lambda x: x.prod(-1),
    "MUL_NO_ZEROS": lambda x: torch.where(x == 0, 1, x).prod(-1),
    "MAX": lambda x: x.amax(-1),
    "MIN": lambda x: x.amin(-1),
    "AMAX": lambda x: x.abs().amax(-1),
    "NORM1": lambda x: x.abs().sum(-1),
    "NORM2": lambda x: x.square().sum(-1).sqrt(),
}


@_evaluates("REDUCTION", "input", "OUT_0", "mode")
def _reduction(node, x):
    """Reduces the dims that are 1 in the output and not in the input."""
    x, dim = x["input"], tuple(node.outputs["OUT_0"].dim)
    mode = getattr(node.params.get("mode"), "name", None)
    kept = [i for i, (n, m) in enumerate(zip(x.shape, dim, strict=False)) if n == m]
    reduced = [i for i in range(x.dim()) if i not in kept]
    if mode not in _REDUCTION or len(dim) != x.dim() or any(dim[i] != 1 for i in reduced):
        raise NotImplementedError(f"{_label(node)}: mode {mode} from {tuple(x.shape)} to {dim} is not evaluated here")
    rows = x.permute(*kept, *reduced).reshape(*(dim[i] for i in kept), -1)
    return {"OUT_0": _REDUCTION[mode](rows).reshape(dim)}


@_evaluates("RMSNORM", "input", "scale", "bias", "epsilon", "Y", "inv_var", "norm_forward_phase")
@_evaluates("LAYERNORM", "input", "scale", "bias", "epsilon", "Y", "mean", "inv_var", "norm_forward_phase")
def _norm(node, inputs):
    """Normalises over the dims where scale is not 1; without a scale, over all but the first.

    y = (x - mean) * inv_var * scale + bias, inv_var = 1 / sqrt(mean((x - mean)^2) + epsilon); RMSNorm has no mean.
    """
    x, scale = inputs["input"], inputs.get("scale")
    dims = [i for i in range(x.dim()) if (i > 0 if scale is None else scale.shape[i] != 1)]
    mean = x.mean(dims, keepdim=True) if node.node_type.name == "LAYERNORM" else torch.zeros((), dtype=x.dtype)
    centred = x - mean.to(x.device)
    inv_var = torch.rsqrt(centred.square().mean(dims, keepdim=True) + inputs["epsilon"])
    y = centred * inv_var * (1 if scale is None else scale) + inputs.get("bias", 0)
    return {"Y": y, "mean": mean, "inv_var": inv_var}


# --- attention -------------------------------------------------------------------------------------------------------

_ATTENTION = ("q", "k", "v", "attn_scale", "use_padding_mask", "seq_len_q", "seq_len_kv")
_ATTENTION += ("use_causal_mask", "use_causal_mask_bottom_right", "diagonal_alignment")
_BAND = ("bias", "diagonal_band_left_bound", "sliding_window_length", "diagonal_band_right_bound")
_FP8_BAND = ("left_bound", "sliding_window", "right_bound")  # sdpa_fp8 has its own names for these, and takes no bias
_FP8_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
_FORWARD = ("O", "Stats", "is_inference", "generate_stats", "implementation", "unfuse_fma")
_BACKWARD = ("o", "dO", "stats", "dQ", "dK", "dV", "dBias", "use_deterministic_algorithm")


def _band(node):
    """(bottom_right, left, right): key j is kept for row i where i - left < j - offset <= i + right.

    offset is 0 for TOP_LEFT and s_kv - s_q for BOTTOM_RIGHT, of each batch's own lengths where there are any.
    """
    p = node.params
    causal = [name for name in ("use_causal_mask", "use_causal_mask_bottom_right") if p.get(name)]
    alignment = getattr(p.get("diagonal_alignment"), "name", "TOP_LEFT")
    names = _FP8_BAND if node.node_type.name == "SDPA_FP8" else _BAND[1:]
    left, window, right = (p.get(name) for name in names)
    left = window if left is None else left
    if not causal:
        return alignment == "BOTTOM_RIGHT", left, right
    if len(causal) > 1 or right or (causal == ["use_causal_mask"] and alignment != "TOP_LEFT"):
        # The frontend calls the mix undetermined, and its versions do differ.
        raise NotImplementedError(f"{_label(node)}: '{causal[0]}' together with another diagonal mask")
    return causal == ["use_causal_mask_bottom_right"], left, 0


def _scores(node, x):
    """Masked scores (B, H_q, S_q, S_kv), which of them are kept, the scale, and the inputs without their padding.

    The inputs come back with K and V repeated for the H_q / H_kv query heads that share one (head h reads h // ratio),
    and with 0 in the rows past a sequence's length, which may hold anything.
    """
    heads, s_q, s_kv = x["q"].shape[1], x["q"].shape[2], x["k"].shape[2]
    i = torch.arange(s_q, device=x["q"].device).view(-1, 1)
    j = torch.arange(s_kv, device=x["q"].device)
    len_q, len_kv = x.get("seq_len_q", torch.tensor(s_q)), x.get("seq_len_kv", torch.tensor(s_kv))
    len_q, len_kv = (n.to(i.device, torch.int64).view(-1, 1, 1, 1) for n in (len_q, len_kv))
    bottom_right, left, right = _band(node)
    offset = len_kv - len_q if bottom_right else 0
    keep = (i < len_q) & (j < len_kv)
    if right is not None:
        keep = keep & (j - i <= offset + right)
    if left is not None:
        keep = keep & (j - i > offset - left)

    x = dict(x)
    for port in x.keys() & {"q", "o", "dO"}:
        x[port] = x[port].masked_fill(i >= len_q, 0)
    for port in ("k", "v"):
        x[port] = x[port].masked_fill(j.view(-1, 1) >= len_kv, 0)
        x[port] = x[port].repeat_interleave(heads // x[port].shape[1], dim=1)
    scale = x.get("attn_scale", node.params.get("attn_scale", 1.0))
    scores = x["q"] @ x["k"].mT * scale + x.get("bias", 0)
    return scores.masked_fill(~keep, -math.inf), keep, scale, x


def _softmax(scores):
    """(probabilities, logsumexp) along the last dim; a row of -Inf alone gives probabilities of 0."""
    stats = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - stats.masked_fill(stats == -math.inf, 0)), stats


@_evaluates("SDPA", *_ATTENTION, *_BAND, *_FORWARD)
def _sdpa(node, x):
    """q (B, H_q, S_q, D), k (B, H_k, S_kv, D), v (B, H_v, S_kv, D_v) to O (B, H_q, S_q, D_v).

    O = softmax(scale * q @ k^T + bias, masked) @ v; scale is 1 unless given. Stats (B, H_q, S_q, 1) is the natural
    logarithm of the sum of exponentials. A row without any kept key gives O = 0 and Stats = -Inf. The softmax is not
    rounded, only O is. The whole score matrix is held in memory.
    """
    scores, _, _, x = _scores(node, x)
    p, stats = _softmax(scores)
    return {"O": p @ x["v"], "Stats": stats}


@_evaluates("SDPA_FP8", *_ATTENTION, *_FP8_BAND, *_FORWARD, *_FP8_SCALES, "Amax_S", "Amax_O")
def _sdpa_fp8(node, x):
    """As SDPA, on FP8 q, k and v that stand for q * descale_q, k * descale_k and v * descale_v; scales have 1 element.

    In the order of the frontend's graph (include/cudnn_frontend/node/scaled_dot_product_flash_attention.h):
    S = softmax(...); Amax_S = max |S|; S * scale_s, rounded to q's FP8 type; O = S @ v * descale_s * descale_v;
    Amax_O = max |O|; O * scale_o is stored. A fused kernel may round exp(score - running maximum) in place of S and
    divide later, so that O differs within the rounding of S. Like all else, S is not rounded for dtype=torch.float64.
    """
    scores, _, _, x = _scores(node, x | {port: x[port] * x[f"descale_{port}"] for port in ("q", "k", "v")})
    p, stats = _softmax(scores)
    s = p * x["scale_s"]
    if s.dtype == torch.float32:
        s = _store(s, _dtype_of(node.inputs["q"].data_type)).float()
    o = s @ x["v"] * x["descale_s"]
    amax = {f"Amax_{name}": t.abs().amax().view(1, 1, 1, 1) for name, t in (("S", p), ("O", o))}
    return {"O": o * x["scale_o"], "Stats": stats, **amax}


@_evaluates("SDPA_BWD", *_ATTENTION, *_BAND, *_BACKWARD)
def _sdpa_backward(node, x):
    """dQ, dK, dV and dBias from the forward's inputs, O and Stats (FlashAttention-2, arXiv 2307.08691, algorithm 2)."""
    shapes = {port: x[port].shape for port in x.keys() & {"k", "v", "bias"}}
    scores, keep, scale, x = _scores(node, x)
    p = torch.exp(scores - x["stats"]).masked_fill(~keep, 0)
    ds = p * (x["dO"] @ x["v"].mT - (x["dO"] * x["o"]).sum(-1, keepdim=True))
    heads_of = {port: (shape[0], shape[1], -1, *shape[2:]) for port, shape in shapes.items()}
    return {
        "dQ": ds @ x["k"] * scale,
        "dK": (ds.mT @ x["q"] * scale).reshape(heads_of["k"]).sum(2),
        "dV": (p.mT @ x["dO"]).reshape(heads_of["v"]).sum(2),
        "dBias": ds.sum_to_size(shapes["bias"]) if "bias" in shapes else None,
    }
