"""Steps of a calculation: what is one, which are right, and which start from known numbers."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.rl.checker import evaluate, numbers_of, steps_of


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("4 + 9 = 13. 13 - 7 = 6.", [True, True]),
        ("4+9=14", [False]),
        ("5 - 9 = -4. -4 + 3 = -1.", [True, True]),
        ("- 4 + 9 = 13", [True]),  # a bullet, no sign
        ("So 35 × 3 = 105 kiwi, and 105 ÷ 5 = 21.", [True, True]),
        ("4 x 3 = 12", [True]),
        ("3 eggs + 4 eggs = 7 eggs", [True]),
        ("2 + 3 * 4 = 14 = 28 / 2", [True, True]),
        ("(2 + 3) * 4 = 20", [True]),
        ("780 = 1 * 461 + 319", [True]),
        ("1,200 + 34 = 1234", [True]),
        ("$1.50 * 2 = $3", [True]),
        ("30% * 160 = 48", [True]),
        ("10 / 3 = 3.33", [True]),
        ("10 / 3 = 3.34", [False]),
        ("10 / 0 = 10", [False]),
        ("48=48, -4 = -4", []),
        ("4 - 1 =", []),
        ("4 + = 7", [False]),
        ("7 * 36: 7 * 30 = 210.", [True]),
        ("1 + 1 = 2 3 + 3 = 6", [True, True]),
        ("=== aaaa end", []),
        ("", []),
    ],
)
def test_steps_are_found_and_computed(text, right):
    assert [step.is_right for step in steps_of(text, "")] == right


@pytest.mark.parametrize(
    ("question", "text", "known"),
    [
        ("4 + 9 - 7", "4 + 9 = 13. 13 - 7 = 6.", [True, True]),
        ("4 + 2", "4 + 9 = 13. 13 - 7 = 6.", [False, False]),
        ("3 cats", "3 * 4 = 12. 12 + 1 = 13.", [True, False]),
        ("3 cats", "3 * 4 = 13. 13 + 3 = 16.", [True, False]),  # what follows from a mistake is not known
        ("780, 461", "780 = 1 * 461 + 319. 461 = 1 * 319 + 142.", [True, True]),
    ],
)
def test_steps_start_from_the_question_or_from_steps_before_them(question, text, known):
    assert [step.is_known for step in steps_of(text, question)] == known


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_values_are_those_of_arithmetic(left, right, operator):
    value = {"+": left + right, "-": left - right, "*": left * right}[operator]
    (step,) = steps_of(f"{left} {operator} {right} = {value}", f"{abs(left)} {abs(right)}")
    assert (step.is_right, step.value) == (True, Fraction(value))
    (wrong,) = steps_of(f"{left} {operator} {right} = {value + 1}", "")
    assert not wrong.is_right


@given(st.text(alphabet="0123456789+-*/()=. x%\n", max_size=200))
def test_no_text_breaks_the_parser(text):
    steps_of(text, text)
    numbers_of(text)


def test_brackets_may_be_nested_to_any_depth():
    assert evaluate(["("] * 5000 + ["1"] + [")"] * 5000) == 1
    assert evaluate(["("] * 5000) is None
