"""Plans on disk: loaded only where all is as it was, and only whole (CASES: stale-plan, torn-plan)."""

import contextlib
import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import struct
import tempfile
import time
import warnings
from pathlib import Path

import cudnn
import numpy as np
import pytest
import torch

from helpers import GraphError, PlanStore, autotune, build, describe, new_graph, scalar, target
from helpers.signature import NO_DRIVER, canonical, environment, graph_signature

CHANNELS_LAST = torch.channels_last
not_as_root = pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to someone else")


def empty_output(plan):
    y = plan.outputs[0]
    result = torch.empty_strided(tuple(y.dim), tuple(y.stride), dtype=target.dtype, device=target.device)
    return result.fill_(float("nan"))


class Conv:
    """A small convolution + bias + ReLU, which has precompiled engines. No two dims are equal."""

    name, padding, stride, mode, compute, out = "layer", 1, 2, "relu", torch.float32, None

    def __init__(self, memory_format=CHANNELS_LAST, **changes):
        vars(self).update(changes)
        torch.manual_seed(0)
        make = lambda *dims: torch.randn(dims).to(target.device, target.dtype)  # noqa: E731
        x, w = (t.to(memory_format=memory_format) for t in (make(3, 24, 13, 19), make(40, 24, 3, 3) / 15))
        self.tensors = {"X": x, "W": w, "bias": make(40)}

    def graph(self, order=("X", "W", "bias"), labels=("X", "W", "bias", "Y"), **options):
        labels = dict(zip(("X", "W", "bias", "Y"), labels, strict=True))
        g = new_graph(self.name, compute=self.compute, **options)
        t = {name: describe(g, self.tensors[name], labels[name]) for name in order}
        steps = {"padding": [self.padding] * 2, "stride": [self.stride] * 2, "dilation": [1, 1]}
        y = getattr(g, self.mode)(g.bias(g.conv_fprop(t["X"], t["W"], **steps), t["bias"]))
        y.set_output(True).set_name(labels["Y"])
        if self.out:
            y.set_data_type(cudnn.data_type.FLOAT)
        return g

    def run(self, plan):
        """The result of `plan` for this case's tensors."""
        result = empty_output(plan)
        plan.run({**self.tensors, plan.outputs[0]: result})
        return result


class Matmul(Conv):
    """relu(A @ B + row) * half, which cuDNN compiles at run time."""

    name, half = "matmul", 0.5

    def __init__(self, **changes):
        vars(self).update(changes)
        torch.manual_seed(0)
        dims = {"A": (2, 96, 64), "B": (2, 64, 160), "row": (2, 1, 160)}
        self.tensors = {name: torch.randn(d).to(target.device, target.dtype) for name, d in dims.items()}

    def graph(self, **options):
        g = new_graph(self.name, **options)
        A, B, row = (describe(g, tensor, name) for name, tensor in self.tensors.items())
        y = g.mul(g.relu(g.add(g.matmul(A, B), row)), scalar(g, self.half, "half"))
        y.set_output(True).set_name("Y")
        return g


@pytest.fixture(autouse=True)
def _usual_umask():
    """Files that tests write themselves are not writable for the group, as some systems have it."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def conv():
    return Conv()


@pytest.fixture
def store(tmp_path):
    return PlanStore(tmp_path / "plans")


@pytest.fixture
def asked(monkeypatch):
    """What cuDNN was asked to deserialize: a list that grows with each call."""
    calls, deserialize = [], cudnn.pygraph.deserialize
    monkeypatch.setattr(cudnn.pygraph, "deserialize", lambda g, *args: calls.append(args[-1]) or deserialize(g, *args))
    return calls


@pytest.fixture
def elsewhere(module, monkeypatch):
    """elsewhere(driver="1.0"): from then on the environment is ours with this change (None: without this entry)."""
    ours = environment()

    def change(**changes):
        changed = {key: value for key, value in (ours | changes).items() if value is not None}
        monkeypatch.setattr(module("plan_store"), "environment", lambda: changed)

    return change


def stored(folder):
    return sorted(folder.glob("*.plan"))


def only(folder):
    (path,) = stored(folder)
    return path


def sealed(content):
    """A file with a right length and sha256, whatever its content."""
    return struct.pack("<8sQ32s", b"cudnnpln", len(content), hashlib.sha256(content).digest()) + content


def parts(path):
    """(metadata, blob) of a file, read as the module's docstring says."""
    data = path.read_bytes()
    assert data[:8] == b"cudnnpln"
    content = data[48:]
    assert struct.unpack("<Q", data[8:16]) == (len(content),) and data[16:48] == hashlib.sha256(content).digest()
    line, _, blob = content.partition(b"\n")
    return json.loads(line), blob


def rewritten(path, blob=None, **changes):
    header, old = parts(path)
    blob = old if blob is None else blob
    return sealed(json.dumps(header | {"bytes": len(blob)} | changes).encode() + b"\n" + blob)


@contextlib.contextmanager
def one_warning(match):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert match in str(caught[0].message) and "\n" not in str(caught[0].message)


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- saving and loading -----------------------------------------------------------------------------------------------


def test_the_second_time_it_is_loaded(conv, store, asked):
    with no_warning():
        built = store.get(conv.graph)
        assert store.reason == "built: not stored yet" and not asked
        assert [s.name for s in built.steps][:2] == ["load", "validate"] and "not stored yet" in str(built)
        loaded = store.get(conv.graph)
    assert asked == [built.graph.serialize(as_bytes=True)]
    assert store.reason == f"loaded: {built.name}, {len(asked[0]):,} bytes" and built.name in str(loaded)
    assert [s.name for s in loaded.steps] == ["load"] and loaded.build_ms > 0
    assert (loaded.name, loaded.notes, loaded.workspace_bytes) == (built.name, built.notes, built.workspace_bytes)
    assert torch.equal(conv.run(loaded), conv.run(built))
    assert loaded.graph.serialize(as_bytes=True)  # a loaded plan can be saved again
    assert store.save(loaded) == only(store.folder) and store.load(conv.graph())[0].name == built.name


def test_a_loaded_plan_checks_its_tensors(conv, store):
    store.get(conv.graph)
    plan = store.get(conv.graph)
    with pytest.raises(ValueError, match="X: expected strides"):
        plan.bind({**conv.tensors, "X": conv.tensors["X"].contiguous(), "Y": empty_output(plan)})
    with pytest.raises(ValueError, match="no input or output of this graph"):
        plan.bind({**conv.tensors, "Z": conv.tensors["X"]})


def test_a_plan_that_needs_a_workspace(store):
    """Contiguous tensors need a channels-last copy in the workspace."""
    conv = Conv(torch.contiguous_format)
    built, loaded = store.get(conv.graph), store.get(conv.graph)
    if not built.workspace_bytes:
        pytest.skip(f"{built.name}, the first choice on {target.name}, needs no workspace")
    assert store.reason.startswith("loaded") and loaded.workspace_bytes == built.workspace_bytes
    assert torch.equal(conv.run(loaded), conv.run(built))


def test_the_file_is_as_documented(conv, store):
    plan = store.get(conv.graph)
    header, blob = parts(only(store.folder))
    assert blob == plan.graph.serialize(as_bytes=True) and header["bytes"] == len(blob)
    signature = graph_signature(conv.graph())
    assert header["decides"] == environment() | {"graph signature": signature}
    assert (header["graph"], header["plan"], header["winner"], header["format"]) == ("layer", plan.name, None, 1)
    assert only(store.folder).name.startswith(f"{signature}-")
    assert not any(only(store.folder).stat().st_mode & bit for bit in (0o077, 0o100))


def test_get_takes_a_graph_as_well(conv, store):
    first, second = store.get(conv.graph()), store.get(conv.graph())
    assert first.name == second.name and store.reason.startswith("loaded")
    only(store.folder).write_bytes(rewritten(only(store.folder), blob=b"{}"))
    third = store.get(conv.graph())  # built on the graph that cuDNN refused to load into
    assert store.reason.startswith("built: cuDNN refuses it") and third.name == first.name
    assert torch.equal(conv.run(third), conv.run(second))


def test_what_was_built_otherwise_is_loaded_too(conv, store):
    other = store.get(conv.graph, build=lambda g: build(g, heuristics=[cudnn.heur_mode.FALLBACK]))
    assert other.name != build(conv.graph()).name and store.get(conv.graph).name == other.name


def test_what_is_no_graph_and_no_plan(conv, store):
    """A function where a graph is looked up would be "not stored" for ever, and its plan built in each run."""
    plan = build(conv.graph())
    calls = [
        (lambda: store.load(conv.graph), "described graph .* got method; call it, and give what it returns"),
        (lambda: store.winner(conv.graph), "described graph .* got method; call it"),
        (lambda: store.load(plan), "described graph .* got Plan$"),
        (lambda: store.load(None), "described graph .* got NoneType$"),
        (lambda: store.get(lambda: None), "described graph .* got NoneType$"),
        (lambda: store.get(plan), "described graph .* got Plan$"),
        (lambda: store.get(conv.graph, build=lambda graph: None), "a built Plan is saved .* got NoneType"),
        (lambda: store.save(conv.graph()), r"a built Plan is saved \(build\(graph\) returns one\), got pygraph"),
        (lambda: store.save(None), "a built Plan is saved .* got NoneType"),
    ]
    for call, words in calls:
        with pytest.raises(TypeError, match=words):
            call()
    assert not store.folder.exists()


def test_a_graph_that_is_refused_raises_and_is_not_stored(store):
    def wrong_dims():
        g = new_graph("wrong_dims")
        x = torch.empty(2, 3, 5, dtype=target.dtype)
        g.matmul(describe(g, x, "A"), describe(g, x, "B")).set_output(True)
        return g

    for graph in (wrong_dims, wrong_dims()):
        with pytest.raises(GraphError, match="failed at step 'validate'"):
            store.get(graph)
    assert not store.folder.exists()


# --- a fresh process --------------------------------------------------------------------------------------------------

IN_ANOTHER_PROCESS = """
import json, sys, time, warnings
sys.path.insert(0, "tests")
from helpers import PlanStore  # before cudnn, which could find a libcudnn of the system
import cudnn
from test_plan_store import Conv, Matmul
warnings.simplefilter("error")
asked, deserialize = [], cudnn.pygraph.deserialize
cudnn.pygraph.deserialize = lambda g, *args: asked.append(len(args[-1])) or deserialize(g, *args)
store, found = PlanStore(sys.argv[1]), {}
for case in (Conv(), Matmul()):
    clock = time.process_time()
    plan = store.get(case.graph)
    seconds = time.process_time() - clock
    result = [float(v) for v in case.run(plan).float().flatten()[:500]]
    notes = [note.name for note in plan.notes]
    found[case.name] = dict(reason=store.reason, plan=plan.name, notes=notes, result=result, seconds=seconds)
print(json.dumps(found | {"asked": asked}))
"""


def test_another_process_loads_what_one_has_built(python, tmp_path):
    """A precompiled convolution and a matmul with its compiled kernel in the blob, for the recorded H200; then what a
    process for an A100 makes of the same folder."""

    def process(**environment):
        result = python(
            IN_ANOTHER_PROCESS, tmp_path, XDG_CACHE_HOME=os.environ.get("XDG_CACHE_HOME", ""), **environment
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    built, loaded = process(), process()
    assert built.pop("asked") == [] and len(loaded.pop("asked")) == 2
    for name, plan in built.items():
        assert plan["reason"] == "built: not stored yet"
        assert loaded[name]["reason"].startswith(f"loaded: {plan['plan']}, ")
        assert [loaded[name][key] for key in ("plan", "notes", "result")] == [
            plan[k] for k in ("plan", "notes", "result")
        ]
        assert len(set(plan["result"])) > 50
    assert "RUNTIME_COMPILATION" not in built["layer"]["notes"]
    assert "RUNTIME_COMPILATION" in built["matmul"]["notes"]
    assert built["matmul"]["seconds"] > 5 * loaded["matmul"]["seconds"]

    other = process(CUDNN_TARGET="a100")
    assert other.pop("asked") == []
    for plan in other.values():
        assert plan["reason"].startswith("built: GPU NVIDIA H200 then, NVIDIA A100-SXM4-40GB now; SM 90 then, 80 now; ")
        assert "\n" not in plan["reason"] and len(plan["reason"]) < 200
    assert len(stored(tmp_path)) == 4
    assert {plan["reason"][:7] for name, plan in process().items() if name != "asked"} == {"loaded:"}


def test_loading_is_much_faster_than_building(store):
    """CPU time of a runtime-compiled plan, in one process: loading must take less than a fifth (seen: 1/200)."""
    matmul, clock = Matmul(), time.process_time

    def seconds(make):
        started = clock()
        plan = make()
        return clock() - started, plan

    build_s, built = seconds(lambda: build(matmul.graph()))
    if "RUNTIME_COMPILATION" not in {note.name for note in built.notes}:
        pytest.skip(f"{built.name}, the first choice on {target.name}, is not compiled at run time")
    store.save(built)
    loads = [seconds(lambda: store.get(matmul.graph)) for _ in range(5)]
    assert {plan.name for _, plan in loads} == {built.name} and store.reason.startswith("loaded")
    ratio = build_s / statistics.median(s for s, _ in loads)
    print(f"\nloading {built.name} took 1/{ratio:.0f} of the CPU time of building it")
    assert ratio > 5


# --- stale-plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "then", "now"),
    [
        ("GPU", "NVIDIA H200", "NVIDIA Another"),
        ("SM", 90, 103),
        ("cuDNN", "9.19.0", "9.24.0"),
        ("frontend", "1.32.0", "1.33.0"),
        ("CUDA", "12.9", "13.0"),
        ("driver", "570.86.10", "580.65.06"),
        ("CPU", "x86_64", "aarch64"),
        ("multiProcessorCount", 132, 114),
        ("maxSharedMemoryPerBlockOptin", 232448, 101376),
    ],
)
def test_a_changed_environment_is_refused_in_one_line_and_rebuilt(conv, store, asked, elsewhere, key, then, now):
    assert key in environment()
    elsewhere(**{key: then})
    store.get(conv.graph)
    elsewhere(**{key: now})
    assert store.load(conv.graph()) == (None, f"{key} {then} then, {now} now")
    with no_warning():
        plan = store.get(conv.graph)
    assert not asked and store.reason == f"built: {key} {then} then, {now} now"
    assert plan.steps[0].produced == f"not loaded: {key} {then} then, {now} now"
    for value in (now, then):  # each environment has its own plan from now on
        elsewhere(**{key: value})
        assert store.load(conv.graph())[1].startswith("loaded")
    assert len(stored(store.folder)) == len(asked) == 2


def test_many_changes_still_make_one_line(conv, store, elsewhere):
    store.get(conv.graph)
    elsewhere(GPU="G", SM=1, cuDNN="8.9.7", frontend="1.0", driver="1")
    reason = store.load(conv.graph())[1]
    assert reason.startswith(f"GPU {target.name} then, G now; SM {target.sm} then, 1 now; cuDNN ")
    assert reason.endswith(" and 2 more") and "\n" not in reason


def test_what_differs_between_cards_of_one_kind_does_not_count(module, monkeypatch):
    changed = target.properties | {"pciDeviceId": 77, "smClockRateKHz": 1, "totalGlobalMem": 5}
    ours = environment()
    monkeypatch.setattr(module("signature"), "target", type(target)(target.live, target.name, target.sm, changed))
    assert environment() == ours
    changed["multiProcessorCount"] = 1
    assert environment() != ours


def test_a_plan_without_a_driver_is_loaded_on_a_gpu_only_if_asked_for(conv, store, elsewhere):
    elsewhere(driver=NO_DRIVER, smCountOrigin=0)
    plan = store.get(conv.graph)
    store.save(plan, {"engine": 1, "knobs": {}, "name": plan.name})
    elsewhere(driver="580.65.06", smCountOrigin=None)
    ahead = PlanStore(store.folder, ahead_of_time=True)
    assert "driver none (built without a GPU) then, 580.65.06 now" in store.load(conv.graph())[1]
    assert ahead.load(conv.graph())[1].startswith("loaded")
    assert ahead.winner(conv.graph())[0] is None  # nothing was timed where it was built
    elsewhere(driver="580.65.06", cuDNN="9.99.0")
    assert "cuDNN" in ahead.load(conv.graph())[1] and "driver" not in ahead.load(conv.graph())[1]


# --- the graph's signature --------------------------------------------------------------------------------------------


def test_the_signature_is_the_same_before_and_after_building_and_under_other_names(conv):
    for case in (conv, Matmul()):
        graph = case.graph()
        before = graph_signature(graph)
        assert before == graph_signature(graph) == graph_signature(case.graph())
        assert before == graph_signature(build(graph).graph)
    labels = ("image", "filter", "offset", "result")
    assert graph_signature(Conv(name="other").graph(labels=labels)) == graph_signature(conv.graph())


def test_a_plan_is_bound_by_the_names_of_the_graph_that_it_is_loaded_into(conv, store):
    expected = conv.run(store.get(conv.graph))
    plan = store.get(lambda: conv.graph(labels=("image", "filter", "offset", "result")))
    assert store.reason.startswith("loaded") and [t.name for t in plan.inputs] == ["image", "filter", "offset"]
    result = empty_output(plan)
    plan.run(dict(zip(("image", "filter", "offset"), conv.tensors.values(), strict=True)) | {"result": result})
    assert torch.equal(result, expected)


def test_numbers_of_numpy_are_the_same_numbers(conv):
    with_numpy = Conv(padding=np.int64(1), stride=np.int32(2))
    assert graph_signature(with_numpy.graph()) == graph_signature(conv.graph())
    assert canonical([np.float32(0.5), np.uint8(3)]) == canonical([0.5, 3])


def difference_of(first, second, **options):
    """A graph of X and Z, alike in all but their names, with `first` - `second`."""
    g = new_graph("difference")
    t = {name: describe(g, torch.empty(2, 3, 5, dtype=target.dtype), name) for name in ("X", "Z")}
    g.sub(t[first], t[second], **options).set_output(True)
    return g


CHANGES = {
    "X - Z": lambda: difference_of("X", "Z"),
    "Z - X": lambda: difference_of("Z", "X"),
    "compute dtype of one operation": lambda: difference_of("X", "Z", compute_data_type=cudnn.data_type.HALF),
    "padding": lambda: Conv(padding=0).graph(),
    "stride of the filter": lambda: Conv(stride=1).graph(),
    "operation": lambda: Conv(mode="sigmoid").graph(),
    "layout": lambda: Conv(torch.contiguous_format).graph(),
    "dtype of the output": lambda: Conv(out=torch.float32).graph(),
    "compute dtype": lambda: Conv(compute=torch.float16).graph(),
    "option": lambda: Conv().graph(is_dynamic_shape_enabled=True),
    "replay expected": lambda: Conv().graph(is_cuda_graph_replay_expected=True),
    "uids": lambda: Conv().graph(order=("W", "X", "bias")),
    "another graph": lambda: Matmul().graph(),
    "scalar": lambda: Matmul(half=0.25).graph(),
}


def test_everything_else_changes_the_signature(conv):
    def dims():
        case = Conv()
        case.tensors["X"] = case.tensors["X"][:2]
        return case.graph()

    signatures = {name: graph_signature(make()) for name, make in (CHANGES | {"dims": dims}).items()}
    signatures["none"] = graph_signature(conv.graph())
    assert len(set(signatures.values())) == len(signatures) == len(CHANGES) + 2


def test_another_graph_is_a_miss(conv, store):
    store.get(conv.graph)
    assert store.load(Conv(padding=0).graph()) == (None, "not stored yet")


def test_what_can_not_be_compared_is_never_guessed(conv, store, module, monkeypatch):
    with pytest.raises(TypeError, match="an attribute of type builtin_function_or_method can't be compared later"):
        canonical({"score_mod": len})

    def no_signature(graph):
        raise TypeError("an attribute of type function can't be compared later")

    monkeypatch.setattr(module("plan_store"), "graph_signature", no_signature)
    with one_warning("the graph has no signature: an attribute of type function"):
        plans = [store.get(conv.graph) for _ in range(2)]
    assert torch.equal(*map(conv.run, plans)) and not store.folder.exists()


# --- torn-plan --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_file(conv, tmp_path_factory):
    store = PlanStore(tmp_path_factory.mktemp("whole"))
    store.get(conv.graph)
    return only(store.folder)


DAMAGE = {
    "empty": (lambda d: b"", "the file is cut or is no plan (0 bytes)"),
    "10 bytes": (lambda d: d[:10], "the file is cut (0 of "),
    "the prefix": (lambda d: d[:48], "the file is cut (0 of "),
    "half": (lambda d: d[: len(d) // 2], "the file is cut ("),
    "one byte less": (lambda d: d[:-1], "the file is cut ("),
    "one byte more": (lambda d: d + b"\0", "the file is cut ("),
    "one byte flipped": (
        lambda d: d[:-40] + bytes([d[-40] ^ 0xFF]) + d[-39:],
        "the file is damaged (its sha256 differs)",
    ),
    "something else": (lambda d: b"{}" * 100, "the file is cut or is no plan (200 bytes)"),
    "null": (lambda d: sealed(b"null\n"), "the metadata is no JSON object"),
    "not JSON": (lambda d: sealed(b"\xff{\nxyz"), "the metadata is no JSON object"),
    "another format": (lambda d: sealed(b'{"format": 99}\n'), "the metadata has format 99, 1 is read here"),
    "no metadata": (lambda d: sealed(b'{"format": 1}\n'), "the metadata is not complete"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_with_a_warning_and_replaced(conv, store, asked, whole_file, damage):
    change, reason = DAMAGE[damage]
    store.folder.mkdir(mode=0o700)
    path = store.folder / whole_file.name
    path.write_bytes(change(whole_file.read_bytes()))
    with one_warning(reason):
        assert store.load(conv.graph())[1].startswith(reason)
        plan = store.get(conv.graph)
    assert not asked and store.reason.startswith(f"built: {reason}")
    assert plan.name == parts(whole_file)[0]["plan"]
    assert all(parts(path)[0][key] == parts(whole_file)[0][key] for key in ("graph", "plan", "decides"))
    with no_warning():
        assert store.get(conv.graph).name == plan.name
    assert len(asked) == 1


def test_metadata_with_a_wrong_length_or_environment_is_not_used(conv, store, asked, whole_file):
    store.folder.mkdir(mode=0o700)
    path = store.folder / whole_file.name
    for changes in ({"bytes": 3}, {"decides": None}):
        path.write_bytes(rewritten(whole_file, **changes))
        with one_warning("the metadata is not complete"):
            assert PlanStore(store.folder).load(conv.graph())[0] is None
    assert not asked


def test_no_flipped_bit_gets_through(conv, store, asked, whole_file):
    """One bit flipped in each part of the file and at 200 places of the whole; cuDNN itself accepts some of them."""
    data = whole_file.read_bytes()
    store.folder.mkdir(mode=0o700)
    path = store.folder / whole_file.name
    start = data.index(b"\n", 48)
    graph = conv.graph()
    places = {0, 9, 20, 60, start, start + 1, len(data) - 1, *range(0, len(data), len(data) // 200)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place in places:
            flipped = bytearray(data)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            assert store.load(graph)[0] is None, place
    assert not asked and len(places) > 200
    path.write_bytes(data)
    assert store.load(graph)[0].name == parts(path)[0]["plan"]


def test_a_file_under_another_graphs_name_is_not_used(conv, store, asked):
    other = Conv(padding=0)
    store.get(conv.graph)
    name = only(store.folder).name
    store.get(other.graph)
    wrong = next(path for path in stored(store.folder) if path.name != name)
    shutil.copy(wrong, store.folder / name)
    assert store.load(conv.graph())[1].startswith("graph signature ") and not asked


def test_what_cudnn_refuses_is_rebuilt(conv, store):
    for blob in (b"", b"{}", b"not UBJSON"):
        store.get(conv.graph)
        only(store.folder).write_bytes(rewritten(only(store.folder), blob))
        with no_warning():
            plan = store.get(conv.graph)
        assert store.reason.startswith("built: cuDNN refuses it: ") and "\n" not in store.reason
        assert len(store.reason) < 250 and not conv.run(plan).isnan().any()
        assert store.get(conv.graph) and store.reason.startswith("loaded")


# --- many processes ---------------------------------------------------------------------------------------------------


def hammer(store, plan, processes, saves, kill=None):
    """`processes` processes save `plan`, each with a blob of its own, `saves` times each under one key; one of them is
    killed when it has saved `kill` times. Returns what a reader saw meanwhile: {length of a whole file's blob}, and the
    texts of all damage; and how often it read."""
    fork, module = multiprocessing.get_context("fork"), __import__("importlib").import_module("helpers.plan_store")
    counts = [fork.Value("i", 0, lock=False) for _ in range(processes)]

    def work(number):
        module._serialized = lambda graph: bytes([number]) * (3000 + 5000 * number)
        for _ in range(saves):
            assert store.save(plan)
            counts[number].value += 1
        os._exit(0)

    children = [fork.Process(target=work, args=(i,)) for i in range(processes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork in a process with threads
        for child in children:
            child.start()
    lengths, damage, reads = set(), [], 0
    while any(child.is_alive() for child in children):
        if kill is not None and counts[0].value >= kill and children[0].is_alive():
            os.kill(children[0].pid, signal.SIGKILL)
            kill = None
        for path in store.folder.glob("*.plan"):
            try:
                _, blob = module._read(path)
                assert blob == bytes([blob[0]]) * len(blob)
                lengths.add(len(blob))
                reads += 1
            except (module.RefusedError, AssertionError) as error:
                damage.append(str(error))
    for child in children:
        child.join()
    assert [c.exitcode for c in children[1:]] == [0] * (processes - 1)
    assert [count.value for count in counts[1:]] == [saves] * (processes - 1)
    return children[0].exitcode, lengths, damage, reads


def test_eight_processes_save_one_plan_and_one_is_killed(conv, tmp_path):
    """torn-plan: 8 processes x 200 saves of one key; a reader sees whole files only, and afterwards all is well."""
    folder = tmp_path / "plans"
    store, plan = PlanStore(folder), build(conv.graph())
    exit_code, lengths, damage, reads = hammer(store, plan, processes=8, saves=200, kill=50)
    assert exit_code == -signal.SIGKILL
    assert damage == [] and reads > 100 and len(lengths) > 2
    assert len(stored(folder)) == 1 and len(list(folder.iterdir())) <= 2  # the killed process may have left one
    with no_warning():
        assert store.load(conv.graph())[1].startswith("cuDNN refuses it")  # a whole file, not a plan
        assert store.save(plan) == only(folder)
        assert store.load(conv.graph())[0].name == plan.name


def test_the_reader_does_see_files_that_are_not_whole(conv, tmp_path, monkeypatch, module):
    """Without the atomic replacement the test above fails."""

    def written_in_place(self, path, content):
        data = sealed(content)
        with open(path, "wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            time.sleep(0.002)
            file.write(data[len(data) // 2 :])

    monkeypatch.setattr(PlanStore, "_write", written_in_place)
    store = PlanStore(tmp_path)
    assert any("cut" in text for text in hammer(store, build(conv.graph()), processes=2, saves=30)[2])


# --- trouble with the folder ------------------------------------------------------------------------------------------


def raises(number):
    def call(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return call


def test_a_missing_folder_is_made_private(conv, tmp_path):
    store = PlanStore(tmp_path / "a" / "b" / "plans")
    umask = os.umask(0)
    try:
        with no_warning():
            assert store.load(conv.graph()) == (None, "not stored yet") and not store.folder.exists()
            store.get(conv.graph)
    finally:
        os.umask(umask)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(store.folder)  # and made again
    store.get(conv.graph)
    assert store.reason == "built: not stored yet" and only(store.folder)


def folder_is_a_file(folder, monkeypatch):
    folder.write_text("")


def folder_is_below_a_file(folder, monkeypatch):
    folder.symlink_to(folder.parent / "file" / "plans")
    (folder.parent / "file").write_text("")


def others_may_write(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o702)


def the_group_may_write(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o770)


def read_only(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "mkstemp", raises(errno.EROFS))


def read_only_by_permission(folder, monkeypatch):
    folder.mkdir(mode=0o500)


def of_someone_else(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    os.chown(folder, os.getuid() + 1, -1)


def full_at_fsync(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", raises(errno.ENOSPC))


def replaced_in_vain(folder, monkeypatch):
    monkeypatch.setattr(os, "replace", raises(errno.EIO))


TROUBLE = [
    (folder_is_a_file, "it is a file"),
    (folder_is_below_a_file, "Not a directory"),
    (others_may_write, "others may write to it, and loading a plan loads native code: chmod 700"),
    (the_group_may_write, "others may write to it"),
    (read_only, "Read-only file system"),
    pytest.param(read_only_by_permission, "Permission denied", marks=not_as_root),
    pytest.param(of_someone_else, "it belongs to another user, and loading a plan loads native code", marks=as_root),
    (full_at_fsync, "No space left on device"),
    (replaced_in_vain, "Input/output error"),
]


@pytest.mark.parametrize(("trouble", "words"), TROUBLE, ids=lambda value: getattr(value, "__name__", ""))
def test_trouble_with_the_folder_costs_one_warning(conv, tmp_path, monkeypatch, asked, trouble, words):
    """Two graphs are built and run twice each: uncached, with one warning, and no file is left behind."""
    folder = tmp_path / "plans"
    trouble(folder, monkeypatch)
    store = PlanStore(folder)
    with one_warning(f"plan store: {folder} can't be used: {words}"):
        for case in (conv, Conv(padding=0)) * 2:
            plan = store.get(case.graph)
            assert store.reason.startswith("built: ") and not case.run(plan).isnan().any()
    assert not asked and not (folder.is_dir() and list(folder.iterdir()))


def test_a_path_that_can_not_exist(conv):
    store = PlanStore("/proc/plans")
    with one_warning("/proc/plans can't be used"):
        plans = [store.get(conv.graph) for _ in range(2)]
    assert torch.equal(*map(conv.run, plans))


def test_a_relative_folder_stays_where_it_was(conv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = PlanStore("plans")
    store.get(conv.graph)
    monkeypatch.chdir("/")
    assert store.folder == tmp_path / "plans" and store.load(conv.graph())[1].startswith("loaded")


def test_without_a_home_folder(conv, tmp_path, monkeypatch):
    """As for a user of a container whom /etc/passwd doesn't know."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = PlanStore()
    assert store.folder == tmp_path / f"cudnn-notebooks-{os.getuid()}" / "plans"
    with no_warning():
        store.get(conv.graph)
        assert store.load(conv.graph())[0]
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_plans_in_an_unsafe_folder_are_not_loaded(conv, store, asked):
    """A folder that was private when the plan was saved, and is not any more."""
    store.get(conv.graph)
    store.folder.chmod(0o722)
    with one_warning("others may write to it"):
        assert store.load(conv.graph())[0] is None
    assert not asked
    store.folder.chmod(0o755)  # others may read it
    assert store.load(conv.graph())[0]


def of_another_user(path):
    os.chown(path, os.getuid() + 1, -1)


def writable_by_others(path):
    path.chmod(0o622)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            of_another_user, "it belongs to another user, and loading a plan loads native code", marks=as_root
        ),
        (writable_by_others, "others may write to it, and loading a plan loads native code: chmod 600"),
    ],
)
def test_a_file_that_someone_else_may_have_written_is_not_loaded(conv, store, asked, change, words):
    """In a private folder, into which it may have come before the folder was private. It is replaced at the save."""
    store.get(conv.graph)
    change(only(store.folder))
    with one_warning(f"the file can't be used ({words}"):
        plan = store.get(conv.graph)
    assert not asked and store.reason.startswith(f"built: the file can't be used ({words}")
    assert not conv.run(plan).isnan().any()
    info = only(store.folder).stat()
    assert info.st_uid == os.getuid() and info.st_mode & 0o777 == 0o600
    assert store.load(conv.graph())[0] and len(asked) == 1


def test_a_read_only_folder_still_serves_its_plans(conv, store, monkeypatch):
    store.get(conv.graph)
    monkeypatch.setattr(os, "utime", raises(errno.EROFS))
    monkeypatch.setattr(tempfile, "mkstemp", raises(errno.EROFS))
    with no_warning():
        assert store.get(conv.graph) and store.reason.startswith("loaded")


def test_a_file_that_can_not_be_read(conv, store, monkeypatch):
    store.get(conv.graph)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", raises(errno.EIO))
        with one_warning("the file can't be used (Input/output error)"):
            assert store.load(conv.graph())[0] is None
    path = only(store.folder)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: path.unlink() or read(p))  # removed by another process just now
    with no_warning():
        assert store.load(conv.graph()) == (None, "not stored yet")


def test_a_plan_that_cudnn_does_not_serialize_is_not_stored(conv, store, monkeypatch):
    def refuse(graph, **options):
        raise RuntimeError("no serialization\nfor this engine")

    monkeypatch.setattr(cudnn.pygraph, "serialize", refuse)
    with one_warning("cuDNN does not serialize it: no serialization for this engine"):
        assert not conv.run(store.get(conv.graph)).isnan().any()
    assert not store.folder.exists()


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sized(conv, store, module, monkeypatch):
    """sized(key): saves 10,000 bytes and some metadata under a key of its own, and returns the file's path."""
    plan = build(conv.graph())
    monkeypatch.setattr(module("plan_store"), "_serialized", lambda graph: b"x" * 10_000)
    age = [time.time() - 1000]

    def save(key):
        monkeypatch.setattr(module("plan_store"), "graph_signature", lambda graph: key.ljust(64, "0"))
        path = store.save(plan)
        age[0] += 1
        os.utime(path, (age[0], age[0]))
        return path

    return save


def test_the_least_recently_used_go_first(store, sized):
    a, b = sized("a"), sized("b")
    store.limit_bytes = 3 * (a.stat().st_size + 100)
    c = sized("c")
    assert set(stored(store.folder)) == {a, b, c}
    os.utime(a)
    d = sized("d")
    assert set(stored(store.folder)) == {a, c, d}
    store.limit_bytes = a.stat().st_size + 100  # room for one, which is the one just saved
    assert sized("e") == only(store.folder)


def test_a_plan_is_stored_where_others_can_not_be_removed(store, sized, monkeypatch):
    first = sized("a")
    store.limit_bytes = first.stat().st_size + 100
    monkeypatch.setattr(Path, "unlink", raises(errno.EACCES))
    with one_warning("can't be used: Permission denied"):
        second = sized("b")
    assert set(stored(store.folder)) == {first, second}


def test_loading_counts_as_use(conv, store):
    store.get(conv.graph)
    path = only(store.folder)
    os.utime(path, (1000, 1000))
    store.load(Conv(padding=0).graph())
    assert path.stat().st_mtime == 1000
    store.load(conv.graph())
    assert abs(path.stat().st_mtime - time.time()) < 60


def test_a_plan_larger_than_the_limit_is_not_stored(store, sized):
    kept = sized("a")
    store.limit_bytes = 10_000
    with one_warning("bytes exceed limit_bytes (10,000)"):
        assert store.save(build(Conv().graph())) is None
    assert only(store.folder) == kept


def test_what_killed_processes_left_is_removed(store, sized):
    sized("a")
    old, new = store.folder / "cudnnpln-old.tmp", store.folder / "cudnnpln-new.tmp"
    theirs = store.folder / "thesis.tmp"
    for path in (old, new, theirs):
        path.write_bytes(b"half a plan")
        os.utime(path, (time.time() - 4000,) * 2)
    os.utime(new)
    sized("b")
    assert not old.exists() and new.exists() and theirs.exists()


def test_files_and_folders_of_others_stay(store, sized):
    sized("a")
    for name in ("thesis.plan", "x.plan.old"):
        (store.folder / name).write_bytes(b"not ours")
    (store.folder / f"{'0' * 64}-{'0' * 16}.plan").mkdir()
    assert store.clear() == 1
    assert len(list(store.folder.iterdir())) == 3


def test_the_table_and_clear(conv, store):
    assert store.table.rows == [] and store.clear() == 0
    store.get(conv.graph)
    plan = store.get(Conv(name="no_padding", padding=0).graph)
    first = next(path for path in stored(store.folder) if path.name.startswith(graph_signature(conv.graph())))
    first.write_bytes(b"cut")
    os.utime(first, (1000, 1000))
    table = store.table
    assert [row[:3] for row in table.rows] == [
        ["no_padding", plan.name, "no"],
        [first.name[:8], "the file is cut or is no plan (3 bytes)", ""],
    ]
    assert table.rows[0][3:5] == [target.name, environment()["cuDNN"]] and table.rows[1][-1] == "3"
    assert table.caption.startswith("2 plans, ")
    (store.folder / "notes.txt").write_text("not ours")
    assert store.clear() == 2 and [p.name for p in store.folder.iterdir()] == ["notes.txt"]


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PlanStore().folder == tmp_path / "cudnn-notebooks" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PlanStore().folder == tmp_path / ".cache" / "cudnn-notebooks" / "plans"


# --- tuned plans ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tune(conv):
    """A function as `retune` takes it: it tunes, with times of which the third candidate's is the lowest. `tune.calls`
    counts."""
    times = [3.0, 2.0, 1.0, 4.0]

    def tune():
        tune.calls += 1
        tensors = {**conv.tensors, "Y": empty_output(build(conv.graph()))}
        return autotune(
            conv.graph,
            tensors,
            modes=[cudnn.heur_mode.A],
            per_mode=4,
            runtime_compilation=False,
            rounds=1,
            launch=lambda candidate, run: run(),
            measure=lambda candidate, call, calls: times[candidate.rank],
        )

    tune.calls = 0
    return tune


def test_a_winner_is_stored_beside_its_plan_and_loaded_from_then_on(conv, store, tune, asked):
    plain = store.get(conv.graph)
    tuned = store.retune(conv.graph, tune)
    assert store.reason == "built: no winner is stored: tune" and tuned.name != plain.name and tune.calls == 1
    header, blob = parts(only(store.folder))
    assert header["winner"]["name"] == header["plan"] == tuned.name and blob == tuned.graph.serialize(as_bytes=True)
    assert set(header["winner"]) == {"engine", "knobs", "name", "cudnn", "gpu"}
    assert tuned.name.startswith(f"eng{header['winner']['engine']}_") and header["winner"]["knobs"]
    assert not asked
    for again in (lambda: store.retune(conv.graph, tune), lambda: store.get(conv.graph)):
        plan = again()
        assert plan.name == tuned.name and store.reason.startswith("loaded")
        assert torch.equal(conv.run(plan), conv.run(tuned))
    assert tune.calls == 1 and len(asked) == 2
    winner, reason = store.winner(conv.graph())
    assert winner == header["winner"] and reason == f"{tuned.name} was tuned for this GPU, driver, cuDNN and frontend"
    assert [row[2] for row in store.table.rows] == ["yes"]


@pytest.mark.parametrize("key", ["GPU", "driver", "cuDNN", "frontend"])
def test_where_the_environment_changed_tuning_is_asked_for_again(conv, store, tune, elsewhere, key):
    """stale-plan: the winner is reported stale in one line; `get` builds what the heuristics say, and says so too."""
    now = environment()[key]
    elsewhere(**{key: "then"})
    tuned = store.retune(conv.graph, tune)
    elsewhere()
    stale = f"the winner {tuned.name} is stale ({key} then then, {now} now): tune again"
    assert store.winner(conv.graph()) == (None, stale)
    plain = store.get(conv.graph)
    assert store.reason == f"built: {key} then then, {now} now; that plan was tuned: retune"
    assert plain.name != tuned.name and tune.calls == 1
    assert store.winner(conv.graph()) == (None, stale)
    assert store.retune(conv.graph, tune).name == tuned.name and tune.calls == 2
    assert store.reason == f"built: {stale}"
    assert store.retune(conv.graph, tune).name == tuned.name and tune.calls == 2


def test_a_winner_outlives_its_blob(conv, store, tune):
    tuned = store.retune(conv.graph, tune)
    only(store.folder).write_bytes(rewritten(only(store.folder), b"{}"))
    assert store.retune(conv.graph, tune).name == tuned.name and tune.calls == 1
    assert store.reason.startswith("built: cuDNN refuses it")
    assert store.get(conv.graph).name == tuned.name and store.reason.startswith("loaded")


def test_a_winner_is_found_in_a_list_that_is_reordered(conv, store, tune, monkeypatch):
    """stale-plan: its place in the list is another candidate's now, and its plan has to be built again."""
    tuned, place = store.retune(conv.graph, tune), 2
    listed, create = [], cudnn.pygraph.create_execution_plans

    def reordered(graph, modes):
        result = create(graph, [cudnn.heur_mode.FALLBACK, cudnn.heur_mode.A])
        listed.append(graph.get_plan_name_at_index(place))
        return result

    monkeypatch.setattr(cudnn.pygraph, "create_execution_plans", reordered)
    build(conv.graph())
    assert listed.pop() != tuned.name
    only(store.folder).write_bytes(rewritten(only(store.folder), b"{}"))
    again = store.retune(conv.graph, tune)
    assert again.name == tuned.name and tune.calls == 1 and store.reason.startswith("built: cuDNN refuses it")
    assert torch.equal(conv.run(again), conv.run(tuned))


def test_tuning_goes_on_without_a_folder(conv, tmp_path, tune):
    store = PlanStore(tmp_path / "file")
    store.folder.write_text("")
    with one_warning("it is a file"):
        plans = [store.retune(conv.graph, tune) for _ in range(2)]
    assert tune.calls == 2 and plans[0].name == plans[1].name and "it is a file" in store.reason


def test_a_place_in_the_list_or_another_plans_winner_is_no_winner(conv, store, tune):
    tuning = tune()
    plan = build(conv.graph())
    for winner in ({"index": 3, "name": plan.name}, tuning.winner, {}, tuning.best):
        with pytest.raises(ValueError, match=f"engine, knobs and the plan's name, {plan.name}"):
            store.save(plan, winner)
    with pytest.raises(ValueError, match=r"save the plan of replay\(graph, winner\)"):
        store.save(tuning.best.plan)
    assert not store.folder.exists()


def test_a_tuning_without_a_winner_raises(conv, store, tune):
    tuning = tune()
    tuning.candidates.clear()
    with pytest.raises(ValueError, match="no winner"):
        store.retune(conv.graph, lambda: tuning)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Conv, Matmul])
def test_on_a_gpu_a_loaded_plan_gives_the_same_bits(store, asked, case):
    case = case()
    built, loaded = store.get(case.graph), store.get(case.graph)
    assert len(asked) == 1 and store.reason.startswith(f"loaded: {built.name}")
    results = [case.run(plan) for plan in (built, loaded, loaded)]
    assert not results[0].isnan().any() and all(torch.equal(r, results[0]) for r in results)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        bound = loaded.bind({**case.tensors, loaded.outputs[0]: (late := empty_output(loaded))})
        bound()
    stream.synchronize()
    assert torch.equal(late, results[0])


@pytest.mark.gpu
def test_on_a_gpu_the_driver_counts(store):
    assert environment()["driver"] not in (NO_DRIVER, "")


@pytest.mark.gpu
def test_on_a_gpu_plans_built_without_one_are_loaded_and_run(python, tmp_path):
    """Built by a process that sees no GPU, for the recorded device of this one's name."""
    from helpers.target import Target, recorded_devices

    key = next((key for key in recorded_devices() if Target.recorded(key).name == target.name), None)
    if key is None:
        pytest.skip(f"no device is recorded under the name {target.name}")
    result = python(IN_ANOTHER_PROCESS, tmp_path, CUDNN_TARGET=key)
    assert result.returncode == 0, result.stderr
    store, ahead = PlanStore(tmp_path), PlanStore(tmp_path, ahead_of_time=True)
    built = json.loads(result.stdout.splitlines()[-1])
    for case in (Conv(), Matmul()):
        assert store.load(case.graph())[1].startswith(f"driver {NO_DRIVER} then, ")
        plan, reason = ahead.load(case.graph())
        assert plan is not None, reason
        assert plan.name == built[case.name]["plan"]
        torch.testing.assert_close(case.run(plan), case.run(build(case.graph())))
