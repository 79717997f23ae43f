"""tests/reruns.py finds cells that fail, or print another verdict, when they are executed again."""

import subprocess
import sys
from pathlib import Path

from environments import without_gpu
from nbformat import v4

SCRIPT = Path(__file__).with_name("reruns.py")
SOUND = {
    "import": "import random",
    "verdict": "print(1)",
    "built-once": "if 'g' in globals():\n    raise RuntimeError('this graph was built before')\ng = 1",
    "no-verdict": "print(random.random())",
}
FAULTY = {
    "list": "x, n = [1], 0",
    "length": "print(len(x))",
    "once": "x.remove(1)",
    "verdict": "n += 1\nprint(n)",
    "shadow": "x = 5",
    "unknown": "print(z)",
    "late": "z = 1",
}
FAULTS = [
    "once · again at once · ValueError: list.remove(x): x not in list",
    "verdict · again at once · another verdict: 2",
    "unknown · the first time · NameError: name 'z' is not defined",
    "unknown · again at once · NameError: name 'z' is not defined",
    "verdict · after later cells · another verdict: 3",
    "once · after later cells · AttributeError: 'int' object has no attribute 'remove'",
    "length · after later cells · TypeError: object of type 'int' has no len()",
]


def notebook(folder, name, cells):
    """A notebook of code cells by id; the cell 'verdict' is one."""
    nb = v4.new_notebook()
    for cell_id, source in cells.items():
        nb.cells.append(v4.new_code_cell(source, id=cell_id))
        if cell_id == "verdict":
            nb.cells[-1].metadata["tags"] = ["nbval-check-output"]
    path = folder / f"{name}.ipynb"
    path.write_text(v4.writes(nb))
    return path


def test_faults_are_found_and_nothing_else(tmp_path):
    paths = notebook(tmp_path, "sound", SOUND), notebook(tmp_path, "faulty", FAULTY)
    run = subprocess.run([sys.executable, SCRIPT, *paths], env=without_gpu(), capture_output=True, text=True)
    lines = [f"faulty · {fault}" for fault in FAULTS]
    assert run.stdout.splitlines() == ["sound: no cell fails, no verdict changes", *lines]
    assert run.returncode == 1
