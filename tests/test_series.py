"""The notebooks as people and CI run them: from anywhere, twice, without a GPU; and that their self-checks can fail."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import notebook_rules as rules
import pytest
from environments import without_gpu
from nbformat import v4

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


# --- elsewhere --------------------------------------------------------------------------------------------------------

IN_EACH_FOLDER = """
import json, os, sys
cell, *folders = json.loads(sys.stdin.read())
path, results = list(sys.path), []
for folder, home in folders:
    sys.path[:] = path  # as in a new process
    for name in [name for name in sys.modules if name.split(".")[0] == "helpers"]:
        del sys.modules[name]
    os.environ.pop("CUDNN_NOTEBOOKS", None)
    os.environ.update({"CUDNN_NOTEBOOKS": home} if home else {})
    os.chdir(folder)
    try:
        names = {}
        exec(cell, names)
        results.append(names["target"].name)
    except ImportError as error:
        results.append(f"{type(error).__name__}: {error}")
print(json.dumps(results))
"""


@each_notebook
def test_setup_cell_works_from_anywhere_or_says_how_to_get_helpers(path, tmp_path):
    """From the root, from notebooks/, from an unrelated folder with CUDNN_NOTEBOOKS, and there without it."""
    setup = rules.code_cells(rules.read(path))[0].source
    folders = [(REPO, ""), (path.parent, ""), (tmp_path, str(REPO)), (tmp_path, "")]
    result = subprocess.run(
        [sys.executable, "-c", IN_EACH_FOLDER],
        input=json.dumps([setup, *((str(folder), home) for folder, home in folders)]),
        env=without_gpu(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    *found, lost = json.loads(result.stdout.splitlines()[-1])
    assert found == ["NVIDIA H200"] * 3
    assert "helpers" in lost and "CUDNN_NOTEBOOKS" in lost


# --- nbval ------------------------------------------------------------------------------------------------------------


def save(nb, folder, name):
    (folder / f"{name}.ipynb").write_text(v4.writes(nb))


WARN_IN_EVERY_CELL = """import sys, warnings
warn = lambda *_: (warnings.warn("a warning"), print("something on stderr", file=sys.stderr))
get_ipython().events.register("pre_run_cell", warn)
get_ipython().events.register("post_run_cell", warn)
"""


def disturbed(nb):
    """The notebook with warnings on stderr in every cell, and other timings and plan names in unchecked outputs."""
    for cell in rules.code_cells(nb):
        if rules.CHECKED not in rules.tags(cell):
            cell.outputs = [v4.new_output("stream", text="eng99_k1=2 · 123.456 ms\n")] if cell.outputs else []
    rules.code_cells(nb)[0].source = WARN_IN_EVERY_CELL + rules.code_cells(nb)[0].source
    return nb


def small_notebook(verdict, opening="# A small one", stored="sum: PASS\n"):
    """A notebook with a cell, one that needs a GPU, and a verdict."""
    nb = v4.new_notebook()
    nb.cells = [
        v4.new_markdown_cell(opening),
        v4.new_code_cell("total = 1 + 1"),
        v4.new_code_cell("%%needs gpu: the rest runs\nraise RuntimeError('ran without a GPU')"),
        v4.new_code_cell(verdict, outputs=[v4.new_output("stream", text=stored)], metadata={"tags": [rules.CHECKED]}),
    ]
    for count, cell in enumerate(rules.code_cells(nb), 1):
        cell.execution_count = count
    return nb


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """pytest under the project's settings over copies in an unrelated folder: {notebook: [outcome of each cell]}.

    `first` is the first notebook of the series, disturbed: pytest itself runs it undisturbed in the same session.
    """
    folder = tmp_path_factory.mktemp("copies")
    verdict = "assert total == 2\nprint('sum: PASS')"
    save(disturbed(rules.read(NOTEBOOKS[0])), folder, "first")
    save(small_notebook(verdict), folder, "fine")
    save(small_notebook(verdict.replace("2", "3")), folder, "wrong")
    save(small_notebook(verdict, stored="sum: PASSED\n"), folder, "tampered")
    save(small_notebook("%%needs gpu\n" + verdict), folder, "skipped")
    save(small_notebook("%%needs sm120\n" + verdict, "# For newer ones\n\nNeeds SM120."), folder, "newer")
    shutil.copy(REPO / "notebooks" / "conftest.py", folder)
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", REPO / ".pytest.ini", "--rootdir", folder, f"--junitxml={report}"]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", folder],
        env=without_gpu(CUDNN_NOTEBOOKS=REPO, PYTHONWARNINGS="always"),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found.setdefault(case.get("classname").split(".")[0], []).append(outcome)
    return found


def test_verdicts_do_not_depend_on_warnings_timings_or_plan_names(outcomes):
    """A disturbed run passes, too; exactly the cells that need a GPU are reported as skipped, none as passed."""
    *cells, a_verdict_ran = outcomes["first"]
    sources = [cell.source for cell in rules.code_cells(rules.read(NOTEBOOKS[0]))]
    assert cells == ["skipped" if source.startswith("%%needs gpu") else "passed" for source in sources]
    assert a_verdict_ran == "passed"


def test_wrong_results_and_other_stored_verdicts_fail(outcomes):
    assert outcomes["fine"] == ["passed", "skipped", "passed", "passed"]
    assert outcomes["wrong"] == ["passed", "skipped", "failure", "passed"]
    assert outcomes["tampered"] == ["passed", "skipped", "failure", "passed"]


def test_a_notebook_that_checks_nothing_fails(outcomes):
    """All verdicts skipped: a failure, but not where the notebook's opening says that it needs a newer GPU."""
    assert outcomes["skipped"] == ["passed", "skipped", "skipped", "failure"]
    assert outcomes["newer"] == ["passed", "skipped", "skipped", "skipped"]


# --- the self-checks can fail -----------------------------------------------------------------------------------------

# What changes the results of each notebook's verdicts; tests/mutate.py says what each name means.
CHANGED_BY = {
    "00_five_steps": {"scaled", "short", "flipped", "dropped", "stale"},
    "01_fused_conv_bias_relu": {"scaled", "short", "flipped", "dropped"},
    "02_autotuning": {"scaled", "short", "flipped", "dropped", "accepted"},
    "03_fp8_amax_epilogue": {"scaled", "short", "flipped", "dropped", "inverted", "stale"},
    "04_sdpa": {"scaled", "short", "flipped", "inverted", "cornered", "unscaled"},
    "05_plan_serialization": {"scaled", "short", "flipped", "dropped"},
    "06_dynamic_shapes": {"scaled", "short", "flipped", "dropped", "stale"},
    "07_cuda_graphs": {"scaled", "short", "flipped", "dropped", "stale"},
    "08_hot_path": {"scaled", "short", "flipped", "dropped", "stale"},
}


@each_notebook
def test_self_checks_pass_on_right_results(path, mutated):
    assert [row for row in mutated(path)["cells"] if row[1]] == []
    assert [row for row in mutated(path)["verdicts"] if row[1] == "correct" and row[3]] == []


@each_notebook
def test_self_checks_fail_on_wrong_results(path, mutated):
    """Every verdict over a result that a mutation changes raises AssertionError, and no mutation goes unnoticed."""
    rows = [row for row in mutated(path)["verdicts"] if row[1] != "correct"]
    assert {mutation for _, mutation, _, _ in rows} == CHANGED_BY[path.stem]
    assert [row for row in rows if row[2:] != [row[0], "AssertionError"]] == []
