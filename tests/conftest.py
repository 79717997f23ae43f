"""Fixtures and marks that the unit tests share."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import target

ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped elsewhere, with the reason")


def pytest_collection_modifyitems(items):
    """Skips what is marked `gpu` on a machine without one."""
    for item in items:
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
        env = {k: v for k, v in os.environ.items() if k not in ("CUDNN_TARGET", "PYTHONPATH")}
        env |= {"CUDA_VISIBLE_DEVICES": ""} | {key: str(value) for key, value in environment.items()}
        command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)

    return run
