"""Executes a notebook without a GPU, and repeats each of its verdicts with wrong results.

    python tests/mutate.py NOTEBOOK

Without a GPU every result comes from helpers.reference.evaluate, so that is what gets replaced (and the verification
of a tuning's candidates): once a verdict has passed, the cell that computed what it checks (often itself) and the
verdict run again, once for each mutation that changes one of those results, and at last with right results.

Prints one line of JSON:
    cells     [[cell, error], ...]: the code cells up to the last verdict, executed once; error is a name or null
    verdicts  [[cell, mutation, failing cell, error], ...]: each verdict over results, with what changes any of them
    exercises what try_answers.tried found after that
"""

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["MPLBACKEND"] = "Agg"
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import notebook_rules as rules  # noqa: E402
import torch  # noqa: E402
import try_answers  # noqa: E402
import wrong_answers  # noqa: E402
from IPython.core.interactiveshell import InteractiveShell  # noqa: E402
from matplotlib import pyplot  # noqa: E402

SHELL = InteractiveShell.instance()  # before helpers, which makes %%needs known to the shell that it finds

from helpers import reference  # noqa: E402

tuning = importlib.import_module("helpers.autotune")  # helpers.autotune itself is the function
CORRECT, BAND, SCORES, DIFFERENCE = reference.evaluate, reference._band, reference._scores, tuning._difference


# --- wrong evaluations; each returns False, having done nothing, for a graph that it has nothing to change in ---------

LAST = {}  # graph: {input: its value} of the graph's last evaluation


def results(graph, tensors):
    return [t for node in graph.nodes for t in node.outputs.values() if t in tensors]


def scaled(graph, tensors):
    """Every result times 1.01. Like `short`, it spoils results that are there and right."""
    for tensor in results(graph, tensors):
        tensors[tensor].copy_(tensors[tensor].double() * 1.01)
    return True


def short(graph, tensors):
    """The last quarter of each result, along the longest axis but the last, stays unwritten, as after a plan or a
    kernel of a smaller shape. Zeros stand for what was there: the old content may be right, from an earlier run."""
    found = False
    for value in (tensors[t] for t in results(graph, tensors)):
        axes = value.shape[:-1] or value.shape
        length = max(axes, default=1)
        if length > 1:
            written = length - max(length // 4, 1)
            value.narrow(axes.index(length), written, length - written).zero_()
            found = True
    return found


def replaced(graph, tensors, values):
    """Evaluates with other `values` for some of the tensors, each in the memory layout of the old one."""
    for tensor, value in values.items():
        old = tensors[tensor]
        tensors = {**tensors, tensor: torch.empty_strided(old.shape, old.stride(), dtype=old.dtype).copy_(value)}
    if values:
        CORRECT(graph, tensors)
    return bool(values)


def flipped(graph, tensors):
    """Convolutions with the filter turned by 180 degrees, matmuls with the rows of B in reverse order."""
    values = {}
    for node in graph.nodes:
        weight = node.inputs.get("weight") or (node.inputs.get("B") if "MATMUL" in str(node.node_type) else None)
        if weight in tensors:  # FP8 has no flip
            values[weight] = tensors[weight].double().flip((-2, -1) if "weight" in node.inputs else (-2,))
    return replaced(graph, tensors, values)


def dropped(graph, tensors):
    """The bias, a real tensor that is added along one axis, counts as zero."""
    values = {}
    for node in graph.nodes:
        bias = node.inputs.get("IN_1")
        if node.params.get("mode") in ("bias", "add") and bias in tensors and sum(d > 1 for d in bias.dim) == 1:
            values[bias] = torch.zeros_like(tensors[bias])
    return replaced(graph, tensors, values)


def inverted(graph, tensors):
    """FP8's scales (scale, scale_s, scale_o) count as their reciprocals: the other convention."""
    return replaced(graph, tensors, {t: 1 / v for t, v in tensors.items() if t.name.startswith("scale")})


def stale(graph, tensors):
    """The inputs are those of the graph's last evaluation, as in a CUDA graph whose buffers got no new values."""
    last = LAST.get(graph, {})
    values = {t: value for t, value in last.items() if not torch.equal(as_bytes(value), as_bytes(tensors[t]))}
    return replaced(graph, tensors, values)


def attention(graph, tensors, name, function):
    """Evaluates a graph that has attention with `function` in the place of reference.`name`."""
    found = any(node.node_type.name.startswith("SDPA") for node in graph.nodes)
    if found:
        with mock.patch.object(reference, name, function):
            CORRECT(graph, tensors)
    return found


def cornered(graph, tensors):
    """A causal mask in the other corner: top-left for bottom-right, and the other way round."""
    return attention(graph, tensors, "_band", lambda node: (not BAND(node)[0], *BAND(node)[1:]))


def unscaled(graph, tensors):
    """Attention without its scale."""
    return attention(graph, tensors, "_scores", lambda node, x: SCORES(node, {**x, "attn_scale": 1.0}))


def correct(graph, tensors):
    """Nothing is wrong."""
    return False


SPOILING = (scaled, short)
EVALUATIONS = (*SPOILING, flipped, dropped, inverted, cornered, unscaled, stale)


def as_bytes(tensor):
    """A tensor's values as bytes, in which NaN equals NaN and FP8 can be compared."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def remember(graph, tensors):
    """Notes the inputs of an evaluation for `stale`."""
    outputs = results(graph, tensors)
    LAST[graph] = {tensor: value.clone() for tensor, value in tensors.items() if tensor not in outputs}


def changed(mutation, graph, tensors):
    """Whether a mutation changes any of the results in `tensors`, which are right and stay as they are."""
    right = results(graph, tensors)
    wrong = {**tensors, **{t: tensors[t].clone() for t in right}}
    if not mutation(graph, wrong):
        return False
    pairs = ((tensors[t].double(), wrong[t].double()) for t in right)  # FP8 can't be compared
    return not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


# --- what a mutation puts into place ----------------------------------------------------------------------------------


def evaluated(mutation):
    """Replaces reference.evaluate by a mutation."""

    def evaluate(graph, tensors):
        if mutation in SPOILING:
            CORRECT(graph, tensors)
            mutation(graph, tensors)
        elif not mutation(graph, tensors):
            CORRECT(graph, tensors)
        remember(graph, tensors)

    return mock.patch.object(reference, "evaluate", evaluate)


MUTATIONS = {m.__name__: evaluated(m) for m in EVALUATIONS}
# A tuning accepts every candidate.
MUTATIONS["accepted"] = mock.patch.object(tuning, "_difference", lambda *_, **__: "")
CORRECTLY = evaluated(correct)


@contextlib.contextmanager
def watched():
    """Yields a set that receives the names of the mutations that would change anything while this lasts."""
    found = set()

    def evaluate(graph, tensors):
        CORRECT(graph, tensors)
        found.update(m.__name__ for m in EVALUATIONS if changed(m, graph, tensors))
        remember(graph, tensors)

    def difference(*args, **options):
        text = DIFFERENCE(*args, **options)
        found.update(["accepted"] if text else [])
        return text

    with mock.patch.object(reference, "evaluate", evaluate), mock.patch.object(tuning, "_difference", difference):
        yield found


class Notebook:
    """A notebook's cells in one IPython shell."""

    def __init__(self, nb):
        self.cells = nb.cells
        self.code = [i for i, cell in enumerate(nb.cells) if cell.cell_type == "code"]
        self.verdicts = [i for i in self.code if rules.CHECKED in rules.tags(nb.cells[i])]
        self.reached = {}  # cell: the mutations that change any of its results
        self.last = {}  # cell: what LAST was before it

    def run(self, index):
        """Executes one cell; returns the name of its exception or None."""
        _, error = try_answers.execute(self.cells[index].source, SHELL)
        pyplot.close("all")  # as in a notebook, where a cell's figures are shown at its end
        return error and error.partition(":")[0]

    def repeat(self, cells, mutation=CORRECTLY):
        """Executes cells again until one fails: [its index, its error]."""
        LAST.clear()
        LAST.update(self.last[cells[0]])
        with mutation:
            failures = ([index, error] for index in cells if (error := self.run(index)))
            return next(failures, [None, None])

    def mutate(self, verdict, candidates):
        """Rows of the mutations for a verdict; `candidates`: cells to start from, the first that can be repeated."""
        for start in candidates:
            cells = [i for i in self.code if start <= i <= verdict]
            names = [name for name in MUTATIONS if any(name in self.reached[i] for i in cells)]
            rows = [[verdict, name, *self.repeat(cells, MUTATIONS[name])] for name in names]
            rows.append([verdict, "correct", *self.repeat(cells)])
            if rows[-1][3] is None:
                break
        return rows

    def check(self):
        executed, rows, first, computed = [], [], self.code[0], None
        for index in [i for i in self.code if i <= self.verdicts[-1]]:
            self.last[index] = dict(LAST)
            with watched() as self.reached[index]:
                error = self.run(index)
            executed.append([index, error])
            computed = index if self.reached[index] else computed
            if index in self.verdicts:
                if computed is not None and error is None:
                    rows += self.mutate(index, (computed, first))
                first, computed = index + 1, None
        return {"cells": executed, "verdicts": rows}


if __name__ == "__main__":
    os.nice(5)  # in a test run what runs beside it takes longest, one test after the other: it goes first
    path = Path(sys.argv[1])
    nb, wrong = rules.read(path), wrong_answers.WRONG.get(path.stem, {})
    print(json.dumps(Notebook(nb).check() | {"exercises": try_answers.tried(nb, wrong, SHELL)}))
