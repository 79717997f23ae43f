"""Timing on the GPU: CUDA events or the host's clock, medians, measured ceilings of this GPU, comparison tables."""

import functools
import html
import re
import statistics
import time
from typing import NamedTuple

import torch

from .dtypes import short_name
from .target import target

WARMUP_MS, MEASURE_MS = 25.0, 100.0
MIN_REPEATS, MAX_REPEATS = 20, 2000
HOST_MS = 0.2  # host time per call that stays hidden: before it runs, the GPU waits while the host enqueues
HOT_BATCH = 50  # calls that are enqueued during one wait when nothing may come between them


class Timing(NamedTuple):
    """Milliseconds per call: median, 20th and 80th percentile over `repeats` calls; L2 cache "cold" or "hot".

    first_ms is how long the very first call took on the host's clock until the GPU was done: what is loaded, compiled
    or allocated once is in it and in nothing else.
    """

    ms: float
    low: float
    high: float
    repeats: int
    l2: str
    first_ms: float

    def __str__(self):
        spread = f"20-80 %: {self.low:.4f}-{self.high:.4f}, {self.repeats} calls, L2 {self.l2}"
        return f"{self.ms:.4f} ms ({spread}; first call {self.first_ms:.1f} ms)"


def measure(call, l2="cold", calls=None):
    """Times `call()`, which enqueues work on PyTorch's current stream, with one pair of CUDA events per call.

    l2     "cold": before each call the L2 cache is overwritten outside the timed region, so inputs come from device
           memory. "hot": calls follow one another, so inputs that fit into L2 stay there.
    calls  so many calls are timed (2 or more), after one that is not: a rough look at many candidates. By default
           calls are repeated for about 25 ms that are not counted, which keeps run-time compilation and the first call
           out of the result, and then timed for about 100 ms, at least 20.

    The GPU waits before the timed region while the host enqueues, so up to 0.2 ms of host time per call stay out of the
    result; a call that keeps the host busy for longer is timed with what is beyond.

    Returns a Timing. Raises RuntimeError without a GPU: nothing is timed on the CPU in its place.
    """
    return _timing(*_call_times(call, l2, calls), l2)


def wall(call, calls=None):
    """Times `call()` as a caller waits for it: on the host's clock, from the call until the GPU has done its work.

    What `measure` hides is in it: the host time of the launches, where it exceeds the GPU's, and the synchronisation at
    the end. Calls follow one another, so inputs that fit into L2 stay there.

    calls  so many are timed (2 or more); by default as many as fit into about 100 ms, at least 20, after about 25 ms
           of warm-up.

    Returns a Timing. Raises RuntimeError without a GPU.
    """
    if calls is not None and calls < 2:
        raise ValueError(f"calls is {calls}: a spread needs two calls or more")
    _require_gpu()
    torch.cuda.synchronize()
    first_ms = _host_ms(call)
    estimate = max(min(_host_ms(call) for _ in range(3)), 1e-3)
    for _ in range(int(min(WARMUP_MS / estimate, MAX_REPEATS))):
        _host_ms(call)
    return _timing(first_ms, [_host_ms(call) for _ in range(calls or _repeats(estimate))], "hot")


def _host_ms(call):
    """Milliseconds on the host's clock from the call until the GPU has done its work."""
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def _repeats(estimate):
    """How many calls of so many milliseconds are timed."""
    return int(min(max(MEASURE_MS / estimate, MIN_REPEATS), MAX_REPEATS))


def _timing(first_ms, times, l2):
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return Timing(statistics.median(times), fifths[0], fifths[3], len(times), l2, first_ms)


def _call_times(call, l2, calls=None):
    """(milliseconds of the first call, [milliseconds of each timed call])."""
    if l2 not in ("cold", "hot"):
        raise ValueError(f"l2 is 'cold' or 'hot', got {l2!r}")
    _require_gpu()
    torch.cuda.synchronize()
    first_ms = _host_ms(call)
    repeats = calls
    if calls is None:
        estimate = _estimate_ms(call)
        repeats = _repeats(estimate)
        for _ in range(int(min(max(WARMUP_MS / estimate, 3), MAX_REPEATS))):
            call()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if l2 == "cold":
            _flush_l2()
            _wait(HOST_MS)
        elif index % HOT_BATCH == 0:
            _wait(HOST_MS * HOT_BATCH)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return first_ms, [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]


def _estimate_ms(call, calls=5):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        _flush_l2()
        _wait(HOST_MS)
        call()
    end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) / calls, 1e-3)


@functools.cache
def _flush_buffer():
    # Four times the L2 cache, at least 256 MB: writing it leaves nothing of the inputs in the cache.
    size = max(4 * target.properties["l2CacheSize"], 256 << 20)
    return torch.empty(size // 4, dtype=torch.int32, device=target.device)


def _flush_l2():
    _flush_buffer().zero_()


def _wait(ms):
    """Keeps the stream busy for `ms` (at the GPU's highest clock; longer at a lower one) without touching memory."""
    torch.cuda._sleep(int(ms * target.properties["smClockRateKHz"]))


def _require_gpu():
    if not target.live:
        raise RuntimeError(
            f"no GPU: nothing is timed for the recorded {target.name}; start the cell with %%needs gpu, or run on a GPU"
        )


# --- ceilings ---------------------------------------------------------------------------------------------------------


@functools.cache
def matmul_ceiling(dtype, size=8192):
    """TFLOP/s that a size x size x size matmul of `dtype` reaches here through cuBLAS, 2*size^3 FLOP; cached.

    The fastest fifth of the calls counts: under a power limit the clock falls during a run, and a ceiling is what the
    GPU can do.
    dtype: torch.float32 (TF32 off), float16, bfloat16 or float8_e4m3fn (bf16 output, SM89 and newer). Random data:
    zeros switch fewer bits, draw less power and run faster.
    """
    _require_gpu()
    a, b = (torch.randn(size, size, device=target.device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=target.device)
        b_columns = b.t().contiguous().t()

        def call():
            torch._scaled_mm(a, b_columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        out = torch.empty(size, size, device=target.device, dtype=dtype)

        def call():
            torch.mm(a, b, out=out)

    return 2 * size**3 / measure(call).low / 1e9


@functools.cache
def copy_ceiling(gib=4):
    """GB/s (1e9 bytes) of a device-to-device copy of `gib` GiB here, bytes read plus bytes written; cached."""
    _require_gpu()
    free = torch.cuda.mem_get_info()[0]
    size = min(gib << 30, free // 4)
    source = torch.empty(size, dtype=torch.uint8, device=target.device).random_(256)
    copy = torch.empty_like(source)
    return 2 * size / measure(lambda: copy.copy_(source)).low / 1e6


# --- tables -----------------------------------------------------------------------------------------------------------


_NUMBER = r"(inf|nan|(?<=\d)e(?=[-+]\d)|[^a-zA-Z])*"  # or nothing, or a dash
_ONE_LINE = 40  # characters of a cell that is never broken


class Table:
    """Rows of text under a header; shown as HTML in a notebook and as aligned text by print.

    Columns of numbers stand to the right, the others and the first, which names the rows, to the left.
    """

    def __init__(self, header, rows, caption=""):
        self.header, self.caption = [str(h) for h in header], caption
        self.rows = [[str(cell) for cell in row] for row in rows]
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError(f"every row needs {len(self.header)} cells: {', '.join(self.header)}")

    def _columns(self):
        """(is to the left, characters of its longest cell) of each column."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        return [
            (i == 0 or not all(re.fullmatch(_NUMBER, cell) for cell in column), max(map(len, column), default=0))
            for i, column in enumerate(columns)
        ]

    def __str__(self):
        columns = self._columns()
        widths = [max(len(name), width) for name, (_, width) in zip(self.header, columns, strict=True)]
        lines = [self.header, ["-" * width for width in widths], *self.rows]
        body = "\n".join(
            "  ".join(
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, (left, _) in zip(line, widths, columns, strict=True)
            ).rstrip()
            for line in lines
        )
        return f"{self.caption}\n{body}" if self.caption else body

    __repr__ = __str__

    def _repr_html_(self):
        columns = self._columns()

        def row(cells, tag):
            styles = [f"text-align:{'left' if left else 'right'}" for left, _ in columns]
            texts = [html.escape(cell) for cell in cells]
            for i, (_, width) in enumerate(columns):
                # A cell is one line where it can be; the header's words may stand below each other.
                if tag == "td" and width <= _ONE_LINE:
                    styles[i] += ";white-space:nowrap"
                else:  # <wbr> is where a browser may break a long name
                    texts[i] = texts[i].replace("_", "_<wbr>")
                    styles[i] += f";min-width:{_ONE_LINE}ch" if tag == "td" else ""
            cells = (f'<{tag} style="{s}">{text}</{tag}>' for s, text in zip(styles, texts, strict=True))
            return f"<tr>{''.join(cells)}</tr>"

        # A table that is too wide for the page scrolls in a box of its own; the caption, outside of it, stays in sight.
        # Without colours, it is at home on light and dark pages.
        caption = f'<div style="padding:0.5em">{html.escape(self.caption)}</div>' if self.caption else ""
        body = "".join(row(cells, "td") for cells in self.rows)
        table = f"<table><thead>{row(self.header, 'th')}</thead><tbody>{body}</tbody></table>"
        return f'<div>{caption}<div style="overflow-x:auto">{table}</div></div>'


class Comparison(NamedTuple):
    """Timings by name, in the order given, and the table that shows them."""

    timings: dict
    table: Table

    def speedup(self, name, over):
        """How many times faster `name` is than `over` (ratio of the medians)."""
        return self.timings[over].ms / self.timings[name].ms


def compare(calls, flop, bytes_moved, dtype, l2="cold", caption=""):
    """Times rivals side by side in one run.

    calls        {name: function without arguments}; the first is the baseline of the last column.
    flop         floating-point operations of one call, 2 per multiply-add.
    bytes_moved  bytes that one fused call must move through device memory (inputs once, outputs once).
    dtype        of the operands: the matmul ceiling of this dtype is the 100 % of the column.

    Returns a Comparison. The rivals are timed in three interleaved rounds whose calls are counted together, so a clock
    that changes meanwhile meets all of them alike.
    """
    rounds = [{name: _call_times(call, l2) for name, call in calls.items()} for _ in range(3)]
    timings = {name: _timing(rounds[0][name][0], [t for r in rounds for t in r[name][1]], l2) for name in calls}
    peak, base = matmul_ceiling(dtype), next(iter(timings.values())).ms
    header = [
        "",
        "ms",
        "20–80 % (ms)",
        "TFLOP/s",
        f"% of measured {short_name(dtype)} matmul",
        "GB/s",
        "first call (ms)",
        f"vs {next(iter(calls))}",
    ]

    def row(name, t):
        tflops = flop / t.ms / 1e9
        return [
            name,
            f"{t.ms:.4f}",
            f"{t.low:.4f}–{t.high:.4f}",
            f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2f}",
            f"{100 * tflops / peak:.0f} %",
            f"{bytes_moved / t.ms / 1e6:.0f}",
            f"{t.first_ms:.1f}" if t.first_ms < 100 else f"{t.first_ms:.0f}",
            f"{base / t.ms:.2f}×",
        ]

    rows = [row(name, t) for name, t in timings.items()]
    note = f"L2 {l2}, median of {min(t.repeats for t in timings.values())} or more calls, build and first call apart"
    return Comparison(timings, Table(header, rows, f"{caption} ({note})" if caption else note))
