"""The README's troubleshooting: each error text in it is provoked, and most provokers then do what the README advises.

A text in the README without a provoker fails, and so does a provoker whose text the README lacks.
"""

import contextlib
import re
import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import cudnn
import notebook_rules as rules
import pytest
import test_colab
import torch

from helpers import PlanStore, bench, build, capture, colab, describe, new_graph, target
from helpers.target import Target

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text()

NOT_HERE = {  # texts that no test can provoke, and why
    "because ensurepip is not": "needs Debian's Python without its package python3-venv",
    "The NVIDIA driver on your system is too old": "needs a GPU with a driver older than PyTorch's CUDA",
}


# --- the section ------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A row of the section's tables: the error texts, why they come, and what to do."""

    texts: list
    why: str
    cure: str


def section(readme):
    found = re.search(r"^## Troubleshooting\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def entries(readme):
    rows = [line.strip("| ").split(" | ") for line in section(readme).splitlines() if line.startswith("|")]
    rows = [row for row in rows if row[0] not in ("what you see", "---")]
    return [Entry(re.findall(r"`(.+?)`", row[0]), *(cell.strip() for cell in (*row[1:], "", "")[:2])) for row in rows]


def faults(readme, provoked, not_here):
    """What does not fit between a README, the texts that are provoked, and those that can't be, as a list of words."""
    rows, found = entries(readme), []
    texts = [text for row in rows for text in row.texts]
    found += [f"{row}: no text, cause or cure" for row in rows if not (row.texts and row.why and row.cure)]
    found += [f"{text}: twice in the README" for text in sorted(set(texts)) if texts.count(text) > 1]
    for text in texts:
        if (text in provoked) + (text in not_here) != 1:
            found.append(f"{text}: has to be provoked, or else be in NOT_HERE")
    found += [f"{text}: not in the README" for text in (*provoked, *not_here) if text not in texts]
    return found


PROVOKERS = []  # pytest parameters: a function, and the README's texts that it provokes


def provokes(*texts, gpu=False):
    """Marks a function of fixtures that returns what is said, one string for each of `texts`."""

    def register(function):
        marks = [pytest.mark.gpu] if gpu else []
        PROVOKERS.append(pytest.param(function, texts, marks=marks, id=function.__name__))
        return function

    return register


def provoked():
    return [text for parameters in PROVOKERS for text in parameters.values[1]]


def said(call, *arguments, **options):
    """The message of the error that a call raises."""
    try:
        call(*arguments, **options)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        return str(error)
    pytest.fail("no error was raised")


# --- installing and starting ------------------------------------------------------------------------------------------


@provokes("no C compiler was found")
def no_compiler_without_a_driver(module, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        text = said(module("libcudnn")._compiled_null_driver)
    if shutil.which("cc"):
        assert module("libcudnn")._compiled_null_driver().is_file()
    return [text]


TRITON = """
import sys, sysconfig
from triton.runtime import build
paths = sysconfig.get_paths
sysconfig.get_paths = lambda *arguments, **options: {**paths(*arguments, **options), "include": "/nowhere"}
build._build("module", sys.argv[1], sys.argv[2], [], [], [], [])
"""


@provokes("Failed to find C compiler", "Python.h: No such file or directory")
def triton_compiles_its_launcher(python, tmp_path):
    """What torch.compile lets Triton do first, without a compiler, and with one but without Python's header files."""
    pytest.importorskip("triton", reason="this PyTorch has no Triton")
    if not shutil.which("gcc"):
        pytest.skip("needs gcc, found none")
    (tmp_path / "main.c").write_text("#include <Python.h>\n")
    arguments = (TRITON, tmp_path / "main.c", tmp_path)
    return [python(*arguments, PATH=tmp_path).stderr, python(*arguments, CC="gcc", LC_ALL="C").stderr]


@provokes(
    "no libcudnn.so.9 was found", "was loaded, 9.19.0 or newer is needed", "is installed, 1.32.0 or newer is needed"
)
def missing_and_old_libraries(module, monkeypatch):
    libcudnn = module("libcudnn")

    def no_symbol():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    texts = []
    for owner, name, value in (
        (cudnn, "backend_version", no_symbol),
        (cudnn, "backend_version", lambda: 90100),
        (cudnn, "__version__", "1.18.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(libcudnn, "_loaded_versions", dict)
            patch.setattr(owner, name, value)
            texts.append(said(libcudnn.import_cudnn))
    assert libcudnn.import_cudnn() is cudnn
    assert " ".join(map(repr, colab.CPU_BUILD_LACKS)) in section(README)
    return texts


@provokes("libcudnn files of two releases are loaded together", "overwrite each other's libcudnn files")
def two_releases(module, monkeypatch, tmp_path):
    libcudnn, texts = module("libcudnn"), []
    with monkeypatch.context() as patch:
        versions = {"/opt/cuda/libcudnn.so.9": 90100, "/venv/libcudnn.so.9": cudnn.backend_version()}
        patch.setattr(libcudnn, "_loaded_versions", lambda: versions)
        texts.append(said(libcudnn.import_cudnn))
    for name, version in (("nvidia_cudnn_cu11", "9.1.0.70"), ("nvidia_cudnn_cu12", "9.10.2.21")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        texts.append(said(libcudnn.import_cudnn))
    return texts


@provokes("is not NVIDIA's cuDNN frontend")
def another_module_named_cudnn(module, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cudnn", types.SimpleNamespace(__file__="/somewhere/cudnn.py"))
        text = said(module("libcudnn").import_cudnn)
    return [text]


@provokes("no helpers:")
def a_copied_notebook(monkeypatch, tmp_path):
    """The set-up cell outside of the repository; then with CUDNN_NOTEBOOKS."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDNN_NOTEBOOKS", raising=False)
    text = said(exec, test_colab.setup_cell(), {})
    monkeypatch.setenv("CUDNN_NOTEBOOKS", str(REPO))
    names = {}
    exec(test_colab.setup_cell(), names)
    assert names["target"] is target
    return [text]


@provokes("no such recorded device", "which needs a process that sees no GPU")
def wrong_targets(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDNN_TARGET", "a100")
    texts = [said(Target.recorded, "v100"), said(Target.detect)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Target.detect().name == "NVIDIA A100-SXM4-40GB"
    return texts


@provokes("No GPU; recorded target", "no GPU: nothing is timed")
def no_visible_gpu(module, monkeypatch):
    recorded = Target.recorded("h200")
    monkeypatch.setattr(module("bench"), "target", recorded)
    return [recorded.report(), said(bench.measure, lambda: None)]


# --- describing and running a graph -----------------------------------------------------------------------------------


class Layer:
    """relu(conv(X, W) + bias) of contiguous tensors: precompiled engines, which on most GPUs need a workspace."""

    def __init__(self):
        dims = {"X": (3, 24, 13, 19), "W": (40, 24, 3, 3), "bias": (40,)}
        self.tensors = {name: torch.randn(d).to(target.device, target.dtype) for name, d in dims.items()}
        self.plan = build(self.graph())
        y = self.plan.outputs[0]
        self.tensors["Y"] = torch.empty_strided(y.dim, y.stride, dtype=target.dtype, device=target.device)

    def graph(self, output=True):
        graph = new_graph("layer")
        X, W, B = (describe(graph, self.tensors[name], name) for name in ("X", "W", "bias"))
        conv = graph.conv_fprop(X, W, padding=[1, 1], stride=[2, 2], dilation=[1, 1])
        graph.relu(graph.bias(conv, B)).set_name("Y").set_output(output)
        return graph

    def run(self, **changed):
        self.plan.run(self.tensors | changed)


@pytest.fixture(scope="module")
def layer():
    return Layer()


@provokes("has stride 0", "elements share", "has no cuDNN data type")
def tensors_that_cudnn_cannot_read():
    expanded, shared = torch.zeros(1, 4, 1).expand(2, 4, 3), torch.zeros(8).as_strided((3, 3), (1, 1))
    wrong = (expanded, shared, torch.zeros(3, 4, dtype=torch.uint16))
    texts = [said(describe, new_graph("wrong"), tensor, "T") for tensor in wrong]
    for tensor in wrong:
        assert describe(new_graph("right"), tensor.contiguous().to(torch.int32), "T").dim == list(tensor.shape)
    return texts


@provokes("is neither used nor marked as an output", "is virtual, it has no memory")
def outputs_that_are_not_marked(layer):
    graph = layer.graph(output=False)
    texts = [said(build, graph)]
    virtual = layer.plan.graph.nodes[0].outputs["Y"]
    texts.append(said(layer.plan.run, {**layer.tensors, virtual: layer.tensors["Y"]}))
    graph.nodes[-1].outputs["OUT_0"].set_output(True)
    assert [t.name for t in build(graph).outputs] == ["Y"]
    return texts


@provokes(
    "no tensor was given for",
    "is no input or output of this graph",
    "expected dims",
    "expected strides",
    "expected torch.",
    "expected memory aligned to 16 bytes",
)
def tensors_that_differ_from_their_descriptions(layer):
    x, w = layer.tensors["X"], layer.tensors["W"]
    slice_ = torch.cat([w.flatten(), w.flatten()[:1]])[1:].view(w.shape)
    texts = [
        said(layer.plan.run, {"X": x}),
        said(layer.run, Z=x),
        said(layer.run, X=x[:2]),
        said(layer.run, X=x.to(memory_format=torch.channels_last)),
        said(layer.run, X=x.double()),
        said(layer.run, W=slice_),
    ]
    layer.run(X=x.double().to(x.dtype), W=slice_.clone())
    layer.run(X=x.to(memory_format=torch.channels_last).contiguous())
    return texts


@provokes("bytes are required, got")
def a_small_workspace(layer):
    need = layer.plan.workspace_bytes
    if not need:
        pytest.skip(f"{layer.plan.name}, the first choice on {target.name}, needs no workspace")
    memory = torch.empty(need, dtype=torch.uint8, device=target.device)
    text = said(layer.plan.run, layer.tensors, workspace=memory[:-1])
    layer.plan.run(layer.tensors, workspace=memory)
    return [text]


@provokes("this graph was built before")
def a_second_build(layer):
    text = said(build, layer.plan.graph)
    assert build(layer.graph()).name == layer.plan.name
    return [text]


# --- building a plan --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def no_engine():
    """What is said of a graph for which no GPU has an engine: the tangent of a matmul in double precision."""
    graph = new_graph("double", io=torch.float64)
    a, b = (torch.zeros(dims, dtype=torch.float64, device=target.device) for dims in ((1, 64, 96), (1, 96, 32)))
    graph.tan(graph.matmul(describe(graph, a, "A"), describe(graph, b, "B"))).set_output(True)
    return said(build, graph)


@provokes("No valid engine configs")
def no_engine_takes_it(no_engine):
    return [no_engine]


@provokes("ARCH_MISMATCH", "deviceVer < 800", "requires SM80 (Ampere) or newer")
def graphs_for_newer_gpus(module, monkeypatch, no_engine):
    """Engines for other GPUs, which every GPU has; a convolution in bf16 and attention on a T4."""
    if target.live:
        pytest.skip("graphs for a T4 are built where no GPU is visible")
    monkeypatch.setattr(module("graph"), "target", Target.recorded("t4"))

    def conv(dtype):
        graph = new_graph("conv", io=dtype)
        x, w = (
            torch.zeros(d, dtype=dtype).to(memory_format=torch.channels_last) for d in ((2, 8, 8, 8), (16, 8, 3, 3))
        )
        X, W = describe(graph, x, "X"), describe(graph, w, "W")
        graph.relu(graph.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])).set_output(True)
        return graph

    graph = new_graph("attention")
    q = torch.zeros(2, 3, 40, 64, dtype=torch.float16)
    Q, K, V = (describe(graph, q, name) for name in ("Q", "K", "V"))
    graph.sdpa(Q, K, V, generate_stats=False)[0].set_output(True).set_dim(q.shape).set_stride(q.stride())
    texts = [no_engine, said(build, conv(torch.bfloat16)), said(build, graph)]
    assert build(conv(torch.float16)).name
    return texts


@provokes("needs cuDNN 9.21, found")
def a_gate_for_a_release(monkeypatch):
    monkeypatch.setattr(cudnn, "backend_version", lambda: 91900)
    return [target.lacks("cudnn9.21")]


@provokes("Override shape support requires cudnn 9.21.0")
def overrides_with_an_old_cudnn():
    if cudnn.backend_version() >= 92100:
        pytest.skip(f"needs cuDNN before 9.21, found {cudnn.backend_version_string()}")
    options = {"is_dynamic_shape_enabled": True, "is_override_shape_enabled": True}
    graph = new_graph("overrides", kernel_cache=cudnn.create_kernel_cache(), **options)
    a, b = (torch.zeros(dims, dtype=target.dtype, device=target.device) for dims in ((1, 40, 56), (1, 56, 24)))
    graph.relu(graph.matmul(describe(graph, a, "A"), describe(graph, b, "B"))).set_output(True)
    return [said(build, graph)]


def test_a_graph_error_is_read_as_the_readme_says(no_engine):
    parts = re.findall(r"\*\*(\w+)\*\*", section(README))
    assert parts == ["step", "cause", "operations", "next"]
    places = [
        no_engine.index(word) for word in (" at step '", "  cause: ", "  operations:\n", "  next: ", "in full:\n")
    ]
    assert places == sorted(places) and "\n    engine " in no_engine


# --- saved plans and CUDA graphs --------------------------------------------------------------------------------------


@provokes("others may write to it, and loading a plan loads native code", "the file is damaged (its sha256 differs)")
def plans_that_are_not_trusted(layer, tmp_path):
    """A warning each, and a plan; then it is as the README says."""
    store, texts = PlanStore(tmp_path / "plans"), []
    store.get(layer.graph)

    @contextlib.contextmanager
    def warned():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        texts.append("\n".join(str(warning.message) for warning in caught))

    store.folder.chmod(0o770)
    with warned():
        assert store.get(layer.graph).name == layer.plan.name
    store.folder.chmod(0o700)
    assert store.load(layer.graph())[1].startswith("loaded")

    (path,) = store.folder.glob("*.plan")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with warned():
        assert store.get(layer.graph).name == layer.plan.name
    assert store.load(layer.graph())[1].startswith("loaded")
    return texts


@provokes("build and warm up first")
def a_build_while_capturing(layer, module, monkeypatch):
    """graph.py is made to believe in a GPU, on which a CUDA graph is captured."""
    graph = layer.graph()
    with monkeypatch.context() as patch:
        patch.setattr(module("graph"), "target", Target(True, target.name, target.sm, target.properties))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        text = said(build, graph)
    assert build(graph).name == layer.plan.name
    return [text]


@provokes("operation not permitted when stream is capturing", gpu=True)
def a_capture_that_waits():
    x = torch.ones(3, device=target.device)
    text = said(capture, lambda x: x * x.sum().item(), {"x": x})
    assert torch.equal(capture(lambda x: x * x.sum(), {"x": x}).outputs, 3 * x)
    return [text]


@provokes("Offset increment outside graph capture", gpu=True)
def random_numbers_after_a_failed_capture(module):
    """By hand, without what helpers.capture does after a failure; in the end, this is done here as well."""
    if torch.__version__.split(".")[:2] != ["2", "11"]:
        pytest.skip(f"seen with PyTorch 2.11, found {torch.__version__}")
    x, side, pool = torch.ones(3, device=target.device), torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def failing():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=side):
            x.sum().item()

    with torch.cuda.stream(side):  # a torch.cuda.graph that fails leaves its stream current
        said(failing)
    try:
        return [said(torch.randn, 3, device=target.device)]
    finally:
        with torch.cuda.stream(side):
            module("cuda_graph")._clean_up(side, pool)
        assert torch.randn(3, device=target.device).isfinite().all()


@provokes("The CUDA Graph is empty", gpu=True)
def a_capture_of_nothing():
    return [said(capture, lambda x: x, {"x": torch.ones(3, device=target.device)})]


# --- tests and memory -------------------------------------------------------------------------------------------------


@provokes(
    "the code has changed since its outputs were stored", "outputs have changed since tests/refresh.py stored them"
)
def an_edited_notebook():
    """A stamped notebook, in which first the code and then an output is changed."""
    notebook = rules.read(min((REPO / "notebooks").glob("*.ipynb")))
    cell = next(cell for cell in rules.code_cells(notebook) if cell.outputs)

    def stamped():
        hashes = {"code_sha256": rules.code_hash(notebook), "outputs_sha256": rules.outputs_hash(notebook)}
        notebook.metadata[rules.STAMP].update(hashes)
        assert rules.stamped(notebook) == []

    texts = []
    for change in ("source", "outputs"):
        stamped()
        cell[change] = cell[change] + ("\n" if change == "source" else cell.outputs)
        texts.append("\n".join(rules.stamped(notebook)))
    return texts


@provokes("CUDA out of memory", gpu=True)
def a_tensor_of_32_tebibytes():
    return [said(torch.empty, 1 << 45, dtype=torch.uint8, device=target.device)]


# --- the README against all of it -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("provoke", "texts"), PROVOKERS)
def test_it_says(provoke, texts, request):
    names = provoke.__code__.co_varnames[: provoke.__code__.co_argcount]
    messages = provoke(*map(request.getfixturevalue, names))
    assert len(messages) == len(texts)
    for text, message in zip(texts, messages, strict=True):
        assert text in message


def test_the_readme_has_what_is_provoked_and_nothing_else():
    assert faults(README, provoked(), NOT_HERE) == []
    assert len(entries(README)) >= 15


GOOD = """## Troubleshooting

| what you see | why | what to do |
| --- | --- | --- |
| `one`<br>`two` | a cause | a `cure` |
| `three` | a cause | a cure |

## Another section

| `four` | is not | of this section |
"""


def test_faults_of_a_good_section():
    assert entries(GOOD) == [Entry(["one", "two"], "a cause", "a `cure`"), Entry(["three"], "a cause", "a cure")]
    assert faults(GOOD, ["one", "three"], {"two": "needs a GPU"}) == []


@pytest.mark.parametrize(
    ("readme", "provoked", "not_here", "fault"),
    [
        (GOOD, ["one", "two"], {}, "three: has to be provoked, or else be in NOT_HERE"),
        (GOOD, ["one", "two", "three"], {"three": ""}, "three: has to be provoked, or else be in NOT_HERE"),
        (GOOD, ["one", "two", "three", "four"], {}, "four: not in the README"),
        (GOOD, ["one", "two", "three"], {"four": ""}, "four: not in the README"),
        (GOOD.replace("three", "two"), ["one", "two"], {}, "two: twice in the README"),
        (GOOD.replace("| a cure |", "|  |"), ["one", "two", "three"], {}, "no text, cause or cure"),
        (GOOD.replace("a cause |", "|"), ["one", "two", "three"], {}, "no text, cause or cure"),
        (GOOD.replace("`three`", "three"), ["one", "two"], {}, "no text, cause or cure"),
        (GOOD.replace("Troubleshooting", "Trouble"), ["one"], {}, "one: not in the README"),
    ],
)
def test_faults_are_found(readme, provoked, not_here, fault):
    assert any(fault in found for found in faults(readme, provoked, not_here))
