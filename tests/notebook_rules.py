"""The rules that every notebook keeps. Each is a function of a notebook node and returns a list of violations.

Nothing here imports torch or cuDNN, so the rules also run where neither is installed.
"""

import ast
import hashlib
import itertools
import json
import re
import statistics
from urllib.parse import unquote, urlsplit

import nbformat

STAMP = "cudnn_series"  # the metadata key under which tests/refresh.py says where the stored outputs come from
STAMP_KEYS = ("gpu", "driver", "torch", "cudnn", "cudnn_frontend", "python", "date", "code_sha256", "outputs_sha256")
NO_GPU = "none; recorded target "  # how the stamp of an execution without a GPU starts
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CHECKED, SOLUTION = "nbval-check-output", "solution"
MAX_BYTES = 1_000_000
MAX_CELL_LINES, MAX_MEDIAN_LINES, MAX_SETUP_LINES = 30, 8, 15
CALL_OUTS = ("Requirement", "Pitfall", "Why")
# Texts link only to these. A list of what is allowed also stops package mirrors and mistyped addresses.
HOSTS = {
    "arxiv.org",
    "developer.nvidia.com",
    "docs.nvidia.com",
    "docs.pytorch.org",
    "github.com",
    "matplotlib.org",
    "numpy.org",
    "pytorch.org",
    "triton-lang.org",
}


# --- reading a notebook -----------------------------------------------------------------------------------------------


def read(path):
    """The notebook as it is in the file: nbformat.read would repair missing ids and other faults."""
    return nbformat.v4.reads(path.read_text(encoding="utf-8"))


def code_cells(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def tags(cell):
    return list(cell.metadata.get("tags", []))


def needs(cell):
    """The words of a cell's %%needs line: ["gpu", "sm89"]; [] without one. helpers.needs obeys the same line."""
    first = cell.source.split("\n", 1)[0]
    return first.split(":")[0].split()[1:] if re.match(r"%%needs\b", first) else []


def lines(cell):
    return len(cell.source.splitlines())


def verdict_cells(nb):
    """The cells whose output nbval compares."""
    return [cell for cell in code_cells(nb) if CHECKED in tags(cell)]


def output_text(output):
    """What an output shows as text. Pictures are left out: their base64 is no text."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join([output.ename, output.evalue, *output.traceback])
    data = output.get("data", {})
    texts = (value for kind, value in data.items() if not kind.startswith(("image/png", "image/jpeg")))
    return "\n".join(v if isinstance(v, str) else json.dumps(v) for v in texts)


def stored_text(cell):
    return "".join(output_text(output) for output in cell.get("outputs", []))


def code_hash(nb):
    """sha256 of the code cells' sources and tags, in order; outputs, ids and text cells don't count."""
    content = [[cell.source, sorted(tags(cell))] for cell in code_cells(nb)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def outputs_hash(nb):
    """sha256 of all stored outputs, in order."""
    content = [cell.get("outputs", []) for cell in code_cells(nb)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def required_sm(nb):
    """The least compute capability named before the first code cell ("SM80" or "compute capability 8.0"), else 75."""
    texts = itertools.takewhile(lambda cell: cell.cell_type != "code", nb.cells)
    found = re.findall(r"\b(?:SM ?|compute capability )(\d{1,2}\.?\d)\b", "\n".join(cell.source for cell in texts))
    return min((int(number.replace(".", "")) for number in found), default=75)


def _where(nb, cell):
    first = next(iter(cell.source.strip().splitlines()), "empty")
    return f"cell {nb.cells.index(cell)} ({first[:50]!r})"


# --- the stored outputs -----------------------------------------------------------------------------------------------


def stamped(nb):
    """Stored outputs are those of tests/refresh.py, on a named GPU, and of exactly this code."""
    stamp = nb.metadata.get(STAMP)
    if not stamp:
        return ["no stamp: execute it on a GPU machine with python tests/refresh.py"]
    found = [f"stamp: no {key}" for key in STAMP_KEYS if not stamp.get(key)]
    if found:
        return found
    if stamp["gpu"].startswith(NO_GPU) or "no gpu" in stamp["gpu"].lower():
        found.append(f"stamp: executed without a GPU ({stamp['gpu']})")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", stamp["date"]):
        found.append(f"stamp: date {stamp['date']!r} is not YYYY-MM-DD")
    if stamp["code_sha256"] != code_hash(nb):
        found.append("the code has changed since its outputs were stored: python tests/refresh.py on a GPU machine")
    if stamp["outputs_sha256"] != outputs_hash(nb):
        found.append("outputs have changed since tests/refresh.py stored them: run it again on a GPU machine")
    return found


def setup_cell_matches_stamp(nb):
    """The set-up cell's stored line names the GPU, the driver and the versions of the stamp."""
    stamp, cells = nb.metadata.get(STAMP, {}), code_cells(nb)
    line = stored_text(cells[0]) if cells else ""
    wanted = [("GPU: {gpu} ", "gpu"), ("driver {driver} ", "driver"), ("torch {torch} ", "torch")]
    wanted += [("cuDNN {cudnn} ", "cudnn"), ("cudnn-frontend {cudnn_frontend}", "cudnn_frontend")]
    texts = [text.format(**{key: stamp.get(key)}) for text, key in wanted]
    return [f"the set-up cell's output does not say {text.strip()!r}" for text in texts if text not in line]


def execution_counts(nb):
    """Execution counts are 1, 2, 3, ... in the order of the code cells."""
    counts = [cell.execution_count for cell in code_cells(nb)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts are {counts}"]


def no_errors(nb):
    """No stored error, and nothing on stderr."""
    found = []
    for cell in code_cells(nb):
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"{_where(nb, cell)}: stored {output.ename}")
            elif output.output_type == "stream" and output.name == "stderr":
                found.append(f"{_where(nb, cell)}: stored stderr {output.text[:60]!r}")
    return found


def verdicts(nb):
    """There are cells that nbval compares, and each stores a verdict: one that could not fail would check nothing."""
    found = [] if verdict_cells(nb) else [f"no cell is tagged {CHECKED}"]
    for cell in verdict_cells(nb):
        if {"nbval-skip", "nbval-ignore-output", "nbval-raises-exception", "raises-exception"} & set(tags(cell)):
            found.append(f"{_where(nb, cell)}: its other tags keep nbval from checking it")
        if not cell.outputs or cell.execution_count is None:
            found.append(f"{_where(nb, cell)}: no stored output to compare with")
        elif "PASS" not in stored_text(cell):
            found.append(f"{_where(nb, cell)}: its stored output says no PASS")
        elif any(o.output_type != "stream" or o.name != "stdout" for o in cell.outputs):
            found.append(f"{_where(nb, cell)}: prints its verdict and nothing else, so that it is the same everywhere")
    markers = r"^\s*#+\s*(NBVAL_\w+|PYTEST_VALIDATE_IGNORE_OUTPUT)\s*$"
    for cell in code_cells(nb):
        for marker in re.findall(markers, cell.source, re.MULTILINE):
            found.append(f"{_where(nb, cell)}: {marker} as a comment; cells are marked by tags alone")
    return found


# --- the code ---------------------------------------------------------------------------------------------------------


def cell_lengths(nb):
    """No code cell is over 30 lines; the median is at most 8."""
    found = [f"{_where(nb, c)}: {lines(c)} lines" for c in code_cells(nb) if lines(c) > MAX_CELL_LINES]
    median = statistics.median([lines(cell) for cell in code_cells(nb)] or [0])
    return found + ([f"the median code cell has {median:g} lines"] if median > MAX_MEDIAN_LINES else [])


def no_empty_cells(nb):
    return [f"cell {i} is empty" for i, cell in enumerate(nb.cells) if not cell.source.strip()]


def setup_cell(nb):
    """The first code cell has at most 15 lines and prints one line."""
    cells = code_cells(nb)
    if not cells:
        return ["no code cell"]
    found = []
    if lines(cells[0]) > MAX_SETUP_LINES:
        found.append(f"the set-up cell has {lines(cells[0])} lines")
    if "target.report()" not in cells[0].source:
        found.append("the first code cell does not print target.report()")
    if len(stored_text(cells[0]).strip().splitlines()) != 1:
        found.append(f"the set-up cell stores {len(stored_text(cells[0]).strip().splitlines())} lines of output, not 1")
    return found


def needs_lines(nb):
    """%%needs is a cell's first line and names requirements that exist."""
    found = []
    for cell in code_cells(nb):
        for number, line in enumerate(cell.source.splitlines()):
            if not line.startswith("%%"):
                continue
            if number > 0 or not re.match(r"%%needs\b", line):
                found.append(f"{_where(nb, cell)}: {line!r} is not a %%needs line at the top of its cell")
            elif not needs(cell) or not all(re.fullmatch(r"gpu|sm\d{2,3}|cudnn\d+\.\d+", word) for word in needs(cell)):
                found.append(f"{_where(nb, cell)}: {line!r} names no requirement that %%needs knows")
    return found


def no_absolute_paths(nb):
    """No path of the machine that wrote or executed it, in any source or output."""
    roots = "home|root|work|workspace|tmp|usr|opt|var|etc|mnt|media|srv|data|content|private|Users|builds|github"
    pattern = rf"(?<![\w.:/~*)\]}}])/(?:{roots})/[\w.-]+|\b[A-Z]:\\\\?(?:Users|Windows|Program)\b|file://\S+"
    found = []
    for cell in nb.cells:
        for text in (cell.source, stored_text(cell)):
            found += [f"{_where(nb, cell)}: {match}" for match in re.findall(pattern, text)]
    return found


# --- the text ---------------------------------------------------------------------------------------------------------


def title(nb):
    """The first cell is text that starts with the title."""
    first = nb.cells[0] if nb.cells else None
    fine = first is not None and first.cell_type == "markdown" and first.source.startswith("# ")
    return [] if fine else ["the first cell is no text cell that starts with '# '"]


def call_outs(nb):
    """Block quotes are call-outs, of three kinds."""
    found = []
    for cell in nb.cells:
        if cell.cell_type != "markdown":
            continue
        text = _without_code(cell.source).splitlines()
        starts = [line for i, line in enumerate(text) if line.startswith(">") and (i == 0 or text[i - 1][:1] != ">")]
        kinds = rf"> \*\*(?:{'|'.join(CALL_OUTS)})[.:]?\*\*"
        found += [f"{_where(nb, cell)}: {line[:50]!r}" for line in starts if not re.match(kinds, line)]
    return found


def exercises(nb):
    """Two to four exercises, each with a hint, a stub and, after the stub, a checked and folded solution cell."""
    found, parts = [], exercise_parts(nb)
    if not 2 <= len(parts) <= 4:
        found.append(f"{len(parts)} exercises (under '## Exercises', each starts with '**1. ' and so on)")
    if [number for number, _, _ in parts] != list(range(1, len(parts) + 1)):
        found.append(f"exercises are numbered {[number for number, _, _ in parts]}")
    for number, text, cells in parts:
        if "hint" not in text.lower():
            found.append(f"exercise {number}: no hint")
        solved = [SOLUTION in tags(cell) for cell in cells]
        if solved[:1] != [False]:
            found.append(f"exercise {number}: no stub before its solution")
        if True not in solved:
            found.append(f"exercise {number}: no cell tagged {SOLUTION}")
        if not any(SOLUTION in tags(cell) and CHECKED in tags(cell) for cell in cells):
            found.append(f"exercise {number}: no solution cell is tagged {CHECKED}")
    for cell in nb.cells:
        if SOLUTION in tags(cell) and cell.metadata.get("jupyter", {}).get("source_hidden") is not True:
            found.append(f"{_where(nb, cell)}: a solution that is not folded (metadata jupyter.source_hidden)")
    return found


def exercises_alone(nb):
    """Each exercise can be done without the others: it reads no name that only their cells define."""
    cells_of = {number: cells for number, _, cells in exercise_parts(nb)}
    parts = [(number, _names(cells)) for number, cells in cells_of.items()]
    inside = [cell for cells in cells_of.values() for cell in cells]
    before, _ = _names([cell for cell in code_cells(nb) if cell not in inside])
    found = []
    for number, (own, used) in parts:
        others = {name: other for other, (defined, _) in parts if other != number for name in defined}
        borrowed = sorted((used & others.keys()) - own - before)
        found += [f"exercise {number} needs {name} of exercise {others[name]}" for name in borrowed]
    return found


def _names(cells):
    """(the names that code cells define, at any level; the names that they read)"""
    defined, used = set(), set()
    for cell in cells:
        for node in ast.walk(ast.parse(re.sub(r"^(%%|%|!).*$", "", cell.source, flags=re.MULTILINE))):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
    return defined, used


def exercise_parts(nb):
    """(number, its text, its code cells) of each exercise under the heading 'Exercises'."""
    parts, inside = [], False
    for cell in nb.cells:
        if cell.cell_type == "code":
            if inside and parts:
                parts[-1][2].append(cell)
            continue
        for line in cell.source.splitlines():
            number = re.match(r"(?:#+\s+|\*\*)(?:Exercise\s+)?(\d+)[.:]?\s", line)
            if re.match(r"#+\s+Exercises?\s*$", line):
                inside = True
            elif inside and number:
                parts.append([int(number[1]), "", []])
            elif line.startswith("#"):
                inside = False
            if inside and parts:
                parts[-1][1] += line + "\n"
    return parts


def _without_code(markdown):
    """Markdown without fenced blocks and `code`, in which brackets and quotes mean nothing."""
    markdown = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", markdown)


def link_targets(markdown):
    """Targets of Markdown links, pictures and reference definitions, and of HTML href and src."""
    text = _without_code(markdown)
    found = re.findall(r"\]\(\s*<?([^\s)>]+)", text)
    found += re.findall(r"^\s*\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    return found + re.findall(r"""(?:href|src)\s*=\s*["']([^"']+)["']""", text)


def anchors(markdown):
    """The anchors of the headings of a text, as Jupyter and as GitHub write them."""
    headings = re.findall(r"^#+\s+(.*?)\s*#*$", re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S), re.MULTILINE)
    found = set(re.findall(r"""(?:id|name)\s*=\s*["']([^"']+)["']""", markdown))
    for heading in headings:
        plain = re.sub(r"[*`]", "", heading)
        found |= {plain.replace(" ", "-"), re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")}
    return found


def broken_links(markdown, path):
    """Links of the text of the file at `path` that lead to no file or no heading."""
    found, path = [], path.resolve()
    for target in link_targets(markdown):
        url = urlsplit(target)
        if url.scheme in ("http", "https"):  # see foreign_hosts
            continue
        if url.scheme:
            found.append(f"{target}: neither a web page nor a file of this repository")
            continue
        file = (path.parent / unquote(url.path)).resolve() if url.path else path
        if file != path and not file.exists():
            found.append(f"{target}: no such file")
        elif url.fragment and unquote(url.fragment) not in anchors(_text_of(file, path, markdown)):
            found.append(f"{target}: no such heading")
    return found


def foreign_hosts(text):
    """URLs whose host is not in HOSTS."""
    urls = re.findall(r"https?://[^\s)>\]\"'`]+", text)
    return [f"{url}: host not in HOSTS" for url in urls if urlsplit(url).hostname not in HOSTS]


def hosts(nb):
    """Sources and texts name no web host but those in HOSTS."""
    return [f"{_where(nb, cell)}: {found}" for cell in nb.cells for found in foreign_hosts(cell.source)]


def _text_of(file, path, markdown):
    if file == path:
        return markdown
    if file.suffix == ".ipynb":
        return markdown_of(read(file))
    return file.read_text(encoding="utf-8")


def markdown_of(nb):
    return "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")


# --- the file ---------------------------------------------------------------------------------------------------------


def file_format(nb):
    """nbformat 4.5, valid, with unique ids, for the kernel that every Jupyter has."""
    found = []
    if (nb.nbformat, nb.nbformat_minor) != (4, 5):
        found.append(f"nbformat {nb.nbformat}.{nb.nbformat_minor}, not 4.5")
    if nb.metadata.get("kernelspec") != KERNELSPEC:
        found.append(f"kernelspec {dict(nb.metadata.get('kernelspec', {}))}, not {KERNELSPEC}")
    ids = [cell.get("id") for cell in nb.cells]
    if None in ids or len(set(ids)) < len(ids):
        found.append("cell ids are missing or not unique")
    else:
        try:
            nbformat.validate(nb)
        except nbformat.ValidationError as error:
            found.append(f"not valid: {str(error).splitlines()[0]}")
    timings = [cell for cell in nb.cells if "execution" in cell.get("metadata", {})]
    return found + [f"{_where(nb, cell)}: stores when it was executed" for cell in timings]


def file_size(size):
    return [f"{size:,} bytes"] if size > MAX_BYTES else []


def file_names(names):
    """Notebooks are named NN_name.ipynb, numbered from 00 without a gap."""
    found = [name for name in names if not re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", name)]
    numbers = sorted(name[:2] for name in names)
    if numbers != [f"{i:02}" for i in range(len(names))]:
        found.append(f"numbered {', '.join(numbers)}")
    return found


RULES = (
    file_format,
    title,
    setup_cell,
    no_empty_cells,
    cell_lengths,
    needs_lines,
    execution_counts,
    no_errors,
    verdicts,
    no_absolute_paths,
    hosts,
    call_outs,
    exercises,
    exercises_alone,
    stamped,
    setup_cell_matches_stamp,
)
