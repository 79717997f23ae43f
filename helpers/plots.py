"""The series' plots (bars, stacked bars, speed-ups, roofline) in one shared matplotlib style.

Every function returns its matplotlib Figure and shows nothing itself: a notebook shows each open figure once when the
cell ends. End the cell with a semicolon, `bars(...);`, or IPython displays the returned Figure a second time.
"""

import contextlib
import math

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

# fmt: off
COLORS = {  # Okabe and Ito's palette: told apart with every common form of colour blindness
    "blue": "#0072B2", "orange": "#E69F00", "green": "#009E73", "vermillion": "#D55E00",
    "purple": "#CC79A7", "sky": "#56B4E9", "yellow": "#F0E442", "black": "#000000",
}
GREY = "#595959"
POINTS = 8.5  # size of text inside figures
STYLE = {
    "figure.figsize": (7, 3.6), "figure.dpi": 100, "figure.constrained_layout.use": True,  # 700 pixels wide
    "font.size": 9, "axes.labelsize": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "legend.fontsize": 8.5,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    "figure.titlesize": 10, "figure.titleweight": "bold",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#E3E3E3",
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=list(COLORS.values())),
}
# fmt: on


@contextlib.contextmanager
def style():
    """Context manager and decorator that applies the series' matplotlib style: `with style(): fig, ax = ...`.

    It puts back only what it set. matplotlib's rc_context would also switch interactive mode off again, which the first
    figure of a notebook switches on, and the second figure would never be shown.
    """
    before = {key: mpl.rcParams[key] for key in STYLE}
    mpl.rcParams.update(STYLE)
    try:
        yield
    finally:
        mpl.rcParams.update(before)


def _positive(name, values):
    """values as a float array; ValueError unless all are finite and above zero."""
    array = np.asarray(values, float)
    if not array.size or not np.isfinite(array).all() or (array <= 0).any():
        raise ValueError(f"{name} is {values!r}; expected finite numbers above zero")
    return array


def _axes(ax, labels, title, pad, rows=None):
    """ax, or axes of a new figure that is high enough; with a title and one named row per label, the first on top."""
    ax = ax or plt.subplots(figsize=(7, max(2.0, 1.0 + 0.29 * (rows or len(labels)))))[1]
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_title(title, pad=pad)
    return ax


def _short(value):
    """Three significant digits without an exponent: 0.0123, 1.20, 3942."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


@style()
def bars(labels, values, *, unit, title, errors=None, highlight=None, reference=None, log=False, ax=None):
    """Horizontal bars, the first label on top, each value written at the end of its bar.

    labels     n names.
    values     n positive numbers in `unit`.
    unit       label of the value axis with its unit, e.g. "time per call (ms)".
    errors     n (low, high) pairs in the same unit, e.g. the 20 % and 80 % quantiles, drawn as whiskers.
    highlight  the label drawn in the accent colour.
    reference  a number, or (number, text): a vertical line.
    log        logarithmic value axis.
    ax         axes to draw into (default: a new figure 7 inches wide).

    Returns the Figure. Raises ValueError for lengths that differ, values that are not positive, whiskers that do not
    enclose their value, and a highlight that is no label.
    """
    labels, values = list(labels), _positive("bars: values", values)
    if values.shape != (len(labels),):
        raise ValueError(f"bars: {len(labels)} labels but values of shape {values.shape}; expected one value per label")
    ends = values
    if errors is not None:
        errors = _positive("bars: errors", errors)
        if errors.shape != (len(labels), 2) or (errors[:, 0] > values).any() or (errors[:, 1] < values).any():
            raise ValueError(f"bars: errors is {errors.tolist()}; expected a (low, high) pair around each of {values}")
        ends = errors[:, 1]
        errors = np.abs(errors.T - values)
    if highlight is not None and highlight not in labels:
        raise ValueError(f"bars: highlight is {highlight!r}; expected one of {labels}")
    ax = _axes(ax, labels, title, 6 if reference is None else 18)
    colors = [COLORS["vermillion"] if label == highlight else COLORS["sky"] for label in labels]
    whiskers = dict(ecolor="black", capsize=2.5, error_kw={"elinewidth": 1})
    ax.barh(range(len(labels)), values, 0.66, color=colors, xerr=errors, log=log, **whiskers)
    for row, (value, end) in enumerate(zip(values, ends, strict=True)):
        weight = "bold" if labels[row] == highlight else "normal"
        number = dict(weight=weight, size=POINTS, bbox=dict(facecolor="white", edgecolor="none", pad=0.5))
        ax.annotate(_short(value), (end, row), (5, 0), textcoords="offset points", va="center", **number)
    top = ends.max()
    if reference is not None:
        number, text = reference if isinstance(reference, (tuple, list)) else (reference, _short(reference))
        ax.axvline(number, color="black", linestyle="--", linewidth=1)
        above = ax.get_xaxis_transform()
        ax.annotate(text, (number, 1), (0, 2), above, "offset points", ha="center", va="bottom", size=POINTS)
        top = max(top, number)
    low = min(ends.min(), values.min() if reference is None else min(values.min(), number))
    ax.set_xlim((low / 2, top * (top * 2 / low) ** 0.15) if log else (0, top * 1.15))
    if log:
        ax.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
    ax.set_xlabel(unit + (" · whiskers: 20–80 % of the runs" if errors is not None else ""))
    return ax.figure


@style()
def stacked(labels, parts, *, unit, title, ax=None):
    """Horizontal bars that are made of parts, the first label on top, each bar's total written at its end.

    labels  n names.
    parts   {name of a part: n numbers in `unit`, zero or more}, from left to right; at most 8 parts.
    unit    label of the value axis with its unit, e.g. "time (ms)".
    ax      axes to draw into (default: a new figure 7 inches wide); the key stands to their right.

    A part that is wide enough has its number in it. Returns the Figure. Raises ValueError for lengths that differ, for
    negative numbers and for a bar without any length.
    """
    labels, names = list(labels), list(parts)
    if not 0 < len(names) <= len(COLORS) or any(len(numbers) != len(labels) for numbers in parts.values()):
        raise ValueError(f"stacked: expected 1 to {len(COLORS)} parts with {len(labels)} numbers each, got {parts}")
    values = np.array([parts[name] for name in names], float)
    totals = values.sum(axis=0)
    if not np.isfinite(values).all() or (values < 0).any() or (totals <= 0).any():
        raise ValueError(f"stacked: parts is {parts}; expected finite numbers, none below zero, and no empty bar")
    ax = _axes(ax, labels, title, 6)
    top, starts = totals.max() * 1.18, np.zeros(len(labels))
    # Neighbours differ in lightness as well.
    palette = [COLORS[c] for c in ("sky", "blue", "yellow", "green", "orange", "vermillion", "purple", "black")]
    for name, color, widths in zip(names, palette, values, strict=False):
        ax.barh(
            range(len(labels)), widths, 0.66, left=starts, color=color, edgecolor="white", linewidth=0.5, label=name
        )
        text = "white" if np.dot(mpl.colors.to_rgb(color), (0.3, 0.59, 0.11)) < 0.5 else "black"
        for row, (start, width) in enumerate(zip(starts, widths, strict=True)):
            if width > 0.09 * top:
                ax.text(start + width / 2, row, _short(width), color=text, size=POINTS, ha="center", va="center")
        starts = starts + widths
    for row, total in enumerate(totals):
        end = dict(textcoords="offset points", va="center", size=POINTS, weight="bold")
        ax.annotate(_short(total), (total, row), (5, 0), **end)
    ax.set(xlim=(0, top), xlabel=unit)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), handlelength=1)
    return ax.figure


@style()
def speedup(labels, ratios, *, title, baseline, ax=None):
    """Ratios of times as stems that leave 1.0 to the right (faster) or to the left (slower), on a log axis.

    labels    n names, the first on top.
    ratios    n positive numbers, time of the baseline / our time; or a dict {"vs eager": n numbers, ...}.
    baseline  what the ratios compare with, for the axis label, e.g. "PyTorch eager".
    ax        axes to draw into (default: a new figure 7 inches wide).

    Returns the Figure. Raises ValueError for lengths that differ and for ratios that are not positive.
    """
    labels = list(labels)
    series = ratios if isinstance(ratios, dict) else {None: ratios}
    series = {name: _positive("speedup: ratios", values) for name, values in series.items()}
    for name, values in series.items():
        if values.shape != (len(labels),):
            raise ValueError(
                f"speedup: {len(labels)} labels but {name or 'ratios'} of shape {values.shape}, expected equal"
            )
    ax = _axes(ax, labels, title, 18, len(labels) * (len(series) + 1) / 2)
    looks = [("o", "blue"), ("s", "orange"), ("D", "green"), ("^", "purple")]
    if len(series) > len(looks):
        raise ValueError(f"speedup: {len(series)} series; expected at most {len(looks)}")
    everything = np.concatenate(list(series.values()))
    for k, (name, values) in enumerate(series.items()):
        marker, color = looks[k][0], COLORS[looks[k][1]]
        rows = np.arange(len(labels)) + (k - (len(series) - 1) / 2) * 0.8 / len(series)
        ax.hlines(rows, 1, values, color=color, linewidth=2)
        filled = [color if v >= 1 else "white" for v in values]  # hollow: slower
        ax.scatter(values, rows, s=34, c=filled, edgecolors=color, marker=marker, linewidths=1.5, zorder=3)
        if name is not None:
            ax.scatter([], [], color=color, marker=marker, label=name)
        for value, row in zip(values, rows, strict=True):
            ha, x = ("left", 7) if value >= 1 else ("right", -7)
            outside = dict(textcoords="offset points", ha=ha, va="center", size=POINTS)
            ax.annotate(f"{value:.2f}×", (value, row), (x, 0), **outside)
    reach = max(abs(np.log(everything)).max(), np.log(1.2))
    low, high = np.log(min(everything.min(), 1)), np.log(max(everything.max(), 1))
    ax.set_xscale("log")
    ax.set_xlim(math.exp(min(low, -0.25 * reach) - 0.3 * reach), math.exp(max(high, 0.25 * reach) + 0.3 * reach))
    _ratio_ticks(ax)
    ax.axvline(1, color="black", linewidth=1)
    ax.axvspan(ax.get_xlim()[0], 1, color="#EFEFEF", zorder=0)
    for text, x, ha in (("◀ slower", -6, "right"), ("faster ▶", 6, "left")):
        at = dict(xycoords=ax.get_xaxis_transform(), textcoords="offset points")
        ax.annotate(text, (1, 1), (x, 2), ha=ha, va="bottom", weight="bold", size=POINTS, **at)
    ax.set_xlabel(f"speed-up over {baseline} (ratio of times, 1× = equal)")
    if None not in series:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1), handletextpad=0.2)
    return ax.figure


def _ratio_ticks(ax):
    """Round ratios on the x axis, as many as have room for their labels; 1× is one of them."""
    steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100]
    ticks = [t for t in steps if ax.get_xlim()[0] < t < ax.get_xlim()[1]]
    apart = 0.1 * np.ptp(np.log(ax.get_xlim()))  # room for a label
    for tick in sorted(ticks, key=lambda t: abs(math.log(t))):  # outwards from 1
        kept = [t for t in ticks if abs(math.log(t)) < abs(math.log(tick))]
        if any(abs(math.log(t / tick)) < apart for t in kept):
            ticks.remove(tick)
    ax.set_xticks(ticks, [f"{t:g}×" for t in ticks])
    ax.minorticks_off()


@style()
def roofline(points, *, peak_tflops, peak_gbs, title, ax=None):
    """Roofline: where each kernel stands below the measured ceilings of this GPU (both axes logarithmic).

    points       (label, flop, bytes, seconds) tuples: FLOP executed, bytes moved to and from memory, time in seconds.
    peak_tflops  measured compute ceiling in TFLOP/s.
    peak_gbs     measured memory bandwidth in GB/s.
    ax           axes to draw into (default: a new figure 7 inches wide); the key stands to their right.

    Points are numbered; the key says what they are and how much of the roof above them they reach.
    Returns the Figure. Raises ValueError for a point of another form and for numbers that are not positive.
    """
    points = list(points)
    if not points or any(len(p) != 4 for p in points):
        raise ValueError(f"roofline: points is {points!r}; expected (label, flop, bytes, seconds) tuples, at least one")
    flop, size, seconds = _positive("roofline: flop, bytes, seconds", [p[1:] for p in points]).T
    peak, bandwidth = _positive("roofline: peak_tflops, peak_gbs", (peak_tflops, peak_gbs / 1000))
    x, y, ridge = flop / size, flop / seconds / 1e12, peak / bandwidth
    reach = y / np.minimum(peak, x * bandwidth)
    ax = ax or plt.subplots()[1]
    ends = np.array([min(x.min(), ridge) / 10, max(x.max(), ridge) * 6])
    ax.loglog()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set(major_formatter="{x:g}", minor_formatter="")
    ax.set(xlim=ends, ylim=(min(y.min(), ends[0] * bandwidth * 4) / 2.5, max(peak, y.max()) * 4))
    ax.plot([ends[0], ridge, ends[1]], [ends[0] * bandwidth, peak, peak], color="black", linewidth=1.5, zorder=2)
    corner = dict(color=COLORS["orange"], markeredgecolor="black", zorder=3)
    ax.plot(ridge, peak, "D", label=f"ridge: {ridge:.0f} FLOP/byte", **corner)
    above = dict(textcoords="offset points", size=POINTS, va="bottom")
    slope = math.sqrt(ends[0] * ridge)
    ceilings = [
        ax.annotate(f"measured {_short(peak)} TFLOP/s", (ends[1], peak), (-2, 4), ha="right", **above),
        ax.annotate(f"measured\n{_short(peak_gbs)} GB/s", (slope, slope * bandwidth), (-4, 4), ha="right", **above),
    ]
    ax.plot(x, y, "o", color=COLORS["blue"], markersize=4, zorder=4)
    for n, point in enumerate(points):
        ax.plot([], [], " ", label=f"{n + 1}  {point[0]}: {100 * reach[n]:.0f} %")
    key = dict(handlelength=0.8, alignment="left", title="per cent of the roof above it")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), **key)
    ax.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="throughput (TFLOP/s)")
    ax.set_title(title)
    _number_points(ax, x, y, ridge, peak, ceilings)
    return ax.figure


def _number_points(ax, x, y, ridge, peak, texts):
    """Writes 1, 2, ... beside the points of a roofline, whose roof is flat at `peak` from the intensity `ridge` on.

    Each number goes to the nearest free place around its point, under the roof, away from other points and numbers and
    from `texts`, which are there already.
    """
    ax.figure.draw_without_rendering()  # settles where points are on the page
    to_page = lambda *xy: ax.transData.transform(np.column_stack(xy)) * 72 / ax.figure.dpi  # noqa: E731
    roof = np.geomspace(*ax.get_xlim(), 400)
    spots, roof = to_page(x, y), to_page(roof, peak * np.minimum(1, roof / ridge))
    boxes = [text.get_window_extent().get_points() * 72 / ax.figure.dpi for text in texts]
    edges = [(across, up) for (x0, y0), (x1, y1) in boxes for across in np.arange(x0, x1, 4) for up in (y0, y1)]
    written = np.array(edges)
    circle = [(r * math.cos(a), r * math.sin(a)) for r in (9, 14, 20, 28, 36, 45) for a in np.arange(12) * math.pi / 6]
    numbers = np.empty((0, 2))
    for n, spot in enumerate(spots):
        under = y[n] < peak * min(1, x[n] / ridge)
        for offset in [*circle, circle[0]]:
            at = spot + offset
            near = (
                (numbers, at, 13),
                (numbers, (at + spot) / 2, 6),
                (numbers, 0.3 * at + 0.7 * spot, 6),
                (spots, at, 8),
                (roof, at, 8),
                (written, at, 8),
            )
            clear = all((np.hypot(*(others - place).T) > room).all() for others, place, room in near)
            if clear and (at[1] < np.interp(at[0], *roof.T) or not under):
                break
        numbers = np.vstack([numbers, spot + offset])
        leader = dict(arrowstyle="-", color=GREY, linewidth=0.6, shrinkA=0, shrinkB=2)
        how = dict(ha="center", va="center", size=POINTS, weight="bold", arrowprops=leader)
        ax.annotate(str(n + 1), (x[n], y[n]), offset, textcoords="offset points", **how)
