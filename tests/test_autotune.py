"""Autotuning: only what is verified may win, ties, filters, winners that survive (CASES: bad-candidate, stale-plan)."""

import itertools
import json
import random

import cudnn
import pytest
import torch

from helpers import GraphError, autotune, bench, describe, new_graph, replay, target

without_gpu = pytest.mark.skipif(target.live, reason="what happens without a GPU: this machine has one")
CHANNELS_LAST = torch.channels_last


class Layer:
    """A small convolution + bias + ReLU, no two dims equal: `graph()` describes it, `tensors` go with it."""

    def __init__(self, memory_format=CHANNELS_LAST):
        torch.manual_seed(0)
        make = lambda *dims: torch.randn(dims, device=target.device).to(target.dtype)  # noqa: E731
        x, w = (t.to(memory_format=memory_format) for t in (make(3, 24, 13, 19), make(40, 24, 3, 3) / 15))
        y = torch.empty(3, 40, 7, 10, device=target.device, dtype=target.dtype).to(memory_format=CHANNELS_LAST)
        self.tensors = {"X": x, "W": w, "bias": make(40), "Y": y}

    def graph(self):
        g = new_graph("layer")
        X, W, B = (describe(g, self.tensors[name], name) for name in ("X", "W", "bias"))
        conv = g.conv_fprop(X, W, padding=[1, 1], stride=[2, 2], dilation=[1, 1])
        g.relu(g.bias(conv, B)).set_output(True).set_name("Y")
        return g

    def tune(self, **options):
        """Compiling takes long and rarely matters here; where nothing else is asked for, candidates are executed."""
        options = {"runtime_compilation": False, "launch": lambda candidate, run: run()} | options
        return autotune(self.graph, self.tensors, **options)


@pytest.fixture(scope="module")
def layer():
    return Layer()


@without_gpu
def test_tensors_are_checked_without_a_gpu(layer):
    """What Plan.run refuses is refused where nothing is launched, too."""
    for wrong, words in (({"bias": None}, "bias"), ({"X": layer.tensors["X"].double()}, "X: expected")):
        with pytest.raises((TypeError, ValueError), match=words):
            autotune(layer.graph, layer.tensors | wrong, per_mode=1)


@pytest.mark.parametrize("wrong", [None, lambda: None, lambda: ("graph",)])
def test_not_a_graph(wrong, layer):
    with pytest.raises(TypeError, match=r"a function that returns a new cudnn\.pygraph"):
        autotune(wrong, layer.tensors)


@pytest.mark.parametrize("winner", ["{}", None, {"engine": 1}])
def test_replay_of_what_is_no_winner(winner, layer):
    with pytest.raises(TypeError, match="the dict of a Tuning's winner"):
        replay(layer.graph(), winner)


def clock(times, noise=0.0):
    """A `measure` for autotune: by rank, `times[rank]` ms (the last value for all further ones) within +-noise."""
    generator = random.Random(0)

    def measure(candidate, call, calls):
        return times[min(candidate.rank, len(times) - 1)] * (1 + generator.uniform(-noise, noise))

    return measure


def cells(tuning):
    """The table's rows, each as {column: text}."""
    return [dict(zip(tuning.table.header, row, strict=True)) for row in tuning.table.rows]


# --- bad-candidate ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sabotage(layer, monkeypatch):
    """Four bad candidates, which are also the fastest, as options of autotune; the first of them does not build."""
    build = cudnn.pygraph.build_plan_at_index

    def build_plan_at_index(graph, index):
        if index == 0:
            raise RuntimeError("no kernel\nfor this one")
        return build(graph, index)

    def launch(candidate, run):
        if candidate.rank == 1:
            raise RuntimeError("launch refused")
        run()
        y = layer.tensors["Y"]
        if candidate.rank == 2:
            y[0, 0, 0, 0] = float("nan")
        if candidate.rank == 3:
            y.mul_(1.01)

    monkeypatch.setattr(cudnn.pygraph, "build_plan_at_index", build_plan_at_index)
    return {"launch": launch, "measure": clock([1.0, 1.0, 1.0, 1.0, 3.0, 2.0, 4.0])}


def test_bad_candidates_are_rows_with_their_reason_and_never_win(layer, sabotage):
    """bad-candidate: raises at build, raises at run, NaN, off by 1 %; the fastest of the others wins."""
    tuning = layer.tune(**sabotage)
    found = [(c.status, c.reason) for c in tuning.candidates[:4]]
    assert found[:3] == [
        ("not built", "RuntimeError: no kernel for this one"),
        ("failed", "RuntimeError: launch refused"),
        ("wrong", "Y has 1 NaN among 8,400 elements"),
    ]
    assert found[3][0] == "wrong" and "typically by 1" in found[3][1]
    others = [c for c in tuning.candidates[4:] if c.status != "filtered"]
    assert others and all(c.status == "timed" for c in others)
    assert (tuning.best.rank, tuning.winner["name"]) == (5, tuning.candidates[5].name)
    rows = {int(row["rank"]): row["result"] for row in cells(tuning)}
    assert all(status in rows[rank] for rank, (status, _) in enumerate(found))
    assert list(rows)[:2] == [5, 4] and rows[5] == "winner"


def test_it_is_the_verification_that_keeps_wrong_candidates_from_winning(layer, sabotage, module, monkeypatch):
    """With a verification that accepts everything, a wrong candidate does win: the test above can fail."""
    monkeypatch.setattr(module("autotune"), "_difference", lambda *arguments: "")
    assert layer.tune(**sabotage).best.rank == 2


def test_what_the_last_candidate_left_in_the_output_does_not_pass(layer):
    def launch(candidate, run):
        if candidate.rank != 1:
            run()

    tuning = layer.tune(launch=launch, measure=clock([2.0, 1.0, 3.0]))
    assert tuning.candidates[1].reason == "Y has 8,400 NaN among 8,400 elements"
    assert tuning.best.rank == 0


def test_no_right_candidate_no_winner(layer):
    tuning = layer.tune(launch=lambda candidate, run: None, measure=clock([1.0]))
    assert (tuning.best, tuning.winner, tuning.gain) == (None, None, None)
    assert "no winner" in tuning.summary and str(tuning)


def test_a_candidate_that_fails_while_timed_is_out(layer):
    calls = itertools.count()

    def measure(candidate, call, calls_each):
        if candidate.rank == 0 and next(calls) == 3:
            raise RuntimeError("lost")
        return 1.0 + candidate.rank

    tuning = layer.tune(measure=measure)
    assert (tuning.candidates[0].status, tuning.candidates[0].reason) == ("failed", "while timed: RuntimeError: lost")
    assert tuning.best.rank == 1


@pytest.mark.parametrize(
    ("dtype", "got", "expected", "words"),
    [
        (torch.bfloat16, [1.0, -2.0, 0.5], [1.0039, -2.0078, 0.5], ""),
        (
            torch.bfloat16,
            [1.0, 2.0, 3.0],
            [1.01, 2.02, 3.03],
            "Y is wrong in 100.0 % of its elements, typically by 0.99 %",
        ),
        (torch.float16, [1.0, 2.0, 3.0], [1.0004, 2.0, 3.0], ""),
        (torch.float16, [1.0, 2.0, 3.0], [1.01, 2.0, 3.0], "Y is wrong in 33.3 %"),
        (torch.float32, [1.0, 2.0, 0.0], [1.0, 2.0, 1e-3], ""),
        (torch.float32, [1.0, 2.0, 0.0], [1.01, 2.0, 0.0], "Y is wrong in 33.3 %"),
        (torch.float32, [1.0, float("nan"), 0.0], [1.0, 2.0, 0.0], "Y has 1 NaN among 3 elements"),
        (torch.float32, [1.0, float("nan"), 0.0], [1.0, float("nan"), 0.0], ""),
        (torch.float8_e4m3fn, [448.0, -448.0, 16.0], [1000.0, -449.0, 17.0], ""),
        (torch.float8_e4m3fn, [448.0, 16.0, 18.0], [448.0, 18.0, 18.0], "Y is wrong in 33.3 %"),
        (torch.int32, [1, 2, 3], [1, 2, 3], ""),
        (torch.int32, [1, 2, 4], [1, 2, 3], "Y is wrong in 33.3 % of its elements, typically by 33 %"),
    ],
)
def test_one_rounding_is_right_and_one_per_cent_is_wrong(module, dtype, got, expected, words):
    got, expected = torch.tensor(got).to(dtype), torch.tensor(expected, dtype=torch.float32)
    found = module("autotune")._difference("Y", got, expected)
    assert found.startswith(words) if words else found == ""


def test_small_values_are_verified_too(module):
    """The default absolute tolerance follows the size of the values: 1 % of 1e-6 is wrong as well."""
    values = torch.randn(1000)
    assert module("autotune")._difference("Y", values * 1.01e-6, values * 1e-6)


# --- ties -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "tied"),
    [
        ([1.0, 1.0, 1.0], [1.009, 1.009, 1.009], True),  # below 1 %
        ([1.0, 1.0, 1.0], [1.02, 1.02, 1.02], False),
        ([1.0, 1.03, 1.01], [1.03, 1.03, 1.03], True),  # differ by 0.02, the rounds of one by 0.03
        ([1.0, 1.015, 1.01], [1.03, 1.03, 1.03], False),
        ([0.0050, 0.0050, 0.0050], [0.0054, 0.0054, 0.0054], True),  # less than the events resolve
        ([0.0050, 0.0050, 0.0050], [0.0056, 0.0056, 0.0056], False),
    ],
)
def test_tie_rule(module, a, b, tied):
    auto = module("autotune")
    one, other = (auto.Candidate(i, {}, i, {}, f"eng{i}", [], rounds=r) for i, r in enumerate((a, b)))
    assert auto.tied(one, other) == auto.tied(other, one) == tied


def test_of_a_tie_the_best_ranked_wins_each_time(layer):
    """Rank 2 is the fastest by 0.3 %, rank 1 ties with it, rank 0 does not: ten runs with noise, one winner."""
    found = [layer.tune(measure=clock([1.5, 1.003, 1.0, 2.0], noise=0.002)) for _ in range(10)]
    assert {t.best.rank for t in found} == {1}
    assert all([c.rank for c in t.tie] == [1, 2] and "in a tie of 2" in t.summary for t in found)


def test_only_what_is_near_the_fastest_is_timed_again(layer):
    asked = []

    def measure(candidate, call, calls):
        asked.append((candidate.rank, calls))
        return [1.0, 1.2, 1.3][min(candidate.rank, 2)]

    tuning = layer.tune(measure=measure, per_mode=4, modes=[cudnn.heur_mode.A], rounds=2, calls=7)
    assert asked == [(0, 3), (1, 3), (2, 3), (3, 3), (0, 7), (1, 7), (0, 7), (1, 7)]
    assert [len(c.rounds) for c in tuning.candidates[:4]] == [2, 2, 1, 1]
    capped = len(tuning.candidates) - 4
    last = cells(tuning)[4]
    assert last["candidate"] == f"{capped} more" and len(cells(tuning)) == 5
    assert last["result"] == "filtered: not among the first 4 of a mode"


# --- candidates and filters -------------------------------------------------------------------------------------------


def test_every_row_says_which_mode_proposed_it(layer):
    """The places of a mode's candidates are 0, 1, 2, ...; the common list has each candidate once."""
    tuning = layer.tune(launch=None)
    for mode in ("A", "B", "FALLBACK"):
        places = sorted(c.modes[mode] for c in tuning.candidates if mode in c.modes)
        assert places == list(range(len(places))) and (places or mode == "B")
    assert all(c.modes for c in tuning.candidates)
    assert [c.rank for c in tuning.candidates] == list(range(len(tuning.candidates)))
    assert len({c.name for c in tuning.candidates}) == len(tuning.candidates)


def test_no_runtime_compilation(layer):
    found = layer.tune(launch=None).candidates
    compiled = [c for c in found if "RUNTIME_COMPILATION" in c.notes]
    assert all((c.status, c.reason, c.plan) == ("filtered", "compiles at run time", None) for c in compiled)
    assert [c for c in found if c.plan and c in compiled] == []


def test_workspace_limit():
    """Contiguous tensors need a channels-last copy in the workspace; a limit below it leaves the others."""
    layer = Layer(torch.contiguous_format)
    sizes = [c.plan.workspace_bytes for c in layer.tune(launch=None).candidates if c.plan]
    limit = max(sizes) - 1
    limited = layer.tune(launch=None, workspace_limit=limit)
    kept = [c.plan.workspace_bytes for c in limited.candidates if c.plan]
    assert kept == [size for size in sizes if size <= limit]
    over = [c.reason for c in limited.candidates if c.status == "filtered" and "workspace" in c.reason]
    assert over == [f"needs a workspace of {size:,} bytes" for size in sizes if size > limit]


def test_deterministic_only():
    """A filter gradient has a candidate whose sums depend on the order of atomic additions."""
    x, w = Layer().tensors["X"], Layer().tensors["W"]
    dy, dw = Layer().tensors["Y"].normal_(), torch.empty_like(w)

    def graph():
        g = new_graph("filter_gradient")
        options = {"padding": [1, 1], "stride": [2, 2], "dilation": [1, 1]}
        dw_ = g.conv_wgrad(image=describe(g, x, "X"), loss=describe(g, dy, "dY"), **options)
        dw_.set_output(True).set_name("dW").set_dim(list(w.shape)).set_stride(list(w.stride()))
        return g

    tensors = {"X": x, "dY": dy, "dW": dw}
    found = [autotune(graph, tensors, runtime_compilation=False, deterministic=d) for d in (False, True)]
    excluded = [c.name for c in found[1].candidates if c.reason == "not deterministic"]
    assert excluded and set(excluded) < {c.name for c in found[0].candidates if c.plan}


def test_candidates_that_no_mode_proposed(layer):
    """`also` adds what is new and can be built; what cuDNN refuses is a row."""
    plain = layer.tune(launch=None)
    first = plain.candidates[0]
    also = [(first.engine, first.knobs), (first.engine, {}), (first.engine, dict.fromkeys(first.knobs, 9999))]
    tuning = layer.tune(launch=None, also=also)
    new = tuning.candidates[len(plain.candidates) :]
    assert [(c.engine, c.modes, c.status == "not built") for c in new][-1] == (first.engine, {}, True)
    assert all(c.knobs == {} for c in new[:-1])
    assert "asked for" in [row["in mode"] for row in cells(tuning)]


@without_gpu
def test_without_a_gpu_candidates_are_built_and_the_heuristics_decide(layer):
    tuning = autotune(layer.graph, layer.tensors, modes=[cudnn.heur_mode.A], per_mode=3)
    assert {(c.status, c.reason) for c in tuning.candidates[:3]} == {("built", "not run: no GPU")}
    assert (tuning.best.rank, tuning.gain, tuning.timed) == (0, None, [])
    assert "nothing was timed, heuristics' order decides" in tuning.summary


# --- recording and replaying ------------------------------------------------------------------------------------------


def test_a_winner_survives_as_json_and_replays_on_a_fresh_graph(layer):
    tuning = layer.tune(measure=clock([4.0, 3.0, 2.0, 1.0, 5.0]))
    stored = json.dumps(tuning.winner)
    plan = replay(layer.graph(), json.loads(stored))
    assert plan.name == tuning.best.name == tuning.candidates[3].name
    layer.tensors["Y"].fill_(float("nan"))
    plan.run(layer.tensors)
    assert not layer.tensors["Y"].isnan().any()


def test_a_winner_with_a_knob_that_has_no_name_is_found_by_its_own_name(layer):
    winner = layer.tune(measure=clock([3.0, 2.0, 1.0, 4.0])).winner
    assert replay(layer.graph(), winner | {"knobs": {"NOT_SET": 0}}).name == winner["name"]
    with pytest.raises(ValueError, match=r"eng0_k1=2 was recorded, .* was built: tune again"):
        replay(layer.graph(), winner | {"knobs": {"NOT_SET": 0}, "name": "eng0_k1=2"})


@pytest.mark.parametrize(("key", "value"), [("cudnn", "8.0.0"), ("gpu", "NVIDIA Another")])
def test_a_winner_of_another_cudnn_or_gpu_is_refused(layer, key, value):
    """stale-plan: in one line, with what was recorded and what is here."""
    winner = layer.tune(launch=None).winner | {key: value}
    with pytest.raises(ValueError, match=f"was chosen for {key} {value}, here .*: tune again") as caught:
        replay(layer.graph(), winner)
    assert "\n" not in str(caught.value)


def test_a_winner_that_the_graph_does_not_have_is_refused(layer):
    winner = layer.tune(launch=None).winner
    with pytest.raises(GraphError, match="choose again"):
        replay(layer.graph(), winner | {"engine": 12345, "knobs": {}})
    with pytest.raises(ValueError, match="tune again"):
        replay(layer.graph(), winner | {"name": "eng0_k1=2"})


# --- what raises ------------------------------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_raise(layer):
    for name in ("X", "Y"):
        rest = {key: t for key, t in layer.tensors.items() if key != name}
        with pytest.raises(ValueError, match=f"no tensor was given for '{name}'"):
            autotune(layer.graph, rest, runtime_compilation=False, launch=lambda candidate, run: run())


def test_graphs_that_are_refused_raise(layer):
    graph = layer.graph()
    with pytest.raises(GraphError, match="was built before"):
        autotune(lambda: graph, layer.tensors, runtime_compilation=False)

    def wrong_dims():
        g = new_graph("wrong_dims")
        x = torch.empty(2, 3, 5, dtype=target.dtype)
        g.matmul(describe(g, x, "A"), describe(g, x, "B")).set_output(True)
        return g

    with pytest.raises(GraphError, match="failed at step 'validate'"):
        autotune(wrong_dims, {})


def test_expected_values_can_be_given_but_not_left_out(layer):
    layer.tune(launch=lambda candidate, run: run())
    right = layer.tensors["Y"].clone()
    assert layer.tune(expected={"Y": right}, rtol=1e-2).best
    assert layer.tune(expected={"Y": right * 1.1}, rtol=1e-2).best is None
    with pytest.raises(ValueError, match="no expected values for Y"):
        layer.tune(expected={})


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_every_candidate_ends_with_a_time_or_a_reason(layer):
    tuning = autotune(layer.graph, layer.tensors)
    assert tuning.timed and tuning.first.status == "timed"
    assert all(c.status == "timed" or c.reason for c in tuning.candidates)
    assert tuning.best.ms <= tuning.first.ms * 1.01 + 0.0005 and tuning.gain > 0.98
    plan = replay(layer.graph(), json.loads(json.dumps(tuning.winner)))
    assert plan.name == tuning.best.name
    ms = bench.measure(plan.bind(layer.tensors)).ms
    assert abs(ms - tuning.best.ms) < max(0.2 * ms, 0.002)


@pytest.mark.gpu
def test_on_a_gpu_bad_candidates_do_not_win(layer, sabotage):
    """bad-candidate with real launches and real times."""
    tuning = layer.tune(launch=sabotage["launch"])
    assert [c.status for c in tuning.candidates[:4]] == ["not built", "failed", "wrong", "wrong"]
    assert tuning.best.status == "timed"
