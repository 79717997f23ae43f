"""A function in a fresh process: what it is given, what it returns, what it sees, and how it fails."""

import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import helpers
from helpers import in_new_process, target


def double(x):
    return 2 * x


class Kept:
    value = 5


def marked(cls):
    cls.mark = "marked"
    return cls


@marked
class Pair:
    def both(self, first):
        return [first, self.mark]


def everything(number, items, options=None):
    """What arrives, and what the child finds without importing anything."""
    import os

    named = [build, describe, PlanStore, bench, target, plots]  # noqa: F821
    time.sleep(0.05)
    print("a line of the child")
    print("a warning of the child", file=sys.stderr)
    return {
        "doubled": [double(number), double(items), Kept.value, options],
        "found": len(named) + len(cudnn.backend_version_string() + torch.__version__),  # noqa: F821
        "process": os.getpid(),
        "live": target.live,
        "properties": target.properties,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def device():
    return [target.live, target.name, torch.cuda.is_available()]


def test_arguments_values_names_and_times(capfd):
    """Without a GPU: what arrives and returns, and this GPU's own properties as the recorded target."""
    import os

    done = in_new_process(everything, 1.5, [3, "x"], {"a": None}, uses=(double, Kept), gpu=False)
    assert done.value["doubled"] == [3.0, [3, "x", 3, "x"], 5, {"a": None}] and done.value["found"] > 10
    assert done.value["process"] != os.getpid()
    assert done.value["live"] is False and done.value["visible"] == ""
    assert done.value["properties"] == target.properties
    assert capfd.readouterr() == ("a line of the child\n", "")
    assert min(done.start_ms, done.import_ms) > 1 and 50 < done.call_ms < done.import_ms
    assert done.start_ms + done.import_ms + done.call_ms < done.wall_ms < 60_000


def test_a_recorded_device_by_name():
    assert in_new_process(device, device="a100").value == [False, "NVIDIA A100-SXM4-40GB", False]


@pytest.mark.gpu
def test_on_a_gpu_the_child_has_it_unless_told_otherwise():
    assert in_new_process(device).value == [True, target.name, True]
    assert in_new_process(device, gpu=False).value == [False, target.name, False]


def test_a_target_set_later_does_not_count(monkeypatch):
    """The child's recorded target is this process's own, not what the variable says meanwhile."""
    monkeypatch.setenv("CUDNN_TARGET", "no such device")
    assert in_new_process(device, gpu=False).value == [False, target.name, False]


def variables():
    import os

    return [os.environ.get(name) for name in ("CUDA_CACHE_PATH", "KEPT", "CUDA_VISIBLE_DEVICES")]


def test_further_variables_of_the_child(monkeypatch, tmp_path):
    """Added to this process's own or in their place, and this process keeps its own; `gpu` decides what it decides."""
    monkeypatch.setenv("CUDA_CACHE_PATH", "old")
    monkeypatch.setenv("KEPT", "kept")
    given = {"CUDA_CACHE_PATH": tmp_path, "CUDA_VISIBLE_DEVICES": "0"}
    done = in_new_process(variables, gpu=False, environment=given)
    assert done.value == [str(tmp_path), "kept", ""]
    assert os.environ["CUDA_CACHE_PATH"] == "old"


def pairs(n):
    return Pair().both(n)


def test_a_class_keeps_its_decorators():
    assert in_new_process(pairs, 4, uses=(marked, Pair), gpu=False).value == [4, "marked"]


def raises():
    raise ValueError("\n".join(["first", *map(str, range(50)), "last"]))


def lacks_a_name():
    return double(2)


def ends():
    import os

    os.kill(os.getpid(), 9)


def no_json():
    return {"found": [target]}


def keys_that_are_no_texts():
    return {(1, 2): 3}


def sleeps():
    import subprocess

    print("asleep", flush=True)
    subprocess.run(["sleep", "60"])


def leaves():
    raise SystemExit(0)


FAILURES = {
    raises: (r"^raises ended with exit code 1 in a new process:\n39\n(\d+\n)+last$", 300),
    lacks_a_name: (r"(?s)NameError: name 'double' is not defined\n\(it finds only .*`uses`", 300),
    ends: (r"^ends was killed by SIGKILL in a new process:$", 300),
    no_json: (r"Target is not JSON serializable\n\(what it returns: JSON holds .*\.tolist\(\) of a tensor", 300),
    keys_that_are_no_texts: (r"keys must be str.*\n\(what it returns: JSON holds numbers, texts, lists and dicts", 300),
    sleeps: (r"^sleeps did not finish within 0.5 s in a new process:$", 0.5),
    leaves: (r"^leaves ended the process without returning a value in a new process:$", 300),
}


@pytest.mark.parametrize("function", FAILURES)
def test_a_failing_child_raises_with_its_last_lines(function):
    words, timeout = FAILURES[function]
    with pytest.raises(RuntimeError, match=words) as caught:
        in_new_process(function, gpu=False, timeout=timeout)
    assert "/child.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (lambda: 1, (), "written with def, whose source it reads; got <function <lambda>"),
        (len, (), "got <built-in function len>"),
        (partial(double, 1), (), r"got functools.partial"),
        (double(2), (), "got 4"),
        (double, (target,), "arguments of double: .* Target is not JSON serializable; JSON holds numbers, texts"),
    ],
)
def test_what_can_not_be_sent_raises_before_a_process_is_started(monkeypatch, function, arguments, words):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(TypeError, match=words):
        in_new_process(function, *arguments)


def half():
    print("½")
    return "½"


def test_in_a_locale_that_lacks_characters(python):
    """Sources, what is printed and what is returned arrive; in a notebook stdout is UTF-8 in any locale."""
    code = "import contextlib, io, sys; sys.path.insert(0, 'tests'); import test_process as t; said = io.StringIO()\n"
    code += "with contextlib.redirect_stdout(said): done = t.in_new_process(t.half, gpu=False)\n"
    code += "print(ascii([done.value, said.getvalue()]))"
    result = python(code, LC_ALL="C", PYTHONUTF8=0, PYTHONCOERCECLOCALE=0)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ascii(["½", "½\n"])


def test_functions_of_a_notebook(monkeypatch, tmp_path):
    """Defined in cells, some of them redefined and one under %%needs: the latest source is what runs."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    try:
        helpers.needs.register()
        cells = [
            "from helpers import in_new_process",
            "def one():\n    return 'old'",
            "%%needs sm75: all of it\ndef one():\n    return 'new {braces} ' + describe.__name__",
            "class Kept:\n    def value(self):\n        return 'old'",
            "limit = 3\nclass Kept:\n    value = 6\n\n    def get(self):\n        return self.value\n\nrest = 1",
            "def two(n):\n    return [one()] * n + [Kept().get(), 'limit' in globals() or 'rest' in globals()]",
            "found = in_new_process(two, 2, uses=[one, Kept], gpu=False).value",
        ]
        assert all(shell.run_cell(cell).success for cell in cells)
        assert shell.user_ns["found"] == ["new {braces} describe"] * 2 + [6, False]
        fields = shell.run_cell("class Fields:\n    value = 7\n\nin_new_process(two, 2, uses=[Fields])")
        assert "got <class '__main__.Fields'>" in str(fields.error_in_exec)
    finally:
        InteractiveShell.clear_instance()


def says_bytes():
    import os

    os.write(1, b"\xff and text\n")
    return 1


def leaves_a_process():
    import subprocess

    return subprocess.Popen(["sleep", "50"]).pid


def test_a_process_that_a_child_leaves_behind_neither_holds_it_up_nor_lives_on():
    finished = in_new_process(leaves_a_process, gpu=False, timeout=40)
    assert finished.wall_ms < 39_000
    deadline = time.monotonic() + 5
    while (state := process_state(finished.value)) not in ("gone", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state in ("gone", "Z")


def process_state(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def test_bytes_that_are_no_text_do_not_lose_the_value(capsys):
    assert in_new_process(says_bytes, gpu=False).value == 1
    assert "and text" in capsys.readouterr().out
