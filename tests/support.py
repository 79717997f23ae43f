"""The support matrix: which sections of the notebooks have plans on which recorded device.

    python tests/support.py            prints the table
    python tests/support.py --write    puts it into README.md, between the two lines MARKERS

Every notebook is executed for every device of helpers/devices without a GPU: cuDNN compiles each graph for the device,
and the self-checks run. A failing cell is an error, whatever the device. What a section shows on a device is decided by
the graphs that its cells build:

    runs      all that any device builds there
    partly    some of them
    not       none of them

A graph is missing where its cell is skipped for want of compute capability (`%%needs sm89`), or where cuDNN refuses it
here and builds it for another device; refused for all, it is a lesson. Cells that need a GPU are not executed: they
count by what else their %%needs line asks for. What a newer cuDNN would run is no device's matter and doesn't count.
"""

import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import notebook_rules as rules
import try_answers
from environments import without_gpu

REPO = Path(__file__).resolve().parents[1]
DEVICES = REPO / "helpers" / "devices"
README = REPO / "README.md"
MARKERS = ("<!-- support matrix: python tests/support.py --write -->", "<!-- end of the support matrix -->")
DYNAMIC = "dynamic shapes"  # stands for all such graphs: a device has them or has not
STEPS = ("validate", "build_operation_graph", "create_execution_plans", "create_execution_plan", "check_support")
BUILDS = ("build_plans", "build_plan_at_index", "deserialize")
COMPARED = 2  # of a graph's candidates that are compiled one by one, to be compared; the others tell nothing new


# --- one device, in a process of its own ------------------------------------------------------------------------------


class Recorder:
    """The graphs of each cell: {cell: {graph: [how many were built, how many were refused]}}.

    Compiling is most of the time, so each plan is compiled once: a graph that computes the same as an earlier one takes
    over the plans of that one. Of the candidates that are built one by one, only COMPARED are compiled per graph.

    cudnn      the module whose graphs are noted.
    signature  what tells two graphs apart; helpers.signature.graph_signature.
    """

    def __init__(self, cudnn, signature):
        self.cudnn, self.signature = cudnn, signature
        self.graphs, self.cells = {}, {}
        self.backends, self.compared = {}, {}
        for name in STEPS + BUILDS:
            setattr(cudnn.pygraph, name, self._noting(getattr(cudnn.pygraph, name), name in BUILDS))

    def _noting(self, method, builds):
        def call(graph, *args, **options):
            outcomes = self.graphs.setdefault(graph, set())
            if args and getattr(args[0], "name", "") == "ALL":  # the first plan tells whether there is one
                args = (type(args[0]).HEURISTICS_CHOICE, *args[1:])
            if builds and graph._plans:
                self._take_over(graph)
            try:
                if method.__name__ == "build_plan_at_index":
                    self._compare(graph, *args)
                result = method(graph, *args, **options)
            except Exception:
                outcomes.add("refused")
                raise
            outcomes.update(["built"] if builds else [])
            return result

        return call

    def _take_over(self, graph):
        options = graph._cpp_graph_kwargs
        if "kernel_cache" in options or "is_dynamic_shape_enabled" in options:
            return  # what such a graph compiles depends on the cache
        backend = graph._lowered_graph
        candidates = [backend.get_plan_name_at_index(i) for i in range(backend.get_execution_plan_count())]
        filters = [graph._workspace_limit, sorted(graph._barred_names), graph._note_filters]
        same = repr((self.signature(graph), candidates, filters))
        # The backend's graph holds the plans, and builds none of them a second time.
        graph._lowered_graph = self.backends.setdefault(same, backend)

    def _compare(self, graph, index):
        if self.cudnn.behavior_note.RUNTIME_COMPILATION not in graph.get_behavior_notes_for_plan_at_index(index):
            return
        compiled = self.compared.setdefault(graph._lowered_graph, set())
        if index not in compiled and len(compiled) >= COMPARED:
            raise RuntimeError(f"left out: {COMPARED} others were compiled")
        compiled.add(index)

    def end_of_cell(self, cell):
        found = self.cells.setdefault(cell, {})
        for graph, outcomes in self.graphs.items():
            options = graph._cpp_graph_kwargs
            name = DYNAMIC if options.get("is_dynamic_shape_enabled") else f"`{options['name']}`"
            entry = found.setdefault(name, [0, 0])
            if outcomes:
                entry["built" not in outcomes] += 1  # a candidate that was refused before another was built is none
        self.graphs.clear()


def same_process(process):
    """A stand-in for helpers.in_new_process: a process that builds for this device too would take seconds to start."""
    import torch

    import helpers

    def call(function, *arguments, uses=(), device=None, **options):
        if device:
            return process.in_new_process(function, *arguments, uses=uses, device=device, **options)
        names = {name: sys.modules[name] for name in ("cudnn", "json", "sys", "time", "torch")}
        names |= {name: getattr(helpers, name) for name in helpers.__all__}
        with torch.random.fork_rng():
            torch.manual_seed(67280421310721)  # torch's default
            for item in (*uses, function):
                exec(process._source(item), names)
            value = names[function.__name__](*json.loads(json.dumps(arguments)))
        return process.Finished(json.loads(json.dumps(value)), 1.0, 1.0, 1.0, 3.0)

    return call


def execute(paths):
    """Executes notebooks for the device of CUDNN_TARGET: {path: {cell: {graph: [built, refused]}}}."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()  # before helpers, which makes %%needs known to the shell that it finds
    sys.path.insert(0, str(REPO))
    import helpers  # isort: skip  before cudnn, which could find an older libcudnn of the system
    import cudnn
    from matplotlib import pyplot

    from helpers.signature import graph_signature

    recorder = Recorder(cudnn, graph_signature)
    helpers.draw_graph = lambda *_, **__: None  # pictures take half a second per notebook
    helpers.in_new_process = same_process(sys.modules["helpers.process"])
    gc.freeze()  # collecting all that torch imports takes a fifth of a second, each time
    found = {}
    for path in paths:
        shell.reset(new_session=False)
        recorder.cells = {}
        for index, cell in enumerate(rules.read(Path(path)).cells):
            if cell.cell_type != "code":
                continue
            _, error = try_answers.execute(cell.source, shell)
            pyplot.close("all")
            if error:
                message = " ".join(error.split())
                raise RuntimeError(f"{Path(path).stem}, cell {index}: {message[:500]}")
            recorder.end_of_cell(index)
        found[path] = recorder.cells
    return found


# --- all devices ------------------------------------------------------------------------------------------------------


class Device(NamedTuple):
    """A recorded device: the name of its file, its compute capability as one number, and the file."""

    key: str
    sm: int
    path: Path


def devices(folder=DEVICES):
    """The recorded devices of a folder, by compute capability."""
    found = []
    for path in folder.glob("*.json"):
        properties = json.loads(path.read_text())["properties"]
        found.append(Device(path.stem, properties["deviceVer"] // 10, path))
    return sorted(found, key=lambda device: (device.sm, device.key))


def collect(paths, recorded, jobs=None):
    """Executes notebooks for recorded devices: {device: {path: {cell: {graph: [built, refused]}}}}.

    jobs  how many processes at once; default: the number of CPU cores. Each takes about 1.5 GB of memory.

    Raises RuntimeError for a cell that fails, with notebook, cell and error.
    """
    jobs = jobs or os.cpu_count()

    def run(device, paths):
        environment = without_gpu(CUDNN_TARGET=device.path, CUDNN_NOTEBOOKS=REPO, MPLBACKEND="Agg")
        environment["OMP_NUM_THREADS"] = "1"  # several devices at once
        command = [sys.executable, __file__, "--execute", *map(str, paths)]
        with tempfile.TemporaryDirectory() as folder:
            child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if child.returncode:
            said = child.stdout.strip() or child.stderr.strip() or f"exit code {child.returncode}"
            raise RuntimeError(f"{device.key}: {said.splitlines()[-1]}")
        found = json.loads(child.stdout.splitlines()[-1])
        return {Path(path): {int(cell): graphs for cell, graphs in cells.items()} for path, cells in found.items()}

    tasks = []
    for place, device in enumerate(recorded):
        # Devices that would leave processes without work at the end: their notebooks are divided among all.
        parts = jobs if place >= len(recorded) - len(recorded) % jobs else 1
        tasks += [(device, paths[i::parts]) for i in range(parts) if paths[i::parts]]
    found = {device: {} for device in recorded}
    with ThreadPoolExecutor(jobs) as pool:
        for (device, _), cells in zip(tasks, pool.map(run, *zip(*tasks, strict=True)), strict=True):
            found[device] |= cells
    return found


# --- the table --------------------------------------------------------------------------------------------------------


def sections(nb):
    """{heading: [indices of its code cells]} of the second-level headings; cells before the first have the title's."""
    found, heading = {}, "start"
    for index, cell in enumerate(nb.cells):
        if cell.cell_type == "code":
            found.setdefault(heading, []).append(index)
        else:
            text = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
            heading = next(reversed(re.findall(r"^## +(.*?) *#*$", text, re.MULTILINE)), heading)
    return found


def shortfall(cell, index, recorded, found):
    """{device: (what it builds of this cell's graphs, why not the rest)}: ("all", ""), ("some", ...) or ("none", ...).

    {} for a cell without graphs of its own. found: {device: {cell: {graph: [built, refused]}}} of the notebook.
    """
    built = {graph for cells in found.values() for graph, (count, _) in cells.get(index, {}).items() if count}
    words = rules.needs(cell)
    required = max((int(word[2:]) for word in words if word.startswith("sm")), default=0)
    if not built and not (required and {"gpu", "cudnn"} & {word[:5] for word in words}):
        return {}
    shortfalls = {}
    for device in recorded:
        here = {graph: found[device].get(index, {}).get(graph, [0, 0]) for graph in built}
        # A graph that nobody asked for here isn't missing. Dynamic shapes are, where static plans take their place.
        lacking = sorted(g for g, (count, refused) in here.items() if not count and (refused or g == DYNAMIC))
        if device.sm < required:
            shortfalls[device] = ("none", f"SM{required}")
        elif lacking:
            reasons = (f"no plan {'with' if graph == DYNAMIC else 'for'} {graph}" for graph in lacking)
            shortfalls[device] = ("some" if any(count for count, _ in here.values()) else "none", "; ".join(reasons))
        else:
            shortfalls[device] = ("all", "")
    return shortfalls


def rows(paths, recorded, found):
    """[(notebook, [sections], [(status, [reasons]) of each device])]; a notebook's sections of equal status are one."""
    listed = []
    for path in paths:
        nb, groups = rules.read(path), {}
        here = {device: found[device][path] for device in recorded}
        for heading, indices in sections(nb).items():
            cells = [cell for i in indices if (cell := shortfall(nb.cells[i], i, recorded, here))]
            if cells:
                groups.setdefault(tuple(_status([c[device] for c in cells]) for device in recorded), []).append(heading)
        most = max(groups.values(), key=len, default=[])
        for statuses, headings in sorted(groups.items(), key=lambda group: group[1] is most):
            if headings is most and len(most) > 1:
                headings = ["all"] if len(groups) == 1 else ["the other sections"]
            listed.append((path.stem, headings, list(statuses)))
    return listed


def _status(cells):
    """(status, the different reasons) of a section from the shortfalls of its cells."""
    built = {what for what, _ in cells}
    status = "runs" if built == {"all"} else "not" if built == {"none"} else "partly"
    return status, tuple(dict.fromkeys(reason for _, reason in cells if reason))


def made_from(paths, recorded):
    """The line below the table: a hash of the code and headings of the notebooks and of the devices' properties.

    It tells in a moment that a table is older than the files it was made from. What helpers and cuDNN change, only a
    fresh table tells.
    """
    notebooks = [[path.stem, rules.code_hash(nb := rules.read(path)), list(sections(nb))] for path in paths]
    content = [notebooks, [[device.key, json.loads(device.path.read_text())["properties"]] for device in recorded]]
    return f"<!-- made from {hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]} -->"


def table(paths, recorded, found):
    """The matrix in Markdown. A compute capability that is missing stands in the cell, another reason below it."""
    notes = []

    def text(status, reasons):
        sm = [reason for reason in reasons if reason.startswith("SM")]
        others = [reason for reason in reasons if reason not in sm]
        notes.extend(reason for reason in others if reason not in notes)
        marks = "".join(f" ({notes.index(reason) + 1})" for reason in others)
        return status + (": " + ", ".join(sm) if sm else "") + marks

    lines = [
        "| notebook · section | " + " | ".join(f"{d.key.upper()}<br>SM{d.sm}" for d in recorded) + " |",
        "| --- |" + " --- |" * len(recorded),
    ]
    for name, headings, statuses in rows(paths, recorded, found):
        lines.append(" | ".join([f"| {name} · {', '.join(headings)}", *(text(*status) for status in statuses)]) + " |")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))]).strip()


# --- the README -------------------------------------------------------------------------------------------------------


def block(paths, recorded, found):
    """The table as the README has it, with the line that says what it was made from."""
    return f"{table(paths, recorded, found)}\n\n{made_from(paths, recorded)}"


def shown(readme):
    """The block between the two MARKERS of a README's text. Raises ValueError where they are missing."""
    start, end = _between(readme)
    return readme[start:end].strip()


def written(readme, text):
    """A README's text with this table between its MARKERS; where it has none, with both at its end."""
    if MARKERS[0] not in readme:
        readme = "\n".join([readme.rstrip(), "", *MARKERS, ""])
    start, end = _between(readme)
    return f"{readme[:start]}\n\n{text}\n\n{readme[end:]}"


def _between(readme):
    between = re.search("(.*)".join(map(re.escape, MARKERS)), readme, re.DOTALL)
    if between is None:
        raise ValueError("README.md has no support matrix: `python tests/support.py --write` writes one")
    return between.span(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--execute"]:
        try:
            print(json.dumps(execute(sys.argv[2:])))
        except RuntimeError as error:
            print(error)
            sys.exit(1)
        sys.exit()
    notebooks, recorded = sorted((REPO / "notebooks").glob("*.ipynb")), devices()
    fresh = block(notebooks, recorded, collect(notebooks, recorded))
    if sys.argv[1:] == ["--write"]:
        README.write_text(written(README.read_text(), fresh))
    else:
        print(fresh)
