"""The reference against cuDNN itself: each graph is built on any machine, and executed and compared on a GPU.

Inputs are small multiples of a power of two wherever that makes every product and sum exact in fp32; then the results
have to be equal bit for bit. Elsewhere the tolerance is two units in the last place of the output's dtype.
"""

import functools
import math
from dataclasses import dataclass, field

import cudnn
import pytest
import torch

from helpers import GraphError, build, describe, new_graph, reference, scalar, target

TYPE, MODE = cudnn.data_type, cudnn.reduction_mode
CASES = {}


@dataclass
class Case:
    """A graph under construction with the tensors of its inputs."""

    graph: object
    inputs: dict = field(default_factory=dict)
    exact: bool = False
    atol: float | None = None
    compared: object = lambda name, value: value  # the part of an output that is defined

    def input(self, name, tensor, channels_last=False):
        tensor = tensor.to(target.device)
        if channels_last:
            tensor = tensor.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[tensor.dim()])
        described = describe(self.graph, tensor, name)
        self.inputs[described] = tensor
        return described


def case(name, needs="sm75"):
    """Registers a function (Case) -> None that adds operations to the case's graph."""

    def register(function):
        assert name not in CASES
        CASES[name] = (function, needs)
        return function

    return register


@functools.cache
def built(name):
    """The case and its plan; built once for the tests that share it."""
    function, needs = CASES[name]
    if target.lacks(needs):
        pytest.skip(target.lacks(needs))
    torch.manual_seed(0)
    this = Case(new_graph(name.replace(" ", "_")))
    function(this)
    return this, build(this.graph)


def fractions(*dims, low=-4, high=4, of=8, dtype=None):
    """Random multiples of 1/of from low/of to high/of."""
    return (torch.randint(low, high + 1, dims) / of).to(dtype or target.dtype)


# --- convolution ------------------------------------------------------------------------------------------------------

CONVOLUTION = cudnn._compiled_module.convolution_mode.CONVOLUTION
ONES = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}


def add_conv(name, x, w, **options):
    @case(f"conv {name}")
    def conv(this):
        X = this.input("X", fractions(*x), channels_last=True)
        W = this.input("W", fractions(*w), channels_last=True)
        this.graph.conv_fprop(X, W, **options).set_output(True)
        this.exact = True


add_conv("plain", (2, 8, 9, 11), (16, 8, 3, 3), **ONES)
add_conv("stride", (2, 8, 9, 11), (16, 8, 3, 3), **ONES | {"stride": [2, 3]})
add_conv("dilation", (2, 8, 9, 11), (16, 8, 3, 3), **ONES | {"padding": [2, 1], "dilation": [2, 1]})
add_conv("groups", (2, 32, 9, 11), (32, 16, 3, 3), **ONES)
add_conv("depthwise", (2, 8, 9, 11), (8, 1, 3, 3), **ONES)
add_conv("flipped filter", (2, 8, 9, 11), (16, 8, 3, 3), convolution_mode=CONVOLUTION, **ONES)
add_conv(
    "asymmetric padding",
    (2, 8, 9, 11),
    (16, 8, 3, 5),
    pre_padding=[1, 0],
    post_padding=[0, 2],
    stride=[2, 1],
    dilation=[1, 1],
)
add_conv("3d", (2, 8, 5, 6, 7), (16, 8, 3, 3, 3), padding=[1, 1, 0], stride=[1, 2, 1], dilation=[1, 1, 1])


@case("conv bias relu")
def conv_bias_relu(this):
    X, W = this.input("X", fractions(2, 8, 9, 11), True), this.input("W", fractions(16, 8, 3, 3), True)
    conv = this.graph.conv_fprop(X, W, **ONES)
    this.graph.relu(this.graph.bias(conv, this.input("bias", fractions(16)))).set_output(True)
    this.exact = True


def channels_last_output(tensor, *dims):
    """Marks a result whose dims cuDNN can't infer as an output."""
    like = torch.empty(dims).to(memory_format=torch.channels_last)
    tensor.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))


@case("conv dgrad")
def conv_dgrad(this):
    loss, W = this.input("dY", fractions(2, 16, 5, 6), True), this.input("W", fractions(16, 8, 3, 3), True)
    channels_last_output(this.graph.conv_dgrad(loss=loss, filter=W, **ONES | {"stride": [2, 2]}), 2, 8, 9, 11)
    this.exact = True


@case("conv wgrad")
def conv_wgrad(this):
    X, loss = this.input("X", fractions(2, 8, 9, 11), True), this.input("dY", fractions(2, 16, 5, 6), True)
    channels_last_output(this.graph.conv_wgrad(image=X, loss=loss, **ONES | {"stride": [2, 2]}), 16, 8, 3, 3)
    this.exact = True


# --- matmul and every pointwise mode ----------------------------------------------------------------------------------


def matmul(this, low=-4):
    A, B = this.input("A", fractions(1, 64, 96, low=low)), this.input("B", fractions(1, 96, 128, low=low))
    return this.graph.matmul(A, B)


def operand(this, name="C", zero=True):
    """Multiples of 1/4 from -2 to 2, so that some equal a result of the matmul."""
    values = fractions(1, 64, 128, low=-8, high=8, of=4)
    return this.input(name, values if zero else torch.where(values == 0, 0.25, values).to(target.dtype))


# Up to four modes share a matmul and its compilation, one output each: (modes, exact, matmul's range, operand).
ANY, POSITIVE, NONZERO = {}, {"low": 1}, {"zero": False}
POINTWISE = [
    (("abs", "ceil", "floor"), True, ANY, None),
    (("identity", "neg", "relu"), True, ANY, None),
    (("cos", "sin", "tan", "exp"), False, ANY, None),
    (("elu", "erf", "gelu", "gelu_approx_tanh"), False, ANY, None),
    (("leaky_relu", "sigmoid", "softplus"), False, ANY, None),
    (("swish", "tanh"), False, ANY, None),
    (("log", "reciprocal", "rsqrt", "sqrt"), False, POSITIVE, None),
    (("add", "bias", "max", "min"), True, ANY, ANY),
    (("add_square", "mul", "scale", "sub"), True, ANY, ANY),
    (("cmp_eq", "cmp_neq", "cmp_gt"), True, ANY, ANY),
    (("cmp_ge", "cmp_lt", "cmp_le"), True, ANY, ANY),
    (("mod",), True, ANY, NONZERO),
    (("div",), False, ANY, NONZERO),
    (("pow",), False, POSITIVE, ANY),
    (("relu_backward",), True, ANY, ANY),
    (("elu_backward", "leaky_relu_backward", "tanh_backward"), False, ANY, ANY),
    (("gelu_backward", "gelu_approx_tanh_backward"), False, ANY, ANY),
    (("sigmoid_backward",), False, ANY, ANY),
    (("softplus_backward",), False, ANY, ANY),
    (("swish_backward",), False, ANY, ANY),
]
SPECIAL = ("binary_select", "gen_index", "logical_and", "logical_not", "logical_or")


def add_pointwise(modes, exact, domain, other):
    @case(f"matmul {' '.join(modes)}")
    def pointwise(this):
        operands = [matmul(this, **domain)] + ([] if other is None else [operand(this, **other)])
        for mode in modes:
            options = {"negative_slope": 0.125} if mode.startswith("leaky") else {}
            getattr(this.graph, mode)(*operands, **options).set_name(mode).set_output(True)
        this.exact = exact


for _group in POINTWISE:
    add_pointwise(*_group)


@case("matmul relu clipped")
def matmul_relu_clipped(this):
    this.graph.relu(matmul(this), lower_clip=0.25, upper_clip=1.5).set_output(True)
    this.exact = True


@case("matmul binary_select")
def matmul_binary_select(this):
    product, C = matmul(this), operand(this)
    this.graph.binary_select(product, C, this.graph.cmp_gt(product, C)).set_output(True)
    this.exact = True


@case("matmul gen_index")
def matmul_gen_index(this):
    product = matmul(this)
    index = this.graph.gen_index(product, axis=2).set_data_type(TYPE.INT32)
    this.graph.add(product, index).set_output(True)
    this.exact = True


def add_logical(mode):
    @case(f"matmul {mode}")
    def logical(this):
        product, C = matmul(this), operand(this)
        boolean = {"compute_data_type": TYPE.BOOLEAN}  # no engine computes these in fp32
        masks = [this.graph.cmp_gt(product, C)]
        if mode != "logical_not":
            masks.append(this.graph.cmp_lt(product, operand(this, "D")))
        for mask in masks:
            mask.set_data_type(TYPE.BOOLEAN)
        mask = getattr(this.graph, mode)(*masks, **boolean).set_data_type(TYPE.BOOLEAN)
        this.graph.binary_select(product, C, mask).set_output(True)  # booleans never reach memory
        this.exact = True


for _mode in ("logical_and", "logical_not", "logical_or"):
    add_logical(_mode)


def test_every_operation_of_the_reference_is_compared():
    found = set()
    for function, _ in CASES.values():
        this = Case(new_graph("described"))
        function(this)
        found |= {node.node_type.name for node in this.graph.nodes}
    lacking = reference._NODES.keys() - found - {"SDPA_FP8"}  # which test_sdpa.py compares
    assert not lacking, f"no case compares {', '.join(sorted(lacking))} with cuDNN"


def test_every_pointwise_mode_is_compared():
    """Whatever the reference evaluates has a case here."""
    listed = {mode for group in POINTWISE for mode in group[0]} | set(SPECIAL)
    backward = {f"{mode}_backward" for mode in reference._POINTWISE if hasattr(cudnn.pygraph, f"{mode}_backward")}
    assert listed == reference._POINTWISE.keys() | backward
    assert {f"matmul {mode}" for mode in SPECIAL} <= CASES.keys()


# --- low precision ----------------------------------------------------------------------------------------------------


@case("fp8 matmul scaled amax", needs="sm89")
def fp8_matmul(this):
    """Results beyond 448 are stored as 448, amax is taken before."""
    e4m3 = torch.float8_e4m3fn
    A = this.input("A", fractions(1, 64, 96, dtype=e4m3))
    b = fractions(1, 128, 96, dtype=e4m3).to(target.device)
    B = this.input("B", b.transpose(1, 2))
    scaled = this.graph.mul(this.graph.matmul(A, B), this.input("descale", torch.tensor(4.0)))
    Y = this.graph.mul(scaled, this.input("scale", torch.tensor(64.0))).set_output(True)
    Y.set_data_type(TYPE.FP8_E4M3)
    amax(this, scaled)
    this.exact = True


@case("int8 matmul")
def int8_matmul(this):
    this.graph = new_graph("int8_matmul", io=torch.int8, intermediate=torch.int32, compute=torch.int32)
    A = this.input("A", torch.randint(-128, 128, (1, 64, 96), dtype=torch.int8))
    B = this.input("B", torch.randint(-128, 128, (1, 128, 96), dtype=torch.int8).to(target.device).transpose(1, 2))
    this.graph.matmul(A, B).set_output(True).set_data_type(TYPE.INT32)
    this.exact = True


# --- reductions -------------------------------------------------------------------------------------------------------


def amax(this, tensor):
    reduced = this.graph.reduction(tensor, mode=MODE.AMAX).set_output(True).set_data_type(TYPE.FLOAT)
    reduced.set_dim([1] * len(tensor.dim or [1, 1, 1])).set_stride([1] * len(tensor.dim or [1, 1, 1]))


def signed_powers_of_two(this):
    """A matmul whose results are +-1/2, +-1 and +-2, so that the product of a row is a power of two."""
    A = this.input("A", torch.eye(64, 96, dtype=target.dtype)[None])
    powers = 2.0 ** torch.randint(-1, 2, (1, 96, 128)) * torch.randint(2, (1, 96, 128)).mul(2).sub(1)
    return this.graph.matmul(A, this.input("B", powers.to(target.dtype)))


def add_reduction(mode):
    @case(f"matmul reduction {mode}", needs="sm80" if mode == "MUL" else "sm75")  # no engine multiplies on SM75
    def reduction(this):
        product = signed_powers_of_two(this) if mode.startswith("MUL") else matmul(this)
        rows = this.graph.reduction(product, mode=MODE.__members__[mode]).set_output(True).set_data_type(TYPE.FLOAT)
        rows.set_dim([1, 64, 1]).set_stride([64, 1, 1])
        this.exact = True


# cuDNN refuses the others when the operation graph is built.
REDUCTIONS = ("ADD", "MUL", "MIN", "MAX", "AMAX")
UNSUPPORTED_REDUCTIONS = ("AVG", "NORM1", "NORM2", "MUL_NO_ZEROS")
for _mode in REDUCTIONS + UNSUPPORTED_REDUCTIONS:
    add_reduction(_mode)


def test_every_reduction_is_compared_or_unsupported():
    assert (
        {*REDUCTIONS, *UNSUPPORTED_REDUCTIONS} == MODE.__members__.keys() - {"NOT_SET"} == reference._REDUCTION.keys()
    )


@pytest.mark.parametrize("mode", UNSUPPORTED_REDUCTIONS)
def test_unsupported_reduction(mode):
    """Once cuDNN builds one of these, it belongs into the list above."""
    with pytest.raises(GraphError) as caught:
        built(f"matmul reduction {mode}")
    assert caught.value.step == "build_operation_graph"
    assert "NOT_SUPPORTED" in caught.value.reason


@case("matmul relu amax")
def matmul_relu_amax(this):
    Y = this.graph.relu(matmul(this)).set_output(True)
    amax(this, Y)
    this.exact = True


# --- normalisation ----------------------------------------------------------------------------------------------------


def norm_inputs(this):
    X = this.input("X", fractions(6, 96, 1, 1, low=-16, high=16))
    return X, this.input("scale", fractions(1, 96, 1, 1, low=4, high=12))


@case("rmsnorm inference")
def rmsnorm_inference(this):
    X, S = norm_inputs(this)
    phase, epsilon = cudnn.norm_forward_phase.INFERENCE, scalar(this.graph, 0.01, "epsilon")
    Y, _ = this.graph.rmsnorm(norm_forward_phase=phase, input=X, scale=S, epsilon=epsilon)
    Y.set_output(True)


@case("rmsnorm training")
def rmsnorm_training(this):
    X, S = norm_inputs(this)
    phase, epsilon = cudnn.norm_forward_phase.TRAINING, scalar(this.graph, 0.01, "epsilon")
    Y, inv_var = this.graph.rmsnorm(norm_forward_phase=phase, input=X, scale=S, epsilon=epsilon)
    Y.set_output(True)
    inv_var.set_output(True).set_data_type(TYPE.FLOAT)


@case("layernorm training")
def layernorm_training(this):
    (X, S), B = norm_inputs(this), this.input("bias", fractions(1, 96, 1, 1))
    phase, epsilon = cudnn.norm_forward_phase.TRAINING, scalar(this.graph, 0.01, "epsilon")
    Y, *statistics = this.graph.layernorm(norm_forward_phase=phase, input=X, scale=S, bias=B, epsilon=epsilon)
    Y.set_output(True)
    for tensor in statistics:
        tensor.set_output(True).set_data_type(TYPE.FLOAT)


# --- attention --------------------------------------------------------------------------------------------------------

TOP_LEFT, BOTTOM_RIGHT = cudnn.diagonal_alignment.TOP_LEFT, cudnn.diagonal_alignment.BOTTOM_RIGHT


def add_attention(name, heads=(4, 4), lengths=None, stats=False, **options):
    """Q (2, H_q, 64, 64), K and V (2, H_kv, 128, 64)."""

    @case(f"sdpa {name}", needs="sm80")
    def attention(this):
        q, k, v = (
            torch.randn(2, h, s, 64).to(target.dtype) for h, s in ((heads[0], 64), (heads[1], 128), (heads[1], 128))
        )
        Q, K, V = (this.input(n, t) for n, t in (("Q", q), ("K", k), ("V", v)))
        if lengths:
            numbers = [torch.tensor(n, dtype=torch.int32).view(2, 1, 1, 1) for n in lengths]
            LQ, LKV = (this.input(n, t) for n, t in zip(("len_q", "len_kv"), numbers, strict=True))
            options.update(use_padding_mask=True, seq_len_q=LQ, seq_len_kv=LKV)
            keep = torch.arange(64) < numbers[0].view(2, 1, 1)
            # Rows past a sequence's end are nobody's result.
            this.compared = lambda _, value: value.transpose(1, 2)[keep.view(2, 64).to(value.device)]
        output, statistics = this.graph.sdpa(
            q=Q, k=K, v=V, attn_scale=1 / math.sqrt(64), generate_stats=stats, **options
        )
        output.set_name("O").set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
        if stats:
            statistics.set_name("Stats").set_output(True).set_data_type(TYPE.FLOAT)
        # The probabilities are rounded to the working dtype inside, by half a unit of at most the largest |V|.
        this.atol = torch.finfo(target.dtype).eps * v.abs().max().item()


add_attention("plain")
add_attention("causal top-left", diagonal_alignment=TOP_LEFT, diagonal_band_right_bound=0)
add_attention("causal bottom-right", diagonal_alignment=BOTTOM_RIGHT, diagonal_band_right_bound=0)
add_attention("grouped heads", heads=(4, 2))
add_attention("stats", heads=(4, 1), stats=True, use_causal_mask=True)
add_attention("padding", lengths=([64, 37], [128, 61]))
add_attention(
    "padding stats bottom-right",
    lengths=([64, 37], [128, 61]),
    stats=True,
    diagonal_alignment=BOTTOM_RIGHT,
    diagonal_band_right_bound=0,
)


@case("sdpa backward", needs="sm80")
def attention_backward(this):
    """Q (2, 4, 64, 64), K and V (2, 2, 128, 64), with the O and Stats that belong to them."""
    q, k, v, d_o = (torch.randn(2, h, s, 64).to(target.dtype) for h, s in ((4, 64), (2, 128), (2, 128), (4, 64)))
    scores = q.float() @ k.float().repeat_interleave(2, 1).mT / math.sqrt(64)
    stats = scores.logsumexp(-1, keepdim=True)
    o = ((scores - stats).exp() @ v.float().repeat_interleave(2, 1)).to(target.dtype)
    named = zip(("Q", "K", "V", "O", "dO", "Stats"), (q, k, v, o, d_o, stats), strict=True)
    gradients = this.graph.sdpa_backward(*(this.input(name, t) for name, t in named), attn_scale=1 / math.sqrt(64))
    for name, gradient, like in zip(("dQ", "dK", "dV"), gradients, (q, k, v), strict=True):
        gradient.set_name(name).set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
    # Inside, probabilities and their gradients are rounded to the working dtype; each result sums 64 to 256 of them.
    this.atol = torch.finfo(target.dtype).eps


# --- the tests --------------------------------------------------------------------------------------------------------

SUPPORTED = [name for name in CASES if name.removeprefix("matmul reduction ") not in UNSUPPORTED_REDUCTIONS]


def empty_output(tensor):
    """An output tensor full of a value that no result has."""
    dtype = reference._dtype_of(tensor.data_type)
    out = torch.empty_strided(tensor.dim, tensor.stride, dtype=dtype, device=target.device)
    return out.fill_(-77 if dtype in (torch.int32, torch.int8) else math.nan)


@pytest.mark.parametrize("name", SUPPORTED)
def test_builds(name):
    """Each case is built for the target; its plan takes the inputs described and gives something."""
    this, plan = built(name)
    assert plan.name.startswith("eng")
    assert set(plan.inputs) == set(this.inputs)
    assert plan.outputs


@pytest.mark.parametrize("name", SUPPORTED)
def test_exact_cases_are_exact(name):
    """Where bits are to be equal, evaluating in float64 and rounding once gives the reference's bits too.

    The results also have to be worth comparing: finite, and not all the same.
    """
    this, _ = built(name)
    rounded = reference.reference_values(this.graph, this.inputs)
    wide = reference.reference_values(this.graph, this.inputs, dtype=torch.float64)
    for tensor, value in rounded.items():
        if this.exact:
            assert torch.equal(reference._store(wide[tensor], value.dtype).double(), value.double()), tensor.name
        compared = this.compared(tensor.name, value).double()
        assert compared.isfinite().all(), tensor.name
        assert value.numel() == 1 or len(compared.unique()) > 1, tensor.name


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUPPORTED)
def test_cudnn_gives_what_the_reference_gives(name):
    this, plan = built(name)
    outputs = {tensor: empty_output(tensor) for tensor in plan.outputs}
    plan.run(this.inputs | outputs)
    expected = reference.reference_values(this.graph, this.inputs)
    assert expected.keys() == outputs.keys()
    for tensor, out in outputs.items():
        ours, theirs = (this.compared(tensor.name, t).double() for t in (expected[tensor], out))
        eps = torch.finfo(out.dtype).eps if out.dtype.is_floating_point else 0
        # Single-precision results are compared as loosely as fast approximations of exp and rsqrt need it.
        rtol, atol = (1e-4, 1e-4) if out.dtype == torch.float32 else (2 * eps, eps / 8)
        rtol, atol = (0, 0) if this.exact else (rtol, this.atol if this.atol and eps > 1e-4 else atol)
        torch.testing.assert_close(theirs, ours, rtol=rtol, atol=atol, msg=lambda text, t=tensor: f"{t.name}: {text}")
