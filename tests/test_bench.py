"""Timing and tables (CASES: stopwatch)."""

import html.parser
import statistics
import time

import pytest
import torch

from helpers import bench, build, describe, new_graph, target

without_gpu = pytest.mark.skipif(target.live, reason="what happens without a GPU: this machine has one")


# --- without a GPU ----------------------------------------------------------------------------------------------------


@without_gpu
@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_no_gpu_nothing_is_timed(l2):
    """no-gpu: measure says that nothing is timed and what to write; it does not even make the call."""
    calls = []
    with pytest.raises(RuntimeError) as caught:
        bench.measure(lambda: calls.append(1), l2=l2)
    with pytest.raises(RuntimeError, match="no GPU: nothing is timed"):
        bench.wall(lambda: calls.append(1))
    text = str(caught.value)
    assert text.startswith(f"no GPU: nothing is timed for the recorded {target.name}")
    assert "%%needs gpu" in text
    assert calls == []


@without_gpu
def test_no_gpu_no_ceilings_and_no_comparison():
    """no-gpu: ceilings and comparisons are refused in the same way."""
    calls = []
    for measured in (
        lambda: bench.matmul_ceiling(torch.bfloat16),
        bench.copy_ceiling,
        lambda: bench.compare({"ours": lambda: calls.append(1)}, 1, 1, torch.bfloat16),
    ):
        with pytest.raises(RuntimeError, match="no GPU: nothing is timed"):
            measured()
    assert calls == []


def test_wall_takes_the_time_until_the_gpu_is_done(monkeypatch):
    """What the call and the synchronisation after it take is counted: 2 ms and 3 ms here, 50 ms more at first."""
    clock, waiting = [0.0], [50e-3]

    def call():
        clock[0] += 2e-3

    def synchronize():
        clock[0] += 3e-3 + waiting.pop() if waiting and clock[0] else 3e-3

    monkeypatch.setattr(bench, "_require_gpu", lambda: None)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    timing = bench.wall(call)
    assert timing[:3] == pytest.approx((5, 5, 5)) and timing.first_ms == pytest.approx(55)
    assert (timing.repeats, timing.l2) == (20, "hot")
    assert bench.wall(call, calls=7).repeats == 7


def test_unknown_cache_policy():
    with pytest.raises(ValueError, match="l2 is 'cold' or 'hot', got 'warm'"):
        bench.measure(lambda: None, l2="warm")


# --- numbers and tables -----------------------------------------------------------------------------------------------


def test_timing_of_known_times():
    """Median and the 20th and 80th percentile of 0..10 ms are 5, 2 and 8 ms."""
    timing = bench._timing(70.0, [float(n) for n in (10, 0, 9, 1, 8, 2, 7, 3, 6, 4, 5)], "hot")
    assert timing == bench.Timing(5, 2, 8, 11, "hot", 70)
    assert str(timing) == "5.0000 ms (20-80 %: 2.0000-8.0000, 11 calls, L2 hot; first call 70.0 ms)"


@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_stopwatch_says_the_cache_policy(l2):
    """stopwatch: hot or cold L2 is part of every result's text."""
    assert f"L2 {l2}" in str(bench._timing(70.0, [1.0, 2.0], l2))
    assert "first call 70.0 ms" in str(bench._timing(70.0, [1.0, 2.0], l2))


def test_speedup():
    """Twice as fast is 2, by the medians."""
    timings = {name: bench.Timing(ms, ms, ms, 20, "cold", ms) for name, ms in (("eager", 3.0), ("ours", 1.5))}
    comparison = bench.Comparison(timings, bench.Table(["a"], []))
    assert comparison.speedup("ours", over="eager") == 2
    assert comparison.speedup("eager", over="ours") == 0.5


def test_compare_counts_all_rounds_and_fills_the_table(monkeypatch):
    """Three rounds are counted together; FLOP, bytes, ceiling and baseline give the columns."""
    rounds = {"eager": iter([(300, [4.0]), (5, [4.0]), (5, [8.0])]), "ours": iter([(9, [2.0]), (3, [1.0]), (3, [2.0])])}
    monkeypatch.setattr(bench, "_call_times", lambda call, l2: next(rounds[call]))
    monkeypatch.setattr(bench, "matmul_ceiling", lambda dtype: 20.0)
    result = bench.compare({"eager": "eager", "ours": "ours"}, 2e10, 4e8, torch.bfloat16, l2="hot", caption="Conv")
    assert [(t.ms, t.repeats) for t in result.timings.values()] == [(4, 3), (2, 3)]
    assert result.table.header == [
        "",
        "ms",
        "20–80 % (ms)",
        "TFLOP/s",
        "% of measured bf16 matmul",
        "GB/s",
        "first call (ms)",
        "vs eager",
    ]
    assert result.table.rows == [
        ["eager", "4.0000", "4.0000–6.4000", "5.00", "25 %", "100", "300", "1.00×"],
        ["ours", "2.0000", "1.4000–2.0000", "10", "50 %", "200", "9.0", "2.00×"],
    ]
    assert result.table.caption == "Conv (L2 hot, median of 3 or more calls, build and first call apart)"


def test_table_as_text():
    """Numbers are aligned right; the first column and columns with words left; each as wide as its widest cell."""
    rows = [["eager", 1.25, "eng0_k24=0", 1], ["a long name", "1.5e-05", "—", "inf"], [7, "", "eng10", ""]]
    assert str(bench.Table(["", "ms", "plan", "n"], rows, caption="Times")).splitlines() == [
        "Times",
        "                  ms  plan          n",
        "-----------  -------  ----------  ---",
        "eager           1.25  eng0_k24=0    1",
        "a long name  1.5e-05  —           inf",
        "7                     eng10",
    ]
    table = bench.Table(["", "ms"], [["eager", 1.25]])
    assert repr(table) == str(table)
    assert str(bench.Table(["n"], [])).splitlines() == ["n", "-"]


class Cells(html.parser.HTMLParser):
    """Tag, style and text of each cell; `tags` has every tag that is opened."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag in ("th", "td", "div"):
            self.cells.append([tag, dict(attrs).get("style", ""), ""])
            self.inside = self.cells[-1]

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.inside[2] += data


def test_table_as_html():
    """The same alignment, a box that scrolls, and text stays text: markup in a name or a caption is escaped."""
    rows = [["a < b & 'c'", 1, "<script>alert(1)</script>"], ["one_line", 22, "long_ " * 9]]
    parsed = Cells(bench.Table(["name", "<b>ms", "why"], rows, caption="L2 <cold> & dry")._repr_html_())
    assert parsed.cells == [
        ["div", "", ""],
        ["div", "padding:0.5em", "L2 <cold> & dry"],
        ["div", "overflow-x:auto", ""],
        ["th", "text-align:left", "name"],
        ["th", "text-align:right", "<b>ms"],
        ["th", "text-align:left", "why"],
        ["td", "text-align:left;white-space:nowrap", "a < b & 'c'"],
        ["td", "text-align:right;white-space:nowrap", "1"],
        ["td", "text-align:left;min-width:40ch", "<script>alert(1)</script>"],
        ["td", "text-align:left;white-space:nowrap", "one_line"],
        ["td", "text-align:right;white-space:nowrap", "22"],
        ["td", "text-align:left;min-width:40ch", "long_ " * 9],
    ]
    row = ["tr", "td", "td", "td"]
    assert parsed.tags == [
        "div",
        "div",
        "div",
        "table",
        "thead",
        "tr",
        "th",
        "th",
        "th",
        "tbody",
        *row,
        *row,
        *["wbr"] * 9,
    ]
    assert Cells(bench.Table(["a"], [["b"]])._repr_html_()).tags[:3] == ["div", "div", "table"]


@pytest.mark.parametrize("row", [[], ["one"], ["one", "two", "three"]])
def test_table_with_a_row_of_another_length(row):
    with pytest.raises(ValueError, match="every row needs 2 cells: name, ms"):
        bench.Table(["name", "ms"], [["right", 1], row])


# --- with a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 4096])
def test_stopwatch_against_triton(size):
    """stopwatch: a 64^3 and a 4096^3 matmul take what triton's do_bench finds, within 5 %.

    do_bench overwrites the L2 cache before each call too. The timers take turns, so clocks that change meet both. The
    median of 5 µs calls jumps between two values 10 % apart from one measurement to the next; means of many settle.
    """
    do_bench = pytest.importorskip("triton.testing").do_bench
    a, b = (torch.randn(size, size, device=target.device, dtype=target.dtype) for _ in range(2))
    out = torch.empty_like(a)

    def call():
        torch.mm(a, b, out=out)

    ours, theirs = [], []
    for _ in range(15):
        ours.append(bench.measure(call, l2="cold").ms)
        theirs.append(do_bench(call, return_mode="median"))
    ratio = statistics.mean(ours) / statistics.mean(theirs)
    assert 0.95 <= ratio <= 1.05, (ratio, ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_stopwatch_first_call_and_build_are_apart(l2):
    """stopwatch: a slow first call and the build are not in the result; the build has its own time."""
    graph = new_graph("stopwatch")
    a, b = (torch.ones(1, *dims, device=target.device, dtype=target.dtype) for dims in ((64, 96), (96, 32)))
    y = graph.matmul(describe(graph, a, "A"), describe(graph, b, "B")).set_output(True)
    plan = build(graph)
    run = plan.bind({"A": a, "B": b, y: torch.empty(1, 64, 32, device=target.device, dtype=target.dtype)})
    calls = []

    def slow_at_first():
        if not calls:
            torch.cuda._sleep(int(300 * target.properties["smClockRateKHz"]))  # 300 ms
        calls.append(1)
        run()

    timing = bench.measure(slow_at_first, l2=l2)
    assert timing.low <= timing.ms <= timing.high < 1
    assert timing.first_ms > 250
    assert timing.repeats >= bench.MIN_REPEATS
    assert len(calls) > timing.repeats
    assert f"L2 {l2}" in str(timing)
    assert plan.build_ms > 0
    assert "total" in str(plan)


@pytest.mark.gpu
def test_stopwatch_of_a_known_time():
    """stopwatch: waiting for as many cycles as 2 ms have at the highest clock takes 2 ms, or more at a lower one."""
    cycles = int(2 * target.properties["smClockRateKHz"])
    timing = bench.measure(lambda: torch.cuda._sleep(cycles), l2="hot")
    assert 1.9 < timing.ms < 6


@pytest.mark.gpu
@pytest.mark.parametrize("l2", ["cold", "hot"])
def test_stopwatch_counts_as_many_calls_as_asked(l2):
    """stopwatch: a rough look makes one call that is not timed and then those that are."""
    calls = []
    cycles = int(2 * target.properties["smClockRateKHz"])
    timing = bench.measure(lambda: calls.append(torch.cuda._sleep(cycles)), l2=l2, calls=3)
    assert (len(calls), timing.repeats) == (4, 3)
    assert 1.9 < timing.ms < 6


@pytest.mark.gpu
def test_wall_counts_host_and_gpu():
    """The GPU's 2 ms are in it, and the host's 2 ms too where they exceed what the GPU has to do."""
    cycles = int(2 * target.properties["smClockRateKHz"])
    assert 1.9 < bench.wall(lambda: torch.cuda._sleep(cycles)).ms < 6
    assert 1.9 < bench.wall(lambda: time.sleep(2e-3)).ms < 6


@pytest.mark.gpu
def test_stopwatch_hot_is_not_slower_than_cold():
    """stopwatch: a copy that fits into L2 is faster when its input is still there."""
    source = torch.empty(target.properties["l2CacheSize"] // 8, dtype=torch.uint8, device=target.device)
    copy = torch.empty_like(source)
    cold, hot = (bench.measure(lambda: copy.copy_(source), l2=l2).ms for l2 in ("cold", "hot"))
    assert hot < cold


@pytest.mark.gpu
def test_ceilings():
    """Both ceilings are positive, measured once, and in the units that their names say."""
    assert bench.copy_ceiling() is bench.copy_ceiling()
    bus = target.properties.get("memoryBusWidth")  # older cuDNN releases do not tell
    peak = 2 * target.properties["memClockRateKHz"] * (bus or 8192) / 8 / 1e6  # GB/s, two transfers per clock
    assert (0.5 * peak if bus else 100) < bench.copy_ceiling() < 1.05 * peak
    assert bench.matmul_ceiling(target.dtype) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [1, 0, -1])
def test_wall_wants_two_calls(calls):
    with pytest.raises(ValueError, match="two calls or more"):
        bench.wall(lambda: None, calls=calls)
