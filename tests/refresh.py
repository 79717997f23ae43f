"""Executes notebooks top to bottom on this machine's GPU and stores their outputs, stamped with where they come from.

    python tests/refresh.py                                  all notebooks, in place
    python tests/refresh.py notebooks/00_five_steps.ipynb    these
    python tests/refresh.py --to FOLDER                      writes copies into FOLDER; works without a GPU, too

Each notebook has a compute cache of CUDA's driver of its own, empty at first: how long kernels take to compile then
doesn't depend on what this machine has compiled before. A notebook is written only after all of its cells ran without
an error.
"""

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from notebook_rules import KERNELSPEC, NO_GPU, STAMP, code_hash, outputs_hash, read  # noqa: E402

CELL_TIMEOUT_S = 900


def environment():
    """What executes the notebooks: the part of the stamp that does not depend on the notebook."""
    import torch

    from helpers.target import cudnn, driver_version, target

    return {
        "gpu": target.name if target.live else NO_GPU + target.name,
        "driver": driver_version() if target.live else "none",
        "torch": torch.__version__,
        "cudnn": cudnn.backend_version_string(),
        "cudnn_frontend": cudnn.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def refresh(source, destination, stamp):
    """Executes the notebook at `source` in a fresh kernel, in its folder, and writes it, stamped, to `destination`."""
    nb = read(source)
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
    client = NotebookClient(
        nb,
        timeout=CELL_TIMEOUT_S,
        kernel_name=KERNELSPEC["name"],
        resources={"metadata": {"path": str(source.parent)}},
        record_timing=False,  # else every cell stores four times of day
        coalesce_streams=True,  # else how a cell's prints are cut into pieces depends on timing
    )
    with tempfile.TemporaryDirectory() as cache:
        client.execute(env=os.environ | {"CUDA_CACHE_PATH": cache})
    nb.metadata.kernelspec = dict(KERNELSPEC)
    nb.metadata.language_info = {"name": "python", "file_extension": ".py", "pygments_lexer": "ipython3"}
    nb.metadata[STAMP] = {**stamp, "code_sha256": code_hash(nb), "outputs_sha256": outputs_hash(nb)}
    nbformat.validate(nb)
    write(destination, nbformat.writes(nb) + "\n")


def write(path, text):
    """Replaces the file in one step, so that a run that is stopped leaves the old file or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of notebooks/")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write copies there instead of replacing the files")
    options = parser.parse_args(arguments)
    notebooks = [path.resolve() for path in options.notebooks or sorted((REPO / "notebooks").glob("*.ipynb"))]
    stamp = environment()
    if stamp["gpu"].startswith(NO_GPU) and options.to is None:
        return "no GPU here: stored outputs come from a GPU; write copies somewhere else with --to FOLDER"
    if options.to is not None:
        options.to.mkdir(parents=True, exist_ok=True)
    print(" · ".join(f"{key} {value}" for key, value in stamp.items()), flush=True)
    for number, path in enumerate(notebooks, 1):
        print(f"[{number}/{len(notebooks)}] {path.name} ...", end=" ", flush=True)
        started = time.monotonic()
        try:
            refresh(path, options.to.resolve() / path.name if options.to else path, stamp)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print("failed", flush=True)
            return f"{error}\n{path.name} was left as it is"
        print(f"{time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
