"""Fixtures and marks that the unit tests share."""

import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from environments import without_gpu

from helpers import target

ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped elsewhere, with the reason")
    config.addinivalue_line("markers", "matrix: minutes of compilation; runs with -m matrix alone")


def pytest_collection_modifyitems(config, items):
    """Skips what is marked `gpu` on a machine without one, and the support matrix unless it is asked for.

    What waits for `mutated` comes last: its processes run beside all other tests.
    """
    items.sort(key=_waits)
    for item in items:
        if item.get_closest_marker("matrix") and config.getoption("markexpr") != "matrix":
            item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m matrix tests"))
        if item.get_closest_marker("gpu") and not target.live:
            item.add_marker(pytest.mark.skip(reason=target.lacks("gpu")))


@pytest.fixture(scope="session")
def module():
    """A module of helpers by name: `helpers.target` itself is the Target, which hides the module of that name."""
    return lambda name: importlib.import_module(f"helpers.{name}")


@pytest.fixture(scope="session")
def python():
    """Runs Python code in a new process that sees no GPU, from the repository's root.

    python(code, PYTHONPATH=..., flags=["-S"]) returns the finished subprocess with its text output.
    """

    def run(code, *arguments, flags=(), **environment):
        command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
        return subprocess.run(
            command, env=without_gpu(**environment), cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture(scope="session")
def mutated(request, tmp_path_factory):
    """What tests/mutate.py found for a notebook, executed in an unrelated folder; two at once, the longest first."""

    def run(path, folder):
        result = subprocess.run(
            [sys.executable, ROOT / "tests" / "mutate.py", path],
            env=without_gpu(CUDNN_NOTEBOOKS=ROOT, OMP_NUM_THREADS=1),  # several processes on two cores
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    paths = sorted({item.callspec.params["path"] for item in request.session.items if _waits(item)}, reverse=True)
    pool = ThreadPoolExecutor(2)
    found = {path: pool.submit(run, path, tmp_path_factory.mktemp("unrelated")) for path in paths}
    yield lambda path: found[path].result()
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session", autouse=True)
def _begun(request):
    """Starts the processes of `mutated` with the first test, where any test waits for them."""
    if any(map(_waits, request.session.items)):
        request.getfixturevalue("mutated")


def _waits(item):
    return "mutated" in getattr(item, "fixturenames", ())
