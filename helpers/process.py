"""A function in a fresh Python process: what a cold start costs, and what a process without a GPU can do."""

import ast
import contextlib
import inspect
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from .target import target

LAST_LINES = 12  # of a failed child's stderr
JSON_HOLDS = "JSON holds numbers, texts, lists and dicts: .tolist() of a tensor or an array, str() of a path"
# time.monotonic() counts from the machine's start in every process of it, so two processes' readings can be compared.
CHILD = """
import time
_times = [time.monotonic()]
import json, sys
sys.path.insert(0, {root!r})
from helpers import {names}  # before cudnn, which could find an older libcudnn of the system
import cudnn
import torch
_times.append(time.monotonic())

{sources}

with open({arguments!r}) as _file:
    _arguments = json.load(_file)
_called = time.monotonic()
_value = {function}(*_arguments)
_times += [_called, time.monotonic()]
with open({result!r}, "w") as _file:
    json.dump([_value, _times], _file)
"""


class Finished(NamedTuple):
    """What a function returned in a process of its own, and how long each part took in ms.

    value      what it returned.
    start_ms   Python itself, up to the child's first statement.
    import_ms  helpers, torch and cuDNN, including the first look at the GPU.
    call_ms    the function.
    wall_ms    all of it as the caller meets it, with the end of the process.
    """

    value: object
    start_ms: float
    import_ms: float
    call_ms: float
    wall_ms: float


def in_new_process(function, *arguments, uses=(), gpu=True, device=None, environment=None, timeout=300):
    """Runs function(*arguments) in a fresh Python process and returns a Finished.

    function  written with `def`, in a notebook's cell or in a file. Its source goes to the child, nothing else of the
              notebook does: it finds time, torch, cudnn, the names that helpers exports, and `uses`.
    arguments, value  what JSON can hold: numbers, texts, lists, dicts. Tuples arrive as lists, keys as texts.
    uses      further functions or classes that it needs, defined in this order.
    gpu       False: the child sees no GPU, and its recorded target is this GPU by all of its properties.
    device    a recorded device's name, such as "a100": the child sees no GPU and builds for that one.
    environment  {name: text or path} of variables that the child has besides this process's own, or instead of them,
              such as {"CUDA_CACHE_DISABLE": "1"}.
    timeout   seconds; None: no limit.

    Without a GPU in this process the child has this process's recorded target, whatever `gpu` says. What the child
    prints is printed here; its stderr is shown only where it fails. Settings made in this process (seeds, precision)
    are not the child's.

    Raises RuntimeError with the child's last lines where it fails, is killed or takes too long; before it is started,
    TypeError for a function without source (a lambda) and for arguments that JSON can't hold.
    """
    sources = [_source(f) for f in (*uses, function)]
    try:
        given_json = json.dumps(arguments)
    except TypeError as error:
        raise TypeError(f"arguments of {function.__name__}: {error}; {JSON_HOLDS}") from None
    with tempfile.TemporaryDirectory() as folder:
        script, given, result, seen = (str(Path(folder) / n) for n in ("child.py", "in.json", "out.json", "seen.json"))
        Path(given).write_text(given_json)
        variables = {key: value for key, value in os.environ.items() if key != "CUDNN_TARGET"}
        variables |= {"PYTHONIOENCODING": "utf-8"} | {key: str(value) for key, value in (environment or {}).items()}
        if device or not (gpu and target.live):
            Path(seen).write_text(json.dumps({"properties": target.properties}))
            variables |= {"CUDA_VISIBLE_DEVICES": "", "CUDNN_TARGET": device or seen}
        package = sys.modules[__package__]
        code = CHILD.format(
            root=str(Path(__file__).parent.parent),
            names=", ".join(package.__all__),
            sources="\n\n".join(sources),
            arguments=given,
            function=function.__name__,
            result=result,
        )
        Path(script).write_text(code, encoding="utf-8")  # Python's own for sources, whatever the locale says
        started = time.monotonic()
        code, said, complaint = _run([sys.executable, script], variables, folder, timeout)
        ended = time.monotonic()
        print(said, end="")
        if code != 0 or not Path(result).exists():
            raise RuntimeError(_failure(function.__name__, code, complaint, timeout).replace(folder + os.sep, ""))
        value, (first, imported, called, returned) = json.loads(Path(result).read_text())
    spans = (first - started, imported - first, returned - called, ended - started)
    return Finished(value, *(1e3 * seconds for seconds in spans))


def _source(function):
    """The source of a function or class, moved to the left margin."""
    try:
        if function.__name__ == "<lambda>":
            raise TypeError
        if inspect.isclass(function):
            return _class_source(function)
        return textwrap.dedent(inspect.getsource(function))
    except (AttributeError, OSError, StopIteration, TypeError):
        raise TypeError(
            f"in_new_process takes functions written with def, whose source it reads; got {function!r}"
        ) from None


def _class_source(cls):
    """inspect looks for a class in its module's file, and a notebook has none; its methods know their cell."""
    method = next((m for m in vars(cls).values() if inspect.isfunction(m)), None)
    if method is None:
        return textwrap.dedent(inspect.getsource(cls))
    lines = linecache.getlines(method.__code__.co_filename)
    tree = ast.walk(ast.parse("".join(lines)))
    found = next(node for node in tree if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : found.end_lineno]))


def _run(command, environment, folder, timeout):
    """(exit code, stdout, stderr) of a command; the code is None after `timeout` seconds.

    What it says goes to files, since a pipe stays open as long as any process that the child has left behind. Those are
    ended with it.
    """
    paths = [Path(folder) / name for name in ("stdout", "stderr")]
    with open(paths[0], "wb") as out, open(paths[1], "wb") as err:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return code, *(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def _failure(name, code, complaint, timeout):
    """Why a child failed, with the end of what it said."""
    lines = complaint.strip().splitlines()
    if code is None:
        how = f"did not finish within {timeout} s"
    elif code == 0:
        how = "ended the process without returning a value"
    else:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    hint = ""
    if lines and lines[-1].startswith("NameError"):
        hint = "\n(it finds only what is imported for it: name further functions in `uses`, pass values as arguments)"
    elif re.search("^TypeError: .*(is not JSON serializable|keys must be str)", complaint, re.MULTILINE):
        hint = f"\n(what it returns: {JSON_HOLDS})"
    return "\n".join([f"{name} {how} in a new process:", *lines[-LAST_LINES:]]) + hint
