"""Which GPU graphs are built for: the one in this machine or, where there is none, a recorded one."""

import contextlib
import functools
import json
import os
import re
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path

from . import colab
from .libcudnn import SetupError, import_cudnn, load_driver, loaded_path

colab.prepare()
DRIVER = load_driver()
cudnn = import_cudnn()

import torch  # noqa: E402  import_cudnn comes first: it says clearly what is wrong where an import fails

DEVICES = Path(__file__).with_name("devices")
DEFAULT_DEVICE = "h200"


@dataclass(frozen=True)
class Target:
    """The GPU that graphs are built for.

    live         True: a GPU of this machine, plans execute on it. False: a recorded device; plans are compiled for it
                 and their results are evaluated on the CPU by `reference`.
    name         as CUDA names the device, e.g. "NVIDIA H200".
    sm           compute capability as one number, e.g. 90 for 9.0.
    properties   the device properties as cuDNN serializes them (bytes, kHz, counts).
    """

    live: bool
    name: str
    sm: int
    properties: dict = field(repr=False)

    @classmethod
    def recorded(cls, key):
        """A recorded device, by the name of its file in helpers/devices (in any case) or by the path of such a file.

        The file is a JSON object whose "properties" are what cuDNN serializes for a device:
        cudnn.create_device_properties(0).serialize(). Raises SetupError for an unknown name and for another file.
        """
        key = str(key)
        path = Path(key) if key.lower().endswith(".json") else DEVICES / f"{key.lower()}.json"
        if not path.is_file():
            known = f"there are {', '.join(recorded_devices())}, or give the path of a .json file like theirs"
            raise SetupError(f"CUDNN_TARGET={key}: no such recorded device; {known}")
        try:
            properties = json.loads(path.read_text())["properties"]
            return cls(False, properties["deviceName"], properties["deviceVer"] // 10, properties)
        except (ValueError, TypeError, KeyError) as error:
            raise SetupError(
                f'CUDNN_TARGET={key}: not a JSON object with the "properties" of a device ({error!r})'
            ) from None

    @classmethod
    def detect(cls):
        """This machine's current GPU, else the recorded device that CUDNN_TARGET names, else the recorded H200."""
        key = os.environ.get("CUDNN_TARGET", "").strip()
        if not torch.cuda.is_available():
            return cls.recorded(key or DEFAULT_DEVICE)
        if key:
            # With a visible GPU of another architecture, cuDNN's cuBLASLt engines would answer for that GPU.
            raise SetupError(
                f"CUDNN_TARGET={key} builds for a recorded device, which needs a process that sees no GPU: "
                "set CUDA_VISIBLE_DEVICES='' as well, or unset CUDNN_TARGET"
            )
        ordinal = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(ordinal)
        serialized = cudnn.create_device_properties(ordinal).serialize()
        properties = json.loads(bytes(serialized) if not isinstance(serialized, str) else serialized)
        return cls(True, torch.cuda.get_device_name(ordinal), 10 * major + minor, properties)

    @property
    def device(self):
        """torch.device for the notebooks' tensors: the current GPU, or the CPU for a recorded target."""
        return torch.device("cuda", torch.cuda.current_device()) if self.live else torch.device("cpu")

    @property
    def dtype(self):
        """The working dtype: bfloat16 from SM80 on, else float16.

        It goes by compute capability: torch.cuda.is_bf16_supported() is also True where bf16 is only emulated.
        """
        return torch.bfloat16 if self.sm >= 80 else torch.float16

    def lacks(self, *needs):
        """What of `needs` this target lacks, as "needs SM80, found SM75 (Tesla T4)"; "" if it lacks nothing.

        needs: "gpu" (a live one), "smNN" (compute capability NN or newer), "cudnnX.Y" (that release of cuDNN or a later
        one). Raises ValueError for another word.
        """
        lacking = []
        for need in needs:
            sm, release = re.fullmatch(r"sm(\d{2,3})", need), re.fullmatch(r"cudnn(\d+)\.(\d+)", need)
            if sm is None and release is None and need != "gpu":
                raise ValueError(
                    f"unknown requirement {need!r}: use 'gpu' or 'sm' and a number, such as 'sm80', or 'cudnn9.21'"
                )
            if need == "gpu" and not self.live:
                lacking.append(f"needs a GPU, found none (graphs are built for the recorded {self.name})")
            elif sm and self.sm < int(sm[1]):
                lacking.append(f"needs SM{sm[1]}, found SM{self.sm} ({self.name})")
            elif release and cudnn.backend_version() < 10000 * int(release[1]) + 100 * int(release[2]):
                lacking.append(f"needs cuDNN {release[1]}.{release[2]}, found {cudnn.backend_version_string()}")
        return "; ".join(lacking)

    def handle(self, ordinal=None):
        """The cuDNN handle of this thread for the current device, or for device `ordinal`; None if recorded.

        It is set to PyTorch's current stream on that device. A handle belongs to one device and may not be used by two
        threads at once, hence one for each pair.
        """
        if not self.live:
            return None
        if ordinal is None:
            ordinal = torch.cuda.current_device()
        try:
            handle = _thread.handles[ordinal]
        except (AttributeError, KeyError):
            with torch.cuda.device(ordinal):
                handle = _thread.__dict__.setdefault("handles", {})[ordinal] = cudnn.create_handle()
        stream = _raw_stream(ordinal)
        if handle.stream != stream:
            cudnn.set_stream(handle, stream)
        return handle

    def graph_arguments(self):
        """Keyword arguments with which cudnn.pygraph builds for this target: a handle, or recorded properties."""
        if self.live:
            return {"handle": self.handle()}
        return {"device_property": _device_properties(json.dumps(self.properties)), "sm_version": self.sm}

    def report(self):
        """One line: what this machine can show, and the versions and the libcudnn in use."""
        versions = (
            f"torch {torch.__version__} · cuDNN {cudnn.backend_version_string()} ({loaded_path()})"
            f" · cudnn-frontend {cudnn.__version__}"
        )
        if self.live:
            return f"GPU: {self.name} (SM{self.sm}) · driver {driver_version()} · {versions}"
        limits = "plans are compiled by cuDNN, results come from the CPU reference, nothing is timed"
        if DRIVER not in ("system", "stand-in"):
            limits += f"; run-time compilation is off: {DRIVER}"
        return f"No GPU; recorded target: {self.name} (SM{self.sm}): {limits} · driver: {DRIVER} · {versions}"


_thread = threading.local()
# What torch.cuda.current_stream(ordinal).cuda_stream returns, without making a Stream object: `handle` is called before
# every launch. A build of torch without CUDA lacks it.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@functools.cache
def _device_properties(text):
    return cudnn.create_device_properties(text)


def recorded_devices():
    """Names of the recorded devices, sorted: the JSON files of helpers/devices."""
    return sorted(path.stem for path in DEVICES.glob("*.json"))


@functools.cache
def driver_version():
    """The NVIDIA driver's version as nvidia-smi prints it, else the CUDA version that the driver supports."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()  # at once; nvidia-smi can take a second
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        cuda = torch._C._cuda_getDriverVersion()
        return f"for CUDA {cuda // 1000}.{cuda % 1000 // 10}"


target = Target.detect()
