"""The pictures: nothing overlaps or leaves the page, nothing is missing, virtual tensors are dashed."""

import functools
import itertools
import pathlib

import cudnn
import matplotlib
import nbclient
import nbformat
import numpy as np
import pytest

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text

from helpers import draw, plots

DT = cudnn.data_type


@pytest.fixture(autouse=True)
def _closed_figures():
    yield
    plt.close("all")


# --- example graphs: described, never built ---------------------------------------------------------------------------


def new(name, io=DT.BFLOAT16):
    return cudnn.pygraph(name, io_data_type=io, intermediate_data_type=DT.FLOAT, compute_data_type=DT.FLOAT)


def infer(graph):
    """What validate() fills in, without a device."""
    for node in graph.nodes:
        node.infer_properties(graph.context)
    return graph


def channels_last(n, c, h, w):
    return dict(dim=[n, c, h, w], stride=[c * h * w, 1, w * c, c])


def conv_bias_relu():
    g = new("conv_bias_relu")
    x = g.tensor(**channels_last(32, 128, 56, 58), name="X")
    w = g.tensor(**channels_last(256, 128, 3, 3), name="W")
    b = g.tensor(**channels_last(1, 256, 1, 1), name="bias")
    y = g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), b))
    y.set_output(True).set_name("Y").set_dim([32, 256, 56, 58]).set_stride(channels_last(32, 256, 56, 58)["stride"])
    return g


def conv3d_named_virtual():
    g = new("strided_conv3d")
    x = g.tensor(dim=[32, 128, 8, 56, 58], name="X_with_a_name_that_is_far_too_long_for_its_box")
    w = g.tensor(dim=[256, 128, 3, 3, 3], name="W")
    y = g.conv_fprop(x, w, padding=[1, 1, 1], stride=[2, 2, 2], dilation=[1, 1, 1]).set_name("conv_out")
    g.relu(y, upper_clip=6.0).set_output(True)
    g.reduction(y, mode=cudnn.reduction_mode.AMAX).set_output(True)
    return g


def matmul_two_reductions():
    g = new("matmul_two_reductions")
    a = g.tensor(dim=[4, 512, 1024], name="A")
    b = g.tensor(dim=[4, 1024, 256], stride=[1024 * 256, 1, 1024], name="B")
    y = g.relu(g.bias(g.matmul(a, b), g.tensor(dim=[1, 1, 256], name="bias"))).set_output(True)
    g.reduction(y, mode=cudnn.reduction_mode.AMAX).set_output(True).set_name("amax")
    g.reduction(y, mode=cudnn.reduction_mode.ADD).set_output(True).set_name("total")
    return g


def fp8_matmul():
    g = new("fp8_matmul", DT.FP8_E4M3)
    a = g.tensor(dim=[1, 512, 1024], name="A")
    b = g.tensor(dim=[1, 1024, 256], stride=[1024 * 256, 1, 1024], name="B")
    da, db, sy = (g.tensor(dim=[1, 1, 1], data_type=DT.FLOAT, name=n) for n in ("descale_A", "descale_B", "scale_Y"))
    y = g.mul(g.mul(g.matmul(a, b), da), db)
    g.reduction(y, mode=cudnn.reduction_mode.AMAX).set_output(True).set_name("amax_Y").set_data_type(DT.FLOAT)
    g.mul(y, sy).set_output(True).set_name("Y")
    return g


def attention():
    g = new("attention")
    b, h, s, d = 2, 16, 2048, 128
    q, k, v = (g.tensor(dim=[b, h, s, d], stride=[h * s * d, d, h * d, 1], name=n) for n in "QKV")
    o, stats = g.sdpa(q=q, k=k, v=v, attn_scale=d**-0.5, use_causal_mask=True, generate_stats=True)
    o.set_output(True)
    stats.set_output(True)
    return g


def padded_attention():
    g = new("padded_attention")
    q, k, v = (g.tensor(dim=[2, 4, 64, 64], stride=[16384, 4096, 64, 1], name=n) for n in "QKV")
    lengths = {
        n: g.tensor(dim=[2, 1, 1, 1], stride=[1, 1, 1, 1], name=n, data_type=cudnn.data_type.INT32)
        for n in ("seq_len_q", "seq_len_kv")
    }
    o, _ = g.sdpa(q=q, k=k, v=v, attn_scale=0.5, use_padding_mask=True, generate_stats=False, **lengths)
    o.set_output(True)
    return g


OPS = ["relu", "abs", "exp", "neg", "gelu", "sqrt", "tanh", "sigmoid", "swish", "erf", "add", "mul"]


def twelve_pointwise():
    g = new("twelve_pointwise")
    x = first = g.tensor(dim=[8, 64, 4096], name="x")
    for i, op in enumerate(OPS):
        inputs = [x, g.tensor(dim=[1, 64, 1], name="shift")] if op == "add" else [x, first] if op == "mul" else [x]
        x = getattr(g, op)(*inputs)
        if i == 4:
            x.set_name("middle")
    x.set_output(True)
    return infer(g)


def residual():
    g = new("residual")
    x = g.tensor(**channels_last(32, 64, 28, 30), name="X")
    w = g.tensor(**channels_last(64, 64, 3, 3), name="W")
    b = g.tensor(**channels_last(1, 64, 1, 1), name="bias")
    y = g.add(g.bias(g.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1]), b), x)
    g.relu(y).set_output(True).set_name("Y")
    return g


def virtual_skips():
    g = new("virtual_skips")
    m = g.matmul(g.tensor(dim=[4, 512, 1024], name="A"), g.tensor(dim=[4, 1024, 256], name="B"))
    t = g.gelu(m)
    g.add(g.mul(g.sigmoid(t), t), m).set_output(True).set_name("Y")
    return infer(g)


def two_branches():
    g = new("two_branches")
    a = g.relu(g.tensor(dim=[4, 512, 1024], name="A"))
    b = g.sigmoid(g.gelu(g.tensor(dim=[4, 512, 1024], name="B")))
    both = g.add(a, b).set_output(True).set_name("sum")
    g.mul(both, a).set_output(True).set_name("Y")
    return g


def rmsnorm():
    g = new("rmsnorm")
    x = g.tensor(**channels_last(4096, 768, 1, 1), name="X")
    s = g.tensor(**channels_last(1, 768, 1, 1), name="scale")
    eps = g.tensor(dim=[1, 1, 1, 1], data_type=DT.FLOAT, is_pass_by_value=True, name="epsilon")
    y, _ = g.rmsnorm(norm_forward_phase=cudnn.norm_forward_phase.TRAINING, input=x, scale=s, epsilon=eps)
    g.mul(y, g.tensor_scalar(0.5, DT.FLOAT)).set_output(True).set_name("Y")
    return g


GRAPHS = [
    conv_bias_relu, conv3d_named_virtual, matmul_two_reductions, fp8_matmul, attention, twelve_pointwise, residual,
    virtual_skips, two_branches, rmsnorm,
]  # fmt: skip


@functools.cache
def picture(make):
    """(graph, figure) of an example; the tests only look at it."""
    graph = make()
    return graph, draw.draw_graph(graph)


every_graph = pytest.mark.parametrize("make", GRAPHS, ids=lambda f: f.__name__)


# --- geometry, in pixels ----------------------------------------------------------------------------------------------


def texts(fig):
    """(text, extent) of everything that can be read, without the tick labels beyond an axis and leader lines."""
    fig.draw_without_rendering()
    axes = [axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)]
    beyond = {id(tick.label1) for axis in axes for tick in ticks_out_of_view(axis)}
    found = [t for t in fig.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in beyond]
    return [(t, Text.get_window_extent(t)) for t in found]


def ticks_out_of_view(axis):
    low, high = sorted(axis.get_view_interval())
    ticks = axis.get_major_ticks() + axis.get_minor_ticks()
    return [t for t in ticks if not low * (1 - 1e-9) <= t.get_loc() <= high * (1 + 1e-9)]


def patches(fig, *kinds):
    return [(p, p.get_window_extent()) for p in fig.axes[0].patches if p.get_gid() in kinds]


def overlap(a, b, slack=0.5):
    return min(a.x1, b.x1) - max(a.x0, b.x0) > slack and min(a.y1, b.y1) - max(a.y0, b.y0) > slack


def inside(a, b, slack=0.5):
    return a.x0 > b.x0 - slack and a.x1 < b.x1 + slack and a.y0 > b.y0 - slack and a.y1 < b.y1 + slack


def overlapping_texts(fig):
    return [(a.get_text(), b.get_text()) for (a, p), (b, q) in itertools.combinations(texts(fig), 2) if overlap(p, q)]


def assert_page_is_clean(fig):
    for text, box in texts(fig):
        assert inside(box, fig.bbox), f"{text.get_text()!r} leaves the page"
        assert text.get_fontsize() >= 8
    assert not overlapping_texts(fig)


def lines(fig):
    """Points along every arrow, in pixels."""
    result = []
    for arrow in fig.axes[0].patches:
        if isinstance(arrow, FancyArrowPatch):
            path = fig.axes[0].transData.transform_path(arrow._path_original)
            (points,) = path.to_polygons(closed_only=False)
            result.append(np.concatenate([np.linspace(a, b, 40) for a, b in itertools.pairwise(points)]))
    return result


# --- the picture of a graph -------------------------------------------------------------------------------------------


@every_graph
def test_nothing_overlaps_or_leaves_the_page(make):
    _, fig = picture(make)
    assert fig.get_size_inches()[0] == pytest.approx(7) and fig.dpi == 100
    assert_page_is_clean(fig)
    boxes = patches(fig, "op", "real", "virtual", "scalar")
    for (_, a), (_, b) in itertools.combinations(boxes, 2):
        assert not overlap(a, b, slack=-2)  # two pixels apart at least
    for text, extent in texts(fig):
        for _, box in boxes:
            assert not overlap(extent, box) or inside(extent, box), f"{text.get_text()!r} sticks out of its box"


@every_graph
def test_kernel_holds_operations_and_virtual_tensors_only(make):
    _, fig = picture(make)
    ((_, kernel),) = patches(fig, "kernel")
    assert all(inside(box, kernel) for _, box in patches(fig, "op", "virtual"))
    assert not any(overlap(box, kernel) for _, box in patches(fig, "real", "scalar"))


@every_graph
def test_everything_is_drawn_once_and_virtual_means_dashed(make):
    graph, fig = picture(make)
    tensors = {id(t): t for n in graph.nodes for t in (*n.inputs.values(), *n.outputs.values())}.values()
    assert len(patches(fig, "op")) == len(graph.nodes)
    assert len(patches(fig, "virtual")) == sum(t.is_virtual for t in tensors)
    assert len(patches(fig, "scalar")) == sum(t.is_pass_by_value for t in tensors)
    assert len(patches(fig, "real")) == sum(not t.is_virtual and not t.is_pass_by_value for t in tensors)
    solid = {"-", "solid"}
    assert not any(p.get_linestyle() in solid for p, _ in patches(fig, "virtual"))
    assert all(p.get_linestyle() in solid for p, _ in patches(fig, "real", "op", "scalar"))
    said = [t.get_text() for t, _ in texts(fig)]
    for tensor in tensors:
        if "::" not in tensor.name and not tensor.name.startswith("scalar_") and len(tensor.name) < 15:
            assert sum(line == tensor.name for line in said) == 1, tensor.name


@every_graph
def test_arrows_join_the_right_boxes_and_cross_no_other(make):
    graph, fig = picture(make)
    boxes = patches(fig, "op", "real", "virtual", "scalar")
    joined = []
    for points in lines(fig):
        ends = []
        for point in (points[0], points[-1]):
            (touched,) = [i for i, (_, b) in enumerate(boxes) if b.padded(1).contains(*point)]
            ends.append(touched)
        joined.append(tuple(ends))
        for i, (patch, box) in enumerate(boxes):
            within = [p for p in points if box.padded(-1.5).contains(*p)]
            assert not within, f"an arrow from box {ends[0]} to {ends[1]} runs through box {i} ({patch.get_gid()})"
    expected = sum(len({id(t) for t in n.inputs.values()}) + len(n.outputs) for n in graph.nodes)
    assert len(joined) == len(set(joined)) == expected
    kinds = [(boxes[a][0].get_gid(), boxes[b][0].get_gid()) for a, b in joined]
    assert all((a == "op") != (b == "op") for a, b in kinds)  # operation to tensor or tensor to operation


@pytest.mark.parametrize(
    "make, expected",
    [
        (conv_bias_relu, ["Convolution 3×3", "padding 1 · fp32", "Bias · fp32", "ReLU · fp32", "32×128×56×58"]),
        (conv_bias_relu, ["bf16, channels-last", "virtual fp32"]),
        (conv3d_named_virtual, ["stride 2 · fp32", "upper clip 6 · fp32", "bf16, row-major"]),
        (fp8_matmul, ["Matmul · fp32", "Reduction amax", "fp8 e4m3, row-major", "column-major"]),
        (attention, ["Scaled dot-product", "attention", "causal · scale 0.08839", "Stats", "2×16×2048×1"]),
        (attention, ["BSHD in memory"]),
        (padded_attention, ["padding mask · scale 0.5", "seq_len_kv"]),
        (rmsnorm, ["RMSNorm · fp32", "epsilon", "fp32 by value", "0.5", "Multiply · fp32"]),
        (matmul_two_reductions, ["Reduction sum", "output"]),
        (twelve_pointwise, ["8×64×4096 fp32", "middle", "Swish (SiLU) · fp32"]),
    ],
)
def test_what_the_boxes_say(make, expected):
    said = {t.get_text() for t, _ in texts(picture(make)[1])}
    assert set(expected) <= said, f"missing {set(expected) - said} in {sorted(said)}"


def test_defaults_are_left_out_and_title_is_the_graphs_name():
    g = new("pointwise_convolution")
    x, w = g.tensor(**channels_last(2, 64, 9, 7), name="X"), g.tensor(**channels_last(32, 64, 1, 1), name="W")
    g.conv_fprop(x, w, padding=[0, 0], stride=[1, 1], dilation=[1, 1]).set_output(True)
    said = {t.get_text() for t, _ in texts(draw.draw_graph(g))}
    assert {"pointwise_convolution", "Convolution 1×1 · fp32"} <= said
    assert "dashed: virtual, never in memory" not in said  # nothing is virtual here
    assert "mine" in {t.get_text() for t, _ in texts(draw.draw_graph(g, title="mine"))}


def test_several_kernels():
    fig = draw.draw_graph(conv_bias_relu(), kernels=(1, 2))
    assert_page_is_clean(fig)
    (_, first), (_, second) = sorted(patches(fig, "kernel"), key=lambda p: -p[1].y1)
    assert first.y0 > second.y1
    assert sum(inside(b, first) for _, b in patches(fig, "op")) == 1
    assert sum(inside(b, second) for _, b in patches(fig, "op")) == 2
    between = [b for _, b in patches(fig, "virtual") if not overlap(b, first) and not overlap(b, second)]
    assert len(between) == 1
    assert "through the workspace" in {t.get_text() for t, _ in texts(fig)}


def test_the_figure_is_left_open_once_and_rcparams_are_not_touched():
    before = dict(plt.rcParams)
    fig = draw.draw_graph(conv_bias_relu())
    assert plt.get_fignums() == [fig.number]  # the inline backend shows exactly this one
    assert {k: v for k, v in plt.rcParams.items() if k != "backend"} == {
        k: v for k, v in before.items() if k != "backend"
    }


@pytest.mark.parametrize("graph", [None, "graph", new("empty")], ids=["None", "text", "empty"])
def test_not_a_graph(graph):
    with pytest.raises(ValueError, match="at least one operation"):
        draw.draw_graph(graph)


@pytest.mark.parametrize("kernels", [(1,), (2, 2), (0, 3), (1.0, 2), ()])
def test_kernels_must_cover_the_graph(kernels):
    with pytest.raises(ValueError, match="3 operations"):
        draw.draw_graph(conv_bias_relu(), kernels=kernels)


def test_these_checks_can_fail():
    fig = draw.draw_graph(conv_bias_relu())
    fig.axes[0].text(0.3, 0.2, "on top of the title")
    assert overlapping_texts(fig)
    with pytest.raises(AssertionError):
        assert_page_is_clean(fig)
    other = plt.figure()
    other.text(0.95, 0.5, "leaves the page")
    with pytest.raises(AssertionError, match="leaves the page"):
        assert_page_is_clean(other)


# --- plots ------------------------------------------------------------------------------------------------------------

LAYERS = [f"ResNet-50 conv{i} {k}" for i in range(1, 6) for k in ("1×1", "3×3")]
TIMES = [0.31, 0.082, 0.124, 0.0614, 0.095, 0.043, 0.0712, 0.0391, 0.0655, 1.92]


@pytest.mark.parametrize("log", [False, True])
def test_bars(log):
    spread = [(0.95 * t, 1.1 * t) for t in TIMES]
    how = dict(unit="time per call (ms)", title="Fused convolution", errors=spread, highlight=LAYERS[4], log=log)
    fig = plots.bars(LAYERS, TIMES, **how, reference=(0.7, "eager 0.7 ms"))
    assert_page_is_clean(fig)
    ax = fig.axes[0]
    assert "(ms)" in ax.get_xlabel() and "20–80 %" in ax.get_xlabel()
    assert ax.get_title(loc="left") == "Fused convolution"
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(TIMES)
    colors = [bar.get_facecolor() for bar in ax.patches]
    assert [c == colors[4] for c in colors] == [i == 4 for i in range(10)]
    said = [t.get_text() for t in ax.texts]
    assert {"0.310", "0.0391", "1.92", "eager 0.7 ms"} <= set(said)
    for text, value in zip(ax.texts, TIMES, strict=False):  # each number right of its whisker
        assert text.get_window_extent().x0 > ax.transData.transform((1.1 * value, 0))[0]


def test_stacked():
    """Parts stand next to each other in the order given; each bar ends with its total; narrow parts have no number."""
    parts = {"imports": [5210, 5100, 5250], "plan": [983.4, 7.5, 0], "first result": [12, 11.6, 13.2]}
    fig = plots.stacked(LAYERS[:3], parts, unit="time (ms)", title="Cold start")
    assert_page_is_clean(fig)
    ax = fig.axes[0]
    bars = np.array([(bar.get_x(), bar.get_width()) for bar in ax.patches]).reshape(3, 3, 2)  # part, bar
    np.testing.assert_allclose(bars[..., 1], list(parts.values()))
    np.testing.assert_allclose(bars[..., 0], np.cumsum([[0, 0, 0], *list(parts.values())[:2]], axis=0))
    assert len({bar.get_facecolor() for bar in ax.patches}) == 3
    assert [t.get_text() for t in ax.texts] == ["5,210", "5,100", "5,250", "983", "6,205", "5,119", "5,263"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == list(parts)
    assert (ax.get_xlabel(), ax.get_title(loc="left")) == ("time (ms)", "Cold start")


def test_speedup_marks_both_sides():
    ratios = [1.23, 1.04, 1.61, 0.93, 1.4, 0.71, 1.05, 2.3, 1.12, 3.9]
    fig = plots.speedup(LAYERS, ratios, title="Against PyTorch", baseline="PyTorch eager")
    assert_page_is_clean(fig)
    ax = fig.axes[0]
    one = ax.transData.transform((1, 0))[0]
    labels = {t.get_text(): t.get_window_extent() for t in ax.texts}
    assert labels["◀ slower"].x1 < one < labels["faster ▶"].x0
    assert all(labels[f"{r:.2f}×"].x0 > one if r > 1 else labels[f"{r:.2f}×"].x1 < one for r in ratios)
    assert "PyTorch eager" in ax.get_xlabel() and "ratio" in ax.get_xlabel()


def test_speedup_with_several_series():
    series = {"vs eager": [1.2, 0.8, 2.5], "vs torch.compile": [1.1, 0.7, 1.3]}
    fig = plots.speedup(LAYERS[:3], series, title="Both", baseline="each rival")
    assert_page_is_clean(fig)
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == list(series)


def test_roofline():
    intensity = [50, 60, 280, 62, 290, 130, 300, 135, 310, 1900, 2]
    share = [0.76, 0.58, 0.47, 0.46, 0.84, 0.89, 0.74, 0.8, 0.71, 0.9, 0.63]
    roof = [min(780e12, i * 4100e9) for i in intensity]
    names = [*LAYERS, "RMSNorm"]
    points = [(n, 2e11, 2e11 / i, 2e11 / (s * r)) for n, i, s, r in zip(names, intensity, share, roof, strict=True)]
    fig = plots.roofline(points, peak_tflops=780, peak_gbs=4100, title="H200, bf16")
    assert_page_is_clean(fig)
    ax = fig.axes[0]
    assert "FLOP/byte" in ax.get_xlabel() and "TFLOP/s" in ax.get_ylabel()
    said = " ".join(t.get_text() for t, _ in texts(fig))
    assert "measured 780 TFLOP/s" in said and "4,100 GB/s" in said and "ridge: 190 FLOP/byte" in said
    assert all(f"{n}: {100 * s:.0f} %" in said for n, s in zip(names, share, strict=True))
    assert {str(n + 1) for n in range(11)} <= {t.get_text() for t in ax.texts}
    drawn = [line.get_xydata() for line in ax.lines if len(line.get_xdata()) == 11]
    np.testing.assert_allclose(drawn[0], [(i, s * r / 1e12) for i, s, r in zip(intensity, share, roof, strict=True)])


def test_roofline_numbers_points_that_coincide():
    fig = plots.roofline(
        [(f"layer {i}", 2e11, 1e9, 4e-4) for i in range(8)], peak_tflops=780, peak_gbs=4100, title="Same"
    )
    assert_page_is_clean(fig)


@pytest.mark.parametrize("intensity", [20, 400, 1150, 2500, 5000])
def test_roofline_numbers_a_point_on_the_roof_beside_its_label(intensity):
    roof = min(747e12, intensity * 4300e9)
    points = [(f"{share:.0%}", 2e11, 2e11 / intensity, 2e11 / (share * roof)) for share in (1.01, 0.99, 0.9)]
    points.append(("far right", 2e11, 2e11 / 1700, 2e11 / 600e12))
    assert_page_is_clean(plots.roofline(points, peak_tflops=747, peak_gbs=4300, title="On the roof"))


def test_plots_draw_into_given_axes():
    fig, axes = plt.subplots(2)
    assert plots.bars(["a"], [1.0], unit="ms", title="", ax=axes[0]) is fig
    assert plots.speedup(["a"], [1.5], title="", baseline="eager", ax=axes[1]) is fig
    assert plots.stacked(["a"], {"p": [1.5]}, unit="ms", title="", ax=axes[0]) is fig
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: plots.bars(["a"], [1, 2], unit="ms", title=""), "1 labels"),
        (lambda: plots.bars(["a"], [-1], unit="ms", title=""), "above zero"),
        (lambda: plots.bars(["a"], [float("nan")], unit="ms", title=""), "finite"),
        (lambda: plots.bars(["a"], [1], unit="ms", title="", errors=[(1.1, 1.2)]), "pair around"),
        (lambda: plots.bars(["a"], [1], unit="ms", title="", highlight="b"), "highlight is 'b'"),
        (lambda: plots.stacked(["a"], {"p": [1, 2]}, unit="ms", title=""), "1 numbers each"),
        (lambda: plots.stacked(["a"], {}, unit="ms", title=""), "1 to 8 parts"),
        (lambda: plots.stacked(["a"], {"p": [2], "q": [-1]}, unit="ms", title=""), "none below zero"),
        (lambda: plots.stacked(["a", "b"], {"p": [2, 0]}, unit="ms", title=""), "no empty bar"),
        (lambda: plots.stacked(["a"], {"p": [float("nan")]}, unit="ms", title=""), "finite"),
        (lambda: plots.speedup(["a"], [0], title="", baseline="x"), "above zero"),
        (lambda: plots.speedup(["a"], {"s": [1, 2]}, title="", baseline="x"), "1 labels but s"),
        (lambda: plots.roofline([], peak_tflops=1, peak_gbs=1, title=""), "at least one"),
        (lambda: plots.roofline([("a", 1, 1)], peak_tflops=1, peak_gbs=1, title=""), "seconds"),
        (lambda: plots.roofline([("a", 1, 1, 0)], peak_tflops=1, peak_gbs=1, title=""), "above zero"),
        (lambda: plots.roofline([("a", 1, 1, 1)], peak_tflops=0, peak_gbs=1, title=""), "above zero"),
    ],
)
def test_bad_input_raises_before_a_figure_opens(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert not plt.get_fignums()


def test_style_is_applied_inside_only():
    with plots.style():
        assert plt.rcParams["axes.titlelocation"] == "left"
    assert plt.rcParams["axes.titlelocation"] == "center"


def test_every_figure_of_a_notebook_is_shown():
    """The first figure switches interactive mode on; the style must not switch it off for the ones after it."""
    cells = ['plots.bars(["a"], [1.0], unit="ms", title="t");'] * 3
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from helpers import plots")])
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in cells]
    root = str(pathlib.Path(__file__).parent.parent)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": root}}, timeout=60).execute()
    images = [[("image/png" in o.get("data", {})) for o in cell.outputs] for cell in notebook.cells]
    assert images == [[], [True], [True], [True]]
