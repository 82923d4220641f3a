"""A table of hard answers to TriviaQA's kind of question, with both verdicts: whole aliases, never parts of a text."""

import pytest

from nautile.evals.graders.grading import grade_exact

ALIASES = ("Abraham Lincoln", "Honest Abe", "Lincoln", "16th President", "A. Lincoln")

# answer, strict, lenient
HARD = [
    ("Abraham Lincoln", True, True),
    ("abraham lincoln", True, True),
    ("ABRAHAM LINCOLN", True, True),
    ("Abraham Lincoln.", True, True),
    ("Abraham Lincoln!", True, True),
    ("  Abraham   Lincoln \n", True, True),
    ("'Abraham Lincoln'", True, True),
    ('"Abraham Lincoln"', True, True),
    ("“Abraham Lincoln”", True, True),
    ("**Abraham Lincoln**", True, True),
    ("`Abraham Lincoln`", True, True),
    ("*Lincoln*", True, True),
    ("(Lincoln)", True, True),
    ("The Lincoln", True, True),
    ("a Lincoln", True, True),
    ("an Abraham Lincoln", True, True),
    ("Abraham-Lincoln", True, True),
    ("Abraham_Lincoln", True, True),
    ("Ａｂｒａｈａｍ Ｌｉｎｃｏｌｎ", True, True),
    ("Abraham\nLincoln", True, True),
    ("A Lincoln", True, True),
    ("A. Lincoln", True, True),
    ("Honest Abe", True, True),
    ("the 16th president", True, True),
    ("Lincoln", True, True),
    ("The answer is Abraham Lincoln.", True, True),
    ("The answer is: Lincoln", True, True),
    ("Answer: Honest Abe", True, True),
    ("**Answer:** Lincoln", True, True),
    ("The correct answer is Lincoln.", True, True),
    ("\\boxed{Lincoln}", True, True),
    ("\\boxed{\\text{Lincoln}}", False, False),
    ("#### Lincoln", True, True),
    ("The answer is Lincoln because he freed the slaves.", True, True),
    ("The answer is Lincoln, not Grant.", True, True),
    ("The answer is Lincoln. The answer is Honest Abe.", False, True),
    ("The answer is Lincoln. The answer is Grant.", False, False),
    ("The answer is Grant. The answer is Lincoln.", False, True),
    ("The answer is not Lincoln.", False, False),
    ("Ábraham Líncoln", False, True),
    ("Lincoln\nHe was president.", False, True),
    ("He was president.\nLincoln", False, True),
    ("Lincoln. He was president.", False, True),
    ("Lincoln or Grant", False, False),
    ("Grant or Lincoln", False, False),
    ("Lincoln, Grant", False, False),
    ("Lincoln and Grant", False, False),
    ("Lincoln/Grant", False, False),
    ("Lincoln; Grant", False, False),
    ("Abraham Lincoln (16th President)", False, False),
    ("I think it was Lincoln", False, False),
    ("It was Abraham Lincoln", False, False),
    ("President Lincoln", False, False),
    ("Lincoln, Nebraska", False, False),
    ("Lincolnshire", False, False),
    ("Linc", False, False),
    ("Abraham", False, False),
    ("Abe", False, False),
    ("Abraham Lincon", False, False),
    ("Ulysses Grant", False, False),
    ("16", False, False),
    ("the", False, False),
    ("a", False, False),
    ("?", False, False),
    ("...", False, False),
    ("I do not know", False, False),
    ("None of them", False, False),
    ("Линкольн", False, False),
    ("", False, False),
    (" \n\t", False, False),
    (None, False, False),
]


@pytest.mark.parametrize(("answer", "strict", "lenient"), HARD)
def test_hard_aliases(reply, answer, strict, lenient):
    verdict = grade_exact(reply(answer), ALIASES)
    assert (verdict.strict, verdict.lenient) == (strict, lenient), verdict


@pytest.mark.parametrize("answer", ["Lincoln or Grant", "Lincoln, Grant", "Lincoln and Grant", "Lincoln/Grant"])
def test_several_answers_are_counted_as_such(reply, answer):
    assert grade_exact(reply(answer), ALIASES).problem == "many_answers"


def test_the_reasoning_counts_only_where_there_is_no_answer(reply):
    assert not grade_exact(reply("Grant", reasoning="Lincoln"), ALIASES).lenient
    verdict = grade_exact(reply("", reasoning="Lincoln"), ALIASES)
    assert (verdict.strict, verdict.lenient, verdict.problem) == (False, True, "no_answer")
