"""The picture of a cuDNN graph: what it reads from memory, computes on the chip and writes back."""

import functools
import math
from dataclasses import dataclass

import cudnn
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from .dtypes import short_name
from .graph import graph_name
from .plots import COLORS, GREY, POINTS, style

# fmt: off
_NAMES = {  # standard names, where they are not cuDNN's own word with a capital letter
    "CONV_FPROP": "Convolution", "CONV_DGRAD": "Convolution data gradient", "CONV_WGRAD": "Convolution filter gradient",
    "SDPA": "Scaled dot-product attention", "SDPA_BWD": "Scaled dot-product attention backward",
    "SDPA_FP8": "Scaled dot-product attention", "RMSNORM": "RMSNorm", "LAYERNORM": "LayerNorm", "relu": "ReLU",
    "gelu": "GELU", "gelu_approx_tanh": "GELU (tanh)", "swish": "Swish (SiLU)", "mul": "Multiply", "sub": "Subtract",
    "div": "Divide", "ADD": "sum", "AVG": "mean",
}
# fmt: on
_LINE = 0.145  # inches per line of text
_CENTRED = dict(ha="center", va="center", size=POINTS)
_HEADS = {"read": "read from memory", "written": "written to memory"}  # of the lanes beside the kernel


# --- the picture of a graph -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Box:
    """A box of the picture: `place` is its column in the kernel (0, 1) or a lane ("read", "written"); inches."""

    kind: str  # "op", "real", "virtual" or "scalar"
    bold: list  # lines of text
    plain: list
    row: int
    place: object
    x: float = 0
    y: float = 0

    def __post_init__(self):
        self.w = max(_width(s, s in self.bold) for s in self.bold + self.plain) + 0.16
        self.h = len(self.bold + self.plain) * _LINE + (0.09 if self.kind == "virtual" else 0.12)


@functools.cache
def _width(text, bold=True):
    """Inches that a line of text takes."""
    return TextPath((0, 0), text, POINTS, prop=FontProperties(weight="bold" if bold else 400)).get_extents().width / 72


def _fold(parts, separator, limit):
    """Join parts into lines of at most `limit` inches; a part that is too wide alone ends in an ellipsis."""
    lines = []
    for part in map(str, parts):
        if lines and _width(lines[-1] + separator + part) <= limit:
            lines[-1] += separator + part
        else:
            if lines and separator == "×":
                lines[-1] += separator
            cut = next(
                n for n in range(len(part), 0, -1) if n == 1 or _width(part[:n] + "…" * (n < len(part))) <= limit
            )
            lines.append(part[:cut] + "…" * (cut < len(part)))
    return lines


def _operation(node, row, place, limit):
    """Box of an operation: standard name; attributes that are not their default; compute dtype."""
    kind, p = node.node_type.name, node.params
    key = p["mode"] if kind == "POINTWISE" else kind
    name = _NAMES.get(key, key.replace("_", " ").capitalize())
    notes = []
    if kind == "REDUCTION":
        name += " " + _NAMES.get(p["mode"].name, p["mode"].name.lower())
    if kind.startswith("CONV_"):
        name += " " + "×".join(map(str, node.inputs["weight"].dim[2:])) if "weight" in node.inputs else ""
        for word, default in (("padding", 0), ("stride", 1), ("dilation", 1)):
            values = p.get(word) or p.get(f"pre_{word}") or [default]
            if set(values) != {default}:
                notes.append(f"{word} " + "×".join(map(str, values if len(set(values)) > 1 else values[:1])))
    if p.get("use_causal_mask") or p.get("diagonal_band_right_bound") == 0:
        notes.append("causal")
    if p.get("use_padding_mask"):
        notes.append("padding mask")
    numbers = ("attn_scale", "negative_slope", "lower_clip", "upper_clip")
    notes += [
        f"{n.replace('attn_', '').replace('_', ' ')} {p[n]:.4g}" for n in numbers if isinstance(p.get(n), (int, float))
    ]
    notes.append(short_name(node.compute_data_type))
    if len(notes) == 1 and _width(f"{name} · {notes[0]}") <= limit:
        return _Box("op", [f"{name} · {notes[0]}"], [], row, place)
    return _Box("op", _fold(name.split(), " ", limit), _fold(notes, " · ", limit), row, place)


def _layout(tensor, attention):
    """'channels-last', 'row-major', ... where the strides tell, else ''. Axes of size 1 have no say."""
    dim, stride, axes = tensor.dim, tensor.stride, range(len(tensor.dim))
    if len(stride) != len(dim) or sum(d > 1 for d in dim) < 2:
        return ""

    def dense(*order):
        steps = [math.prod(dim[a] for a in order[i + 1 :]) for i in range(len(order))]
        return all(dim[a] == 1 or stride[a] == step for a, step in zip(order, steps, strict=True))

    if attention and len(dim) == 4:
        return "BSHD in memory" if dense(0, 2, 1, 3) else "BHSD in memory" if dense(*axes) else ""
    if len(dim) > 3 and stride[1] == 1 and dense(0, *axes[2:], 1):
        return "channels-last"
    if dense(*axes):
        return "row-major"
    return "column-major" if len(dim) < 4 and dense(*axes[:-2], axes[-1], axes[-2]) else ""


def _tensor(tensor, row, place, limit, context, computed, attention, leaves):
    """Box of a tensor: its name, and dims, dtype and memory layout as far as they are known before the build."""
    dtype = tensor.data_type or tensor.scalar_type
    if dtype is None:  # what validate() will fill in
        dtype = context.intermediate_data_type if tensor.is_virtual else context.io_data_type
        dtype = cudnn.data_type.FLOAT if tensor.name.endswith("::Stats") else dtype
    dtype = short_name(dtype)
    automatic, _, name = tensor.name.rpartition("::")  # cuDNN's own names look like 'relu.0::OUT_0'
    if tensor.is_pass_by_value:
        value = "" if tensor.pass_by_value is None else f"{tensor.pass_by_value:g}"
        name = value if value and name.startswith("scalar_") else f"{name} = {value}" if value else name
        return _Box("scalar", _fold([name], "", limit), [f"{dtype} by value"], row, place)
    dims = _fold(tensor.dim, "×", limit)
    if tensor.is_virtual:
        lines = ([] if automatic else _fold([name], "", limit)) + dims[:-1]
        lines += _fold((dims[-1:] or ["virtual"]) + [dtype], " ", limit) + ["through the workspace"] * leaves
        return _Box("virtual", [], lines, row, place)
    name = "output" if automatic and name.startswith("OUT_") else name
    # Strides that nobody set on a computed tensor are a guess that cuDNN may still change: not shown.
    layout = _layout(tensor, attention) if tensor.stride_assigned or not computed else ""
    return _Box(
        "real", _fold([name], "", limit), dims + _fold([dtype] + [layout] * bool(layout), ", ", limit), row, place
    )


def _boxes(graph, kernels):
    """All boxes, the (from, to) pairs that arrows connect, and the rows that each kernel spans.

    Every operation and every virtual tensor has a row of its own, in the order the cell wrote them down; real tensors
    stand in the lanes left and right. So a horizontal arrow can never run into a box. Operations on the longest path
    share the kernel's first column, side branches stand in the second.
    """
    nodes = list(graph.nodes)
    kernel = [k for k, count in enumerate(kernels) for _ in range(count)]
    maker = {id(t): i for i, node in enumerate(nodes) for t in node.outputs.values()}
    readers = {key: [i for i, n in enumerate(nodes) if key in map(id, n.inputs.values())] for key in maker}
    attention = any("SDPA" in node.node_type.name for node in nodes)
    paths = []
    for node in nodes:
        before = [paths[maker[id(t)]] for t in node.inputs.values() if id(t) in maker]
        paths.append([*max(before, key=len, default=[]), len(paths)])
    chain = max(reversed(paths), key=len)
    limit = 1.8 if len(chain) == len(nodes) else 1.2
    boxes, edges, rows, row = {}, [], [[] for _ in kernels], 0

    def box(tensor, place, row):
        key = id(tensor)
        if key not in boxes:
            others = [r for r in readers.get(key, []) if kernel[r] != kernel[maker[key]]]  # in a later kernel
            room = limit if place in (0, 1) else 1.4
            boxes[key] = _tensor(tensor, row, place, room, graph.context, key in maker, attention, bool(others))
            if place in (0, 1) and (not others or others != readers[key]):
                rows[kernel[maker[key]]].append(row)
        return boxes[key]

    for i, node in enumerate(nodes):
        operation = boxes[i] = _operation(node, row, 0 if i in chain else 1, limit)
        rows[kernel[i]].append(row)
        edges += [(box(t, "read", row), operation) for t in dict.fromkeys(node.inputs.values())]
        edges += [(operation, box(t, "written", row)) for t in node.outputs.values() if not t.is_virtual]
        for n, tensor in enumerate(t for t in node.outputs.values() if t.is_virtual):
            row += 1
            edges.append((operation, box(tensor, (operation.place + n) % 2, row)))
        row += 1
    return list(boxes.values()), edges, rows


def _route(boxes, edges):
    """(from, side, to, side, rail) of every arrow. A rail is a vertical track beside the columns: (side, number)."""
    filled = {(b.place, b.row) for b in boxes}
    rails, arrows = {"left": [], "right": []}, []
    for a, b in sorted(edges, key=lambda e: e[1].row - e[0].row):  # short rails inside, long ones around them
        nothing_between = not any((b.place, r) in filled for r in range(a.row + 1, b.row))
        rail = None
        if b.place == "written" or (a.place == "read" and a.row == b.row):
            sides = "RL"
        elif a.place == b.place and nothing_between:
            sides = "BT"
        elif (a.place, b.place) == (0, 1) and nothing_between:
            sides = "RT"
        else:
            side, sides = ("left", "RL") if a.place == "read" else ("right", "LR" if a.place == "written" else "RR")
            free = (k for k, spans in enumerate(rails[side]) if all(b.row < c or d < a.row for c, d in spans))
            rail = side, next(free, len(rails[side]))
            rails[side][rail[1] :] = rails[side][rail[1] :] or [[]]
            rails[side][rail[1]].append((a.row, b.row))
        arrows.append((a, sides[0], b, sides[1], rail))
    return arrows, rails


def _rounded(points, radius=0.07):
    """Path along points with rounded corners."""
    points = np.array(points, float)
    path, codes = [points[0]], [Path.MOVETO]
    for before, corner, after in zip(points[:-2], points[1:-1], points[2:], strict=True):
        for end, code in ((before, Path.LINETO), (after, Path.CURVE3)):
            away = end - corner
            turn = corner + away * min(0.5, radius / max(np.hypot(*away), 1e-9))
            path += [turn] if code == Path.LINETO else [corner, turn]
            codes += [code] if code == Path.LINETO else [code, code]
    return Path([*path, points[-1]], [*codes, Path.LINETO])


def _paths(boxes, arrows, left, right, columns_end):
    """Path of every arrow. Arrows that touch one side of a box are spread along it, in the order of their far ends."""
    sides = {}
    for n, (a, side_a, b, side_b, _) in enumerate(arrows):
        sides.setdefault((id(a), side_a), []).append((b.x if side_a in "TB" else b.y, n))
        sides.setdefault((id(b), side_b), []).append((a.x if side_b in "TB" else a.y, n))

    def port(box, side, n):
        ports = sorted(sides[id(box), side])
        place = [p[1] for p in ports].index(n)
        if box.place == "written":  # who wrote it comes in level, who reads it again leaves below: no line on another
            return box.x - box.w / 2, box.y + place * min(0.1, box.h / 2 / len(ports))
        shift = place - (len(ports) - 1) / 2
        if side in "TB":
            return box.x + 0.25 * shift, box.y + (box.h / 2 if side == "B" else -box.h / 2)
        return box.x + (box.w / 2 if side == "R" else -box.w / 2), box.y + shift * min(0.1, box.h / (len(ports) + 1))

    for n, (a, side_a, b, side_b, rail) in enumerate(arrows):
        (x0, y0), (x1, y1) = port(a, side_a, n), port(b, side_b, n)
        if rail:
            track = left - 0.1 - 0.13 * rail[1] if rail[0] == "left" else columns_end + 0.13 * (rail[1] + 1)
            yield _rounded([(x0, y0), (track, y0), (track, y1), (x1, y1)])
        elif side_a + side_b == "RT":
            yield _rounded([(x0, y0), (x1, y0), (x1, y1)])
        elif side_a == "B":
            yield Path([(x0, y0), (x1, y1)])
        else:  # the bend stays between lane and kernel, where nothing stands
            start, end = (x0, left) if a.place == "read" else (right, x1 - 0.1)
            bend = [((start + end) / 2, y0), ((start + end) / 2, y1), (end, y1)]
            codes = [Path.MOVETO, Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4, Path.LINETO]
            yield Path([(x0, y0), (start, y0), *bend, (x1, y1)], codes)


def _across(boxes, left_rails, right_rails):
    """Columns, in inches: lane, gap with rails, kernel (columns, rails), gap, lane; what is left of 7 goes into the
    gaps. Sets the boxes' widths; returns {place: middle}, the kernel's left and width, the right end of its columns
    (rails start there) and the width of the picture."""
    places = {place: [b for b in boxes if b.place == place] for place in ("read", 0, 1, "written")}
    wide = dict.fromkeys(places, 0)
    for place, found in places.items():
        if found:
            wide[place] = max([b.w for b in found] + [_width(_HEADS[place]) if place in _HEADS else 1.25])
            for kinds in (("virtual",), ("op", "real", "scalar")):
                same = [b for b in found if b.kind in kinds]
                for b in same:
                    b.w = wide[place] if b.kind != "virtual" else max(other.w for other in same)
    columns = wide[0] + (0.2 + wide[1] if places[1] else 0)
    inside = max(0.3 + columns + 0.13 * right_rails, 2.35)
    gaps = 0.3 + 0.13 * left_rails, 0.3 if places["written"] else 0
    needed = 0.2 + wide["read"] + sum(gaps) + inside + wide["written"]
    width = max(7, needed)
    left = 0.1 + wide["read"] + gaps[0] + (width - needed) / 2
    first = left + (inside - columns - 0.13 * right_rails) / 2
    middle = {"read": 0.1 + wide["read"] / 2, "written": width - 0.1 - wide["written"] / 2}
    middle |= {0: first + wide[0] / 2, 1: first + columns - wide[1] / 2}
    return middle, left, inside, first + columns, width


def _settle(boxes, rows, left_rails, right_rails, title):
    """Give every box its place in inches; returns the kernels' (left, top, width, height), the right end of the
    columns and the size of the picture."""
    middle, left, inside, columns_end, width = _across(boxes, left_rails, right_rails)
    # Down: the kernel's rows one below the other; real tensors level with the operation that touches them first, or
    # below the real tensor before them. The first operation leaves room for the stack of tensors beside it.
    top = 0.4 if title else 0.1
    label = 0.5 if len(rows) == 1 and any(b.kind == "virtual" for b in boxes) else 0.34
    level = [[b for b in boxes if b.row == row] for row in range(max(b.row for b in boxes) + 1)]
    high = {p: [sum(b.h + 0.08 for b in here if b.place == p) - 0.08 for here in level] for p in _HEADS}
    tops, ends, y = [], [], top
    for row, here in enumerate(level):
        box = next(b for b in here if b.place in (0, 1))
        if any(row == r[0] for r in rows):
            tops.append(y + (0.2 if row else 0))
            y = max(tops[-1] + label, 0 if row else top + 0.3 + (max(h[0] for h in high.values()) - box.h) / 2)
        elif row:
            y += 0.07 if box.kind == "virtual" else 0.17
        box.x, box.y = middle[box.place], y + box.h / 2
        y += box.h
        if any(row == r[-1] for r in rows):
            y += 0.14
            ends.append(y)
    for place, heights in high.items():
        y = top + 0.3
        for here, stack in zip(level, heights, strict=True):
            beside = [b for b in here if b.place == place]
            y = max(y, next(b.y for b in here if b.place in (0, 1)) - stack / 2) if beside else y
            for b in beside:
                b.x, b.y, y = middle[place], y + b.h / 2, y + b.h + 0.08
    ends[-1] = max([b.y + b.h / 2 for b in boxes] + ends)
    frames = [(left, y, inside, end - y) for y, end in zip(tops, ends, strict=True)]
    return frames, columns_end, (width, ends[-1] + 0.1)


def _draw_kernels(ax, frames, boxes):
    """The kernels' frames with what is written in them, and the heads of the lanes beside them."""
    top = frames[0][1]
    for place, head in _HEADS.items():
        for b in [b for b in boxes if b.place == place][:1]:
            ax.text(b.x, top + 0.16, head, color=GREY, weight="bold", **_CENTRED)
    look = dict(
        boxstyle="round,pad=0,rounding_size=0.1", facecolor="#FDF3DC", edgecolor=COLORS["orange"], linewidth=1.2
    )
    for k, (x, y, w, h) in enumerate(frames):
        ax.add_patch(FancyBboxPatch((x, y), w, h, gid="kernel", zorder=1, **look))
        if len(frames) > 1:  # at the side: an arrow may come in from the kernel above
            ax.text(x + 0.1, y + 0.16, f"kernel {k + 1}", weight="bold", **(_CENTRED | {"ha": "left"}))
            continue
        ax.text(x + w / 2, y + 0.16, "intended: one fused kernel", weight="bold", **_CENTRED)
        if any(b.kind == "virtual" for b in boxes):
            ax.text(x + w / 2, y + 0.32, "dashed: virtual, never in memory", color=GREY, **_CENTRED)


def _draw_boxes(ax, boxes):
    looks = {
        "op": dict(facecolor=COLORS["blue"], edgecolor=COLORS["blue"], boxstyle="round,pad=0,rounding_size=0.08"),
        "real": dict(facecolor="white", edgecolor="black", boxstyle="square,pad=0"),
        "virtual": dict(facecolor="white", edgecolor=GREY, boxstyle="square,pad=0", linestyle=(0, (3, 2))),
        "scalar": dict(facecolor="#F8E9F1", edgecolor=COLORS["purple"], boxstyle="round,pad=0,rounding_size=0.13"),
    }
    for b in boxes:
        ax.add_patch(FancyBboxPatch((b.x - b.w / 2, b.y - b.h / 2), b.w, b.h, gid=b.kind, zorder=3, **looks[b.kind]))
        color = {"op": "white", "virtual": GREY}.get(b.kind, "black")
        for i, line in enumerate(b.bold + b.plain):
            weight = "bold" if i < len(b.bold) and b.kind != "scalar" else "normal"
            line_y = b.y + (i - (len(b.bold + b.plain) - 1) / 2) * _LINE
            ax.text(b.x, line_y, line, weight=weight, color=color, zorder=4, **_CENTRED)


@style()
def draw_graph(graph, kernels=None, title=None):
    """Draw a cuDNN graph: what it reads from memory, computes on the chip and writes back, and the kernel around it.

    Nothing is built; dims that cuDNN has not inferred yet (before graph.validate()) are left out. End a notebook cell
    with `draw_graph(g);`.

    graph    a cudnn.pygraph with at least one operation.
    kernels  operations per kernel, in the order of graph.nodes: (1, 2) draws the first operation as one kernel and
             the next two as another. Default: one fused kernel around all of them.
    title    text above the picture (default: the graph's name).

    Returns the Figure, 7 inches wide. Raises ValueError for anything but a graph with operations, and for kernels
    that do not add up to them.
    """
    count = len(getattr(graph, "nodes", []))
    if not count:
        raise ValueError(f"draw_graph: graph is {graph!r}; expected a cudnn.pygraph with at least one operation")
    kernels = (count,) if kernels is None else tuple(kernels)
    if any(not isinstance(k, int) or k < 1 for k in kernels) or sum(kernels) != count:
        raise ValueError(
            f"draw_graph: kernels is {kernels}; expected positive counts that add up to {count} operations"
        )
    title = graph_name(graph) if title is None else title
    boxes, edges, rows = _boxes(graph, kernels)
    arrows, rails = _route(boxes, edges)
    frames, columns_end, (width, height) = _settle(boxes, rows, len(rails["left"]), len(rails["right"]), title)

    fig = plt.figure(figsize=(width, height), layout="none")
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))  # one unit is one inch
    ax.axis("off")
    ax.text(0.1, 0.2, title, va="center", weight="bold", size=10)
    _draw_kernels(ax, frames, boxes)
    _draw_boxes(ax, boxes)
    left, _, inside, _ = frames[0]
    for arrow, path in zip(arrows, _paths(boxes, arrows, left, left + inside, columns_end), strict=True):
        # No head at a virtual tensor: the arrow goes on to the operation that uses the value at once.
        look = dict(arrowstyle="-" if arrow[2].kind == "virtual" else "-|>", mutation_scale=8, color="#333333")
        ax.add_patch(FancyArrowPatch(path=path, gid="arrow", zorder=2, **look))
    return fig
