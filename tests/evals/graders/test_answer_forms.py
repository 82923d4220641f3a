"""Forms of mathematical answers, compared without a computer algebra system."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.evals.graders.answer_forms import equal, is_formula, read

EQUAL = [
    ("4210_5", "4210_{5}"),
    ("4210_5", "4210_{\\text{five}}"),
    ("4210_5", "4210"),
    ("1A_{16}", "1a_{16}"),
    ("10:15 \\text{ p.m.}", "10:15 pm"),
    ("10:15 \\text{ p.m.}", "10:15"),
    ("1,2,\\ldots,9", "1, 2, ..., 9"),
    ("12", "12 \\text{ cm}"),
    ("12 \\text{ cm}^2", "12 square centimeters"),
    ("12 \\text{ inches}", "12 in."),
    ("5 apples", "5"),
    ("(3,4)", "\\left( 3, 4 \\right)"),
    ("\\{1,2\\}", "2, 1"),
    ("9.8 \\text{ m/s}^2", "9.8 m/s^2"),
    ("1,234,567", "1.234.567"),
    ("12 \\text{ per cent}", "12\\%"),
    ("USD 12", "$12"),
    ("\\textbf{(C)}\\ 5", "5"),
    ("2, 2, 3", "3, 2, 2"),
    ("\\emptyset", "\\{\\}"),
    ("x=5", "5"),
    ("5", "5 = x"),
    ("f(2) = 5", "5"),
    ("a_{37} = 19, a_3 = 2", "a_3 = 2, a_{37} = 19"),
    ("x = 1, y = 2", "1, 2"),
    ("x=1 \\text{ or } x=-2", "-2, 1"),
    ("(p,q)=(3,2)", "(3,2)"),
    ("[-2,7]", "-2 \\le x \\le 7"),
    ("x \\in [-2,7]", "[-2, 7]"),
    ("x>3", "3<x"),
    ("x>3", "(3, \\infty)"),
    ("(-\\infty, 2]", "[-\\infty, 2]"),
    ("(-\\infty,2)\\cup(5,\\infty)", "x<2 \\text{ or } x>5"),
    ("(-\\infty,2)\\cup(5,\\infty)", "(5, \\infty) \\cup (-\\infty, 2)"),
    ("]0,1[", "(0,1)"),
    ("\\mathbb{R}", "(-\\infty, \\infty)"),
    ("\\pm 3", "-3, 3"),
    ("\\text{Friday}", "friday"),
    ("\\text{(C)}", "C"),
    ("no solution", "\\text{No solution.}"),
    ("\\text{odd}", "odd"),
    ("28\\%", "28"),
    ("28\\%", "0.28"),
    ("$12", "12 dollars"),
    ("2 \\text{ million}", "2,000,000"),
    ("90^\\circ", "90"),
    ("45 degrees", "45^\\circ"),
    ("\\begin{pmatrix}1 & 2\\\\3 & 4\\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}"),
    ("7:32", "14:64"),
    ("1:2:3", "2:4:6"),
    ("7:32", "\\frac{7}{32}"),
    ("5 \\pmod{7}", "5 \\pmod 7"),
    ("5", "5 \\pmod 7"),
    ("5", "5\\;"),
    ("12.5", "12{,}5"),
    ("1234.5", "1{,}234.5"),
    ("5 \\text{ m}^2", "5\\,\\mathrm{m}^2"),
]
DIFFERENT = [
    ("5", "5_2"),
    ("52", "5_2"),
    ("4210_5", "4210_7"),
    ("4210_5", "555"),
    ("4210_5", "4211"),
    ("10:15 \\text{ p.m.}", "10:15 \\text{ a.m.}"),
    ("12:00", "1:00"),
    ("10:30", "1:3"),
    ("1,2,\\ldots,9", "1,3,\\ldots,9"),
    ("1, 2, \\ldots, 9", "1, 9"),
    ("12 \\text{ cm}", "12\\text{ m}"),
    ("12 \\text{ cm}", "12\\text{ cm}^2"),
    ("5 apples", "5 pears"),
    ("$12", "€12"),
    ("2 \\text{ million}", "2"),
    ("2 \\text{ million}", "2 \\text{ billion}"),
    ("(3,4)", "(4,3)"),
    ("(3,4)", "[3,4]"),
    ("[3,4)", "(3,4]"),
    ("(1, 2, 3)", "(1, 2)"),
    ("9.8 \\text{ m/s}^2", "9.8 m/s"),
    ("EUR 12", "USD 12"),
    ("\\{1,2\\}", "\\{1,2,3\\}"),
    ("1, 2", "(1, 2)"),
    ("x = 1, y = 2", "2, 1"),
    ("x>3", "x \\ge 3"),
    ("[-2,7]", "-2 < x \\le 7"),
    ("\\infty", "-\\infty"),
    ("\\infty", "5"),
    ("\\text{odd}", "even"),
    ("\\text{3 red}", "\\text{3 blue}"),
    ("28\\%", "2.8"),
    ("30^\\circ \\text{C}", "30^\\circ \\text{F}"),
    ("0.0000001", "0.0000002"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1 & 2\\end{pmatrix}"),
    ("7:32", "32:7"),
    ("5 \\pmod{7}", "5 \\pmod{11}"),
    ("5", "5 \\text{ factorial}"),
    ("5", "5\\text{ squared}"),
    ("5", "5\\text{ is wrong}"),
]


class Asked(Exception):
    """Two values were left to the computer algebra system."""


def ask(question, a, b):
    raise Asked(question, a, b)


@pytest.mark.parametrize(("expected", "given_"), EQUAL)
def test_equal_answers_in_two_forms(expected, given_):
    assert equal(read(expected), read(given_), ask)
    assert equal(read(given_), read(expected), ask)


@pytest.mark.parametrize(("expected", "given_"), DIFFERENT)
def test_answers_that_differ_in_what_a_parser_may_drop(expected, given_):
    assert not equal(read(expected), read(given_), ask)
    assert not equal(read(given_), read(expected), ask)


@pytest.mark.parametrize(
    ("expected", "given_", "question"),
    [
        ("a^2", "A^2", ("same", "a^2", "A^2")),
        ("2x + 3", "3 + 2x", ("same", "2x + 3", "3 + 2x")),
        ("(1, \\sqrt{4})", "(1, 2)", ("same", "\\sqrt{4}", "2")),
        ("y = 2x", "2y = 4x", ("multiple", "(y)-(2x)", "(2y)-(4x)")),
        ("2x > 4", "x > 2", ("positive multiple", "(2x)-(4)", "(x)-(2)")),
    ],
)
def test_only_single_values_are_asked_about(expected, given_, question):
    with pytest.raises(Asked) as asked:
        equal(read(expected), read(given_), ask)
    assert asked.value.args == question


def test_what_is_expected_twice_is_given_twice():
    assert not equal(read("2, 2, 3"), read("2, 3"), ask)
    assert equal(read("2, 3"), read("2, 3, 3"), ask)  # said again, and nothing else


BITS = [
    "\\frac{1}{2}",
    "(",
    ")",
    "[",
    "]",
    ",",
    "x",
    "=",
    "<",
    "\\text{cm}",
    "12",
    " or ",
    "\\cup",
    "{",
    "}",
    "%",
    "_5",
]


@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(BITS), max_size=12).map("".join)))
def test_every_text_has_a_form_and_equals_itself(text):
    assert equal(read(text), read(text), ask)
    is_formula(text)


def test_deep_brackets_end_in_no_deep_recursion():
    assert read("(" * 900 + "1" + ")" * 900).kind == "value"
