"""Describing, building and running graphs (CASES: incomplete, bias-shapes, hand-strides, wrong-bytes, workspace)."""

import itertools
import random
import time

import cudnn
import pytest
import torch

from helpers import AUTO, GraphError, build, describe, new_graph, scalar, target
from helpers.graph import ALIGNMENT, describe_node, describe_tensor, graph_name, propose

FLOAT = cudnn.data_type.FLOAT


@pytest.fixture
def check_strides(module):
    return module("strides").check_strides


def zeros(*dims, dtype=None, channels_last=False):
    tensor = torch.zeros(dims, dtype=dtype or target.dtype, device=target.device)
    return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


def channels(length, dtype=None):
    """0, 1, 2, ... as a vector on the target's device."""
    return torch.arange(length, device=target.device).to(dtype or target.dtype)


# --- describe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "dims", "strides"),
    [
        (lambda: torch.empty(2, 3, 5), (2, 3, 5), (15, 5, 1)),
        (lambda: torch.empty(2, 3, 5, 7).to(memory_format=torch.channels_last), (2, 3, 5, 7), (105, 1, 21, 3)),
        (lambda: torch.empty(2, 3, 5).transpose(1, 2), (2, 5, 3), (15, 1, 5)),
        (lambda: torch.empty(2, 3, 5)[:, ::2], (2, 2, 5), (15, 10, 1)),
        (lambda: torch.empty(2, 6, 3, 4, 5)[:, :, 1].transpose(1, 2), (2, 4, 6, 5), (360, 5, 60, 1)),
        (lambda: torch.empty(7), (7,), (1,)),
        (lambda: torch.empty(14)[::2], (7,), (1,)),
        (lambda: torch.empty(()), (1,), (1,)),
    ],
    ids=["contiguous", "channels-last", "transposed", "strided", "interleaved qkv", "1-D", "1-D strided", "0-d"],
)
def test_describe_takes_what_the_tensor_has(make, dims, strides):
    graph = new_graph("describe")
    tensor = describe(graph, make(), "T")
    assert (tuple(tensor.dim), tuple(tensor.stride)) == (dims, strides)
    assert (tensor.name, tensor.data_type, tensor.is_virtual) == ("T", FLOAT, False)


@pytest.mark.parametrize(
    ("first", "vector", "axis", "dims", "strides"),
    [
        ((2, 16, 8, 8), (16,), None, (1, 16, 1, 1), (16, 1, 16, 16)),
        ((2, 16, 4, 8, 8), (16,), None, (1, 16, 1, 1, 1), (16, 1, 16, 16, 16)),
        ((2, 64, 32), (32,), None, (1, 1, 32), (32, 32, 1)),
        ((2, 64, 32), (64,), 1, (1, 64, 1), (64, 1, 64)),
        ((2, 16, 8, 8), (8,), 3, (1, 1, 1, 8), (8, 8, 8, 1)),
        ((2, 16, 8, 8), (8,), -1, (1, 1, 1, 8), (8, 8, 8, 1)),
        ((2, 16, 8, 8), (1,), None, (1, 1, 1, 1), (1, 1, 1, 1)),
        ((2, 16, 8, 8), (), None, (1, 1, 1, 1), (1, 1, 1, 1)),
        ((2, 64, 32), (), None, (1, 1, 1), (1, 1, 1)),
        ((64, 32), (32,), None, (32,), (1,)),
    ],
)
def test_describe_places_vectors_and_scalars(first, vector, axis, dims, strides):
    """A vector takes the rank of the graph's first tensor: along the channels of an image, else along the last axis."""
    graph = new_graph("describe")
    describe(graph, torch.empty(first), "X")
    tensor = describe(graph, torch.empty(vector), "b", axis=axis)
    assert (tuple(tensor.dim), tuple(tensor.stride)) == (dims, strides)


@pytest.mark.parametrize("make", [lambda: torch.empty(32)[::2], lambda: torch.empty(1, 32, 1, 1)[:, ::2]])
def test_describe_takes_a_vector_with_gaps_as_dense(make):
    """cuDNN's engines ignore the stride of a broadcast vector; the plan copies it into a dense one instead."""
    graph = new_graph("describe")
    describe(graph, torch.empty(2, 16, 8, 8), "X")
    assert tuple(describe(graph, make(), "b").stride) == (16, 1, 16, 16)


def test_hand_strides_vector_with_gaps():
    """hand-strides: a vector with gaps typed by hand is refused, since it would be read as a dense one."""
    graph = new_graph("gaps")
    x = describe(graph, torch.empty(2, 16, 8, 8, dtype=target.dtype), "X")
    bias = graph.tensor(dim=[1, 16, 1, 1], stride=[32, 2, 32, 32], name="bias")
    graph.bias(x, bias).set_output(True)
    with pytest.raises(ValueError, match=r"bias.*vector with gaps"):
        build(graph)


def test_bound_plan_follows_a_vector_with_gaps(conv):
    """bias-shapes: a later change of the strided bias reaches the next launch, as that of any other input does."""
    bias = spread(channels(16))
    run = conv.plan.bind(conv.tensors(B=bias))
    run()
    assert conv.right()
    bias += 1
    run()
    assert torch.equal(conv.y[0, :, 0, 0].float(), torch.arange(16, device=target.device) + 1.0)


def test_same_tensor_given_twice(conv):
    """incomplete: a tensor given by name and by descriptor is refused; the second would silently win."""
    with pytest.raises(ValueError, match="'X' was given twice"):
        conv.plan.run({**conv.tensors(), "X": conv.x})
    assert conv.untouched()


def test_output_vector_with_gaps():
    """A result can't be written into a vector with gaps."""
    graph = new_graph("gaps")
    a, b = zeros(1, 64, 96), zeros(1, 96, 1)
    graph.matmul(describe(graph, a, "A"), describe(graph, b, "B")).set_output(True).set_name("Y")
    plan = build(graph)
    with pytest.raises(ValueError, match="Y: an output can't be a vector with gaps"):
        plan.run({"A": a, "B": b, "Y": zeros(1, 128, 1)[:, ::2]})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([1.0, 2.0], TypeError, ["bias", "list"]),
        (None, TypeError, ["bias", "NoneType"]),
        (torch.empty(2, dtype=torch.complex64), TypeError, ["bias", "torch.complex64"]),
        (torch.empty(1, 4, 1).expand(2, 4, 3), ValueError, ["bias", "(2, 4, 3)", "(0, 1, 0)", "stride 0", "expand"]),
        (torch.empty(1).expand(4), ValueError, ["bias", "stride 0"]),
        (torch.empty(8).as_strided((3, 3), (1, 1)), ValueError, ["bias", "9 elements share 5 places"]),
        (torch.eye(3).to_sparse(), ValueError, ["bias", "torch.sparse_coo tensor", ".to_dense()"]),
        (torch.empty(2, 0, 3), ValueError, ["bias", "dims (2, 0, 3) hold no element", "leave the call out"]),
    ],
)
def test_describe_refuses(value, error, words):
    with pytest.raises(error) as caught:
        describe(new_graph("describe"), value, "bias")
    assert all(word in str(caught.value) for word in words), caught.value


# --- strides ----------------------------------------------------------------------------------------------------------


def overlaps(dims, strides):
    """Whether two elements share a place, by counting them all."""
    offsets = [
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, dims))
    ]
    return len(set(offsets)) < len(offsets)


@pytest.mark.parametrize(
    ("dims", "strides", "shared"),
    [
        ((2, 3), (3, 2), False),  # 0 2 4 and 3 5 7: interleaved, and no place is used twice
        ((2, 3), (2, 1), True),
        ((3, 2), (2, 3), False),
        ((2, 2, 2), (1, 2, 3), True),
        ((1, 5), (0, 1), False),  # the stride of an axis of extent 1 is never stepped
        ((4, 1), (1, 0), False),
        ((2, 1), (0, 1), True),
        ((4, 8, 3, 3), (72, 1, 24, 8), False),
        ((), (), False),
        ((1, 1), (1, 1), False),
    ],
)
def test_strides_by_hand(check_strides, dims, strides, shared):
    assert overlaps(dims, strides) is shared
    if shared:
        with pytest.raises(ValueError, match=r"stride 0|share"):
            check_strides("T", dims, strides)
    else:
        check_strides("T", dims, strides)


def test_strides_against_counting(check_strides):
    """Random dims and strides are refused exactly where counting finds a shared place."""
    generator = random.Random(1)
    refused = 0
    for _ in range(3000):
        rank = generator.randint(1, 4)
        dims = [generator.randint(1, 5) for _ in range(rank)]
        strides = [generator.randint(0, 24) for _ in range(rank)]
        try:
            check_strides("T", dims, strides)
        except ValueError:
            refused += 1
            assert overlaps(dims, strides), (dims, strides)
        else:
            assert not overlaps(dims, strides), (dims, strides)
    assert 300 < refused < 2700  # both answers occur often


def test_strides_of_another_number(check_strides):
    with pytest.raises(ValueError, match=r"W: 3 dims \(2, 3, 4\) need as many strides, got \(12, 4\)"):
        check_strides("W", [2, 3, 4], [12, 4])


def test_hand_strides():
    """hand-strides: a 4x8x3x3 filter typed as (72,1,9,3) puts 72 elements into 32 places; (72,1,24,8) is right."""

    def conv(strides):
        graph = new_graph("hand_strides")
        X = describe(graph, zeros(2, 8, 8, 8, channels_last=True), "X")
        W = graph.tensor(dim=[4, 8, 3, 3], stride=strides, name="W")
        graph.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
        return build(graph)

    with pytest.raises(ValueError) as caught:
        conv([72, 1, 9, 3])
    text = str(caught.value)
    assert all(
        word in text for word in ("W:", "(4, 8, 3, 3)", "(72, 1, 9, 3)", "72 elements share 32 places", "describe")
    )
    assert conv([72, 1, 24, 8]).name.startswith("eng")


def test_scalar():
    graph = new_graph("scalar")
    describe(graph, zeros(1, 4, 8), "X")
    assert scalar(graph, 0.5, "half").pass_by_value == 0.5
    for value in (True, "1", None, torch.ones(())):
        with pytest.raises(TypeError, match="epsilon: a scalar is a Python int or float"):
            scalar(graph, value, "epsilon")


# --- a fused convolution, complete and not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(16).as_strided((16,), (0,)),
        lambda: torch.zeros(1).expand(16),
        lambda: torch.zeros(8, 4)[3:4, 2].expand(16),
        lambda: torch.zeros(1, 1, 1, 1).expand(1, 16, 1, 1),
    ],
)
def test_bias_shapes_expanded_vectors(make, conv):
    """bias-shapes: an expanded vector is refused by describe, and by a plan whose bias was described as a good one."""
    bias = make().to(target.dtype).to(target.device)
    bias = bias.as_strided((16,), (0,)) if bias.dim() == 1 else bias[:, :1].expand(1, 16, 1, 1)
    graph = new_graph("expanded")
    describe(graph, zeros(2, 16, 8, 8), "X")
    with pytest.raises(ValueError, match=r"bias: .*stride 0"):
        describe(graph, bias, "bias")
    with pytest.raises(ValueError, match=r"bias: .*stride 0"):
        conv.plan.run(conv.tensors(B=bias))
    assert conv.untouched()


def test_incomplete_a_virtual_tensor_is_given(conv):
    """incomplete: a tensor of this graph that was not marked as output is called virtual, not foreign."""
    virtual = conv.graph.nodes[0].outputs["Y"]
    with pytest.raises(ValueError, match=r"is virtual.*set_output\(True\)"):
        conv.plan.run({**conv.tensors(), virtual: conv.y})
    with pytest.raises(ValueError, match="'nobody' is no input or output of this graph"):
        conv.plan.run({**conv.tensors(), "nobody": conv.y})
    assert conv.untouched()


def test_wrong_bytes_output_shares_memory(conv):
    """wrong-bytes: an output in the memory of an input, or partly in it, is refused; a neighbour is not."""
    memory = zeros(2 * 16 * 8 * 8 + 2 * 8 * 8 * 8)
    x = memory[: 2 * 8 * 8 * 8].view(2, 8, 8, 8).permute(0, 3, 1, 2)
    for start, refused in ((0, True), (512, True), (2 * 8 * 8 * 8, False)):
        y = memory[start : start + 2 * 16 * 8 * 8].view(2, 8, 8, 16).permute(0, 3, 1, 2)
        tensors = conv.tensors(X=x, Y=y)
        if refused:
            with pytest.raises(ValueError, match="Y: this output shares memory with 'X'"):
                conv.plan.run(tensors)
        else:
            conv.plan.run(tensors)
            assert torch.equal(y, channels(16).view(1, 16, 1, 1).expand(2, 16, 8, 8))


def test_tensors_that_share_a_name():
    """Two tensors of one name are two tensors: both are taken by descriptor, and the name alone is refused."""
    graph = new_graph("names")
    a, b, y = zeros(1, 64, 96) + 1, zeros(1, 96, 32) + 1, zeros(1, 64, 32)
    A, B = describe(graph, a, "T"), describe(graph, b, "T")
    Y = graph.matmul(A, B).set_output(True).set_name("Y")
    plan = build(graph)
    assert [t.name for t in plan.inputs] == ["T", "T"]
    plan.run({A: a, B: b, Y: y})
    assert (y == 96).all()
    with pytest.raises(ValueError, match="'T' is the name of 2 tensors"):
        plan.run({"T": a, B: b, Y: y})


def spread(vector):
    """The same values with a gap after each."""
    wide = torch.full((2 * len(vector),), -1, dtype=vector.dtype, device=vector.device)
    wide[::2] = vector
    return wide[::2]


class FusedConv:
    """Y = relu(conv(X, W) + bias), X (2,8,8,8), W (16,8,3,3), all zero but the bias."""

    def __init__(self, bias=None, output=True):
        self.x, self.w = zeros(2, 8, 8, 8, channels_last=True), zeros(16, 8, 3, 3, channels_last=True)
        self.b = channels(16) if bias is None else bias
        self.graph = new_graph("conv_bias_relu")
        self.X, self.W = describe(self.graph, self.x, "X"), describe(self.graph, self.w, "W")
        self.B = describe(self.graph, self.b, "bias")
        conv = self.graph.conv_fprop(self.X, self.W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        self.Y = self.graph.relu(self.graph.bias(conv, self.B)).set_name("Y").set_output(output)
        self.y = torch.full((2, 16, 8, 8), -7, dtype=target.dtype, device=target.device)
        self.y = self.y.to(memory_format=torch.channels_last)

    def tensors(self, **replaced):
        return {self.X: self.x, self.W: self.w, self.B: self.b, self.Y: self.y} | {
            getattr(self, name): value for name, value in replaced.items()
        }

    def untouched(self):
        return bool((self.y == -7).all())

    def right(self):
        return torch.equal(self.y, channels(16).view(1, 16, 1, 1).expand(2, 16, 8, 8))


@pytest.fixture(scope="module")
def built_conv():
    conv = FusedConv()
    conv.plan = build(conv.graph)
    return conv


@pytest.fixture
def conv(built_conv):
    built_conv.y.fill_(-7)
    return built_conv


def test_incomplete_output_not_marked():
    """incomplete: a result that is neither used nor an output is named, with the call that is missing."""
    conv = FusedConv(output=False)
    with pytest.raises(GraphError) as caught:
        build(conv.graph)
    assert caught.value.step == "describe"
    assert "'Y'" in str(caught.value)
    assert ".set_output(True)" in str(caught.value)
    conv.Y.set_output(True)
    plan = build(conv.graph)
    plan.run(conv.tensors())
    assert conv.right()


@pytest.mark.parametrize("name", ["X", "W", "B", "Y"])
def test_incomplete_missing_tensor(conv, name):
    """incomplete: what is missing is named and nothing is launched; the corrected call works."""
    tensors = conv.tensors()
    missing = getattr(conv, name)
    del tensors[missing]
    with pytest.raises(
        ValueError, match=f"no tensor was given for '{missing.name}'; the graph has 'X', 'W', 'bias', 'Y'"
    ):
        conv.plan.run(tensors)
    assert conv.untouched()
    conv.plan.run(conv.tensors())
    assert conv.right()


def test_incomplete_foreign_tensor(conv):
    """incomplete: a tensor of no graph, of another graph with the same name, a virtual one, and an unknown name."""
    other = FusedConv()
    virtual = next(t for t in conv.graph.tensors.values() if t.is_virtual)
    for key, words in (
        (other.X, ["'X (as declared by another graph)'", "is no input or output"]),
        (virtual, [virtual.name, "is virtual"]),
        ("Z", ["'Z'", "it has 'X', 'W', 'bias', 'Y'"]),
        (None, ["None", "is no input or output"]),
    ):
        with pytest.raises(ValueError) as caught:
            conv.plan.run(conv.tensors() | {key: conv.x})
        assert all(word in str(caught.value) for word in words), caught.value
    assert conv.untouched()
    with pytest.raises(ValueError, match="declared by another graph"):
        conv.plan.run({other.X: conv.x, conv.W: conv.w, conv.B: conv.b, conv.Y: conv.y})


@pytest.mark.parametrize("value", [None, 3, [1.0]])
def test_incomplete_not_a_tensor(conv, value):
    """incomplete: None for X."""
    with pytest.raises(TypeError, match=f"X: expected a torch.Tensor, got {type(value).__name__}"):
        conv.plan.run(conv.tensors(X=value))
    assert conv.untouched()
    conv.plan.run(conv.tensors())
    assert conv.right()


def test_wrong_bytes_no_memory_by_strides(conv):
    """wrong-bytes: a sparse tensor."""
    with pytest.raises(ValueError, match=r"X: a torch\.sparse_coo tensor"):
        conv.plan.run(conv.tensors(X=conv.x.to_sparse()))
    assert conv.untouched()


@pytest.mark.parametrize("dims", [[1, 0, 24], [0, 16, 24], [1, 16, 0]])
def test_wrong_bytes_no_elements_by_hand(dims):
    """wrong-bytes: cuDNN 9.24 divides by a dim of 0 and takes the process with it; the check comes before."""
    graph = new_graph("empty")
    x = graph.tensor(dim=dims, stride=[max(dims[1] * dims[2], 1), max(dims[2], 1), 1], name="X")
    graph.relu(x).set_output(True)
    with pytest.raises(ValueError, match=r"X: dims \(.*\) hold no element"):
        build(graph)


@pytest.mark.parametrize("step", [build, lambda graph: propose(graph, [cudnn.heur_mode.A])], ids=["build", "propose"])
@pytest.mark.parametrize("value", [None, (1, 2)])
def test_incomplete_not_a_graph(step, value):
    """incomplete: the function that describes the graph does not return it."""
    with pytest.raises(TypeError, match=f"got {type(value).__name__}; does the function that describes it return it"):
        step(value)


# --- bias-shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: channels(16),
        lambda: channels(16).view(1, 16, 1, 1),
        lambda: channels(32).div(2)[::2],
        lambda: channels(16).view(1, 16, 1, 1).to(memory_format=torch.channels_last),
    ],
    ids=["(16,)", "(1,16,1,1)", "b32[::2]", "(1,16,1,1) channels-last"],
)
def test_bias_shapes_accepted(make):
    """bias-shapes: with X = 0, channel c of Y is c."""
    conv = FusedConv(bias=make())
    assert conv.right() is False
    build(conv.graph).run(conv.tensors())
    assert conv.right()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: channels(16).view(1, 16, 1, 1).expand(2, 16, 8, 8), ValueError, ["(2, 16, 8, 8)", "stride 0"]),
        (lambda: channels(16).view(1, 1, 1, 16), GraphError, ["bias (1, 1, 1, 16)", "(2, 16, 8, 8)"]),
        (lambda: channels(15), GraphError, ["bias (1, 15, 1, 1)", "(2, 16, 8, 8)"]),
        (lambda: channels(17), GraphError, ["bias (1, 17, 1, 1)", "(2, 16, 8, 8)"]),
        (lambda: channels(16).view(16, 1, 1), GraphError, ["bias (16, 1, 1)", "(2, 16, 8, 8)"]),
    ],
    ids=["expanded", "(1,1,1,16)", "length 15", "length 17", "(16,1,1)"],
)
def test_bias_shapes_refused_at_build(make, error, words):
    """bias-shapes: the others are refused with both shapes."""
    with pytest.raises(error) as caught:
        build(FusedConv(bias=make()).graph)
    assert all(word in str(caught.value) for word in ["bias", *words]), caught.value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: channels(16), None),
        (lambda: channels(16).view(1, 16, 1, 1), None),
        (lambda: channels(16).view(1, 16, 1, 1).expand(2, 16, 8, 8), ["dims (1, 16, 1, 1)", "(2, 16, 8, 8)"]),
        (lambda: channels(16).view(1, 1, 1, 16), ["dims (1, 16, 1, 1)", "(1, 1, 1, 16)"]),
        (lambda: channels(15), ["dims (1, 16, 1, 1)", "(15,)"]),
        (lambda: channels(17), ["dims (1, 16, 1, 1)", "(17,)"]),
        (lambda: spread(channels(16)), None),
        (lambda: channels(1), ["dims (1, 16, 1, 1)", "(1,)"]),
        (lambda: channels(16).view(16, 1, 1), ["dims (1, 16, 1, 1)", "(16, 1, 1)"]),
    ],
    ids=["(16,)", "(1,16,1,1)", "expanded", "(1,1,1,16)", "length 15", "length 17", "b32[::2]", "length 1", "(16,1,1)"],
)
def test_bias_shapes_at_run(conv, make, words):
    """bias-shapes: a plan for a bias of (16,) takes the same memory in another shape and refuses the others."""
    if words is None:
        conv.plan.run(conv.tensors(B=make()))
        assert conv.right()
        return
    with pytest.raises(ValueError) as caught:
        conv.plan.run(conv.tensors(B=make()))
    assert all(word in str(caught.value) for word in ["bias: expected", *words]), caught.value
    assert conv.untouched()


# --- wrong-bytes ------------------------------------------------------------------------------------------------------


class ScaledMatmul:
    """Y = descale * (A @ B) and amax = max |Y|, A (1,64,96), B (1,96,32)."""

    def __init__(self):
        self.graph = new_graph("scaled_matmul")
        self.a, self.b = zeros(1, 64, 96) + 1, zeros(1, 96, 32) + 1
        self.descale = torch.full((), 4.0, device=target.device)
        self.A, self.B = describe(self.graph, self.a, "A"), describe(self.graph, self.b, "B")
        self.S = describe(self.graph, self.descale, "descale")
        self.Y = self.graph.mul(self.graph.matmul(self.A, self.B), self.S).set_name("Y").set_output(True)
        self.M = self.graph.reduction(self.Y, mode=cudnn.reduction_mode.AMAX).set_name("amax").set_output(True)
        self.M.set_data_type(FLOAT).set_dim([1, 1, 1]).set_stride([1, 1, 1])
        self.y, self.amax = zeros(1, 64, 32), torch.zeros((), device=target.device)
        self.plan = build(self.graph)

    def tensors(self):
        return {self.A: self.a, self.B: self.b, self.S: self.descale, self.Y: self.y, self.M: self.amax}


@pytest.fixture(scope="module")
def scaled():
    return ScaledMatmul()


def test_wrong_bytes_float64_scale(scaled):
    """wrong-bytes: the first four bytes of the float64 4.0 are the float32 0.0, so a float64 descale is refused."""
    wrong = torch.full((), 4.0, dtype=torch.float64, device=target.device)
    with pytest.raises(TypeError, match=r"descale: expected torch\.float32, got torch\.float64"):
        scaled.plan.run(scaled.tensors() | {scaled.S: wrong})
    assert not scaled.y.any()
    scaled.plan.run(scaled.tensors())
    assert torch.equal(scaled.y, torch.full_like(scaled.y, 4 * 96))
    assert scaled.amax.item() == 4 * 96


def test_wrong_bytes_half_amax_between_sentinels(scaled):
    """wrong-bytes: four bytes written to an fp16 amax would overwrite its neighbour; it is refused, both are intact."""
    buffer = torch.full((24,), -7, dtype=torch.float16, device=target.device)
    with pytest.raises(TypeError, match=r"amax: expected torch\.float32, got torch\.float16"):
        scaled.plan.run(scaled.tensors() | {scaled.M: buffer[8:9]})
    assert buffer.tolist() == [-7] * 24
    right = torch.full((12,), -7.0, device=target.device)
    scaled.plan.run(scaled.tensors() | {scaled.M: right[4:5]})
    assert right.tolist() == [-7] * 4 + [4 * 96] + [-7] * 7


def test_wrong_bytes_nchw(conv):
    """wrong-bytes: a contiguous (NCHW) tensor for a channels-last description, input and output."""
    for name in ("x", "y"):
        tensor = getattr(conv, name)
        key, wrong = getattr(conv, name.upper()), tensor.contiguous()
        words = (f"{key.name}: expected strides {tensor.stride()} for dims {tuple(tensor.shape)}", f"{wrong.stride()}")
        with pytest.raises(ValueError) as caught:
            conv.plan.run(conv.tensors() | {key: wrong})
        assert all(word in str(caught.value) for word in words), caught.value
    assert conv.untouched()


def test_wrong_bytes_int64_lengths():
    """wrong-bytes: int64 sequence lengths where int32 was declared would be read as alternating lengths and zeros."""
    if target.lacks("sm80"):
        pytest.skip(target.lacks("sm80"))
    graph = new_graph("padded_attention")
    q, k = zeros(2, 2, 16, 64), zeros(2, 2, 32, 64)
    lengths = torch.tensor([5, 7], dtype=torch.int32, device=target.device).view(2, 1, 1, 1)
    Q, K, V = (describe(graph, t, name) for t, name in ((q, "Q"), (k, "K"), (k, "V")))
    LQ, LKV = describe(graph, lengths, "seq_len_q"), describe(graph, lengths, "seq_len_kv")
    Y, _ = graph.sdpa(q=Q, k=K, v=V, use_padding_mask=True, seq_len_q=LQ, seq_len_kv=LKV, generate_stats=False)
    Y.set_name("O").set_output(True).set_dim([2, 2, 16, 64]).set_stride(list(q.stride()))
    plan = build(graph)
    out = torch.full_like(q, -7)
    tensors = {Q: q, K: k, V: k + 1, LQ: lengths, LKV: lengths, Y: out}
    with pytest.raises(TypeError, match=r"seq_len_kv: expected torch\.int32, got torch\.int64"):
        plan.run(tensors | {LKV: lengths.long()})
    assert bool((out == -7).all())
    plan.run(tensors)
    assert bool((out[0, :, :5] == 1).all())
    assert bool((out[1, :, :7] == 1).all())


def test_misaligned_slice_is_refused(conv):
    """An address that cuDNN's vector loads can't take is named; a slice at an aligned place is fine."""
    flat = torch.zeros(conv.w.numel() + 8, dtype=target.dtype, device=target.device)
    assert flat.data_ptr() % ALIGNMENT == 0
    wrong, right = (flat[n:].as_strided(conv.w.shape, conv.w.stride()) for n in (1, 8))
    size = flat.element_size()
    with pytest.raises(ValueError, match=f"W: expected memory aligned to 16 bytes, got an address {size} bytes past"):
        conv.plan.run(conv.tensors(W=wrong))
    assert conv.untouched()
    conv.plan.run(conv.tensors(W=right))
    assert conv.right()


@pytest.mark.gpu
def test_wrong_device_is_refused(conv):
    with pytest.raises(ValueError, match=f"X: expected a tensor on {target.device}, got one on cpu"):
        conv.plan.run(conv.tensors(X=conv.x.cpu()))
    torch.cuda.synchronize()
    assert conv.untouched()


# --- workspace --------------------------------------------------------------------------------------------------------


class NormNeedsWorkspace:
    """RMSNorm of X (6,96,1,1): its plans need some bytes of workspace."""

    def __init__(self):
        graph = new_graph("rmsnorm")
        self.x, self.s = zeros(6, 96, 1, 1) + 3, zeros(1, 96, 1, 1) + 2
        self.X, self.S = describe(graph, self.x, "X"), describe(graph, self.s, "scale")
        Y, _ = graph.rmsnorm(
            norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
            input=self.X,
            scale=self.S,
            epsilon=scalar(graph, 0.0, "epsilon"),
        )
        self.Y, self.y = Y.set_name("Y").set_output(True), torch.full_like(self.x, -7)
        self.plan = build(graph)
        self.tensors = {self.X: self.x, self.S: self.s, self.Y: self.y}


@pytest.fixture(scope="module")
def built_norm():
    return NormNeedsWorkspace()


@pytest.fixture
def norm(built_norm):
    if not built_norm.plan.workspace_bytes:
        pytest.skip(f"this plan needs no workspace on {target.name}")
    built_norm.y.fill_(-7)
    return built_norm


def bytes_of(count):
    return torch.empty(count, dtype=torch.uint8, device=target.device)


@pytest.mark.parametrize("given", ["None", "0", "no bytes", "n-1 bytes"])
def test_workspace_too_small(norm, given):
    """workspace: None, 0 and n-1 bytes say required and given, and nothing is launched."""
    need = norm.plan.workspace_bytes
    workspace = {"None": None, "0": 0, "no bytes": bytes_of(0), "n-1 bytes": bytes_of(need - 1)}[given]
    size = need - 1 if given == "n-1 bytes" else 0
    with pytest.raises(ValueError, match=f"workspace: {need} bytes are required, got {size}; leave it out"):
        norm.plan.run(norm.tensors, workspace=workspace)
    assert bool((norm.y == -7).all())


def test_workspace_of_a_wrong_kind(norm):
    """workspace: a number of bytes, a strided tensor and a misaligned slice are no memory that cuDNN can use."""
    need = norm.plan.workspace_bytes
    for workspace, error, words in (
        (need, TypeError, "workspace: expected a torch.Tensor or None, got int"),
        (bytes_of(2 * need)[::2], ValueError, "workspace: expected a contiguous tensor on .*, got a strided one"),
        (bytes_of(need + 1)[1:], ValueError, "workspace: expected memory aligned to 16 bytes"),
    ):
        with pytest.raises(error, match=words):
            norm.plan.run(norm.tensors, workspace=workspace)
    assert bool((norm.y == -7).all())


@pytest.mark.parametrize("given", ["n bytes", "more", "fp32", "allocated"])
def test_workspace_that_fits(norm, given):
    """workspace: n bytes or more of any dtype, or none given: allocated."""
    need = norm.plan.workspace_bytes
    workspace = {
        "n bytes": bytes_of(need),
        "more": bytes_of(need + 100),
        "fp32": torch.empty(-(-need // 4), device=target.device),
        "allocated": AUTO,
    }[given]
    norm.plan.run(norm.tensors, workspace=workspace)
    assert torch.equal(norm.y, torch.full_like(norm.y, 2))  # 3 / sqrt(mean(9)) * 2


def test_workspace_not_needed(scaled):
    """workspace: a plan that needs none runs with None."""
    if scaled.plan.workspace_bytes:
        pytest.skip(f"this plan needs a workspace on {target.name}")
    scaled.y.fill_(-7)
    scaled.plan.run(scaled.tensors(), workspace=None)
    assert torch.equal(scaled.y, torch.full_like(scaled.y, 4 * 96))


def test_workspace_of_the_headline_graph():
    """workspace: refusals come before execution, also for a plan whose execution takes long."""
    graph = new_graph("large_conv")
    x, w = zeros(32, 128, 56, 56, channels_last=True), zeros(256, 128, 3, 3, channels_last=True)
    X, W = describe(graph, x, "X"), describe(graph, w, "W")
    Y = graph.relu(graph.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])).set_output(True)
    plan = build(graph)
    y = zeros(32, 256, 56, 56, channels_last=True).fill_(-7)
    if plan.workspace_bytes:
        with pytest.raises(ValueError, match=f"workspace: {plan.workspace_bytes} bytes are required, got 0"):
            plan.run({X: x, W: w, Y: y}, workspace=None)
        assert bool((y == -7).all())
    assert callable(plan.bind({X: x, W: w, Y: y}))


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["None", "n-1 bytes", "CPU"])
def test_workspace_launches_nothing(norm, given):
    """workspace: after a refusal, a CPU tensor's too, the poisoned output is unchanged on the GPU."""
    need = norm.plan.workspace_bytes
    workspace = {"None": None, "n-1 bytes": bytes_of(need - 1), "CPU": torch.empty(need, dtype=torch.uint8)}[given]
    words = "got a contiguous one on cpu" if given == "CPU" else f"{need} bytes are required"
    with pytest.raises(ValueError, match=words):
        norm.plan.run(norm.tensors, workspace=workspace)
    torch.cuda.synchronize()
    assert bool((norm.y == -7).all())


# --- errors of a build ------------------------------------------------------------------------------------------------


def inner_dims_differ():
    graph = new_graph("inner_dims")
    graph.matmul(describe(graph, zeros(1, 64, 96), "A"), describe(graph, zeros(1, 128, 32), "B")).set_output(True)
    return graph


def channels_differ():
    graph = new_graph("channels")
    x, w = zeros(2, 8, 8, 8, channels_last=True), zeros(16, 5, 3, 3, channels_last=True)
    X, W = describe(graph, x, "X"), describe(graph, w, "W")
    graph.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
    return graph


def no_engine():
    """The tangent of a matmul in double precision: no engine on any target."""
    graph = new_graph("double", io=torch.float64)
    a, b = zeros(1, 64, 96, dtype=torch.float64), zeros(1, 96, 32, dtype=torch.float64)
    graph.tan(graph.matmul(describe(graph, a, "A"), describe(graph, b, "B"))).set_output(True)
    return graph


@pytest.mark.parametrize(
    ("make", "step", "operations", "cause"),
    [
        (inner_dims_differ, "validate", ["matmul: A (1, 64, 96)", "B (1, 128, 32)"], "Inner dimensions must match"),
        (channels_differ, "build_operation_graph", ["conv_fprop: X (2, 8, 8, 8)", "W (16, 5, 3, 3)"], "BAD_PARAM"),
        (no_engine, "create_execution_plans", ["A (1, 64, 96) fp64", "tan: matmul.0::C"], "No valid engine configs"),
    ],
)
def test_build_error_says_it_all(make, step, operations, cause):
    """Step, operations, dims, dtypes, target, cuDNN's reason and the next action are in one message."""
    graph = make()
    with pytest.raises(GraphError) as caught:
        build(graph)
    text = str(caught.value)
    assert caught.value.step == step
    assert cause in caught.value.reason
    first, second = text.splitlines()[:2]
    name = graph_name(graph)
    assert first.startswith(f"graph '{name}' failed at step '{step}' for {target.name} (SM{target.sm}), cuDNN 9.")
    assert second.startswith("  cause: ")
    assert cause in text
    assert all(operation in text for operation in operations), text
    assert any(line.startswith("  next: ") and len(line) > 20 for line in text.splitlines())
    assert caught.value.__cause__ is not None


def test_build_error_names_each_engine_before_the_details():
    """The engines' reasons come first, in a line each; cuDNN's whole message comes last."""
    with pytest.raises(GraphError) as caught:
        build(no_engine())
    text = str(caught.value)
    summary, _, detail = text.partition("  cuDNN's message in full:\n")
    assert summary.count("\n    engine ") == detail.count('"engineId":') >= 1
    assert "NOT_SUPPORTED" in summary
    assert "Warning:" not in summary
    assert "  next: " in summary


@pytest.mark.parametrize("step", ["check_support", "build_plans"])
def test_build_error_at_the_last_steps(monkeypatch, step):
    """What cuDNN refuses at a later step is reported with that step."""
    conv = FusedConv()

    def refuse(*_):
        raise cudnn.cudnnGraphNotSupportedError("refused by the test")

    monkeypatch.setattr(conv.graph, step, refuse)
    with pytest.raises(GraphError, match=f"failed at step '{step}'") as caught:
        build(conv.graph)
    assert "refused by the test" in caught.value.reason


def test_build_error_of_a_check(conv):
    """A graph is planned once; another build of the same graph says so instead of ending inside cuDNN."""
    with pytest.raises(GraphError, match="this graph was built before") as caught:
        build(conv.graph)
    assert "make a new graph" in str(caught.value)
    conv.plan.run(conv.tensors())
    assert conv.right()


def attention(options=(), **sdpa):
    graph = new_graph("attention", **dict(options))
    q, k, v = (zeros(2, 3, s, 64) for s in (40, 56, 56))
    Q, K, V = (describe(graph, t, name) for t, name in ((q, "Q"), (k, "K"), (v, "V")))
    out = graph.sdpa(Q, K, V, attn_scale=0.125, generate_stats=False, **sdpa)[0]
    out.set_output(True).set_dim([2, 3, 40, 64]).set_stride([7680, 2560, 64, 1])
    return graph


@pytest.mark.parametrize("step", ["build", "propose"])
def test_attention_with_dynamic_shapes_is_refused(module, step):
    """cuDNN 9.19 builds it and, for each shape but the first, returns wrong values without an error."""
    graph = attention({"is_dynamic_shape_enabled": True, "kernel_cache": cudnn.create_kernel_cache()})
    with pytest.raises(GraphError, match="wrong results for every shape but the first") as caught:
        build(graph) if step == "build" else module("graph").propose(graph, [cudnn.heur_mode.A])
    assert all(word in str(caught.value) for word in ("static plan for each bucket", "use_padding_mask", "seq_len_q"))
    assert graph._lowered_graph is None  # refused before cuDNN saw it


@pytest.mark.skipif(bool(target.lacks("sm80")), reason=target.lacks("sm80"))
def test_static_attention_and_other_dynamic_graphs_are_not_refused():
    assert build(attention()).name
    graph = new_graph("matmul", is_dynamic_shape_enabled=True, kernel_cache=cudnn.create_kernel_cache())
    A, B = describe(graph, zeros(1, 40, 56), "A"), describe(graph, zeros(1, 56, 24), "B")
    graph.relu(graph.matmul(A, B)).set_output(True)
    assert build(graph).name


# --- plans ------------------------------------------------------------------------------------------------------------

STEPS = ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"]


def test_plan_has_five_named_and_timed_steps(conv):
    plan = conv.plan
    assert [step.name for step in plan.steps] == STEPS
    assert all(step.ms > 0 for step in plan.steps)
    assert plan.build_ms == pytest.approx(sum(step.ms for step in plan.steps))
    assert plan.steps[0].produced.startswith("3 operations")
    assert f"{conv.graph.get_execution_plan_count()} candidates" in plan.steps[2].produced
    assert plan.name in plan.steps[4].produced
    text = str(plan)
    assert text.splitlines()[0] == f"conv_bias_relu: {plan.name} · workspace {plan.workspace_bytes:,} bytes"
    assert [line.split()[0] for line in text.splitlines()[1:]] == [*STEPS, "total"]


NEEDS_SM80 = pytest.mark.skipif(bool(target.lacks("sm80")), reason=target.lacks("sm80"))


@pytest.mark.parametrize(
    ("compiles", "text"),
    [pytest.param(True, "compiled at run time", marks=NEEDS_SM80), (False, "a ready-made kernel")],
    ids=["compiled", "ready"],
)
def test_plan_says_whether_it_was_compiled(compiles, text):
    """Candidates of both kinds, chosen by their note; nothing is called compiled that comes with the library."""
    graph, note = FusedConv().graph, [cudnn.behavior_note.RUNTIME_COMPILATION]
    (graph.select_behavior_notes if compiles else graph.deselect_behavior_notes)(note)
    plan = build(graph)
    assert plan.steps[4].produced == f"{plan.name}, {text}"
    assert ("compiled" in str(plan)) == compiles


def test_plan_lists_its_tensors(conv):
    assert [t.name for t in conv.plan.inputs] == ["X", "W", "bias"]
    assert [t.name for t in conv.plan.outputs] == ["Y"]


def test_plan_takes_nothing_for_a_scalar(built_norm):
    assert [t.name for t in built_norm.plan.inputs] == ["X", "scale"]


def test_plan_runs_by_name(conv):
    """Names and descriptors are the same keys, also mixed."""
    conv.plan.run({"X": conv.x, "W": conv.w, "bias": conv.b, "Y": conv.y})
    assert conv.right()
    conv.y.fill_(-7)
    conv.plan.run({conv.X: conv.x, "W": conv.w, conv.B: conv.b, "Y": conv.y})
    assert conv.right()


def test_bound_plan_sees_inputs_change_in_place(conv):
    """A bound plan runs again and again, each time on what its tensors then hold."""
    bias = conv.b.clone()
    run = conv.plan.bind(conv.tensors(B=bias))
    assert conv.untouched()  # binding executes nothing
    run()
    assert conv.right()
    conv.y.fill_(-7)
    run()
    assert conv.right()
    bias.add_(1)
    run()
    assert torch.equal(conv.y[:, 3], torch.full_like(conv.y[:, 3], 4))
    bias = bias + 100  # another tensor of that name changes nothing
    run()
    assert torch.equal(conv.y[:, 3], torch.full_like(conv.y[:, 3], 4))


def test_bind_checks_as_run_does(conv):
    with pytest.raises(TypeError, match="bias: expected"):
        conv.plan.bind(conv.tensors(B=conv.b.double()))


def test_descriptions_in_words(conv):
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}[target.dtype]
    assert describe_tensor(conv.X) == f"X (2, 8, 8, 8) {names}"
    relu = conv.graph.nodes[-1]
    assert describe_node(relu) == f"relu: bias.0::OUT_0 (2, 16, 8, 8) fp32 virtual -> Y (2, 16, 8, 8) {names}"
    assert graph_name(conv.graph) == "conv_bias_relu"


# --- host time --------------------------------------------------------------------------------------------------------


def host_time_rounds(calls, rounds=31, repeats=50):
    """Host time in µs of each call: the smallest of interleaved rounds in which the GPU never makes the host wait.

    What else runs on the machine only adds to it.
    """
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            torch.cuda._sleep(int(20 * target.properties["smClockRateKHz"]))  # 20 ms
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - started) / repeats * 1e6)
    torch.cuda.synchronize()
    return {name: min(values) for name, values in times.items()}


@pytest.mark.gpu
def test_bound_run_costs_the_host_no_more_than_execute(scaled):
    """A bound plan takes within 1 µs of the host time of graph.execute with ordered uids."""
    tensors = scaled.tensors()
    bound, execute, handle = scaled.plan.bind(tensors), scaled.graph.execute, target.handle()
    uids, buffers = tuple(t.uid for t in tensors), tuple(tensors.values())
    workspace = bytes_of(max(scaled.plan.workspace_bytes, 1))

    def bare():
        execute(buffers, workspace, handle=handle, tensor_uids=uids)

    for call in (bound, bare):
        call()
    times = host_time_rounds({"bound": bound, "bare": bare})
    assert times["bound"] <= times["bare"] + 1.0, times
