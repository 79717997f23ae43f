"""Executes a notebook without a GPU, and repeats each of its verdicts with wrong results.

    python tests/mutate.py NOTEBOOK

Without a GPU every result comes from helpers.reference.evaluate, so that is what gets replaced: once a verdict has
passed, the cell that computed what it checks (often itself) and the verdict run again, once for each mutation, and at
last with right results.

Prints one line of JSON:
    cells     [[cell, error], ...]: the code cells up to the last verdict, executed once; error is a name or null
    verdicts  [[cell, mutation, failing cell, error, affected], ...]; affected: whether the mutation changed anything
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["MPLBACKEND"] = "Agg"
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import notebook_rules as rules  # noqa: E402
import torch  # noqa: E402
from IPython.core.interactiveshell import InteractiveShell  # noqa: E402

SHELL = InteractiveShell.instance()  # before helpers, which makes %%needs known to the shell that it finds

from helpers import reference  # noqa: E402

CORRECT = reference.evaluate


def replaced(tensors, tensor, value):
    """`tensors` with another value for `tensor`, in the memory layout of the old one."""
    old = tensors[tensor]
    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype).copy_(value)
    return {**tensors, tensor: new}, not torch.equal(old.double(), new.double())  # FP8 has no equal and no flip


def scaled(graph, tensors):
    """Every result times 1.01."""
    CORRECT(graph, tensors)
    outputs = [t for node in graph.nodes for t in node.outputs.values() if t in tensors]
    for tensor in outputs:
        tensors[tensor].copy_(tensors[tensor].double() * 1.01)
    return bool(outputs)


def flipped(graph, tensors):
    """Convolutions with the filter turned by 180 degrees, matmuls with the rows of B in reverse order."""
    changed = False
    for node in graph.nodes:
        weight = node.inputs.get("weight") or (node.inputs.get("B") if "MATMUL" in str(node.node_type) else None)
        if weight in tensors:
            dims = (-2, -1) if "weight" in node.inputs else (-2,)
            tensors, differs = replaced(tensors, weight, tensors[weight].double().flip(dims))
            changed |= differs
    CORRECT(graph, tensors)
    return changed


def dropped(graph, tensors):
    """The bias, a real tensor that is added along one axis, counts as zero."""
    changed = False
    for node in graph.nodes:
        bias = node.inputs.get("IN_1")
        if node.params.get("mode") in ("bias", "add") and bias in tensors and sum(d > 1 for d in bias.dim) == 1:
            tensors, differs = replaced(tensors, bias, torch.zeros_like(tensors[bias]))
            changed |= differs
    CORRECT(graph, tensors)
    return changed


def correct(graph, tensors):
    CORRECT(graph, tensors)
    return False


class Notebook:
    """A notebook's cells in one IPython shell."""

    def __init__(self, nb):
        self.cells = nb.cells
        self.code = [i for i, cell in enumerate(nb.cells) if cell.cell_type == "code"]
        self.verdicts = [i for i in self.code if rules.CHECKED in rules.tags(nb.cells[i])]

    def run(self, index, mutation=correct):
        """Executes one cell: the name of its exception or None, and for each result whether it was changed."""
        changes = []
        reference.evaluate = lambda graph, tensors: changes.append(mutation(graph, tensors))
        with contextlib.redirect_stdout(io.StringIO()):
            result = SHELL.run_cell(self.cells[index].source)
        error = result.error_before_exec or result.error_in_exec
        return type(error).__name__ if error else None, changes

    def repeat(self, indices, mutation):
        """Executes cells again until one fails: [its index, its error, whether any result was changed]."""
        affected = False
        for index in indices:
            error, changes = self.run(index, mutation)
            affected |= any(changes)
            if error:
                return [index, error, affected]
        return [None, None, affected]

    def mutate(self, verdict, candidates):
        """Rows of all mutations for a verdict; `candidates`: cells to start from, the first that can be repeated."""
        for start in candidates:
            cells = [i for i in self.code if start <= i <= verdict]
            rows = [[verdict, m.__name__, *self.repeat(cells, m)] for m in (scaled, flipped, dropped, correct)]
            if rows[-1][3] is None:
                break
        return rows

    def check(self):
        executed, rows, first, computed = [], [], self.code[0], None
        for index in [i for i in self.code if i <= self.verdicts[-1]]:
            error, changes = self.run(index)
            executed.append([index, error])
            computed = index if changes else computed
            if index in self.verdicts:
                if computed is not None and error is None:
                    rows += self.mutate(index, (computed, first))
                first, computed = index + 1, None
        return {"cells": executed, "verdicts": rows}


if __name__ == "__main__":
    print(json.dumps(Notebook(rules.read(Path(sys.argv[1]))).check()))
