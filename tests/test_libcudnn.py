"""What is said where the installed packages can't be used (CASES: wrong-build), and the stand-in driver (no-gpu)."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import cudnn
import pytest

from helpers import SetupError

REPORT = "import helpers; print(helpers.target.report())"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler named cc, found none")


@pytest.fixture
def libcudnn(module):
    return module("libcudnn")


def shared_library(path, code):
    """Compiles C code into a shared library whose SONAME is its file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=code, text=True, check=True)
    return path


def module_file(path, code):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)


def packages_without(folder, name):
    """A folder that links to everything installed except `name`, for `python -S` with PYTHONPATH."""
    folder.mkdir()
    for place in filter(os.path.isdir, sys.path):
        if os.path.basename(place) in ("site-packages", "dist-packages"):
            for entry in Path(place).iterdir():
                if entry.name != name and entry.suffix != ".pth" and not (folder / entry.name).exists():
                    (folder / entry.name).symlink_to(entry)
    return folder


def said(result):
    """The SetupError's message: the last line of stderr, one sentence, with nothing chained to it."""
    assert result.returncode == 1, result.stdout + result.stderr
    last = result.stderr.rstrip().splitlines()[-1]
    kind, _, message = last.partition(": ")
    assert kind == "helpers.libcudnn.SetupError", result.stderr
    for trace in ("During handling of the above exception", "direct cause", "OSError"):
        assert trace not in result.stderr
    return sentence(message)


def sentence(message):
    assert "\n" not in message
    assert not re.search(r"[.!?] +[A-Z]", message), f"more than one sentence: {message}"
    assert re.search(r"pip install --upgrade '(torch|nvidia-cudnn-frontend)>=[\d.]+'", message)
    return message


# --- wrong-build: the packages of this process ------------------------------------------------------------------------


@needs_cc
def test_wrong_build_two_releases(python, tmp_path):
    """wrong-build: an old libcudnn in LD_LIBRARY_PATH besides the one that torch brings: both are named."""
    old = shared_library(tmp_path / "libcudnn.so.9", "unsigned long cudnnGetVersion(void) { return 90100; }")
    message = said(python("import helpers", LD_LIBRARY_PATH=tmp_path))
    assert f"9.1.0 from {old}" in message
    assert message.startswith("libcudnn files of two releases are loaded together")
    assert message.count(" from /") == 2
    assert "LD_LIBRARY_PATH" in message


def test_wrong_build_no_torch(python, tmp_path):
    """wrong-build: torch that finds no libcudnn raises ImportError; what it found missing is passed on."""
    missing = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    for number, error in enumerate(("ImportError", "OSError")):
        module_file(tmp_path / str(number) / "torch" / "__init__.py", f"raise {error}({missing!r})")
        result = python("import helpers", PYTHONPATH=tmp_path / str(number))
        message = said(result)
        assert missing in message
        assert message.startswith("PyTorch could not be imported")


def test_wrong_build_unrelated_module(python, tmp_path):
    """wrong-build: a file cudnn.py that is not NVIDIA's hides the frontend; its place is named."""
    module_file(tmp_path / "cudnn.py", "x = 1")
    message = said(python("import helpers", PYTHONPATH=tmp_path))
    assert str(tmp_path / "cudnn.py") in message
    assert "is not NVIDIA's cuDNN frontend" in message
    assert "nvidia-cudnn-frontend" in message


def test_wrong_build_no_frontend_and_an_unrelated_folder(python, tmp_path):
    """wrong-build: without the frontend, and with only a folder named cudnn in its place."""
    others = packages_without(tmp_path / "others", "cudnn")
    message = said(python("import helpers", flags=["-S"], PYTHONPATH=others))
    assert message.startswith("cudnn could not be imported (No module named 'cudnn')")
    assert "nvidia-cudnn-frontend" in message

    (tmp_path / "here" / "cudnn").mkdir(parents=True)
    message = said(python("import helpers", flags=["-S"], PYTHONPATH=f"{tmp_path / 'here'}:{others}"))
    assert str(tmp_path / "here" / "cudnn") in message
    assert "is not NVIDIA's cuDNN frontend" in message


def test_wrong_build_old_frontend(python, tmp_path):
    """wrong-build: a frontend older than needed: both versions are said."""
    module_file(tmp_path / "cudnn.py", "__version__ = '1.18.0'\nclass pygraph: pass\n")
    message = said(python("import helpers", PYTHONPATH=tmp_path))
    assert message.startswith("nvidia-cudnn-frontend 1.18.0 is installed, 1.32.0 or newer is needed")


def test_wrong_build_two_wheels(python, tmp_path):
    """wrong-build: two nvidia-cudnn wheels unpack into one folder; both are named, and what to uninstall."""
    for name, version in (("nvidia-cudnn-cu11", "9.1.0.70"), ("nvidia-cudnn-cu12", "9.10.2.21")):
        place = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        module_file(place, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    message = said(python("import helpers", PYTHONPATH=tmp_path))
    assert "nvidia-cudnn-cu11 9.1.0.70" in message
    assert "nvidia-cudnn-cu12" in message
    assert "both installed" in message
    assert "pip uninstall nvidia-cudnn-cu11 nvidia-cudnn-cu12" in message


# --- wrong-build: simulated in this process ---------------------------------------------------------------------------


def refused(libcudnn):
    with pytest.raises(SetupError) as caught:
        libcudnn.import_cudnn()
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return sentence(str(caught.value))


def test_wrong_build_accepts_this_installation(libcudnn):
    """wrong-build: what is installed here passes; without this the refusals below would prove nothing."""
    assert libcudnn.import_cudnn() is cudnn


def test_wrong_build_old_libcudnn(libcudnn, monkeypatch):
    """wrong-build: the only libcudnn is older than needed: found, needed, and the package."""
    monkeypatch.setattr(cudnn, "backend_version", lambda: 90100)
    monkeypatch.setattr(libcudnn, "_loaded_versions", lambda: {"/opt/old/libcudnn.so.9": 90100})
    message = refused(libcudnn)
    assert message.startswith("cuDNN 9.1.0 from /opt/old/libcudnn.so.9 was loaded, 9.19.0 or newer is needed")
    monkeypatch.setattr(libcudnn, "_loaded_versions", dict)  # where /proc/self/maps can't tell
    assert refused(libcudnn).startswith("cuDNN 9.1.0 was loaded, 9.19.0 or newer is needed")


def test_wrong_build_cudnn_8(libcudnn, monkeypatch):
    """wrong-build: cuDNN 8 counts its version differently."""
    monkeypatch.setattr(cudnn, "backend_version", lambda: 8907)
    monkeypatch.setattr(libcudnn, "_loaded_versions", lambda: {"/usr/lib/libcudnn.so.8": 8907})
    assert refused(libcudnn).startswith("cuDNN 8.9.7 from /usr/lib/libcudnn.so.8 was loaded, 9.19.0 or newer")


def test_wrong_build_missing_libcudnn(libcudnn, monkeypatch):
    """wrong-build: no libcudnn at all; the frontend then finds no symbol in it."""

    def backend_version():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    monkeypatch.setattr(cudnn, "backend_version", backend_version)
    assert refused(libcudnn).startswith("no libcudnn.so.9 was found; cuDNN 9.19.0 or newer is needed: pip install")


@pytest.mark.parametrize("version", [None, "2.14.0", "2.14.0+cpu"])
def test_wrong_build_cpu_build_of_torch(libcudnn, monkeypatch, module, version):
    """wrong-build: pip would keep a CPU build, which brings no cuDNN; the other way is what Colab's machines get."""
    installed = metadata.version

    def of(name):
        if name == "torch" and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == "torch" else installed(name)

    monkeypatch.setattr(libcudnn.metadata, "version", of)
    monkeypatch.setattr(cudnn, "backend_version", lambda: 90100)
    monkeypatch.setattr(libcudnn, "_loaded_versions", lambda: {"/usr/lib/libcudnn.so.9": 90100})
    message = refused(libcudnn)
    if version == "2.14.0+cpu":
        assert f"needed: pip uninstall torch, then {libcudnn.GET_TORCH}, or keep torch 2.14.0+cpu" in message
        assert message.endswith("pip install 'nvidia-cudnn-cu13>=9.19.0' 'nvidia-cuda-nvrtc>=13'")
    else:
        assert message.endswith(f"needed: {libcudnn.GET_TORCH}")
    assert module("colab").CPU_BUILD_LACKS is libcudnn.CPU_BUILD_LACKS


def test_wrong_build_module_without_a_file(libcudnn, monkeypatch):
    """wrong-build: a stranger that is in sys.modules already."""
    stranger = types.ModuleType("cudnn")
    stranger.__file__ = "/somewhere/cudnn.py"
    monkeypatch.setitem(sys.modules, "cudnn", stranger)
    assert "/somewhere/cudnn.py" in refused(libcudnn)


@needs_cc
def test_wrong_build_replaced_while_loaded(libcudnn, tmp_path, python):
    """wrong-build: pip replaced the libcudnn that this process still has loaded: restart, not a raw OSError."""
    library = shared_library(tmp_path / "libcudnn_graph.so.9", "unsigned long cudnnGetVersion(void) { return 92400; }")
    code = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1]); os.remove(sys.argv[1]); import helpers"
    message = said(python(code, library))
    assert message.startswith(f"{library} was removed or replaced after this process had loaded it; restart the kernel")


@pytest.mark.parametrize(
    ("number", "version"),
    [(92400, (9, 24, 0)), (91900, (9, 19, 0)), (90102, (9, 1, 2)), (100003, (10, 0, 3)), (8907, (8, 9, 7))],
)
def test_cudnn_version(libcudnn, number, version):
    assert libcudnn.cudnn_version(number) == version
    assert libcudnn.dotted(version) == ".".join(map(str, version))


def test_loaded_path_is_short(libcudnn):
    """The report names where libcudnn came from by its place on sys.path, without the user's folders before it."""
    path = libcudnn.loaded_libraries("libcudnn.so")[0]
    short = libcudnn.loaded_path()
    assert path.endswith(short)
    assert os.path.basename(short).startswith("libcudnn.so")
    entries = [entry for entry in sys.path if entry and path.startswith(entry.rstrip("/") + "/")]
    assert (len(short) < len(path)) == bool(entries)


# --- no-gpu: the stand-in driver --------------------------------------------------------------------------------------

# These load helpers/libcudnn.py by itself: it needs neither torch nor cudnn, so a process takes a few hundredths of a
# second.
ALONE = "import sys; sys.path.insert(0, 'helpers'); import libcudnn; "
COMPILE = ALONE + "import ctypes; path = libcudnn._compiled_null_driver(); ctypes.CDLL(str(path)); print(path)"

SYMBOLS = re.findall(
    r"\w+",
    """
cuLibraryLoadData cuLibraryLoadFromFile cuLibraryGetKernel cuLibraryUnload cuKernelSetAttribute cuKernelGetAttribute
cuKernelGetFunction cuFuncSetAttribute cuFuncGetAttribute cuModuleLoadData cuModuleGetFunction cuModuleUnload
cuOccupancyMaxPotentialClusterSize cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet
cuDeviceGetCount cuDriverGetVersion cuGetErrorName cuGetErrorString cuGetProcAddress cuGetProcAddress_v2 cuInit
cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy
cuStreamGetCtx cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
""",
)


def compiled(result):
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


@needs_cc
def test_no_gpu_driver_functions(python, tmp_path):
    """no-gpu: the stand-in has every function that cuDNN's engines look up; it stores kernels and has no device."""
    code = (
        COMPILE
        + """
import json
driver, handle, value = ctypes.CDLL(str(path)), ctypes.c_void_p(), ctypes.c_int(-1)
answers = {
    "missing": [name for name in sys.argv[1:] if not hasattr(driver, name)],
    "cuInit": driver.cuInit(0),
    "cuDeviceGetCount": driver.cuDeviceGetCount(ctypes.byref(value)),
    "cuLaunchKernel": driver.cuLaunchKernel(),
    "count": value.value,
    "cuLibraryLoadData": driver.cuLibraryLoadData(ctypes.byref(handle)),
    "handle": bool(handle),
    "cuKernelGetAttribute": driver.cuKernelGetAttribute(ctypes.byref(value), 0, None, 0),
    "attribute": value.value,
    "cuOccupancyMaxPotentialClusterSize": driver.cuOccupancyMaxPotentialClusterSize(ctypes.byref(value), None, None),
    "clusters": value.value,
}
print(json.dumps(answers))
"""
    )
    result = python(code, *SYMBOLS, XDG_CACHE_HOME=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "missing": [],
        "cuInit": 100,
        "cuDeviceGetCount": 100,
        "cuLaunchKernel": 100,
        "count": -1,
        "cuLibraryLoadData": 0,
        "handle": True,
        "cuKernelGetAttribute": 0,
        "attribute": 0,
        "cuOccupancyMaxPotentialClusterSize": 0,
        "clusters": 8,
    }


@needs_cc
def test_no_gpu_driver_is_compiled_once(python, tmp_path):
    """no-gpu: the second process takes the file of the first, even without a compiler."""
    first = compiled(python(COMPILE, XDG_CACHE_HOME=tmp_path))
    assert first.parent == tmp_path / "cudnn-notebooks"
    before = first.stat()
    second = compiled(python(COMPILE, XDG_CACHE_HOME=tmp_path, PATH=""))
    assert second == first
    assert (second.stat().st_mtime_ns, second.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert os.listdir(first.parent) == [first.name]


@needs_cc
def test_no_gpu_driver_processes_at_once(python, tmp_path):
    """no-gpu: processes that start together with an empty cache each load a whole file, and leave one."""
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: python(COMPILE, XDG_CACHE_HOME=tmp_path), range(4)))
    paths = {compiled(result) for result in results}
    assert len(paths) == 1
    assert os.listdir(tmp_path / "cudnn-notebooks") == [next(iter(paths)).name]


@needs_cc
def test_no_gpu_driver_without_a_cache_folder(python, tmp_path):
    """no-gpu: where no cache folder can be made (a read-only home), the stand-in is compiled for this process alone."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    code = COMPILE + "; print(path.is_file())"
    result = python(code, XDG_CACHE_HOME=tmp_path / "file" / "below", TMPDIR=tmp_path / "tmp")
    assert result.returncode == 0, result.stderr
    path, existed = result.stdout.splitlines()
    assert Path(path).is_relative_to(tmp_path / "tmp")
    assert existed == "True"
    assert os.listdir(tmp_path / "tmp") == []


# What becomes of the cache folder before the stand-in is compiled into it.
UNUSABLE = {
    "no home folder": """
def unknown():
    raise RuntimeError("Could not determine home directory.")
libcudnn.Path.home = unknown
""",
    "a home of someone else": """
def no_entry(path, **options):
    raise PermissionError(13, "Permission denied", str(path))
libcudnn.Path.is_file = libcudnn.Path.mkdir = no_entry
""",
    "a full disk": """
def full(command, **options):
    if "cudnn-notebooks" in command[-1]:
        raise libcudnn.subprocess.CalledProcessError(1, command, stderr=b"No space left on device")
    return run(command, **options)
run, libcudnn.subprocess.run = libcudnn.subprocess.run, full
""",
}


@needs_cc
@pytest.mark.parametrize("trouble", UNUSABLE)
def test_no_gpu_driver_where_the_cache_folder_can_not_be_used(python, tmp_path, trouble):
    """no-gpu: it is compiled for this process alone, and nothing is left, neither in the cache folder nor beside it."""
    (tmp_path / "tmp").mkdir()
    code = f"{ALONE}import os\n{UNUSABLE[trouble]}\n{COMPILE}; print(os.path.isfile(path))"
    cache = "" if trouble == "no home folder" else tmp_path / "cache"
    result = python(code, TMPDIR=tmp_path / "tmp", XDG_CACHE_HOME=cache)
    assert result.returncode == 0, result.stderr
    path, existed = result.stdout.splitlines()
    assert Path(path).is_relative_to(tmp_path / "tmp") and existed == "True"
    assert os.listdir(tmp_path / "tmp") == [] and not list(tmp_path.glob("cache/cudnn-notebooks/*"))


@needs_cc
def test_paths_that_are_no_text(python, tmp_path):
    """A folder's name is bytes to Linux: what is loaded from it is still found, in any locale."""
    folder = os.fsencode(tmp_path) + b"/\xff \xc3\xa4"
    os.mkdir(folder)
    library = folder + b"/libnull.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", library], check=True)
    code = ALONE + "import ctypes, os; ctypes.CDLL(sys.argv[1]); print(ascii(libcudnn.loaded_libraries('libnull')))"
    for locale in ({}, {"LC_ALL": "C", "PYTHONUTF8": 0, "PYTHONCOERCECLOCALE": 0}):
        result = python(code, os.fsdecode(library), **locale)
        assert result.returncode == 0, result.stderr
        assert "libnull.so" in result.stdout and "udcff" in result.stdout


def test_no_gpu_torch_sees_no_device(module, python):
    """no-gpu: with the driver that helpers loaded, torch still finds no GPU, and the report is printed."""
    code = "import helpers, torch; print(torch.cuda.is_available(), torch.cuda.device_count()); print("
    result = python(code + "helpers.target.report())")
    assert result.returncode == 0, result.stderr
    seen, report = result.stdout.splitlines()
    assert seen == "False 0"
    assert f"driver: {module('target').DRIVER}" in report
    assert module("target").DRIVER in ("system", "stand-in")


def test_no_gpu_driver_of_the_system_comes_first(libcudnn):
    """no-gpu: the stand-in is never loaded beside a real driver."""
    stand_in = libcudnn.loaded_libraries("null_driver")
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        pytest.fail("no libcuda.so.1 is loaded, neither a driver nor the stand-in")
    assert bool(stand_in) != bool(libcudnn.loaded_libraries("libcuda.so"))
    assert libcudnn.load_driver() == ("stand-in" if stand_in else "system")


WITHOUT_COMPILER = """
import torch
from helpers import GraphError, build, describe, new_graph, target

print(target.report())


def channels_last(*dims):
    return torch.empty(dims, dtype=target.dtype).to(memory_format=torch.channels_last)


graph = new_graph("conv")
x, w = describe(graph, channels_last(32, 128, 56, 56), "X"), describe(graph, channels_last(256, 128, 3, 3), "W")
b = describe(graph, torch.empty(256, dtype=target.dtype), "bias")
y = graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
graph.relu(graph.bias(y, b)).set_output(True)
print("conv", build(graph).name)

graph = new_graph("matmul")
a = describe(graph, torch.empty(1, 64, 96, dtype=target.dtype), "A")
b = describe(graph, torch.empty(1, 96, 32, dtype=target.dtype), "B")
graph.relu(graph.matmul(a, b)).set_output(True)
try:
    print("matmul", build(graph).name)
except GraphError as error:
    print(error)
"""


def test_no_gpu_without_a_compiler(module, python, tmp_path):
    """no-gpu: without cc the report says what to install; precompiled engines build, others say what they miss."""
    if module("target").DRIVER == "system":
        pytest.skip("a driver is installed, so no compiler is needed")
    result = python(WITHOUT_COMPILER, PATH="", XDG_CACHE_HOME=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    install = "no C compiler was found: install gcc (for example: apt-get install gcc)"
    assert f"run-time compilation is off: {install}" in lines[0]
    assert lines[1].startswith("conv eng")
    assert lines[2].startswith("graph 'matmul' failed at step 'create_execution_plans' for NVIDIA H200")
    (action,) = (line for line in lines if line.startswith("  next: "))
    assert install in action


@needs_cc
def test_no_gpu_driver_damaged_file_is_compiled_again(python, tmp_path):
    """no-gpu: a cut file in the cache is replaced, and run-time compilation goes on."""
    path = compiled(python(COMPILE, XDG_CACHE_HOME=tmp_path))
    path.write_bytes(path.read_bytes()[:100])
    result = python("from helpers import target, libcudnn; print(target.report())", XDG_CACHE_HOME=tmp_path)
    assert "driver: stand-in" in result.stdout, result.stdout + result.stderr
    assert path.stat().st_size > 1000


@needs_cc
def test_wrong_build_damaged_libcudnn(python, tmp_path):
    """wrong-build: a file that is no library, found first, is named with the way out; not the wrong package."""
    (tmp_path / "libcudnn.so.9").write_bytes(b"")
    message = said(python("import helpers", LD_LIBRARY_PATH=tmp_path))
    assert str(tmp_path / "libcudnn.so.9") in message
    assert "LD_LIBRARY_PATH" in message
    assert "nvidia-cudnn-frontend" not in message
