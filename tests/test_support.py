"""The support matrix of tests/support.py: the README shows it, and it tells devices apart."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import support
from nbformat import v4

NOTEBOOKS = sorted((support.REPO / "notebooks").glob("*.ipynb"))

# Sections of a small notebook. A T4 has no bf16 and no dynamic shapes. A section without graphs isn't listed, nor is
# one whose graphs no device builds.
SET_UP = """
import os, sys, torch
sys.path.insert(0, os.environ["CUDNN_NOTEBOOKS"])
from helpers import GraphError, build, describe, in_new_process, new_graph
def conv(name, dtype=torch.float16, filters=16, **options):
    g = new_graph(name, io=dtype, **options)
    x, w = (torch.empty(*dims, dtype=dtype) for dims in ((2, 16, 8, 10), (32, filters, 3, 3)))
    X, W = (describe(g, t.to(memory_format=torch.channels_last), n) for t, n in ((x, "X"), (w, "W")))
    g.conv_fprop(X, W, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
    return build(g)
def attempt(*args, **options):
    try:
        return conv(*args, **options).name
    except GraphError:
        return None
def elsewhere(dtype):
    return attempt("elsewhere", getattr(torch, dtype))
"""
SECTIONS = {
    "Everywhere": ["conv('everywhere')"],
    "Everywhere too": ["for _ in range(2): conv('twice')"],
    "Newer": ["%%needs sm89: not on a T4\nconv('newer')"],
    "Partly": ["conv('older')", "%%needs sm90\nconv('newer')"],
    "Refused": ["attempt('bf16', torch.bfloat16)"],
    "Replaced": ["attempt('x', is_dynamic_shape_enabled=True) or conv('static in the place of x')"],
    "Another process": ["in_new_process(elsewhere, 'bfloat16', uses=[conv, attempt])"],
    "A lesson": ["attempt('wrong', torch.float16, 17)"],
    "Timed": ["%%needs gpu sm89\nraise RuntimeError('no GPU')"],
    "Timed everywhere": ["%%needs gpu\nraise RuntimeError('no GPU')"],
    "Newest": ["%%needs cudnn99.0 sm90\nraise RuntimeError('no such cuDNN')"],
    "Text": ["print('no graph')"],
}
TABLE = """
| notebook · section | T4<br>SM75 | MINE<br>SM89 | H200<br>SM90 |
| --- | --- | --- | --- |
| 00_small · Newer, Timed | not: SM89 | runs | runs |
| 00_small · Partly | partly: SM90 | partly: SM90 | runs |
| 00_small · Refused | not (1) | runs | runs |
| 00_small · Replaced | partly (2) | runs | runs |
| 00_small · Another process | not (3) | runs | runs |
| 00_small · Newest | not: SM90 | not: SM90 | runs |
| 00_small · the other sections | runs | runs | runs |

1. no plan for `bf16`
2. no plan with dynamic shapes
3. no plan for `elsewhere`
""".strip()


def notebook(folder, sections):
    nb = v4.new_notebook(cells=[v4.new_markdown_cell("# A small one"), v4.new_code_cell(SET_UP)])
    for heading, sources in sections.items():
        nb.cells += [v4.new_markdown_cell(f"## {heading}"), *map(v4.new_code_cell, sources)]
    path = folder / "00_small.ipynb"
    path.write_text(v4.writes(nb))
    return path


@pytest.fixture
def folder(tmp_path):
    """Recorded devices: two of ours, and one more file."""
    for key in ("t4", "h200"):
        shutil.copy(support.DEVICES / f"{key}.json", tmp_path)
    mine = json.loads((support.DEVICES / "l4.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps({"properties": mine["properties"] | {"deviceName": "Mine"}}))
    return tmp_path


# --- the README -------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_readme_shows_the_support_matrix():
    """Executes every notebook for every recorded device."""
    shown, recorded = support.shown(support.README.read_text()), support.devices()
    fresh = support.block(NOTEBOOKS, recorded, support.collect(NOTEBOOKS, recorded))
    assert shown == fresh, "python tests/support.py --write renews it"


def test_the_matrix_is_of_these_notebooks_and_devices():
    """At once, where the test above takes minutes: the table was made from this code, these headings and devices."""
    shown = support.shown(support.README.read_text())
    assert support.made_from(NOTEBOOKS, support.devices()) in shown, "python tests/support.py --write renews it"


def test_a_changed_cell_heading_or_device_is_noticed(folder):
    path, recorded = notebook(folder, SECTIONS), support.devices(folder)
    made_from = support.made_from([path], recorded)
    assert made_from == support.made_from([path], recorded)
    assert made_from != support.made_from([path], recorded[1:])
    assert made_from != support.made_from([notebook(folder, SECTIONS | {"More": ["conv('more')"]})], recorded)
    assert made_from != support.made_from([notebook(folder, SECTIONS | {"Text": ["print('another')"]})], recorded)
    device = json.loads((folder / "mine.json").read_text())
    device["properties"]["deviceName"] = "Another"
    (folder / "mine.json").write_text(json.dumps(device))
    assert made_from != support.made_from([notebook(folder, SECTIONS)], recorded)


def test_another_table_is_noticed():
    readme = support.written("# Ours\n\nText.\n", TABLE)
    assert readme.startswith("# Ours\n\nText.\n")
    assert support.shown(readme) == TABLE
    assert support.shown(readme.replace("not (1)", "runs")) != TABLE


def test_only_the_table_is_rewritten():
    readme = support.written("# Ours\n\nText.\n", TABLE) + "\n## More\n"
    newer = TABLE.replace("not: SM89", "runs")
    assert support.written(readme, newer) == readme.replace(TABLE, newer)
    assert support.written(readme.replace(TABLE, ""), TABLE).split() == readme.split()


def test_a_readme_without_the_table_says_what_writes_it():
    with pytest.raises(ValueError, match=re.escape("`python tests/support.py --write` writes one")):
        support.shown("# Ours\n\n| notebook · section | T4 |\n")


# --- what the matrix sees ---------------------------------------------------------------------------------------------


def test_devices_are_told_apart_and_a_new_one_is_one_file(folder):
    """By %%needs lines and by what cuDNN refuses; what is refused for all is a lesson, not a gap."""
    path, recorded = notebook(folder, SECTIONS), support.devices(folder)
    assert support.table([path], recorded, support.collect([path], recorded)) == TABLE


def test_no_process_waits_for_the_last_device(folder, monkeypatch):
    """Of three devices and two processes, each takes one; the notebooks of the third are divided."""
    ran = []

    def run(command, env, **_):
        paths = command[command.index("--execute") + 1 :]
        ran.append((Path(env["CUDNN_TARGET"]).stem, paths))
        return subprocess.CompletedProcess(command, 0, json.dumps({path: {"1": {}} for path in paths}), "")

    monkeypatch.setattr(support.subprocess, "run", run)
    recorded, paths = support.devices(folder), [Path(f"/{i}.ipynb") for i in range(5)]
    found = support.collect(paths, recorded, jobs=2)
    assert found == {device: {path: {1: {}} for path in paths} for device in recorded}
    assert sorted((key, len(mine)) for key, mine in ran) == [("h200", 2), ("h200", 3), ("mine", 5), ("t4", 5)]
    ran.clear()
    support.collect(paths[:1], recorded[:1], jobs=2)
    assert ran == [("t4", ["/0.ipynb"])]


SAME = """
from helpers import new_graph
def backend(graph):
    return graph._lowered_graph
first, again = conv("first"), conv("again")
assert backend(first.graph) is backend(again.graph) and first.name == again.name
others = conv("dtype", torch.float32), conv("filters", filters=8)
assert len({*map(backend, (first.graph, *(plan.graph for plan in others)))}) == 3
"""
FILTERED = """
from helpers import autotune
a, b = (torch.empty(1, 64, 64, dtype=torch.float16) for _ in range(2))
def gelu():
    g = new_graph("gelu", io=torch.float16)
    g.gelu_approx_tanh(g.matmul(describe(g, a, "A"), describe(g, b, "B"))).set_output(True).set_name("Y")
    return g
tensors = {"A": a, "B": b, "Y": torch.empty_like(a)}
def compiled(tuning):
    return [c for c in tuning.candidates if "RUNTIME_COMPILATION" in c.notes]
tuning, limited = autotune(gelu, tensors), autotune(gelu, tensors, workspace_limit=1_000_000)
assert len(compiled(tuning)) > 2 and sum(c.status == "built" for c in compiled(tuning)) == 2
assert {c.reason for c in compiled(tuning) if c.status != "built"} == {"RuntimeError: left out: 2 others were compiled"}
assert tuning.best.plan.graph._lowered_graph is not limited.best.plan.graph._lowered_graph
"""


def test_a_plan_is_compiled_once(folder):
    """Equal graphs share their plans and both count; graphs that differ in a dtype, a dim or a filter share none."""
    path, recorded = notebook(folder, {"Same": [SAME], "Compared": [FILTERED]}), support.devices(folder)[-1:]
    (cells,) = (found[path] for found in support.collect([path], recorded).values())
    same, compared = (graphs for _, graphs in sorted(cells.items()) if graphs)
    assert same == {f"`{name}`": [1, 0] for name in ("first", "again", "dtype", "filters")}
    assert compared["`gelu`"][0] > 0


def test_a_cell_that_fails_is_an_error(folder):
    path = notebook(folder, {"Refused": ["conv('bf16', torch.bfloat16)"]})
    message = r"t4: 00_small, cell 3: GraphError: graph 'bf16' failed at step"
    with pytest.raises(RuntimeError, match=message):
        support.collect([path], support.devices(folder)[:1])


def test_all_recorded_devices_have_a_column():
    keys = [device.key for device in support.devices()]
    assert sorted(keys) == sorted(path.stem for path in support.DEVICES.glob("*.json")) and len(keys) >= 7
