"""The wrong evaluations of tests/mutate.py: what each changes, and that a check which overlooks one is reported.

Run as a program, this file tries them on four small graphs and on two small notebooks, and prints one JSON object.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat import v4

REPO = Path(__file__).resolve().parents[1]

SET_UP = """
import torch
from helpers import describe, new_graph, reference, target
torch.manual_seed(0)
target.report()
first, second, weights = torch.randn(2, 12, 9), torch.randn(2, 12, 9), torch.randn(2, 9, 7)
g = new_graph("matmul", io=torch.float32)
X, W = describe(g, first, "X"), describe(g, weights, "W")
Y = g.matmul(X, W).set_output(True)
g.validate()
y = torch.empty(2, 12, 7)
reference.evaluate(g, {X: first, W: weights, Y: y})
"""
RUN = "reference.evaluate(g, {X: second, W: weights, Y: y})\n"
VERDICTS = {
    "careful": RUN + "torch.testing.assert_close(y, second @ weights)",
    "of the first rows": RUN + "torch.testing.assert_close(y[:, :8], (second @ weights)[:, :8])",
    "of the size": RUN + "assert y.norm() > 1",
}


def small_graphs():
    """{name: (graph, {tensor: value})}: a convolution with bias, a matmul, an FP8-like scale, and attention."""
    import torch

    from helpers import describe, new_graph

    def graph(name, operations, *shapes):
        g = new_graph(name, io=torch.float32)
        values = {n: torch.randn(*shape) for n, shape in shapes}
        tensors = {n: describe(g, value, n) for n, value in values.items()}
        outputs = operations(g, **tensors)
        g.validate()
        pack = {tensors[n]: value for n, value in values.items()}
        return g, pack | {t: torch.empty(tuple(t.dim)) for t in outputs}

    def conv(g, X, W, bias):
        Y = g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        return [g.bias(Y, bias).set_output(True)]

    def matmul(g, A, B):
        return [g.matmul(A, B).set_output(True)]

    def scaled_sum(g, X, scale):
        Y = g.mul(X, scale).set_output(True)
        total = g.reduction(Y, mode=cudnn.reduction_mode.ADD).set_output(True)
        return [Y, total.set_dim([1, 1, 1]).set_stride([1, 1, 1]).set_data_type(cudnn.data_type.FLOAT)]

    def attention(g, Q, K, V):
        corner = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
        Y, _ = g.sdpa(Q, K, V, attn_scale=0.25, generate_stats=False, **corner)
        return [Y.set_output(True).set_dim([2, 3, 5, 8]).set_stride([120, 40, 8, 1])]

    import cudnn

    heads = (("Q", (2, 3, 5, 8)), ("K", (2, 3, 7, 8)), ("V", (2, 3, 7, 8)))
    return {
        "conv": graph("conv", conv, ("X", (2, 4, 6, 5)), ("W", (3, 4, 3, 3)), ("bias", (3,))),
        "matmul": graph("matmul", matmul, ("A", (2, 8, 6)), ("B", (2, 6, 5))),
        "scale": graph("scale", scaled_sum, ("X", (2, 8, 6)), ("scale", (1, 1, 1))),
        "attention": graph("attention", attention, *heads),
    }


def findings():
    import mutate
    import torch

    found = {"changes": {}, "notebooks": {}}
    graphs = small_graphs()
    for graph, tensors in graphs.values():
        mutate.CORRECT(graph, tensors)
        mutate.remember(graph, tensors)
        for tensor in mutate.LAST[graph]:
            tensors[tensor] = torch.randn_like(tensors[tensor])  # other inputs than those of the last evaluation
        mutate.CORRECT(graph, tensors)
    for mutation in mutate.EVALUATIONS:
        names = [name for name, (graph, tensors) in graphs.items() if mutate.changed(mutation, graph, tensors)]
        found["changes"][mutation.__name__] = names

    graph, tensors = graphs["matmul"]
    (Y,) = mutate.results(graph, tensors)
    right, old = tensors[Y].clone(), {**tensors, **mutate.LAST[graph], Y: torch.empty_like(tensors[Y])}
    mutate.CORRECT(graph, old)
    mutate.stale(graph, tensors)
    found["stale gives the last result"] = torch.equal(tensors[Y], old[Y])
    mutate.remember(graph, tensors)
    found["stale again"] = mutate.stale(graph, tensors)  # the same inputs as in the call before
    mutate.LAST.clear()
    found["stale at first"] = mutate.stale(graph, tensors)
    tensors[Y].copy_(right)
    mutate.short(graph, tensors)
    found["short"] = [torch.equal(tensors[Y][:, :6], right[:, :6]), tensors[Y][:, 6:].abs().max().item()]

    for name, verdict in VERDICTS.items():
        nb = v4.new_notebook()
        nb.cells = [
            v4.new_markdown_cell("# Small"),
            v4.new_code_cell(SET_UP),
            v4.new_code_cell(verdict, metadata={"tags": ["nbval-check-output"]}),
        ]
        rows = mutate.Notebook(nb).check()["verdicts"]
        found["notebooks"][name] = {mutation: error for _, mutation, _, error in rows}
    return found


if __name__ == "__main__":
    sys.path[:0] = [str(REPO), str(REPO / "tests")]
    print(json.dumps(findings()))
    sys.exit()


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, __file__]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_each_changes_the_graphs_that_it_should(found):
    everything = ["conv", "matmul", "scale", "attention"]
    assert found["changes"] == {
        "scaled": everything,
        "short": everything,
        "flipped": ["conv", "matmul"],
        "dropped": ["conv"],
        "inverted": ["scale"],
        "cornered": ["attention"],
        "unscaled": ["attention"],
        "stale": everything,
    }


def test_stale_gives_the_result_of_the_last_call(found):
    assert found["stale gives the last result"]


def test_stale_changes_nothing_at_first_or_where_the_inputs_are_those_of_the_last_call(found):
    assert found["stale at first"] is False
    assert found["stale again"] is False


def test_short_leaves_the_last_quarter_of_the_rows_unwritten(found):
    assert found["short"] == [True, 0.0]


def test_a_check_that_overlooks_a_wrong_result_is_reported(found):
    wrong = {"scaled", "short", "flipped", "stale"}
    assert found["notebooks"]["careful"] == dict.fromkeys(wrong, "AssertionError") | {"correct": None}
    careless = found["notebooks"]["of the first rows"]
    assert {mutation for mutation, error in careless.items() if error is None} == {"short", "correct"}
    assert set(found["notebooks"]["of the size"].values()) == {None}
