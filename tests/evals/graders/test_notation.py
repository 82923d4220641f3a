"""Mathematical text in one notation, and the numbers that it writes out."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.evals.graders.notation import same_number, split_at, tidy, written_number

ALIKE = [
    (r"\dfrac{1}{2}", r"\frac12", r"$\frac{1}{2}$", r"\boxed{\tfrac 12}.", r"\[ \frac{1}{2} \]", r"\frac1{2}", "½"),
    (r"\sqrt{3}/2", "sqrt(3)/2", r"\sqrt3/2", "√3/2", r"\sqrt 3/2"),
    ("x^{2}", "x²", "x**{2}", r"\(x^{2}\)"),
    ("90^\\circ", "90°", "90^{\\circ}", "90^ \\circ", "90\\degree"),
    ("1,000", r"1\,000", "1{,}000", "1'000", "1\u202f000"),
    ("12", "１２", "١٢", "१२", "๑๒", "𝟏𝟐"),
    (r"x\le 3", r"x\leq 3", "x≤3", "x<=3", r"x\leqslant 3"),
    (r"1, \ldots , 9", r"1, \dots, 9", "1, ..., 9", "1, …, 9", r"1, \cdots, 9"),
    ("2*x", r"2\cdot x", r"2 \times x", "2×x", "2·x"),
    (r"\pi /2", "pi/2", "π/2", r"\pi/2"),
]


@pytest.mark.parametrize("forms", ALIKE)
def test_what_is_written_in_other_signs_is_one_text(forms):
    assert len({tidy(form).replace(" ", "") for form in forms}) == 1, [tidy(form) for form in forms]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3 1/2", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        ("1.5e3", Fraction(1500)),
        (r"1.5 \times 10^{-3}", Fraction(3, 2000)),
        ("10^6", Fraction(10**6)),
        (r"0.\overline{3}", Fraction(1, 3)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"\frac{-6}{4}", Fraction(-3, 2)),
        ("1,234.5", Fraction(2469, 2)),
        (".5", Fraction(1, 2)),
        ("1 000 000", Fraction(10**6)),
        ("1/0", None),
        ("2x", None),
        ("1 2", None),
        ("1,2", None),
        ("9" * 400, None),
    ],
)
def test_numbers_that_are_written_out(text, value):
    number = written_number(tidy(text))
    assert (None if number is None else number.value) == value


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("0.333333", "1/3", True),
        ("0.333334", "1/3", False),
        ("0.333", "1/3", False),
        ("0.6666667", "2/3", True),
        ("0.6666666", "2/3", False),
        ("0.0000001", "0.0000002", False),
        ("0.000001", "1/1234567", False),
        ("3.1400000", "3.14", True),
        ("0.500001", "0.5", False),
    ],
)
def test_a_decimal_stands_for_a_fraction_that_no_decimal_equals_and_for_no_other(a, b, same):
    assert same_number(written_number(a), written_number(b)) is same
    assert same_number(written_number(b), written_number(a)) is same


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_is_read_back(value):
    assert written_number(f"{value}").value == value
    assert written_number(tidy(f"\\frac{{{value.numerator}}}{{{value.denominator}}}")).value == value


@given(st.text(max_size=200))
def test_no_text_breaks_the_notation(text):
    written_number(tidy(text))


def test_separators_within_brackets_separate_nothing():
    assert split_at(r"(1, 2), [3, 4), \{5, 6\}", frozenset(",")) == (["(1, 2)", "[3, 4)", r"\{5, 6\}"], [",", ","])
    assert split_at("(1, 2", frozenset(",")) == (["(1, 2"], [])
    assert split_at("1), 2", frozenset(",")) == (["1), 2"], [])
