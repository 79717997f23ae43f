"""The picture of a cuDNN graph, and the series' three plots (bars, speed-ups, roofline), in one shared style.

Every function returns its matplotlib Figure and shows nothing itself: a notebook's inline backend shows each open
figure once when the cell ends. End such a cell with a semicolon, `draw_graph(g);`, or IPython displays the returned
Figure a second time.
"""

import math
from dataclasses import dataclass, field

import cudnn
import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from .dtypes import short_name

# Okabe and Ito's palette: told apart with every common form of colour blindness.
COLORS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "black": "#000000",
}
GREY = "#595959"
STYLE = {
    "figure.figsize": (7, 3.6),  # inches; 700 pixels wide at 100 dpi
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=list(COLORS.values())),
}


def style():
    """Context manager (or decorator) that applies the series' matplotlib style: `with style(): fig, ax = ...`."""
    return plt.rc_context(STYLE)


# --- the picture of a graph -------------------------------------------------------------------------------------------

_NAMES = {
    "CONV_FPROP": "Convolution",
    "CONV_DGRAD": "Convolution, data gradient",
    "CONV_WGRAD": "Convolution, filter gradient",
    "SDPA": "Scaled dot-product attention",
    "SDPA_BWD": "Scaled dot-product attention, backward",
    "SDPA_FP8": "Scaled dot-product attention, FP8",
    "RMSNORM": "RMSNorm",
    "RMSNORM_BWD": "RMSNorm, backward",
    "LAYERNORM": "LayerNorm",
    "LAYERNORM_BWD": "LayerNorm, backward",
    "BATCHNORM": "BatchNorm",
    "BATCHNORM_BWD": "BatchNorm, backward",
    "relu": "ReLU",
    "leaky_relu": "Leaky ReLU",
    "gelu": "GELU",
    "gelu_approx_tanh": "GELU (tanh)",
    "elu": "ELU",
    "swish": "Swish (SiLU)",
    "mul": "Multiply",
    "sub": "Subtract",
    "div": "Divide",
    "ADD": "sum",
    "AVG": "mean",
}
_PAD, _LINE, _PT = 0.08, 0.145, 8.5  # inches around text, inches per line of text, points


@dataclass(eq=False)
class _Box:
    """One box: what it says, where it stands (row; column 0 or 1 in the kernel, or a lane), its geometry in inches."""

    kind: str  # "op", "real", "virtual" or "scalar"
    lines: list
    row: int
    place: object  # 0 or 1: column in the kernel; "read" or "written": lane beside it
    ports: dict = field(default_factory=lambda: {"L": [], "R": [], "T": [], "B": []})
    x: float = 0
    y: float = 0

    def __post_init__(self):
        self.w = max(_width(s, i == 0) for i, s in enumerate(self.lines)) + 2 * _PAD
        self.h = len(self.lines) * _LINE + (0.10 if self.kind in ("virtual", "scalar") else 0.13)


def _width(text, bold=False):
    return TextPath((0, 0), text, size=_PT, prop=FontProperties(weight="bold" if bold else "normal")).get_extents().width / 72


def _fold(text, limit):
    """Lines of at most `limit` inches, broken at spaces; one word that is too wide ends in an ellipsis."""
    lines = []
    for word in text.split(" "):
        if lines and _width(f"{lines[-1]} {word}", True) <= limit:
            lines[-1] += f" {word}"
            continue
        if _width(word, True) > limit:
            while _width(word + "…", True) > limit:
                word = word[:-1]
            word += "…"
        lines.append(word)
    return lines


def _spelled(values):
    """[1, 1] -> '1', [1, 2] -> '1×2'."""
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    return str(values[0]) if len(set(values)) == 1 else "×".join(map(str, values))


def _operation_text(node, limit):
    """Standard name of an operation with its attributes and its compute dtype, as lines."""
    kind, p = node.node_type.name, node.params
    key = p["mode"] if kind == "POINTWISE" else kind
    name = _NAMES.get(key, key.replace("_", " ").capitalize())
    notes = []
    if kind == "REDUCTION":
        mode = p["mode"].name
        name += f" {_NAMES.get(mode, mode.lower())}"
    if kind.startswith("CONV_"):
        weight = node.inputs.get("weight") or next(iter(node.outputs.values()))
        if len(weight.dim) > 2 and kind != "CONV_WGRAD":
            name += " " + "×".join(map(str, weight.dim[2:]))
        pads = p.get("padding") or p.get("pre_padding") or 0
        for word, value, default in (
            ("pad", pads, "0"),
            ("stride", p.get("stride") or 1, "1"),
            ("dilation", p.get("dilation") or 1, "1"),
        ):
            if _spelled(value) != default:
                notes.append(f"{word} {_spelled(value)}")
    if p.get("use_causal_mask") or p.get("diagonal_band_right_bound") == 0:
        notes.append("causal")
    if isinstance(p.get("attn_scale"), (int, float)):
        notes.append(f"scale {p['attn_scale']:.4g}")
    notes += [f"{n.replace('_', ' ')} {p[n]:g}" for n in ("negative_slope", "lower_clip", "upper_clip") if p.get(n)]
    notes.append(f"{short_name(node.compute_data_type)}")
    short = f"{name} · {notes[0]}"
    if len(notes) == 1 and _width(short, True) <= limit:
        return [short]
    return _fold(name, limit) + _fold(" · ".join(notes), limit)


def _layout(tensor, attention):
    """'channels-last', 'row-major', ... where the strides tell, else ''. Size-1 axes have no say."""
    dim, stride = list(tensor.dim), list(tensor.stride)
    axes = [a for a in range(len(dim)) if dim[a] > 1]
    if len(axes) < 2 or len(stride) != len(dim):
        return ""

    def dense(order):
        order = [a for a in order if a in axes]
        return all(stride[a] == math.prod(dim[b] for b in order[i + 1 :]) for i, a in enumerate(order))

    plain = list(range(len(dim)))
    if attention and len(dim) == 4:
        return "B×S×H×D in memory" if dense([0, 2, 1, 3]) else "B×H×S×D in memory" if dense(plain) else ""
    if len(dim) > 3 and stride[1] == 1 and dense([0, *plain[2:], 1]):
        return "channels-last"
    if dense(plain):
        return "row-major"
    return "column-major" if len(dim) < 4 and dense([*plain[:-2], plain[-1], plain[-2]]) else ""


def _tensor_text(tensor, dtype, limit, attention, produced, via_workspace):
    """Kind of box and lines of a tensor: name, dims, dtype and memory layout as far as they are known."""
    auto = "::" in tensor.name  # cuDNN's own name, 'relu.0::OUT_0': only what follows says something
    name = tensor.name.split("::")[-1]
    name = "output" if auto and name.startswith("OUT_") else name
    dims = "×".join(map(str, tensor.dim))
    if tensor.is_pass_by_value:
        value = "" if tensor.pass_by_value is None else f"{tensor.pass_by_value:g}"
        name = value if name.startswith("scalar_") and value else f"{name} = {value}" if value else name
        return "scalar", _fold(name, limit) + [f"{dtype} by value"]
    if tensor.is_virtual:
        what = "workspace" if via_workspace else "virtual"
        return "virtual", _fold(" ".join(filter(None, ["" if auto else name, dims or what, dtype])), limit)
    lines = _fold(name, limit) + (_fold(dims, limit) if dims else [])
    # Strides that nobody set on a computed tensor are a guess that cuDNN may still change: not shown.
    layout = _layout(tensor, attention) if tensor.stride_assigned or not produced else ""
    return "real", lines + _fold(", ".join(filter(None, [dtype, layout])), limit)


def _main_chain(nodes, producer):
    """Operations on the longest path: they share the kernel's first column, all others stand in the second."""
    longest = {}
    for i, node in enumerate(nodes):
        before = [producer[id(t)] for t in node.inputs.values() if id(t) in producer]
        longest[i] = max((longest[j] for j in before), key=len, default=[]) + [i]
    return max(longest.values(), key=lambda path: (len(path), path[-1]))


def _place(graph, kernels):
    """Boxes of a graph by row and the pairs that arrows connect.

    Every operation and every virtual tensor has a row to itself; real tensors stand in the lanes, in the row of the
    operation that first touches them. So a horizontal arrow can never run into a box. Rows follow the order of
    graph.nodes, the order in which the cell wrote the operations down.
    """
    nodes = list(graph.nodes)
    producer = {id(t): i for i, node in enumerate(nodes) for t in node.outputs.values()}
    kernel_of = [k for k, count in enumerate(kernels) for _ in range(count)]
    leaves = {id(t) for i, n in enumerate(nodes) for t in n.inputs.values() if t.is_virtual and id(t) in producer
              and kernel_of[producer[id(t)]] != kernel_of[i]}  # fmt: skip
    chain = set(_main_chain(nodes, producer))
    attention = any("SDPA" in node.node_type.name for node in nodes)
    skips = any(len({i for i, n in enumerate(nodes) if t in n.inputs.values()}) > 1 for n in nodes for t in n.outputs.values())
    limit = 1.75 if len(chain) == len(nodes) and not skips else 1.2

    boxes, edges, seen, row, bands = [], [], {}, 0, [[] for _ in kernels]

    def add(tensor, place):
        dtype = tensor.data_type or tensor.scalar_type
        if dtype is None:  # the rule validate() will apply
            stats = tensor.name.endswith("::Stats")
            context = graph.context
            dtype = cudnn.data_type.FLOAT if stats else context.intermediate_data_type if tensor.is_virtual else context.io_data_type
        kind, lines = _tensor_text(
            tensor, short_name(dtype), limit if place in (0, 1) else 1.25, attention, id(tensor) in producer, id(tensor) in leaves
        )
        seen[id(tensor)] = _Box(kind, lines, row, place)
        boxes.append(seen[id(tensor)])
        return boxes[-1]

    for i, node in enumerate(nodes):
        operation = _Box("op", _operation_text(node, limit), row, 0 if i in chain else 1)
        boxes.append(operation)
        bands[kernel_of[i]].append(row)
        for tensor in {id(t): t for t in node.inputs.values()}.values():
            edges.append((seen.get(id(tensor)) or add(tensor, "read"), operation))
        for tensor in (t for t in node.outputs.values() if not t.is_virtual):
            edges.append((operation, add(tensor, "written")))
        for column, tensor in enumerate(t for t in node.outputs.values() if t.is_virtual):
            row += 1
            edges.append((operation, add(tensor, operation.place if column == 0 else 1 - operation.place)))
            if id(tensor) not in leaves:
                bands[kernel_of[i]].append(row)
        row += 1
    return boxes, edges, bands


def _route(boxes, edges):
    """Give every arrow a side of both boxes and a shape that crosses no box; returns dicts, rails numbered outwards."""
    column = {(b.place, b.row) for b in boxes}
    taken, arrows = [], []

    def clear(place, first, last):
        """True, and the stretch is taken, if nothing stands or runs in that column between the two rows."""
        blocked = any((place, r) in column for r in range(first + 1, last))
        blocked = blocked or any(p == place and first < b and a < last for p, a, b in taken)
        if not blocked:
            taken.append((place, first, last))
        return not blocked

    for a, b in edges:
        rail = None
        if a.place == "read":
            sides, shape = "RL", "curve" if a.row == b.row else "rail"
            rail = None if shape == "curve" else "left"
        elif b.place == "written":
            sides, shape = "RL", "curve"
        elif a.place == "written":
            sides, shape, rail = "LR", "rail", "right"
        elif a.place == b.place and clear(a.place, a.row, b.row):
            sides, shape = "BT", "straight"
        elif (a.place, b.place) == (0, 1) and clear(1, a.row, b.row):
            sides, shape = "RT", "corner"
        elif (a.place, b.place) == (1, 0) and clear(1, a.row, b.row):
            sides, shape = "BR", "corner"
        else:
            sides, shape, rail = "RR", "rail", "right"
        arrow = {"ends": (a, b), "sides": sides, "shape": shape, "rail": rail}
        a.ports[sides[0]].append((arrow, 0))
        b.ports[sides[1]].append((arrow, 1))
        arrows.append(arrow)
    rails = {"left": [], "right": []}
    for arrow in sorted((w for w in arrows if w["rail"]), key=lambda w: w["ends"][1].row - w["ends"][0].row):
        a, b = (end.row for end in arrow["ends"])
        side = rails[arrow["rail"]]
        free = next((k for k, used in enumerate(side) if all(b < c or d < a for c, d in used)), len(side))
        side[free:] = side[free:] or [[]]
        side[free].append((a, b))
        arrow["number"] = free
    return arrows, {side: len(used) for side, used in rails.items()}


def _port(arrow, end):
    """Where an arrow touches a box: the arrows on one side are spread along it, in the order of their other ends."""
    box, side = arrow["ends"][end], arrow["sides"][end]
    across = side in "TB"
    ports = sorted(box.ports[side], key=lambda p: (lambda o: o.x if across else o.y)(p[0]["ends"][1 - p[1]]))
    k = next(i for i, p in enumerate(ports) if p[0] is arrow) - (len(ports) - 1) / 2
    if across:
        return box.x + 0.25 * k, box.y + (box.h / 2 if side == "B" else -box.h / 2)
    return box.x + (box.w / 2 if side == "R" else -box.w / 2), box.y + k * min(0.11, box.h / (len(ports) + 1))


def _path(arrow, rail_x):
    """Path of an arrow in inches: an S-curve between lanes, else straight stretches with rounded corners."""
    (x0, y0), (x1, y1) = _port(arrow, 0), _port(arrow, 1)
    if arrow["shape"] == "curve":
        middle = (x0 + x1) / 2
        return Path([(x0, y0), (middle, y0), (middle, y1), (x1, y1)], [Path.MOVETO] + [Path.CURVE4] * 3)
    corners = {
        "straight": [],
        "corner": [(x1, y0)] if arrow["sides"] == "RT" else [(x0, y1)],
        "rail": [(rail_x, y0), (rail_x, y1)],
    }[arrow["shape"]]
    points, codes = [(x0, y0)], [Path.MOVETO]
    for i, corner in enumerate(corners):
        for other in (points[-1], (corners + [(x1, y1)])[i + 1]):
            d = math.dist(corner, other)
            t = min(0.07, d / 2) / d if d else 0
            points.append((corner[0] + t * (other[0] - corner[0]), corner[1] + t * (other[1] - corner[1])))
            codes.append(Path.LINETO if other is not (corners + [(x1, y1)])[i + 1] else Path.CURVE3)
            if codes[-1] == Path.LINETO:
                points.append(corner)
                codes.append(Path.CURVE3)
    return Path(points + [(x1, y1)], codes + [Path.LINETO])


@style()
def draw_graph(graph, kernels=None, title=None):
    """Draw a cuDNN graph: operations, real and virtual tensors, and the kernel they are meant to become.

    Left to right: what is read from memory, what happens on the chip, what is written back. Nothing is built; dims
    that cuDNN has not inferred yet (before graph.validate()) are left out.

    graph    a cudnn.pygraph with at least one operation.
    kernels  how many operations each kernel runs, in the order of graph.nodes: (1, 2) draws the first operation as
             one kernel and the next two as another. Default: one fused kernel around all of them.
    title    text above the picture (default: the graph's name).

    Returns the Figure, 7 inches wide. Raises ValueError for an empty graph, for something that is no graph, and for
    kernels that do not add up to the graph's operations.
    """
    nodes = getattr(graph, "nodes", None)
    if not nodes:
        raise ValueError(f"draw_graph: graph is {graph!r}; expected a cudnn.pygraph with at least one operation")
    kernels = (len(nodes),) if kernels is None else tuple(kernels)
    if any(not isinstance(k, int) or k < 1 for k in kernels) or sum(kernels) != len(nodes):
        raise ValueError(f"draw_graph: kernels is {kernels}; expected positive counts that add up to {len(nodes)} operations")
    title = graph._cpp_graph_kwargs.get("name", "") if title is None else title

    boxes, edges, bands = _place(graph, kernels)
    arrows, rails = _route(boxes, edges)
    at = {place: [b for b in boxes if b.place == place] for place in ("read", 0, 1, "written")}
    heads = {"read": "read from memory", "written": "written to memory"}
    wide = {place: max([b.w for b in found] + [_width(heads.get(place, ""), True)] if found else [0]) for place, found in at.items()}

    # Across: lane, gap with rails, kernel (column, column, rails), gap, lane; what is left of 7 inches goes to the gaps.
    inside = 0.15 + wide[0] + (0.22 + wide[1] if at[1] else 0) + 0.13 * rails["right"] + 0.15
    inside = max(inside, 2.35)
    gap = 0.32 + 0.13 * rails["left"]
    width = max(7, 0.1 + wide["read"] + gap + inside + (0.32 + wide["written"] if at["written"] else 0) + 0.1)
    left, right = 0.1 + wide["read"] + gap, width - 0.1 - wide["written"] - (0.32 if at["written"] else 0)
    spare = (right - left - inside) / 2
    left, right = left + spare, right - spare
    free = right - left - 0.3 - wide[0] - (0.22 + wide[1] if at[1] else 0) - 0.13 * rails["right"]
    first = left + 0.15 + free / 2
    middle = {
        "read": 0.1 + wide["read"] / 2,
        0: first + wide[0] / 2,
        1: first + wide[0] + 0.22 + wide[1] / 2,
        "written": width - 0.1 - wide["written"] / 2,
    }

    # Down: each row is as high as its kernel box or its stack of real tensors.
    y, spans, label_y = (0.38 if title else 0.1), {}, {}
    for row in range(max(b.row for b in boxes) + 1):
        here = [b for b in boxes if b.row == row]
        stacks = [[b for b in here if b.place == place] for place in middle]
        high = max(sum(b.h + 0.07 for b in stack) - 0.07 for stack in stacks if stack)
        band = next((k for k, rows in enumerate(bands) if rows and rows[0] == row), None)
        if band is not None:
            label_y[band] = y + (0.17 if row else 0)
            y = label_y[band] + (0.50 if len(bands) == 1 else 0.32)
        elif row:
            y += 0.08 if any(b.kind == "virtual" for b in here) else 0.18
        for stack in stacks:
            top = y + (high - sum(b.h + 0.07 for b in stack) + 0.07) / 2
            for b in stack:
                b.x, b.y, top = middle[b.place], top + b.h / 2, top + b.h + 0.07
        spans[row] = (y, y + high)
        y += high
    height = y + 0.22

    fig = plt.figure(figsize=(width, height), layout="none")
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))  # one unit is one inch
    ax.axis("off")
    if title:
        ax.text(0.1, 0.19, title, ha="left", va="center", weight="bold", size=10)

    def say(x, y, text, **how):
        ax.text(x, y, text, ha="center", va="center", size=_PT, **how)

    for place, head in heads.items():
        if at[place]:
            say(middle[place], label_y[0] + 0.16, head, color=GREY, weight="bold")
    for k, rows in enumerate(bands):
        top, bottom = label_y[k], spans[rows[-1]][1] + 0.12
        ax.add_patch(
            FancyBboxPatch(
                (left, top), right - left, bottom - top, boxstyle="round,pad=0,rounding_size=0.1",
                facecolor="#FDF3DC", edgecolor=COLORS["orange"], linewidth=1.2, gid="kernel", zorder=1,
            )
        )  # fmt: skip
        head = "intended: one fused kernel" if len(bands) == 1 else f"kernel {k + 1} of {len(bands)}"
        say((left + right) / 2, top + 0.16, head, weight="bold")
        if len(bands) == 1 and any(b.kind == "virtual" for b in boxes):
            say((left + right) / 2, top + 0.32, "dashed: virtual, never in memory", color=GREY)
    looks = {
        "op": dict(facecolor=COLORS["blue"], edgecolor=COLORS["blue"], boxstyle="round,pad=0,rounding_size=0.08"),
        "real": dict(facecolor="white", edgecolor="black", boxstyle="square,pad=0"),
        "virtual": dict(facecolor="white", edgecolor=GREY, boxstyle="square,pad=0", linestyle=(0, (3, 2))),
        "scalar": dict(facecolor="#F6E6EF", edgecolor=COLORS["purple"], boxstyle="round,pad=0,rounding_size=0.12"),
    }
    for b in boxes:
        corner = (b.x - b.w / 2, b.y - b.h / 2)
        ax.add_patch(FancyBboxPatch(corner, b.w, b.h, linewidth=1, gid=b.kind, zorder=3, **looks[b.kind]))
        for i, line in enumerate(b.lines):
            bold = "bold" if i == 0 and b.kind in ("op", "real") else "normal"
            color = {"op": "white", "virtual": GREY}.get(b.kind, "black")
            say(b.x, b.y + (i - (len(b.lines) - 1) / 2) * _LINE, line, weight=bold, color=color, zorder=4)
    inner_right = middle[1] + wide[1] / 2 if at[1] else middle[0] + wide[0] / 2
    for arrow in arrows:
        step = 0.13 * (arrow.get("number", 0) + 1)
        path = _path(arrow, left - step if arrow["rail"] == "left" else inner_right + step)
        plain = arrow["ends"][1].kind == "virtual"  # the arrowhead comes after the tensor, at who reads it
        ax.add_patch(
            FancyArrowPatch(
                path=path, arrowstyle="-" if plain else "-|>", mutation_scale=9, color="#333333", linewidth=1, gid="arrow", zorder=2
            )
        )
    return fig
