"""Executes notebooks as a reader does who goes back: every cell twice in a row, then all once more from last to first.

    python tests/reruns.py                                        all notebooks
    python tests/reruns.py notebooks/05_plan_serialization.ipynb  these

No cell may fail (only, a graph is planned once, and says so), and no verdict of a self-check may change. The exercises
keep the answers of their solutions. With a GPU the measuring cells take part. It takes three times as long as the
notebooks alone.

Exit status: 0 without a fault; 1 with a list of faults (notebook, cell, which time, what).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FIRST = "the first time"
ONCE = ("was built before", "was already called on this graph")  # a graph is planned once; these errors say what to do
REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))

import notebook_rules as rules  # noqa: E402
import try_answers  # noqa: E402


def faults(path):
    """[(cell's id, which time, what)] of a notebook that is executed in this process."""
    from IPython.core.interactiveshell import InteractiveShell
    from matplotlib import pyplot

    shell, found, verdicts = InteractiveShell.instance(), [], {}
    cells = rules.code_cells(rules.read(path))
    order = [(cell, time) for cell in cells for time in (FIRST, "again at once")]
    for cell, time in order + [(cell, "after later cells") for cell in reversed(cells)]:
        printed, error = try_answers.execute(cell.source, shell)
        pyplot.close("all")
        if error and time != FIRST and any(said in error for said in ONCE):
            continue
        if error:
            found.append((cell.id, time, " ".join(error.split())[:300]))
        elif rules.CHECKED in rules.tags(cell) and verdicts.setdefault(cell.id, printed) != printed:
            found.append((cell.id, time, f"another verdict: {printed.strip()}"))
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        for fault in faults(Path(sys.argv[2])):
            print(Path(sys.argv[2]).stem, *fault, sep=" · ", file=sys.stderr)
        sys.exit()
    said = []
    for path in map(Path, sys.argv[1:] or sorted((REPO / "notebooks").glob("*.ipynb"))):
        environment = os.environ | {"CUDNN_NOTEBOOKS": str(REPO), "MPLBACKEND": "Agg"}
        command = [sys.executable, __file__, "--one", str(path.resolve())]
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        lines = [line for line in run.stderr.splitlines() if line.startswith(f"{path.stem} · ")]
        if run.returncode:
            lines.append(f"{path.stem} · exit status {run.returncode}: {run.stderr[-300:]}")
        said += lines
        print(*(lines or [f"{path.stem}: no cell fails, no verdict changes"]), sep="\n", flush=True)
    sys.exit(bool(said))
