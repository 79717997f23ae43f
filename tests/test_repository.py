"""What the README and requirements.txt promise, and that CI runs the same."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import notebook_rules as rules
import pytest
import readme
from test_series import CHANGED_BY
from wrong_answers import WRONG

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text()
REQUIREMENTS = (REPO / "requirements.txt").read_text().splitlines()
SETUP = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && "


# --- the two commands -------------------------------------------------------------------------------------------------


def test_readme_gives_both_commands_as_single_lines():
    commands = [line for line in README.splitlines() if line.startswith(SETUP)]
    run, test = (line.removeprefix(SETUP) for line in commands)
    assert run == ".venv/bin/jupyter nbconvert --to html --execute --output-dir site notebooks/*.ipynb"
    assert test == ".venv/bin/pytest"
    assert all(README.index(command) < README.index("## Notebooks") for command in commands)


def test_readme_names_every_helper():
    files = {path.name for path in (REPO / "helpers").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if f"(helpers/{name})" not in README} == set()


def test_readme_has_the_results_that_the_notebooks_store():
    """Headlines, the stamp and the picture: python tests/readme.py."""
    assert readme.differences() == []


def test_every_notebook_has_its_entries():
    """What "Adding to it" asks for, so that a new notebook is told all of it at once."""
    stems = sorted(path.stem for path in (REPO / "notebooks").glob("*.ipynb"))
    listed = [stem for stem in stems if f"| [{stem}](notebooks/{stem}.ipynb) |" in README]
    assert listed == stems, "each notebook has a row in README's table"
    assert sorted(readme.HEADLINES) == stems, "each notebook has a headline in tests/readme.py"
    assert sorted(CHANGED_BY) == stems, "CHANGED_BY in tests/test_series.py says what changes each notebook's verdicts"
    assert sorted(WRONG) == stems, "tests/wrong_answers.py has wrong answers for each notebook's exercises"


def test_routes_hold_what_their_notebooks_ask_to_read_first():
    """...and each notebook's minutes are those of the table."""
    minutes = dict(re.findall(r"^\| \[(\d\d)_.*\| (\d+) \|[^|]*\|$", README, re.MULTILINE))
    routes = re.findall(r"^\| ([^|]*) \| (\d\d(?: · \d\d)+)[^|]*\| (\d+(?: \+ \d+)+)", README, re.MULTILINE)
    assert len(routes) == 4
    for name, numbers, times in routes:
        route = numbers.split(" · ")
        assert times.split(" + ") == [minutes[number] for number in route], name
        for at, number in enumerate(route):
            opening = rules.read(next((REPO / "notebooks").glob(f"{number}_*.ipynb"))).cells[0].source
            before = re.search(r"Read (.*?) first\.", opening)
            asked = re.findall(r"\((\d\d)_\w+\.ipynb\)", before[1]) if before else []
            assert set(asked) <= set(route[:at]), f"{name}: {number} asks for {', '.join(asked)}"


def test_readme_with_another_result_is_noticed(monkeypatch, tmp_path):
    other = tmp_path / "README.md"
    other.write_text(README.replace("× PyTorch eager", "1× PyTorch eager", 1))
    monkeypatch.setattr(readme, "README", other)
    assert readme.differences() == ["README.md differs from the stored outputs"]


def test_ci_runs_the_readme_test_line(tmp_path):
    """.ci/run, with stand-ins for the three programs of the line, runs them in order and passes the last status on."""
    for name in ("README.md", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    stand_in = '#!/bin/sh\necho "$(basename "$0") $*" >> log\n'
    programs = {"bin/python3": "", ".venv/bin/pip": "", ".venv/bin/pytest": "exit 3\n"}
    for name, end in programs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(stand_in + end)
        (tmp_path / name).chmod(0o755)

    def ci():
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            [".ci/run"], cwd=tmp_path, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, capture_output=True
        )

    assert ci().returncode == 3
    assert (tmp_path / "log").read_text() == "python3 -m venv .venv\npip install -r requirements.txt\npytest \n"
    (tmp_path / "README.md").write_text(README.replace("&& .venv/bin/pytest", ""))
    failed = ci()
    assert failed.returncode == 1 and b"exactly one test line" in failed.stderr


def test_workflow():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())
    assert {"push", "schedule", "workflow_dispatch"} <= set(workflow[True])  # YAML reads the key `on` as true
    jobs = workflow["jobs"]
    assert {"style", "cpu", "matrix", "gpu", "versions"} == set(jobs)
    assert jobs["gpu"]["runs-on"] == ["self-hosted", "gpu"]
    for name in ("cpu", "gpu", "versions"):
        assert {"run": ".ci/run"} in jobs[name]["steps"]


def test_workflow_runs_what_the_test_line_leaves_out():
    assert ".venv/bin/pytest -m matrix tests" in (REPO / ".github/workflows/ci.yml").read_text()
    assert ".venv/bin/pytest -m matrix tests" in README


def test_licence():
    text = (REPO / "LICENSE").read_text()
    assert text.startswith("MIT License\n\nCopyright (c) 2026 The cuDNN notebooks authors\n")


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed; CI's style job runs it")
@pytest.mark.parametrize("command", [["check", "--no-cache"], ["format", "--check", "--no-cache"]], ids=lambda c: c[0])
def test_style(command):
    result = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# --- requirements.txt -------------------------------------------------------------------------------------------------


def test_requirements_have_lower_bounds_only():
    """CI makes the oldest set by reading >= as ==, so each line is one name and one lower bound."""
    names = {line.split(">=")[0] for line in REQUIREMENTS}
    assert names == {"nvidia-cudnn-frontend", "torch", "numpy", "matplotlib", "jupyter", "pytest", "nbval"}
    assert all(re.fullmatch(r"[\w-]+>=\d+(\.\d+)+", line) for line in REQUIREMENTS)


def test_bounds_agree_with_what_helpers_demand():
    from helpers import libcudnn

    bounds = dict(line.split(">=") for line in REQUIREMENTS)
    assert libcudnn.dotted(libcudnn.MIN_FRONTEND).startswith(bounds["nvidia-cudnn-frontend"])
    assert f"torch>={bounds['torch']}'" in libcudnn.GET_TORCH
    assert f"nvidia-cudnn-frontend>={bounds['nvidia-cudnn-frontend']}'" in libcudnn.GET_FRONTEND


def _installed(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed in this environment")
def test_installing_moves_nothing(tmp_path):
    """With a suitable torch present, pip has nothing to install: neither torch nor an nvidia package is replaced.

    Runs without a network: anything that pip wanted to fetch would be an error. Packages that are not installed at all
    would be added, not moved, and are left out.
    """
    present = [line for line in REQUIREMENTS if _installed(line.split(">=")[0])]
    assert any(line.startswith("torch>=") for line in present)
    (tmp_path / "requirements.txt").write_text("\n".join(present))
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install"]
    options = ["--dry-run", "--no-index", "--quiet", "--report", "-", "-r", "requirements.txt"]
    result = subprocess.run([*pip, *options], cwd=tmp_path, capture_output=True, text=True)
    missing = re.search(r"No matching distribution found for ([\w.-]+)", result.stderr)
    if missing and _installed(missing[1]) is None:
        pytest.skip(f"{missing[1]}, which a package here requires, is not installed: pip would add it")
    assert result.returncode == 0, result.stderr
    moved = [item["metadata"]["name"] for item in json.loads(result.stdout)["install"]]
    assert moved == []
