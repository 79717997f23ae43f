"""The exercises: stubs are no errors, solutions pass, and a typical wrong answer is told what is wrong with it."""

import json
from pathlib import Path

import notebook_rules as rules
import pytest
import torch
from nbformat import v4
from try_answers import complaints, with_answer
from wrong_answers import WRONG

from helpers.exercises import assert_right

REPO = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))


# --- the notebooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_exercises(path, mutated):
    """Each stub is "not attempted yet", each wrong answer of wrong_answers.py is told so, each solution passes."""
    found = complaints(rules.read(path), WRONG.get(path.stem, {}), mutated(path)["exercises"])
    assert not found, "\n".join(found)


def test_wrong_answers_belong_to_notebooks():
    assert WRONG.keys() <= {path.stem for path in NOTEBOOKS}


# --- a tiny notebook, whose exercises are spoiled in turn -------------------------------------------------------------

TRY = """
import json, sys
sys.path.insert(0, sys.argv[1])
from IPython.core.interactiveshell import InteractiveShell
from nbformat import v4
import try_answers
shell, found = InteractiveShell.instance(), []
for text, wrong in json.loads(sys.argv[2]):
    nb, wrong = v4.reads(text), {int(number): answers for number, answers in wrong.items()}
    found.append(try_answers.complaints(nb, wrong, try_answers.tried(nb, wrong, shell)))
print(json.dumps(found))
"""
CHECK = """
def check(answer):
    if answer is None:
        return print("double: not attempted yet")
    assert answer(3) != 9, "this is the square"
    assert answer(3) == 6, "something else"
    print("double: PASS")


check(double)
"""
SOLUTION = "def double(x):\n    return 2 * x\n\n\ncheck(double)"
SQUARE = ["def double(x):\n    return x * x", "this is the square"]


def tiny(stub="double = None", check=CHECK, solution=SOLUTION):
    nb = v4.new_notebook()
    tags = {"tags": [rules.SOLUTION, rules.CHECKED], "jupyter": {"source_hidden": True}}
    nb.cells = [
        v4.new_markdown_cell("## Exercises\n\n**1. Double it.** *Hint:* add."),
        v4.new_code_cell(stub),
        v4.new_code_cell(check),
        v4.new_code_cell(solution, metadata=tags),
    ]
    return v4.writes(nb)


# what is done to the notebook, the wrong answers, what the test says of it
SPOILED = {
    "nothing": (tiny(), {1: [SQUARE]}, []),
    "stub raises": (tiny(stub="double = 1 / 0"), {1: [SQUARE]}, ["raises ZeroDivisionError", "not reported as"]),
    "stub passes": (tiny(stub="double = lambda x: 2 * x"), {1: [SQUARE]}, ["not reported as not attempted"]),
    "check accepts": (tiny(check=CHECK.replace("assert answer", "answer")), {1: [SQUARE]}, ["'double: PASS"]),
    "other words": (tiny(), {1: [["double = lambda x: x + 1", "the square"]]}, ["AssertionError: something else"]),
    "none": (tiny(), {}, ["no wrong answer"]),
    "stranger": (tiny(), {1: [SQUARE], 2: [SQUARE]}, ["there is no exercise 2"]),
    "wrong solution": (
        tiny(solution=SOLUTION.replace("2", "5")),
        {1: [SQUARE]},
        ["solution gives 'AssertionError"],
    ),
    "no verdict": (tiny(check=CHECK.replace("PASS", "well")), {1: [SQUARE]}, ["the solution gives 'double: well"]),
}


@pytest.fixture(scope="module")
def spoiled(python):
    result = python(TRY, REPO / "tests", json.dumps([case[:2] for case in SPOILED.values()]))
    assert result.returncode == 0, result.stderr
    return dict(zip(SPOILED, json.loads(result.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_with_an_exercise_is_found(case, spoiled):
    says = SPOILED[case][2]
    assert len(spoiled[case]) == len(says), spoiled[case]
    for part, complaint in zip(says, spoiled[case], strict=True):
        assert part in complaint


def test_an_answer_takes_the_place_of_all_but_the_check():
    source = "%%needs sm80: the rest\nimport math\n\n\ndef f(x):\n    return x\n\n\ncheck(\n    f,\n)"
    assert with_answer(source, "f = 1") == "%%needs sm80: the rest\nf = 1\ncheck(\n    f,\n)"
    assert with_answer("f = 2\ncheck(f)", "f = 1") == "f = 1\ncheck(f)"


# --- the helper of their checks ---------------------------------------------------------------------------------------

MATRIX = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("answer", "right", "bound"),
    [
        (2, 2, {}),
        (torch.tensor(2), 2.0, {}),
        (float("inf"), float("inf"), {}),
        ((7, 6), torch.tensor([7, 6]), {}),
        ([7, 6], (7, 6), {}),
        (MATRIX.half(), MATRIX, {}),
        (MATRIX + 0.01, MATRIX, {"atol": 0.011}),
        (1.01 * MATRIX, MATRIX, {"rtol": 0.011}),
        (torch.ones(2, requires_grad=True), [1, 1], {}),
        ("eng1_k2=3", "eng1_k2=3", {}),
    ],
)
def test_right_answers_pass(answer, right, bound):
    """Also where a mistake would give the same."""
    assert assert_right(answer, right, {"a mistake": right}, **bound) is None


@pytest.mark.parametrize(
    ("answer", "right", "says"),
    [
        (3, 2, "one too many"),
        (torch.tensor(3.0), 2, "one too many"),
        (4, 2, "^4 is wrong, and no usual mistake gives it"),
        (float("nan"), 2, "nan is wrong"),
        (None, 2, "None is wrong"),
        ("two", 2, "'two' is wrong"),
        ("b", "a", "'b' is wrong"),
        ((7, 5), (7, 6), r"\(7, 5\) is wrong"),
        ((7, 6, 1), (7, 6), r"\(7, 6, 1\) is wrong"),
        (MATRIX.T, MATRIX, r"dims \(3, 2\) instead of \(2, 3\)"),
        (MATRIX / 0, MATRIX, "1 of 6 elements are NaN"),
        (MATRIX.clamp(max=3), MATRIX, r"2 of 6 elements are wrong.*the first is \[1, 1\]: 3 instead of 4"),
        (MATRIX.flip(0), MATRIX, "the rows are swapped"),
    ],
)
def test_wrong_answers_fail_with_the_likeliest_mistake(answer, right, says):
    mistakes = {"one too many": 3, "three as well": 3, "the rows are swapped": MATRIX.flip(0)}
    with pytest.raises(AssertionError, match=says):
        assert_right(answer, right, mistakes)


def test_mistakes_are_compared_within_the_bound():
    with pytest.raises(AssertionError, match="one too many"):
        assert_right(3.001, 2, {"one too many": 3}, rtol=1e-3)
    with pytest.raises(AssertionError, match="no usual mistake"):
        assert_right(3.01, 2, {"one too many": 3}, rtol=1e-3)
