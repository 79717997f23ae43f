"""Tries the exercises of a notebook that was executed: the stub, typical wrong answers, and the solution.

A solution's cell consists of an answer and, as its last statement, the check of this answer. A wrong answer is tried by
executing the cell with the wrong answer in the place of the right one.
"""

import ast
import contextlib
import io

import notebook_rules as rules


def with_answer(source, answer):
    """A solution cell's source with another answer before its last statement; its %%needs line stays."""
    magic, code = source.split("\n", 1) if source.startswith("%%") else ("", source)
    check = ast.parse(code).body[-1].lineno - 1
    return "\n".join([magic, answer, *code.splitlines()[check:]]).lstrip("\n")


def execute(source, shell):
    """(what a cell's source prints, its error as "Type: message" or None)"""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = shell.run_cell(source)
    error = result.error_before_exec or result.error_in_exec
    return printed.getvalue(), error and f"{type(error).__name__}: {error}"


def tried(nb, wrong, shell):
    """[[exercise, answer, what was printed, error], ...], with "stub" and "solution" beside the wrong answers.

    nb     a notebook whose cells were executed in the IPython `shell`.
    wrong  {exercise's number: [(answer, part of its error), ...]}, as in wrong_answers.py.
    """
    rows = []
    for number, _, cells in rules.exercise_parts(nb):
        solutions = [cell for cell in cells if rules.SOLUTION in rules.tags(cell)]
        sources = [cell.source for cell in cells if cell not in solutions]
        rows += [[number, "stub", *execute(source, shell)] for source in sources]
        for answer, _ in wrong.get(number, ()):
            rows.append([number, answer, *execute(with_answer(solutions[-1].source, answer), shell)])
        rows += [[number, "solution", *execute(cell.source, shell)] for cell in solutions]
    return rows


def complaints(nb, wrong, rows):
    """What is wrong with the exercises of a notebook, for the `rows` of `tried`; nothing, if nothing is."""
    found = []
    for number, _, _ in rules.exercise_parts(nb):
        mine = [row[1:] for row in rows if row[0] == number]
        stubs = [row for row in mine if row[0] == "stub"]
        found += [f"exercise {number}: the stub raises {error}" for _, _, error in stubs if error]
        if not "".join(printed for _, printed, _ in stubs).endswith(": not attempted yet\n"):
            found.append(f"exercise {number}: the stub is not reported as not attempted")
        if not wrong.get(number):
            found.append(f"exercise {number}: no wrong answer in tests/wrong_answers.py")
        for answer, part in wrong.get(number, ()):
            _, printed, error = next(row for row in mine if row[0] == answer)
            if error is None or part not in error:
                found.append(f"exercise {number}: {answer!r} gives {(error or printed)!r}, without {part!r}")
        solution = [row for row in mine if row[0] == "solution"][-1]
        if solution[2] or "PASS" not in solution[1]:
            found.append(f"exercise {number}: the solution gives {solution[2] or solution[1]!r}")
    numbers = {number for number, _, _ in rules.exercise_parts(nb)}
    return found + [f"there is no exercise {number}" for number in sorted(wrong.keys() - numbers)]
