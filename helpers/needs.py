"""The %%needs line that says what a cell needs, and skips the cell with one printed line where that is missing."""

import re

from .target import target


def parse_needs(source):
    """Splits a cell's source that starts with `%%needs gpu sm89: what still runs`.

    Returns (requirements, note): (["gpu", "sm89"], "What still runs"). Returns None for a cell without such a line.
    Target.lacks says what can be required: a GPU, a compute capability, a release of cuDNN (cudnn9.21).
    """
    first = source.lstrip().split("\n", 1)[0]
    if not re.match(r"%%needs\b", first):
        return None
    words, _, note = first.removeprefix("%%needs").partition(":")
    note = note.strip()
    return words.split(), note[:1].upper() + note[1:]


def skip_reason(source):
    """Why a cell with this source is skipped on this target, as "needs SM89, found SM75 (Tesla T4)"; "" if it runs.

    Raises ValueError for a requirement that is not known, or for none at all.
    """
    needs = parse_needs(source)
    if needs is None:
        return ""
    if not needs[0]:
        raise ValueError("%%needs names no requirement: write, for example, %%needs gpu sm80")
    return target.lacks(*needs[0])


def transform_cell(lines):
    """IPython input transformer: drops the %%needs line, or replaces the cell by a print of why it is skipped.

    A transformer instead of a cell magic: what runs is then the cell itself, so that errors, displays and the last
    expression's value behave as in any other cell.
    """
    source = "".join(lines)
    try:
        reason = skip_reason(source)
    except ValueError as error:
        raise SyntaxError(str(error)) from None
    if reason:
        note = parse_needs(source)[1]
        line = f"Skipped: {reason}." + (f" {note.rstrip('.')}." if note else "")
        return [f"print({line!r})\n"]
    if parse_needs(source):
        start = next(index for index, line in enumerate(lines) if line.strip())
        rest = lines[start + 1 :]
        # A comment in its place keeps the line numbers of error messages right; IPython would drop an empty line. A
        # cell magic such as %%time has to be the first line, though.
        return rest if rest and rest[0].startswith("%%") else ["# %%needs: has it\n", *rest]
    return lines


def register():
    """Makes %%needs known to the running IPython shell, if there is one. Safe to call again."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None:
        return
    ours = [
        f for f in shell.input_transformers_cleanup if getattr(f, "__qualname__", "") == transform_cell.__qualname__
    ]
    for old in ours:  # of this module before a reload
        shell.input_transformers_cleanup.remove(old)
    shell.input_transformers_cleanup.insert(0, transform_cell)
