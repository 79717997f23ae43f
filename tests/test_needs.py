"""%%needs: reading the line, and what a real IPython shell then runs (CASES: no-gpu, capability)."""

import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from helpers import needs, target

LACKING = "sm999"  # newer than any target
REASON = f"needs SM999, found SM{target.sm} ({target.name})"


@pytest.mark.parametrize(
    ("source", "parsed"),
    [
        ("%%needs gpu\nx = 1", (["gpu"], "")),
        ("%%needs gpu sm89\nx = 1", (["gpu", "sm89"], "")),
        ("%%needs gpu sm89: what still runs\nx = 1", (["gpu", "sm89"], "What still runs")),
        ("%%needs sm80 :  the CPU's part: exercise 2  \nx = 1", (["sm80"], "The CPU's part: exercise 2")),
        ("%%needs gpu cudnn9.21: the build\nx = 1", (["gpu", "cudnn9.21"], "The build")),
        ("\n\n%%needs gpu", (["gpu"], "")),
        ("%%needs", ([], "")),
        ("%%needs\ngpu", ([], "")),
        ("%%needs: why", ([], "Why")),
        ("%%needsgpu\nx = 1", None),
        ("x = 1\n%%needs gpu", None),
        ("# %%needs gpu", None),
        ("%%time\n%%needs gpu", None),
        ("", None),
    ],
)
def test_parse(source, parsed):
    assert needs.parse_needs(source) == parsed


def test_capability_skip_reason():
    """capability: the reason is the target's own; a cell without the line, or with all it needs, has none."""
    assert needs.skip_reason(f"%%needs sm75 {LACKING}: run it elsewhere\nx = 1") == REASON
    assert needs.skip_reason("%%needs sm75\nx = 1") == ""
    assert needs.skip_reason("x = 1") == ""
    assert needs.skip_reason("%%needs gpu") == target.lacks("gpu")


def test_release_skip_reason():
    """A cell that needs a later cuDNN than there can be says which, and one that needs an old one runs."""
    reason = needs.skip_reason("%%needs cudnn99.1: the rest\nx = 1")
    assert reason.startswith("needs cuDNN 99.1, found 9.")
    assert needs.skip_reason("%%needs cudnn9.1\nx = 1") == ""


@pytest.mark.parametrize("line", ["%%needs", "%%needs:  why", "%%needs GPU", "%%needs sm75 fp8", "%%needs gpu, sm80"])
def test_capability_unknown_requirement(line):
    """capability: a requirement that is not known would let the cell run anywhere, so it raises."""
    with pytest.raises(ValueError, match=r"unknown requirement|names no requirement"):
        needs.skip_reason(line + "\nx = 1")


# --- in IPython -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch, tmp_path):
    """A real IPython shell that knows %%needs."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell puts its own there
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    needs.register()
    yield shell
    InteractiveShell.clear_instance()


def test_no_gpu_cell_is_skipped(shell, capsys):
    """no-gpu: a cell that lacks something prints one line and runs nothing, not even what it would print."""
    result = shell.run_cell(f"%%needs {LACKING}\nran = True\nprint('ran')\n1 / 0")
    assert result.success
    assert capsys.readouterr().out == f"Skipped: {REASON}.\n"
    assert "ran" not in shell.user_ns


def test_no_gpu_cell_is_skipped_with_a_note(shell, capsys):
    """no-gpu: what follows the colon tells the reader what still runs; quotes and braces are only text."""
    result = shell.run_cell(f"%%needs {LACKING}: the table 'above' {{a}} \\ holds\nnot even Python")
    assert result.success
    assert capsys.readouterr().out == f"Skipped: {REASON}. The table 'above' {{a}} \\ holds.\n"


def test_satisfied_cell_runs_as_itself(shell, capsys):
    """A cell that has what it needs assigns, prints and shows its last expression as without the line."""
    result = shell.run_cell("%%needs sm75\nx = 20\nprint('ran')\nx + 1")
    assert result.success
    assert result.result == 21
    assert shell.user_ns["x"] == 20
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "ran"
    assert out[1].endswith("21")


def test_satisfied_cell_that_fails_fails(shell, capsys):
    """An exception inside ends the cell as in any other, at its own line number."""
    result = shell.run_cell("\n%%needs sm75\nx = 1\n\n1 / 0\nx = 2")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert shell.user_ns["x"] == 1
    line = result.error_in_exec.__traceback__.tb_next.tb_lineno
    assert line == 4  # IPython drops the empty lines before a cell's first one
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_line_numbers_without_an_empty_line(shell, capsys):
    result = shell.run_cell("%%needs sm75\nx = 1\n1 / 0")
    assert result.error_in_exec.__traceback__.tb_next.tb_lineno == 3
    result = shell.run_cell("%%needs sm75\nx = 1\nx = = 2")
    assert isinstance(result.error_before_exec, SyntaxError)
    assert result.error_before_exec.lineno == 3
    capsys.readouterr()


@pytest.mark.parametrize("line", ["%%needs", "%%needs gpuu", "%%needs sm75 fp8"])
def test_unknown_requirement_fails_the_cell(shell, capsys, line):
    """Neither skipped nor run: a misspelt requirement is an error of the cell, each time it is executed."""
    for _ in range(2):
        result = shell.run_cell(f"{line}\nran = True")
        assert not result.success
        assert isinstance(result.error_before_exec, SyntaxError)
        assert "requirement" in str(result.error_before_exec)
        assert "ran" not in shell.user_ns
    assert "requirement" in capsys.readouterr().out


def test_a_cell_magic_may_follow(shell, capsys):
    assert shell.run_cell("%%needs sm75\n%%capture captured\nprint('inside')").success
    assert capsys.readouterr().out == ""
    assert shell.user_ns["captured"].stdout == "inside\n"


def test_other_cells_are_left_alone(shell, capsys):
    result = shell.run_cell("text = '%%needs gpu'\nprint(text)")
    assert result.success
    assert capsys.readouterr().out == "%%needs gpu\n"
    assert shell.run_cell("%%time\ny = 3").success
    assert shell.user_ns["y"] == 3
    capsys.readouterr()


def test_register_again_changes_nothing(shell):
    """Reloading the package leaves one transformer, the new one."""
    for _ in range(3):
        needs.register()
    assert shell.input_transformers_cleanup.count(needs.transform_cell) == 1
    assert shell.input_transformers_cleanup[0] is needs.transform_cell


def test_register_without_a_shell():
    """Outside IPython there is nothing to register, and nothing goes wrong."""
    assert not InteractiveShell.initialized()
    assert needs.register() is None
    assert not InteractiveShell.initialized()
