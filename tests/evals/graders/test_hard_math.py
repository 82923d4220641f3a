"""A table of hard mathematical answers with both verdicts, and what holds for any text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.data.chat_template import ParsedReply
from nautile.evals.graders.equivalence import Equivalence, grade_math

HALF, ROOT, POLY, PAIR, SET, WORD, COMMA = (
    "\\frac{1}{2}", "\\frac{\\sqrt{3}}{2}", "x^2+2x+1", "\\left( 3, \\frac{\\pi}{2} \\right)", "\\{1,2\\}",
    "\\text{even}", "1,234",
)  # fmt: skip

# answer, expected, strict, lenient
HARD = [
    ("\\boxed{1/2}", HALF, True, True),
    ("\\boxed{\\frac12}", HALF, True, True),
    ("\\boxed{\\dfrac{1}{2}}", HALF, True, True),
    ("\\boxed{\\tfrac{1}{2}}", HALF, True, True),
    ("\\boxed{0.5}", HALF, True, True),
    ("\\boxed{.5}", HALF, True, True),
    ("\\boxed{2^{-1}}", HALF, True, True),
    ("\\boxed{\\frac{2}{4}}", HALF, True, True),
    ("\\fbox{\\frac{1}{2}}", HALF, True, True),
    ("$\\boxed{\\frac{1}{2}}$", HALF, True, True),
    ("$$\\boxed{ \\frac{1}{2} }$$", HALF, True, True),
    ("\\boxed{x = \\frac{1}{2}}", HALF, True, True),
    ("$\\frac{1}{2}$", HALF, True, True),
    ("\\(\\frac{1}{2}\\)", HALF, True, True),
    ("\\[\\frac{1}{2}\\]", HALF, True, True),
    ("The answer is $\\frac{1}{2}$.", HALF, True, True),
    ("The answer is \\boxed{\\frac{1}{2}}.", HALF, True, True),
    ("#### 1/2", HALF, True, True),
    ("Answer: 0.5", HALF, True, True),
    ("\\boxed{\\frac{1}{2}} which is \\boxed{0.5}", HALF, True, True),
    ("\\boxed{1}, no, \\boxed{0.5}", HALF, False, True),
    ("\\boxed{0.5}, no, \\boxed{1}", HALF, False, False),
    ("$\\frac{1}{2}$ or $2$", HALF, False, False),
    ("$2$ or $\\frac{1}{2}$", HALF, False, True),
    ("2 or 1/2", HALF, False, True),
    ("\\boxed{-\\frac{1}{2}}", HALF, False, False),
    ("\\boxed{\\frac{1}{3}}", HALF, False, False),
    ("\\boxed{0.333}", "\\frac{1}{3}", False, False),
    ("\\boxed{half}", HALF, False, False),
    ("\\boxed{}", HALF, False, False),
    ("\\boxed{\\frac{1}{2}", HALF, False, False),  # the box never closes
    ("", HALF, False, False),
    (" \n", HALF, False, False),
    ("no idea", HALF, False, False),
    (None, HALF, False, False),
    ("\\boxed{\\sqrt{3}/2}", ROOT, True, True),
    ("\\boxed{\\frac{\\sqrt3}{2}}", ROOT, True, True),
    ("\\boxed{\\frac{3}{2\\sqrt{3}}}", ROOT, True, True),
    ("\\boxed{\\sqrt{\\frac{3}{4}}}", ROOT, True, True),
    ("\\boxed{\\sqrt{3}}", ROOT, False, False),
    ("\\boxed{(x+1)^2}", POLY, True, True),
    ("\\boxed{1 + 2x + x^2}", POLY, True, True),
    ("\\boxed{x^2 + 2x + 2}", POLY, False, False),
    ("\\boxed{y^2+2y+1}", POLY, False, False),
    ("\\boxed{(3, \\pi/2)}", PAIR, True, True),
    ("\\boxed{(3, \\frac{\\pi}{2})}", PAIR, True, True),
    ("\\boxed{(\\frac{\\pi}{2}, 3)}", PAIR, False, False),
    ("\\boxed{3}", PAIR, False, False),
    ("\\boxed{\\{2,1\\}}", SET, True, True),
    ("\\boxed{\\{1, 2\\}}", SET, True, True),
    ("\\boxed{\\{1, 2, 3\\}}", SET, False, False),
    ("\\boxed{\\text{even}}", WORD, True, True),
    ("\\boxed{Even}", WORD, True, True),
    ("\\boxed{\\text{odd}}", WORD, False, False),
    ("\\boxed{1234}", COMMA, True, True),
    ("\\boxed{1,234}", COMMA, True, True),
    ("\\boxed{1{,}234}", COMMA, True, True),
    ("\\boxed{1234.0}", COMMA, True, True),
    ("\\boxed{123}", COMMA, False, False),
    ("\\boxed{12 \\text{ cm}}", "12", True, True),
    ("\\boxed{12\\%}", "12", True, True),
    ("\\boxed{\\$12}", "12", True, True),
    ("\\boxed{90^\\circ}", "90", True, True),
    ("\\boxed{-5}", "-5", True, True),
    ("\\boxed{5}", "-5", False, False),
    ("\\boxed{1.2 \\times 10^3}", "1200", True, True),
    ("\\boxed{10^{10}}", "10000000000", True, True),
    ("\\boxed{(C)}", "\\text{(C)}", True, True),
    ("\\boxed{\\text{B}}", "\\text{(C)}", False, False),
    ("\\boxed{x \\in [0, 1]}", "[0,1]", True, True),
    ("\\boxed{[0, 1)}", "[0,1]", False, False),
    ("Answer: The value of $x$ is $\\boxed{5}$.", "5", True, True),
    ("The final answer is:\n\\[\n\\frac{1}{2}\n\\]", HALF, True, True),
    ("\\boxed{4210_7}", "4210_5", False, False),
    ("\\boxed{10:15 \\text{ a.m.}}", "10:15 \\text{ p.m.}", False, False),
    ("\\boxed{A^2}", "a^2", False, False),
    ("\\boxed{1, 2, \\ldots, 9}", "1, 3, \\ldots, 9", False, False),
    ("\\boxed{\\frac{1}{2006!}}", "\\frac{1}{2004!}", False, False),
    ("\\boxed{1+\\frac{1}{e}}", "1-\\frac{1}{e}", False, False),
    ("\\boxed{5} or 6", "5", False, False),
    ("$\\boxed{5}$ or $6$", "6", False, True),
    ("\\boxed{2} million", "2000000", True, True),
    ("\\boxed{\\pm 3}", "3, -3", True, True),
    ("The answer is not \\boxed{\\frac{1}{2}}.", HALF, False, False),
    ("It is not hard to see that it is $\\frac{1}{2}$.", HALF, True, True),
    ("It is not $3$. It is $\\frac{1}{2}$.", HALF, True, True),
    ("\\boxed{3} is wrong, so $\\boxed{0.5}$", HALF, True, True),
    ("Is it $\\frac{1}{2}$?", HALF, False, False),
    ("Simplify $\\frac{2}{4}$.", HALF, False, False),
    ("What is the value of $\\frac{2}{4}$?", HALF, False, False),
    ("Let $y = \\frac{2}{4}$. What is $y$?", HALF, False, False),
    ("Simplify $\\frac{2}{4}$.\n$\\frac{1}{2}$", HALF, True, True),
    ("Simplify to get $\\frac{1}{2}$.", HALF, True, True),
    ("\\boxed{\\pm 3}", "3", False, False),
    ("\\boxed{2+3i}", "3i+2", True, True),
    ("\\boxed{2-3i}", "3i+2", False, False),
    ("\\boxed{١٢}", "12", True, True),
    ("\\boxed{1'234}", COMMA, True, True),
    ("\\boxed{1\\,234}", COMMA, True, True),
    ("\\boxed{(-\\infty, 3)}", "x < 3", True, True),
    ("\\boxed{(-\\infty, 3]}", "x < 3", False, False),
    ("\\boxed{25\\%}", "\\frac{1}{4}", True, True),
    ("\\boxed{€12}", "$12", False, False),
    ("1" * 3000, "1", False, False),
]


@pytest.fixture(scope="module")
def equivalence():
    instance = Equivalence(limit_s=30.0)
    yield instance
    instance.close()


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "expected", "strict", "lenient"), HARD)
def test_hard_mathematics(equivalence, reply, answer, expected, strict, lenient):
    verdict = grade_math(reply(answer), expected, equivalence)
    assert (verdict.strict, verdict.lenient) == (strict, lenient), verdict


BITS = ["\\boxed{", "}", "12", "$", " or ", "\\frac{1}{2}", "x", "^", "the answer is ", "\n", "{", "\\text{", "not "]
ANSWERS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(BITS), max_size=8).map("".join))


@pytest.mark.slow
@settings(max_examples=60)
@given(answer=ANSWERS, reasoning=ANSWERS, thought=st.booleans())
def test_no_text_breaks_the_grader_and_strict_implies_lenient(equivalence, answer, reasoning, thought):
    verdict = grade_math(ParsedReply(reasoning, answer if thought else None, thought, thought), "12", equivalence)
    assert verdict.lenient or not verdict.strict
    assert not (verdict.strict and verdict.problem)
    assert (verdict.problem == "unfinished") == (not thought)


@pytest.mark.slow
@settings(max_examples=40)
@given(answer=ANSWERS, before=st.text(" \t\n\r", max_size=3), after=st.text(" \t\n\r", max_size=3))
def test_surrounding_white_space_changes_nothing(equivalence, answer, before, after):
    bare = grade_math(ParsedReply("", answer.strip(), True, True), "12", equivalence)
    assert grade_math(ParsedReply("", before + answer.strip() + after, True, True), "12", equivalence) == bare
