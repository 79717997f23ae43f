"""Finds the installed cuDNN, stops with one clear sentence if it can't be used, and stands in for a missing driver."""

import atexit
import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path


def dotted(version):
    """(9, 24, 0) -> '9.24.0'."""
    return ".".join(str(part) for part in version)


# Lower bounds that the series was run with: the frontend's graph is Python-native since 1.32, and building without a
# GPU was verified with cuDNN 9.19, 9.24 and 9.28.
MIN_FRONTEND = (1, 32, 0)
MIN_CUDNN = (9, 19, 0)

GET_TORCH = "pip install --upgrade 'torch>=2.11' (its CUDA build brings the matching nvidia-cudnn package)"
# PyTorch's CPU build (Colab's machines without a GPU have it) brings no cuDNN and no NVRTC. These have both.
CPU_BUILD_LACKS = (f"nvidia-cudnn-cu13>={dotted(MIN_CUDNN)}", "nvidia-cuda-nvrtc>=13")
GET_FRONTEND = "pip install --upgrade 'nvidia-cudnn-frontend>=1.32'"


class SetupError(ImportError):
    """The installed packages can't run the notebooks; the message says what was found, what is needed, what to do."""


def cudnn_version(number):
    """cudnnGetVersion()'s number as (major, minor, patch): 92400 -> (9, 24, 0); before cuDNN 9, 8907 -> (8, 9, 7)."""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1_000)
    return major, *divmod(rest, 100)


def version_of(name):
    """The version of an installed package, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def get_torch():
    """How to get the cuDNN that PyTorch brings, for the build of PyTorch that is installed."""
    version = version_of("torch")
    if not version or not version.endswith("+cpu"):
        return GET_TORCH
    lacks = " ".join(map(repr, CPU_BUILD_LACKS))
    # pip counts a CPU build as newer than the CUDA build of that release, and would keep it.
    return f"pip uninstall torch, then {GET_TORCH}, or keep torch {version}, a CPU build, and pip install {lacks}"


def import_cudnn():
    """Imports torch, then NVIDIA's cudnn frontend, and checks what they loaded.

    torch comes first: its CUDA build loads cuDNN and NVRTC from the pip packages, so that cudnn finds both without any
    environment variable.

    Returns the module cudnn. Raises SetupError where a package is missing, too old or not NVIDIA's, or where libcudnn
    files of two releases are loaded together.
    """
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        _check_library_file(error)
        raise SetupError(
            f"PyTorch could not be imported ({_first_line(error)}); these notebooks need it: {get_torch()}"
        ) from None
    try:
        import cudnn
    except (ImportError, OSError) as error:
        _check_library_file(error)
        raise SetupError(
            f"cudnn could not be imported ({_first_line(error)}); these notebooks need it: {GET_FRONTEND}"
        ) from None
    if not hasattr(cudnn, "pygraph"):
        place = getattr(cudnn, "__file__", None) or f"the folder {next(iter(cudnn.__path__))} without __init__.py"
        raise SetupError(
            f"the module cudnn that Python found ({place}) is not NVIDIA's cuDNN frontend; "
            f"rename or remove it, then {GET_FRONTEND}"
        )
    found = tuple(int(part) for part in cudnn.__version__.split(".")[:3] if part.isdigit())
    if found < MIN_FRONTEND:
        raise SetupError(
            f"nvidia-cudnn-frontend {cudnn.__version__} is installed, {dotted(MIN_FRONTEND)} or newer is needed: "
            f"{GET_FRONTEND}"
        )
    _check_backend(cudnn)
    return cudnn


def _check_library_file(error):
    """Raises SetupError with the remedy where an import failed at a libcudnn file that is there but can't be loaded."""
    path = _first_line(error).partition(":")[0]
    if "libcudnn" in path and os.path.isfile(path):
        raise SetupError(
            f"a libcudnn file can't be loaded ({_first_line(error)}), cuDNN {dotted(MIN_CUDNN)} or newer is needed: "
            f"take its folder out of LD_LIBRARY_PATH or LD_PRELOAD, or {get_torch()}"
        ) from None


def _check_backend(cudnn):
    try:
        version = cudnn_version(cudnn.backend_version())
    except RuntimeError:  # the frontend found no libcudnn and so no symbol in it
        raise SetupError(
            f"no libcudnn.so.9 was found; cuDNN {dotted(MIN_CUDNN)} or newer is needed: {get_torch()}"
        ) from None
    replaced = [path for path in loaded_libraries("libcudnn") if path.endswith(" (deleted)")]
    if replaced:
        raise SetupError(
            f"{replaced[0].removesuffix(' (deleted)')} was removed or replaced after this process had loaded it; "
            f"restart the kernel, and if this persists, {get_torch()}"
        )
    places = {path: cudnn_version(number) for path, number in _loaded_versions().items()}
    listing = ", ".join(f"{dotted(v)} from {path}" for path, v in sorted(places.items()))
    if len(set(places.values())) > 1:
        raise SetupError(
            f"libcudnn files of two releases are loaded together ({listing}), which crashes or computes wrongly; take "
            "the other folder out of LD_LIBRARY_PATH and uninstall all nvidia-cudnn packages but one, then "
            f"{get_torch()}"
        )
    if version < MIN_CUDNN:
        raise SetupError(
            f"cuDNN {listing or dotted(version)} was loaded, {dotted(MIN_CUDNN)} or newer is needed: {get_torch()}"
        )
    _check_wheels()


def _check_wheels():
    """Two nvidia-cudnn wheels unpack into the same folder, and the later one overwrites only a part of the other."""
    wheels = {d.metadata["Name"]: d.version for d in metadata.distributions() if _is_cudnn_wheel(d.metadata["Name"])}
    if len(set(wheels.values())) > 1:
        listing = " and ".join(f"{name} {version}" for name, version in sorted(wheels.items()))
        raise SetupError(
            f"{listing} are both installed and overwrite each other's libcudnn files: "
            f"pip uninstall {' '.join(wheels)}, then {get_torch()}"
        )


def _is_cudnn_wheel(name):
    return name is not None and name.startswith("nvidia-cudnn-cu")


def _first_line(error):
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def loaded_libraries(stem):
    """Paths of the shared libraries loaded into this process whose file name starts with `stem`, sorted."""
    # A path is bytes to Linux; it may be no text in this locale's encoding.
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n") if os.path.exists("/proc/self/maps") else []
    paths = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if os.path.basename(path).startswith(stem))


def _loaded_versions():
    """{path: cudnnGetVersion()} of every loaded libcudnn file that has this function (libcudnn and libcudnn_graph)."""
    versions = {}
    for path in loaded_libraries("libcudnn"):
        function = getattr(ctypes.CDLL(path), "cudnnGetVersion", None)
        if function is not None:
            function.restype = ctypes.c_size_t
            versions[path] = function()
    return versions


def loaded_path():
    """Where the libcudnn in use was loaded from, shortened to start at its place on sys.path."""
    paths = loaded_libraries("libcudnn.so") or ["not found"]
    for entry in sorted((e for e in sys.path if e), key=len, reverse=True):
        if paths[0].startswith(entry.rstrip("/") + "/"):
            return os.path.basename(entry) + paths[0][len(entry.rstrip("/")) :]
    return paths[0]


# --- the stand-in driver ----------------------------------------------------------------------------------------------


def load_driver():
    """Loads libcuda.so.1: the system's where a driver is installed, else the stand-in compiled from null_driver.c.

    cuDNN's runtime-compiled engines link against libcuda.so.1, even when they only compile for another machine's GPU.

    Returns "system", "stand-in", or the reason why neither could be loaded; engines that need no run-time compilation
    work even then.
    """
    if loaded_libraries("null_driver"):
        return "stand-in"
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return "system"
    except OSError:
        pass
    try:
        # RTLD_GLOBAL and the SONAME libcuda.so.1 make the loader hand out this file when an engine asks for the driver.
        path = _compiled_null_driver()
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:  # a damaged file in the cache: compile it again, once
            path.unlink(missing_ok=True)
            ctypes.CDLL(str(_compiled_null_driver()), mode=ctypes.RTLD_GLOBAL)
        return "stand-in"
    except subprocess.CalledProcessError as error:
        return f"the C compiler failed on null_driver.c: {_first_line(error.stderr.decode(errors='replace'))}"
    except OSError as error:
        return _first_line(error)


def cache_folder():
    """The folder cudnn-notebooks under $XDG_CACHE_HOME or ~/.cache. Raises OSError where there is no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cudnn-notebooks"
    except RuntimeError:  # neither HOME nor an entry in /etc/passwd, as for some users of containers
        raise OSError("there is no home folder: set HOME or XDG_CACHE_HOME") from None


def _compiled_null_driver():
    """The path of the compiled stand-in: in the cache folder or, where that can't be used, for this process alone."""
    source, cache = Path(__file__).with_name("null_driver.c"), None
    name = "null_driver-" + hashlib.sha256(source.read_bytes()).hexdigest()[:16] + ".so"
    with contextlib.suppress(OSError):  # no home folder, or one that can't be entered
        cache = cache_folder()
        if (cache / name).is_file():
            return cache / name
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("no C compiler was found: install gcc (for example: apt-get install gcc)")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", source, "-o"]
    if cache is not None:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # a read-only home, a full disk
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                subprocess.run([*command, f"{folder}/{name}"], check=True, capture_output=True)
                os.replace(f"{folder}/{name}", cache / name)  # atomic: processes that start together see a whole file
            return cache / name
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run([*command, f"{folder}/{name}"], check=True, capture_output=True)
    return Path(folder, name)
