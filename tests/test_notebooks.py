"""The rules of notebook_rules.py over every notebook and the README, and each rule on notebooks that break it."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import notebook_rules as rules
import pytest
import refresh
from environments import without_gpu
from nbformat import v4

from helpers.needs import parse_needs
from helpers.target import Target, recorded_devices

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
README = REPO / "README.md"
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_rule = pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)


# --- the notebooks of the series --------------------------------------------------------------------------------------


@each_notebook
@each_rule
def test_rule(rule, path):
    found = rule(rules.read(path))
    assert not found, "\n".join(found)


@each_notebook
def test_file_is_under_1_mb(path):
    assert not rules.file_size(path.stat().st_size)


@each_notebook
def test_links_resolve(path):
    found = rules.broken_links(rules.markdown_of(rules.read(path)), path)
    assert not found, "\n".join(found)


def test_names_are_numbered_from_00():
    assert NOTEBOOKS
    assert not rules.file_names([path.name for path in NOTEBOOKS])


@each_notebook
@pytest.mark.parametrize("device", recorded_devices())
def test_every_device_runs_a_verdict(path, device):
    """On each recorded device at least one self-check runs, unless the notebook's opening asks for a newer GPU."""
    assert not without_verdict(rules.read(path), Target.recorded(device))


def without_verdict(nb, target):
    """Why no verdict cell of `nb` would run on `target`; "" if one does, or if `nb` says that it needs a newer GPU."""
    needs = [parse_needs(cell.source) for cell in rules.verdict_cells(nb)]
    if target.lacks(f"sm{rules.required_sm(nb)}") or any(n is None or not target.lacks(*n[0]) for n in needs):
        return ""
    return f"none of {len(needs)} verdict cells runs on {target.name} (SM{target.sm})"


def test_readme_links_resolve():
    text = README.read_text()
    assert not rules.broken_links(text, README)
    assert not rules.foreign_hosts(text)


def test_readme_lists_every_notebook():
    named = set(re.findall(r"[\w-]+\.ipynb", README.read_text()))
    assert named == {path.name for path in NOTEBOOKS}


@each_notebook
def test_readme_gives_the_minutes_that_the_notebook_gives(path):
    row = next(line for line in README.read_text().splitlines() if f"(notebooks/{path.name})" in line)
    minutes = re.search(r"(\d+) minutes", rules.read(path).cells[0].source)
    assert minutes and row.split("|")[-3].strip() == minutes[1]


# --- a notebook that keeps the rules ----------------------------------------------------------------------------------


def markdown(source):
    return v4.new_markdown_cell(source)


def code(source, output="", *tags, folded=False, kind="stdout"):
    cell = v4.new_code_cell(source, outputs=[v4.new_output("stream", name=kind, text=output)] if output else [])
    cell.metadata.update({"tags": list(tags)} if tags else {})
    cell.metadata.update({"jupyter": {"source_hidden": True}} if folded else {})
    return cell


def good_notebook():
    nb = v4.new_notebook()
    nb.nbformat_minor = 5
    nb.metadata.kernelspec = dict(rules.KERNELSPEC)
    setup = (
        "GPU: NVIDIA H200 (SM90) · driver 1.2 · torch 2.14.1 · cuDNN 9.24.0 (site-packages/x) · cudnn-frontend 1.32.0"
    )
    nb.cells = [
        markdown("# Do one thing\n\nNeeds SM75. See [the steps](#the-steps) and [cuDNN](https://docs.nvidia.com/)."),
        code("from helpers import target\n\nprint(target.report())", setup + "\n"),
        markdown("## The steps\n\n> **Why** Because `[this](is no link)`.\n> Second line.\n\n1 TFLOP/s and/or 2 GB/s"),
        code("assert 1 + 1 == 2\nprint('sum: PASS')", "sum: PASS\n", "nbval-check-output"),
        code("%%needs gpu sm80 cudnn9.21: the rest runs\nprint(1)", "1\n"),
        markdown("## Exercises\n\n**1. One.** *Hint:* think."),
        code("check(None)", "not attempted yet\n"),
        code("check(1)", "one: PASS\n", "solution", "nbval-check-output", folded=True),
        markdown("**2. Two.** *Hint:* think more."),
        code("check(None)", "not attempted yet\n"),
        code("check(2)", "two: PASS\n", "solution", "nbval-check-output", folded=True),
        markdown("## In practice\n\nDo it."),
    ]
    for count, cell in enumerate(rules.code_cells(nb), 1):
        cell.execution_count = count
    return restamped(nb)


def restamped(nb, **changes):
    environment = {
        "gpu": "NVIDIA H200",
        "driver": "1.2",
        "torch": "2.14.1",
        "cudnn": "9.24.0",
        "cudnn_frontend": "1.32.0",
        "python": "3.12.3",
        "date": "2026-01-31",
        "code_sha256": rules.code_hash(nb),
        "outputs_sha256": rules.outputs_hash(nb),
    }
    nb.metadata[rules.STAMP] = {**environment, **changes}
    return nb


@each_rule
def test_rule_accepts_a_good_notebook(rule):
    assert not rule(good_notebook())


def test_exercises_may_share_what_stands_before_them_and_have_names_of_their_own():
    nb = good_notebook()
    nb.cells[5:6] = [markdown("## Exercises"), code("def check(a):\n    pass"), markdown("**1. One.** *Hint:* think.")]
    set_source(nb, 8, "x = 1\ncheck(x)")
    set_source(nb, 11, "x = 2\ncheck(x)")
    assert not rules.exercises_alone(nb)


# --- each rule on notebooks that break it -----------------------------------------------------------------------------


def change_output(nb, cell=3, output="sum: PASS, too\n"):
    nb.cells[cell].outputs[0].text = output


def add_output(nb, cell, output):
    nb.cells[cell].outputs.append(output)


def picture(text=""):
    return v4.new_output("display_data", {"image/png": "/tmp/" + "A" * 80, "text/plain": text})


def set_source(nb, cell, source):
    nb.cells[cell].source = source


def set_tags(nb, cell, *tags):
    nb.cells[cell].metadata["tags"] = list(tags)


def lend(nb, first, second):
    """Sets the stubs of both exercises."""
    set_source(nb, 6, first)
    set_source(nb, 9, second)


ERROR = v4.new_output("error", ename="ValueError", evalue="no", traceback=["at /home/me/x.py"])
WINDOWS = "'C:" + "\\" + "Users'"

# (rule, what is done to the good notebook, what the violation says)
BAD = [
    (rules.stamped, lambda nb: nb.metadata.pop(rules.STAMP), "no stamp"),
    (rules.stamped, lambda nb: nb.metadata[rules.STAMP].pop("driver"), "no driver"),
    (rules.stamped, lambda nb: restamped(nb, date="yesterday"), "date"),
    (rules.stamped, lambda nb: restamped(nb, gpu=rules.NO_GPU + "NVIDIA H200"), "without a GPU"),
    (rules.stamped, lambda nb: set_source(nb, 3, "print('sum: PASS')"), "code has changed"),
    (rules.stamped, lambda nb: set_tags(nb, 3), "code has changed"),
    (rules.stamped, lambda nb: nb.cells.insert(3, nb.cells.pop(4)), "code has changed"),
    (rules.stamped, change_output, "outputs have changed"),
    (rules.setup_cell_matches_stamp, lambda nb: restamped(nb, gpu="Tesla T4"), "Tesla T4"),
    (rules.setup_cell_matches_stamp, lambda nb: restamped(nb, cudnn="9.19.0"), "cuDNN 9.19.0"),
    (rules.setup_cell_matches_stamp, lambda nb: change_output(nb, 1, "No GPU; recorded target: NVIDIA H200"), "GPU:"),
    (rules.execution_counts, lambda nb: nb.cells[3].update(execution_count=None), "None"),
    (rules.execution_counts, lambda nb: nb.cells[1].update(execution_count=7), "7"),
    (rules.no_errors, lambda nb: add_output(nb, 4, ERROR), "ValueError"),
    (rules.no_errors, lambda nb: add_output(nb, 4, v4.new_output("stream", name="stderr", text="warn")), "stderr"),
    (rules.verdicts, lambda nb: [set_tags(nb, i) for i in (3, 7, 10)], "no cell is tagged"),
    (rules.verdicts, lambda nb: nb.cells[3].update(outputs=[]), "no stored output"),
    (rules.verdicts, lambda nb: nb.cells[3].update(execution_count=None), "no stored output"),
    (rules.verdicts, lambda nb: change_output(nb, 3, "2\n"), "no PASS"),
    (rules.verdicts, lambda nb: add_output(nb, 3, picture()), "nothing else"),
    (rules.verdicts, lambda nb: set_tags(nb, 3, "nbval-check-output", "nbval-skip"), "other tags"),
    (rules.verdicts, lambda nb: set_tags(nb, 3, "nbval-check-output", "raises-exception"), "other tags"),
    (rules.verdicts, lambda nb: set_source(nb, 3, "# NBVAL_IGNORE_OUTPUT\nprint(1)"), "NBVAL_IGNORE_OUTPUT"),
    (rules.cell_lengths, lambda nb: set_source(nb, 4, "a\n" * 31), "31 lines"),
    (rules.cell_lengths, lambda nb: [set_source(nb, i, "a\n" * 9) for i in (3, 4, 6, 7)], "median"),
    (rules.no_empty_cells, lambda nb: set_source(nb, 4, " \n"), "cell 4"),
    (rules.setup_cell, lambda nb: set_source(nb, 1, "a\n" * 15 + "print(target.report())"), "16 lines"),
    (rules.setup_cell, lambda nb: set_source(nb, 1, "print(1)"), "target.report()"),
    (rules.setup_cell, lambda nb: change_output(nb, 1, "one\ntwo\n"), "2 lines"),
    (rules.setup_cell, lambda nb: nb.cells[1].update(outputs=[]), "0 lines"),
    (rules.setup_cell, lambda nb: nb.update(cells=[nb.cells[0]]), "no code cell"),
    (rules.needs_lines, lambda nb: set_source(nb, 4, "import x\n%%needs gpu"), "top of its cell"),
    (rules.needs_lines, lambda nb: set_source(nb, 4, "%%time\nx"), "%%time"),
    (rules.needs_lines, lambda nb: set_source(nb, 4, "%%needs a100\nx"), "no requirement"),
    (rules.needs_lines, lambda nb: set_source(nb, 4, "%%needs: gpu\nx"), "no requirement"),
    (rules.needs_lines, lambda nb: set_source(nb, 4, "%%needs gpu cudnn9\nx"), "no requirement"),
    (rules.no_absolute_paths, lambda nb: set_source(nb, 4, "open('/home/me/x')"), "/home/me"),
    (rules.no_absolute_paths, lambda nb: set_source(nb, 4, f"open({WINDOWS})"), "Users"),
    (rules.no_absolute_paths, lambda nb: set_source(nb, 2, "Look into /usr/lib/x."), "/usr/lib"),
    (rules.no_absolute_paths, lambda nb: change_output(nb, 4, "at /tmp/ipykernel_7/1.py:3\n"), "/tmp/ipykernel_7"),
    (rules.no_absolute_paths, lambda nb: add_output(nb, 4, picture("file '/root/a'")), "/root/a"),
    (rules.no_absolute_paths, lambda nb: add_output(nb, 4, ERROR), "/home/me"),
    (rules.hosts, lambda nb: set_source(nb, 2, "See https://example.org/x."), "example.org"),
    (
        rules.hosts,
        lambda nb: set_source(nb, 4, "!pip install --index-url https://packages.example/simple x"),
        "example",
    ),
    (rules.title, lambda nb: set_source(nb, 0, "Do one thing"), "first cell"),
    (rules.title, lambda nb: nb.cells.pop(0), "first cell"),
    (rules.call_outs, lambda nb: set_source(nb, 2, "> **Note** this"), "Note"),
    (rules.call_outs, lambda nb: set_source(nb, 2, "> quoted"), "quoted"),
    (rules.exercises, lambda nb: [nb.cells.pop() for _ in range(4)], "1 exercises"),
    (rules.exercises, lambda nb: [nb.cells.insert(11, copy.deepcopy(nb.cells[8])) for _ in range(3)], "5 exercises"),
    (rules.exercises, lambda nb: set_source(nb, 8, "**3. Two.** *Hint:* none"), "[1, 3]"),
    (rules.exercises, lambda nb: set_source(nb, 8, "**2. Two.**"), "2: no hint"),
    (rules.exercises, lambda nb: nb.cells.pop(6), "1: no stub"),
    (rules.exercises, lambda nb: nb.cells.pop(10), "2: no cell tagged solution"),
    (rules.exercises, lambda nb: set_tags(nb, 7, "solution"), "1: no solution cell is tagged"),
    (rules.exercises, lambda nb: nb.cells[7].metadata.pop("jupyter"), "not folded"),
    (rules.exercises_alone, lambda nb: lend(nb, "import math", "print(math.pi)"), "2 needs math of exercise 1"),
    (rules.exercises_alone, lambda nb: lend(nb, "for x in y: pass", "%%needs sm80\nx"), "2 needs x of exercise 1"),
    (rules.exercises_alone, lambda nb: lend(nb, "z", "def z(a):\n    return a"), "exercise 1 needs z of exercise 2"),
    (rules.file_format, lambda nb: nb.update(nbformat_minor=4), "4.4"),
    (rules.file_format, lambda nb: nb.metadata.kernelspec.update(name="my-env"), "my-env"),
    (rules.file_format, lambda nb: nb.metadata.pop("kernelspec"), "kernelspec"),
    (rules.file_format, lambda nb: nb.cells[2].update(id=nb.cells[3].id), "ids"),
    (rules.file_format, lambda nb: nb.cells[2].pop("id"), "ids"),
    (rules.file_format, lambda nb: nb.cells[3].pop("metadata"), ""),
    (rules.file_format, lambda nb: nb.cells[3].metadata.update(execution={"iopub.execute_input": "x"}), "executed"),
]


@pytest.mark.parametrize(
    ("rule", "spoil", "says"), BAD, ids=[f"{rule.__name__}-{i}" for i, (rule, _, _) in enumerate(BAD)]
)
def test_rule_finds_what_breaks_it(rule, spoil, says):
    nb = good_notebook()
    spoil(nb)
    found = rule(nb)
    assert found
    assert any(says in violation for violation in found), found


def test_every_rule_is_shown_to_fail():
    assert {rule for rule, _, _ in BAD} == set(rules.RULES)


def test_paths_in_packages_urls_and_pictures_are_no_absolute_paths():
    nb = good_notebook()
    fine = (
        "site-packages/nvidia/cudnn/lib · https://docs.nvidia.com/usr/x · a/home/b · ~/tmp/x · {folder}/data/x · </var>"
    )
    set_source(nb, 4, fine)
    add_output(nb, 4, picture())
    assert not rules.no_absolute_paths(nb)


def test_ids_are_those_of_the_file(tmp_path):
    """nbformat.read would repair them silently."""
    nb = json.loads(v4.writes(good_notebook()))
    del nb["cells"][0]["id"]
    (tmp_path / "x.ipynb").write_text(json.dumps(nb))
    assert any("ids" in found for found in rules.file_format(rules.read(tmp_path / "x.ipynb")))


def test_file_size():
    assert not rules.file_size(1_000_000)
    assert rules.file_size(1_000_001) == ["1,000,001 bytes"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["00_a.ipynb", "02_b.ipynb"], "00, 02"),
        (["01_a.ipynb"], "01"),
        (["00_a.ipynb", "00_b.ipynb"], "00, 00"),
        (["00-a.ipynb"], "00-a"),
        (["00_A.ipynb"], "00_A"),
    ],
)
def test_file_names(names, says):
    assert any(says in found for found in rules.file_names(names))


def test_links(tmp_path):
    (tmp_path / "other.md").write_text("# A heading, here\n\n```\n# not one\n```\n")
    (tmp_path / "nb.ipynb").write_text(v4.writes(good_notebook()))
    text = """# Here `too`
    [a](other.md) [b](other.md#a-heading-here) [c](#here-too) [d](#Here-too) [e](nb.ipynb#The-steps) ![p](other.md "t")
    [web](https://github.com/x) `[not](a link)` <img src="other.md">\n[ref]: other.md
    """
    assert not rules.broken_links(text, tmp_path / "README.md")
    for bad in (
        "[a](missing.md)",
        "![a](missing.png)",
        "[a](<missing.md>)",
        '<img src="missing.png">',
        "[a]: missing.md",
        "[a](other.md#not-one)",
        "[a](#nowhere)",
        "[a](nb.ipynb#nowhere)",
        "[a](ftp://x/y)",
    ):
        assert rules.broken_links(bad, tmp_path / "README.md"), bad
    assert rules.foreign_hosts("see http://example.org/a") and not rules.foreign_hosts("https://github.com/a")


def test_required_sm():
    def opening(text):
        nb = good_notebook()
        set_source(nb, 0, text)
        return rules.required_sm(nb)

    assert opening("# T\n\nNeeds SM89 or newer; SM100 is faster.") == 89
    assert opening("# T\n\nA GPU of compute capability 8.0 or newer") == 80
    assert opening("# T\n\nAny GPU.") == 75


def test_a_notebook_whose_verdicts_all_need_more_is_found():
    nb = good_notebook()
    nb.cells[7].source = nb.cells[10].source = "%%needs gpu\ncheck(1)"
    set_source(nb, 3, "%%needs sm89\nassert True")
    t4, h200 = Target.recorded("t4"), Target.recorded("h200")
    assert "Tesla T4" in without_verdict(nb, t4)
    assert not without_verdict(nb, h200)
    set_source(nb, 0, "# T\n\nNeeds SM89.")
    assert not without_verdict(nb, t4)


def test_hashes_depend_on_what_they_stand_for():
    nb, first = good_notebook(), rules.code_hash(good_notebook())
    assert rules.code_hash(nb) == first  # cell ids are random
    set_source(nb, 0, "# Other text")
    change_output(nb)
    nb.cells[3].execution_count = 9
    assert rules.code_hash(nb) == first
    assert rules.outputs_hash(nb) != rules.outputs_hash(good_notebook())
    two = good_notebook()
    two.cells[3].source, two.cells[4].source = two.cells[3].source + two.cells[4].source, ""
    assert rules.code_hash(two) != first


# --- the script that stores the outputs -------------------------------------------------------------------------------


def executable_notebook():
    nb = good_notebook()
    nb.metadata.pop(rules.STAMP)
    nb.cells = nb.cells[:4]
    set_source(nb, 1, "import sys\nprint('set up'); print('in', end=' '); print('one line')")
    for cell in rules.code_cells(nb):
        cell.update(outputs=[], execution_count=None)
    return nb


def stamp(gpu="NVIDIA H200"):
    return {
        key: value
        for key, value in restamped(good_notebook(), gpu=gpu).metadata[rules.STAMP].items()
        if "sha" not in key
    }


def test_refresh_executes_and_stamps(tmp_path):
    path = tmp_path / "00_x.ipynb"
    path.write_text(v4.writes(executable_notebook()))
    ids = [cell.id for cell in rules.read(path).cells]
    refresh.refresh(path, path, stamp())
    nb = rules.read(path)
    for rule in (rules.stamped, rules.execution_counts, rules.file_format, rules.verdicts, rules.no_errors):
        assert not rule(nb)
    assert [cell.id for cell in nb.cells] == ids
    assert rules.stored_text(rules.code_cells(nb)[0]) == "set up\nin one line\n"
    assert set(nb.metadata.language_info) == {"name", "file_extension", "pygments_lexer"}
    assert os.listdir(tmp_path) == ["00_x.ipynb"]


def test_refresh_leaves_a_failing_notebook_as_it_is(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "00_x.ipynb", tmp_path / "01_y.ipynb"
    nb = executable_notebook()
    set_source(nb, 3, "assert 1 + 1 == 3, 'wrong sum'")
    bad.write_text(v4.writes(nb))
    before = bad.read_bytes()
    monkeypatch.setattr(refresh, "environment", stamp)
    assert "wrong sum" in refresh.main([str(bad), str(good)])
    assert bad.read_bytes() == before
    assert "[1/2] 01_y.ipynb ... failed" in capsys.readouterr().out


def test_refresh_gives_each_notebook_an_empty_compute_cache(tmp_path):
    path, nb = tmp_path / "00_x.ipynb", executable_notebook()
    set_source(
        nb, 3, "import os, pathlib\n\ncache = pathlib.Path(os.environ['CUDA_CACHE_PATH'])\nprint([*cache.iterdir()])"
    )
    path.write_text(v4.writes(nb))
    refresh.refresh(path, path, stamp())
    assert rules.stored_text(rules.read(path).cells[3]) == "[]\n"


def test_refresh_stops_in_place_without_a_gpu(tmp_path):
    path = tmp_path / "00_x.ipynb"
    path.write_text(v4.writes(executable_notebook()))
    before = path.read_bytes()
    result = subprocess.run(
        [sys.executable, REPO / "tests" / "refresh.py", path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=without_gpu(),
    )
    assert result.returncode == 1
    assert "no GPU here" in result.stderr and "Traceback" not in result.stderr
    assert path.read_bytes() == before


def test_refresh_writes_copies_without_a_gpu_whose_stamp_says_so(tmp_path, monkeypatch):
    path = tmp_path / "00_x.ipynb"
    path.write_text(v4.writes(executable_notebook()))
    before = path.read_bytes()
    monkeypatch.setattr(refresh, "environment", lambda: stamp(rules.NO_GPU + "NVIDIA H200"))
    assert refresh.main([str(path), "--to", str(tmp_path / "copies")]) == 0
    assert path.read_bytes() == before
    assert any("without a GPU" in found for found in rules.stamped(rules.read(tmp_path / "copies" / "00_x.ipynb")))


def test_write_is_whole_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    refresh.write(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        refresh.write(path, "newer")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a"]
