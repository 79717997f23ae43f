"""Autotuning: builds every candidate that cuDNN proposes for a graph, verifies each, and times those that are right."""

import functools
import math
import re
import statistics
import time
from dataclasses import dataclass, field

import cudnn
import torch

from . import bench, reference
from .graph import GraphError, Plan, build, graph_name, propose
from .target import target

MODES = (cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK)
SCREEN_CALLS = 3  # calls of the first look at every candidate
RESOLUTION_MS = 0.0005  # CUDA events resolve about 0.5 µs (CUDA Runtime API, cudaEventElapsedTime)
MARGIN = 0.01  # a gain below 1 % is no reason to leave the better ranked candidate
_CAPPED = "not among the first"
_LETTERS = {"RUNTIME_COMPILATION": "R", "SUPPORTS_CUDA_GRAPH_NATIVE_API": "G", "CUBLASLT_DEPENDENCY": "L"}


@dataclass(eq=False)
class Candidate:
    """One row of the result.

    rank     place in cuDNN's list; 0 is the first choice.
    modes    {heuristic mode: place in that mode's own list}; {} for one that was asked for by `also`.
    engine, knobs  the number of the engine and {name of a knob: value}.
    name     the same, as cuDNN writes it.
    notes    names of its behaviour notes.
    status   "filtered", "not built", "built" (and not run), "failed" (while running), "wrong", "verified" or "timed".
    reason   why it went no further.
    build_ms, plan  how long the build took, and the Plan.
    rounds   median milliseconds per call of each round, the first look left out where others followed.
    """

    rank: int
    modes: dict
    engine: int
    knobs: dict
    name: str
    notes: list
    status: str = "proposed"
    reason: str = ""
    build_ms: float | None = None
    plan: Plan | None = None
    call: object = field(default=None, repr=False)
    rounds: list = field(default_factory=list)

    def ends(self, status, reason=""):
        self.status, self.reason = status, " ".join(str(reason).split())

    @property
    def ms(self):
        """Median over the rounds, milliseconds per call."""
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def spread(self):
        """Slowest minus fastest round, in ms."""
        return max(self.rounds) - min(self.rounds)


def tied(a, b):
    """Whether two times can't be told apart: they differ by no more than the larger spread of the two candidates'
    rounds, than what CUDA events resolve, or than 1 % of the faster one."""
    return abs(a.ms - b.ms) <= max(a.spread, b.spread, RESOLUTION_MS, MARGIN * min(a.ms, b.ms))


@dataclass(eq=False, repr=False)
class Tuning:
    """What `autotune` found; shown as a table.

    title       the graph's name.
    candidates  every Candidate, by rank.
    seconds     {"plan", "build", "verify", "time": seconds that each part of the tuning took}.
    """

    title: str
    candidates: list
    seconds: dict

    @property
    def first(self):
        """What cuDNN takes without tuning: the best ranked candidate that builds (and that no filter excludes)."""
        return next((c for c in self.candidates if c.plan), None)

    @property
    def timed(self):
        """The timed candidates, fastest first."""
        return sorted((c for c in self.candidates if c.status == "timed"), key=lambda c: c.ms)

    @property
    def tie(self):
        """The candidates `tied` with the fastest, itself included, by rank."""
        return sorted((c for c in self.timed if tied(c, self.timed[0])), key=lambda c: c.rank)

    @property
    def best(self):
        """The best ranked of `tie`; where nothing was timed, the best ranked that is right or did not run; or None."""
        untimed = [c for c in self.candidates if c.status in ("verified", "built")]
        return next(iter(self.tie or untimed), None)

    @property
    def winner(self):
        """`best` in a form that survives this process and fits into JSON; `replay` takes it. None without a `best`."""
        best = self.best
        untimed = {} if self.timed else {"timed": False}  # chosen by rank alone, on a machine without a GPU
        return best and {"engine": best.engine, "knobs": best.knobs, "name": best.name} | _here() | untimed

    @property
    def gain(self):
        """How many times faster `best` is than `first`; None unless both were timed."""
        return self.first.ms / self.best.ms if self.timed and self.first.status == "timed" else None

    @property
    def cost_ms(self):
        """Milliseconds that the whole tuning took."""
        return 1e3 * sum(self.seconds.values())

    @property
    def summary(self):
        """One line: the winner, what it gains and what the tuning cost."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        cost = f"tuning took {self.cost_ms / 1e3:.1f} s ({parts})"
        if self.best is None:
            return f"{self.title}: no winner · {cost}"
        if not self.timed:
            return f"{self.title}: {self.best.name}: nothing was timed, heuristics' order decides · {cost}"
        tie = f" in a tie of {len(self.tie)}" if len(self.tie) > 1 else ""
        gain = f" ({self.gain:.2f}× the first choice)" if self.gain else ""
        return f"{self.title}: {self.best.name} wins{tie} with {self.best.ms:.4f} ms{gain} · {cost}"

    @property
    def table(self):
        """A bench.Table: timed candidates from fast to slow, the others by rank, those beyond `per_mode` in one row."""
        timed, base = self.timed, self.first.ms if self.gain else None
        rows = [
            (
                c.rank,
                " ".join(f"{mode} {place}" for mode, place in c.modes.items()) or "asked for",
                c.name,
                "".join(_LETTERS.get(note, "") for note in c.notes),
                f"{c.plan.workspace_bytes:,}" if c.plan else "",
                f"{c.build_ms:.1f}" if c.plan else "",
                self._result(c),
                f"{c.ms:.4f}" if c.rounds else "",
                f"{base / c.ms:.2f}×" if c.rounds and base else "",
            )
            for c in timed + [c for c in self.candidates if c.status != "timed" and not c.reason.startswith(_CAPPED)]
        ]
        capped = [c.reason for c in self.candidates if c.reason.startswith(_CAPPED)]
        if capped:
            rows.append(("…", "", f"{len(capped)} more", "", "", "", f"filtered: {capped[0]}", "", ""))
        notes = " · notes: R compiled at run time, G native CUDA graph, L needs cuBLASLt"
        header = ("rank", "in mode", "candidate", "notes", "workspace", "build ms", "result", "ms", "vs first")
        filled = [i for i in range(len(header)) if any(row[i] != "" for row in rows)]
        header, *rows = ([row[i] for i in filled] for row in (header, *rows))
        return bench.Table(header, rows, self.summary + (notes if "notes" in header else ""))

    def _result(self, c):
        if c.status == "built":
            return c.reason
        if c.status != "timed":
            return ": ".join(filter(None, (c.status, c.reason[:80])))
        place = "winner" if c is self.best else "tie" if c in self.tie else ""
        return ", ".join(filter(None, (place, "first choice" if c is self.first else "")))

    def __str__(self):
        return str(self.table)

    __repr__ = __str__

    def _repr_html_(self):
        return self.table._repr_html_()


def autotune(
    make_graph,
    tensors,
    *,
    expected=None,
    rtol=None,
    atol=None,
    modes=MODES,
    per_mode=None,
    also=(),
    workspace_limit=None,
    deterministic=False,
    runtime_compilation=True,
    rounds=5,
    calls=10,
    keep=1.25,
    l2="cold",
    launch=None,
    measure=None,
):
    """Builds, verifies and times every candidate for a graph; returns a Tuning. The graph in, a ranked table out.

    make_graph  function without arguments that returns the described, unbuilt graph: planning happens once per graph.
    tensors     {name in the graph: torch.Tensor} with every input and output, as for Plan.run.
    expected    {name: right values} for every output. Default: reference.reference_values in fp32, nothing rounded.
    rtol, atol  |result - expected| <= atol + rtol * |expected| is right. Default rtol: one rounding to the output's
                dtype (half its epsilon, at least 1e-5); default atol: 1e-3 times the root mean square of `expected`.
    modes       heuristic modes to ask. per_mode: only the first so many candidates of each.
    also        [(engine, {knob name: value})]: candidates that no mode proposed.
    workspace_limit, deterministic, runtime_compilation  leave out candidates that need more bytes, that carry the
                numerical note NONDETERMINISTIC, or (False) the behaviour note RUNTIME_COMPILATION.
    rounds, calls, keep, l2  every right candidate is timed with 3 calls; those within `keep` times the fastest are
                timed again in `rounds` interleaved rounds of `calls` calls each, with bench.measure and its l2.
    launch      function (candidate, run) that executes a candidate, by calling run() or otherwise.
    measure     function (candidate, call, calls) that returns milliseconds per call. Both are for tests and recorded
                targets: without a GPU, candidates are executed only with `launch` and timed only with `measure`.

    A candidate that does not build, fails to run, or gives wrong values is a row with its reason. Outputs are filled
    with NaN before each verification, so that what is left of the last candidate can't pass. A launch that ruins the
    CUDA context (an illegal address) ends the process's use of the GPU, and this function can't prevent that.

    Raises GraphError where the graph itself is refused, and what Plan.run raises for tensors that don't fit it.
    """
    seconds, started = {}, time.perf_counter()

    def lap(part):
        nonlocal started
        now = time.perf_counter()
        seconds[part], started = now - started, now

    tensors = {getattr(key, "name", key): tensor for key, tensor in tensors.items()}
    graph, candidates = _propose(make_graph, modes, also)
    if workspace_limit is not None:
        graph.deselect_workspace_greater_than(workspace_limit)
    if deterministic:
        graph.deselect_numeric_notes([cudnn.numerical_note.NONDETERMINISTIC])
    lap("plan")

    for c in candidates:
        if c.status != "proposed":  # one of `also` that cuDNN refused
            continue
        if per_mode is not None and c.modes and min(c.modes.values()) >= per_mode:
            c.ends("filtered", f"{_CAPPED} {per_mode} of a mode")
        elif not runtime_compilation and "RUNTIME_COMPILATION" in c.notes:
            c.ends("filtered", "compiles at run time")
        else:
            _build(graph, c)
    lap("build")

    built = [c for c in candidates if c.plan]
    for c in built[:1]:
        c.plan._checked(tensors)  # here, since without a GPU nothing will be bound
    if built and (target.live or launch):
        _bind(built, tensors, launch)
        _verify_all(built, tensors, expected, rtol, atol)
    lap("verify")

    if target.live or measure:
        _time([c for c in built if c.status == "verified"], rounds, calls, keep, measure or _measure(l2))
    lap("time")
    return Tuning(graph_name(graph), candidates, seconds)


def replay(graph, winner):
    """Takes a fresh `graph` through the five steps with a recorded winner (Tuning.winner) and returns its Plan.

    Some engines for older GPUs have knobs for which the frontend has no name (it reports NOT_SET). Those can't be asked
    for, so there the heuristics are asked again and the candidate is found by its whole name, never by its place.

    Raises ValueError where cuDNN or GPU are not those of the tuning, since numbers of engines and values of knobs mean
    something else there; GraphError where the graph does not have this candidate.
    """
    if not isinstance(winner, dict) or not {"engine", "knobs", "name", *_here()} <= winner.keys():
        raise TypeError(f"expected the dict of a Tuning's winner (json.loads of what was stored), got {winner!r:.80}")
    if target.live and winner.get("timed") is False:
        raise ValueError(f"{winner['name']} was chosen without a GPU, by rank alone: tune again")
    stale = [f"{key} {winner[key]}, here {value}" for key, value in _here().items() if winner[key] != value]
    if stale:
        raise ValueError(f"{winner['name']} was chosen for {' and '.join(stale)}: tune again")
    if "NOT_SET" in winner["knobs"]:
        plan = _by_name(graph, winner["name"])
    else:
        plan = build(graph, choice=(winner["engine"], _knobs(winner["knobs"])))
    if plan.name != winner["name"]:
        raise ValueError(f"{winner['name']} was recorded, {plan.name} was built: tune again")
    return plan


# --- the parts --------------------------------------------------------------------------------------------------------


def _here():
    return {"cudnn": cudnn.backend_version_string(), "gpu": target.name}


def _knobs(names):
    unknown = [name for name in names if name not in cudnn.knob_type.__members__]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such knob in cudnn.knob_type of frontend {cudnn.__version__}")
    return {cudnn.knob_type.__members__[name]: value for name, value in names.items()}


def _by_name(graph, name):
    propose(graph, MODES)
    names = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    graph.build_plan_at_index(names.index(name) if name in names else 0)
    return Plan(graph)


def _planned(make_graph, modes):
    """A fresh graph with the candidates of `modes`, none of them built."""
    graph = make_graph() if callable(make_graph) else make_graph
    if not isinstance(graph, cudnn.pygraph) or graph is make_graph:
        raise TypeError(f"expected a function that returns a new cudnn.pygraph at each call, got {graph!r:.80}")
    propose(graph, modes)
    return graph


def _listed(graph):
    """[(engine, {knob name: value})] of the graph's candidates, by rank."""
    pairs = (graph.get_engine_and_knobs_at_index(i) for i in range(graph.get_execution_plan_count()))
    return [(engine, {knob.name: value for knob, value in knobs.items()}) for engine, knobs in pairs]


def _propose(make_graph, modes, also):
    """The graph to build on and its candidates. The modes are asked one by one on graphs of their own as well, since
    the common list holds each candidate once and does not say which modes proposed it."""
    graph = _planned(make_graph, modes)
    listed, asked = _listed(graph), {}
    for mode in modes:
        try:
            asked[mode.name] = _listed(_planned(make_graph, [mode])) if len(modes) > 1 else listed
        except GraphError as error:
            if error.step != "create_execution_plans":
                raise
            # A mode may have nothing to propose where another has.
            asked[mode.name] = []
    refused = []
    for pair in map(tuple, also):
        if pair in listed:
            continue
        try:
            graph.create_execution_plan(pair[0], _knobs(pair[1]))
            listed.append(pair)
        except Exception as error:
            refused.append((pair, error))
    candidates = []
    for rank, (engine, knobs) in enumerate(listed):
        places = {mode: found.index((engine, knobs)) for mode, found in asked.items() if (engine, knobs) in found}
        notes = [note.name for note in graph.get_behavior_notes_for_plan_at_index(rank)]
        candidates.append(Candidate(rank, places, engine, knobs, graph.get_plan_name_at_index(rank), notes))
    for (engine, knobs), error in refused:
        values = "".join(f" {knob}={value}" for knob, value in knobs.items())
        candidates.append(Candidate(len(candidates), {}, engine, knobs, f"eng{engine}{values}", []))
        candidates[-1].ends("not built", error)
    return graph, candidates


def _build(graph, candidate):
    started = time.perf_counter()
    try:
        graph.build_plan_at_index(candidate.rank)
        candidate.build_ms = (time.perf_counter() - started) * 1e3
        candidate.plan = Plan(graph, index=candidate.rank)
    except Exception as error:
        # cuDNN answers a filter in the same way as a failure.
        workspace = re.search(r"workspace violation\. Requires (\d+)", str(error))
        if workspace:
            candidate.ends("filtered", f"needs a workspace of {int(workspace[1]):,} bytes")
        elif "Deselecting execution plan" in str(error):
            candidate.ends("filtered", "not deterministic")
        else:
            candidate.ends("not built", f"{type(error).__name__}: {error}")
    else:
        candidate.ends("built", "" if target.live else "not run: no GPU")


def _bind(built, tensors, launch):
    """Gives each candidate its `call`. They share one workspace, as large as the largest that fits into memory."""
    workspace = None
    for c in sorted(built, key=lambda c: c.plan.workspace_bytes, reverse=True):
        try:
            if workspace is None and c.plan.workspace_bytes:
                workspace = torch.empty(c.plan.workspace_bytes, dtype=torch.uint8, device=target.device)
        except torch.OutOfMemoryError:
            c.ends("failed", f"no memory for a workspace of {c.plan.workspace_bytes:,} bytes")
        else:
            run = c.plan.bind(tensors, workspace)
            c.call = functools.partial(launch, c, run) if launch else run


def _expected(plan, tensors):
    fp32 = all(tensors[t.name].dtype.itemsize <= 4 and tensors[t.name].is_floating_point() for t in plan.outputs)
    inputs = {t: tensors[t.name] for t in plan.inputs}
    values = reference.reference_values(plan.graph, inputs, torch.float32 if fp32 else torch.float64)
    return {tensor.name: value for tensor, value in values.items()}


def _verify_all(built, tensors, expected, rtol, atol):
    plan = built[0].plan
    expected = _expected(plan, tensors) if expected is None else expected
    missing = [t.name for t in plan.outputs if t.name not in expected]
    if missing:
        raise ValueError(f"no expected values for {', '.join(missing)}: an output that is not verified can be wrong")
    for c in built:
        if c.call:
            _verify(c, tensors, expected, rtol, atol)


def _verify(candidate, tensors, expected, rtol, atol):
    for name in expected:
        tensors[name].fill_(float("nan") if tensors[name].is_floating_point() else 77)
    try:
        candidate.call()
        if target.live:
            torch.cuda.synchronize()
    except Exception as error:
        return candidate.ends("failed", f"{type(error).__name__}: {error}")
    wrong = [_difference(name, tensors[name], value, rtol, atol) for name, value in expected.items()]
    return candidate.ends(*(("wrong", "; ".join(filter(None, wrong))) if any(wrong) else ("verified",)))


def _difference(name, got, expected, rtol=None, atol=None):
    """How `got` differs from `expected` beyond the tolerance (see autotune), in words; "" if it does not."""
    limits = torch.finfo(got.dtype) if got.is_floating_point() else None
    expected = expected.reshape(got.shape)
    if got.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        expected = expected.clamp(limits.min, limits.max)  # stored values saturate
    got = got.to(expected.dtype)
    rtol = max(0.51 * limits.eps, 1e-5) if rtol is None and limits else rtol or 0
    atol = 1e-3 * expected.nan_to_num(0, 0, 0).square().mean().sqrt() if atol is None else atol
    off = (got - expected).abs()
    bad = ~(off <= atol + rtol * expected.abs()) & (got != expected) & ~(got.isnan() & expected.isnan())
    count = int(bad.sum())
    if not count:
        return ""
    if int(got[bad].isnan().sum()):
        return f"{name} has {int(got[bad].isnan().sum()):,} NaN among {got.numel():,} elements"
    share = f"{100 * count / got.numel():.1f} %" if count >= got.numel() / 1000 else f"{count:,} of {got.numel():,}"
    typical = float((off[bad] / expected[bad].abs()).median())
    by = f"{100 * typical:.2g} %" if math.isfinite(typical) else f"{float(off[bad].median()):.2g}"
    return f"{name} is wrong in {share} of its elements, typically by {by}"


def _measure(l2):
    return lambda candidate, call, calls: bench.measure(call, l2, calls).ms


def _time(verified, rounds, calls, keep, measure):
    """A first look at all of them, then interleaved rounds of those near the fastest."""

    def once(c, calls):
        try:
            ms = measure(c, c.call, calls)
            if not ms > 0:
                raise ValueError(f"a time of {ms} ms")
            c.rounds.append(ms)
            c.ends("timed")
        except Exception as error:
            c.rounds.clear()
            c.ends("failed", f"while timed: {type(error).__name__}: {error}")

    for c in verified:
        once(c, SCREEN_CALLS)
    timed = [c for c in verified if c.status == "timed"]
    near = [c for c in timed if c.ms <= keep * min(other.ms for other in timed)]
    for c in near:
        c.rounds.clear()
    for _ in range(rounds):
        for c in near:
            if c.status == "timed":
                once(c, calls)
