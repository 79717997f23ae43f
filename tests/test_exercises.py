"""The exercises: stubs are no errors, solutions pass, and a typical wrong answer is told what is wrong with it."""

import json
from pathlib import Path

import notebook_rules as rules
import numpy as np
import pytest
import torch
from nbformat import v4
from try_answers import complaints, with_answer
from wrong_answers import WRONG

from helpers.exercises import answered, assert_kind, assert_right, in_words, untouched

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


# --- what their checks ask before they compare ------------------------------------------------------------------------


def a_stub(x, largest=8192):
    """Other words and other arguments than those of the helper's own."""
    return None  # your code here


def without_return(x, largest=8192):
    """As in the stub."""
    min(x, largest)


def another_constant(x):
    """The stub's instructions, up to what they return."""
    return "text"


def an_argument(x):
    """As in the stub."""
    return x


def yielding(x):
    """As in the stub."""
    yield None


def own_errors(error):
    """Raises it, as a mistake in an answer's code would."""
    raise error


def test_a_stub_is_untouched_and_nothing_else_is():
    assert untouched(a_stub)
    attempts = (without_return, another_constant, an_argument, yielding, own_errors, lambda x: 2, print, int, None, 3)
    assert [attempt for attempt in attempts if untouched(attempt)] == []


def test_an_answer_is_called_with_the_arguments():
    assert answered(divmod, 7, 2) == (3, 1)
    assert answered(lambda: None) is None


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (None, "the answer is None: define the function of the stub"),
        ([1, 2], "the answer is a list of 2: define the function of the stub"),
        (lambda: 1, r"keep the arguments that the stub has: .*takes 0 positional arguments but 1 was given"),
        (lambda x, y: 1, r"keep the arguments that the stub has: .*missing 1 required positional argument: 'y'"),
    ],
)
def test_an_answer_that_can_not_be_called_as_its_stub(function, says):
    with pytest.raises(AssertionError, match=f"^{says}$"):
        answered(function, 1)


@pytest.mark.parametrize("error", [TypeError("too many"), ValueError("too many"), KeyError("dims"), RuntimeError()])
def test_errors_of_an_answers_own_code_pass(error):
    with pytest.raises(type(error)) as raised:
        answered(own_errors, error, told={"of dims": "another shape"})
    assert raised.value is error
    assert raised.traceback[-1].name == "own_errors"


def test_errors_of_functions_without_python_code():
    with pytest.raises(ValueError, match="invalid literal"):
        answered(int, "one")
    with pytest.raises(AssertionError, match=r"^give a list$"):
        answered(len, 1, told={"has no len": "give a list"})


@pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError, AttributeError, RuntimeError])
def test_errors_with_a_sentence_of_their_own(kind):
    error = kind("a list of dims")
    with pytest.raises(AssertionError, match=r"^another shape$") as raised:
        answered(own_errors, error, told={"strides": "other strides", "of dims": "another shape", "list": "later"})
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("answer", "kinds", "length"),
    [
        (3, int, None),
        (2.5, (int, float), None),
        (True, bool, None),
        (False, (bool, int), None),
        ([1, 2], (list, tuple), 2),
        ((), tuple, 0),
        (torch.zeros(2), torch.Tensor, None),
    ],
)
def test_answers_of_the_right_kind_pass(answer, kinds, length):
    assert assert_kind(answer, kinds, "it", length) is None


@pytest.mark.parametrize(
    ("answer", "kinds", "length", "says"),
    [
        (None, int, None, "None was returned: is `return` missing? Return it"),
        (None, (list, tuple), 2, "None was returned: is `return` missing? Return it"),
        (True, int, None, "a bool was returned: return it"),
        (True, (int, float), None, "a bool was returned: return it"),
        (1, bool, None, "an int was returned: return it"),
        ("3", (int, float), None, "a str was returned: return it"),
        ({1: 2}, list, None, "a dict of 1 was returned: return it"),
        (torch.zeros(2, 3), list, 2, "a tensor with dims (2, 3) was returned: return it"),
        ([1, 2, 3], list, 2, "a list of 3 was returned: return it"),
        ((), tuple, 1, "a tuple of 0 was returned: return it"),
        ([1], list, 0, "a list of 1 was returned: return it"),
    ],
)
def test_answers_of_another_kind_are_told(answer, kinds, length, says):
    with pytest.raises(AssertionError) as raised:
        assert_kind(answer, kinds, "it", length)
    assert str(raised.value) == says


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None"),
        (torch.zeros(2, 3), "a tensor with dims (2, 3)"),
        (torch.tensor(1.0), "a tensor with dims ()"),
        ((1, 2), "a tuple of 2"),
        ({}, "a dict of 0"),
        (3, "an int"),
        (b"abc", "a bytes"),
        (EOFError(), "an EOFError"),
        (iter([]), "a list_iterator"),
        (print, "a builtin_function_or_method"),
    ],
)
def test_what_a_value_is_in_words(value, words):
    assert in_words(value) == words


# --- how they compare -------------------------------------------------------------------------------------------------

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
        (1 + 2j, torch.tensor(1 + 2j), {}),
        (torch.tensor([1 + 2.01j]), [1 + 2j], {"atol": 0.011}),
        (10**400, 10**400, {}),
        (2**70, 2.0**70, {}),
        ({"a": MATRIX, "b": [MATRIX.T, 1]}, {"b": (MATRIX.T.half(), 1.0), "a": MATRIX}, {}),
        ([[MATRIX[0]], MATRIX], ([MATRIX[0]], MATRIX), {}),
        ({"a": 1.01}, {"a": 1.0}, {"rtol": 0.011}),
        ([MATRIX[0, 1], MATRIX[0, 2]], torch.tensor([1.0, 2.0]), {}),
        (MATRIX.to(torch.float8_e4m3fn), MATRIX, {}),
        (MATRIX.bool(), MATRIX.bool().int(), {}),
        (MATRIX.to_sparse(), MATRIX, {}),
        (torch.tensor(float("-inf")), float("-inf"), {"rtol": 0.1}),
        ({1, 2}, {2, 1}, {}),
        ([], (), {}),
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
        (1 + 3j, 1 + 2j, r"\(1\+3j\) is wrong"),
        (torch.tensor([1 + 3j]), torch.tensor([1 + 2j]), r"the first is \[0\]: 1\+3j instead of 1\+2j"),
        (2**200 + 1, 2**200, "^16069380.* is wrong"),
        (10**400, float("inf"), "^1000000.*… is wrong"),
        (torch.tensor(2**53 + 1), torch.tensor(2**53), r"9,007,199,254,740,993 instead of 9,007,199,254,740,992$"),
        (float("inf"), 1e308, "inf is wrong"),
        (
            {"a": MATRIX},
            {"a": MATRIX + 1},
            r"^\['a'\]: 6 of 6 elements are wrong.*the first is \[0, 0\]: 0 instead of 1",
        ),
        ({"b": MATRIX}, {"a": MATRIX}, "^parts 'b' instead of 'a'"),
        (MATRIX, {"a": MATRIX, "b": 1}, r"^a tensor with dims \(2, 3\) instead of 2 parts: 'a', 'b'"),
        ([MATRIX], {0: MATRIX}, "is wrong: of another type"),
        ([MATRIX, [MATRIX, 1]], [MATRIX, [MATRIX, 2]], r"^\[1\]: \[1\]: 1 is wrong"),
        ([MATRIX, MATRIX], [MATRIX, MATRIX.T], r"^\[1\]: dims \(2, 3\) instead of \(3, 2\)"),
        (MATRIX, 2, r"^a tensor with dims \(2, 3\) is wrong"),
        (MATRIX.to("meta"), MATRIX, r"^a tensor with dims \(2, 3\) is wrong"),
        (float("nan"), float("nan"), "nan is wrong"),
        (MATRIX / 0, MATRIX / 0, "1 of 6 elements are NaN"),
        ([0 * MATRIX / 0], [MATRIX], "everything was divided by 0"),
    ],
)
def test_wrong_answers_fail_with_the_likeliest_mistake(answer, right, says):
    mistakes = {"one too many": 3, "three as well": 3, "the rows are swapped": MATRIX.flip(0)}
    mistakes["everything was divided by 0"] = [0 * MATRIX / 0]
    with pytest.raises(AssertionError, match=says):
        assert_right(answer, right, mistakes)


class Strange:
    def __eq__(self, other):
        raise ZeroDivisionError

    def __repr__(self):
        raise ZeroDivisionError

    __hash__ = None


def test_an_answer_that_can_not_be_compared_or_shown_is_wrong():
    with pytest.raises(AssertionError, match=r"^your Strange is wrong, and no usual mistake gives it"):
        assert_right(Strange(), "a", {"b": "b"})
    with pytest.raises(AssertionError, match=r"^your int is wrong"):  # Python doesn't write so many digits
        assert_right(10**5000, 1, {})
    with pytest.raises(AssertionError, match="is wrong"):
        assert_right(np.array(["a", "b"]), "a", {})


def test_mistakes_are_compared_within_the_bound():
    with pytest.raises(AssertionError, match="one too many"):
        assert_right(3.001, 2, {"one too many": 3}, rtol=1e-3)
    with pytest.raises(AssertionError, match="no usual mistake"):
        assert_right(3.01, 2, {"one too many": 3}, rtol=1e-3)
