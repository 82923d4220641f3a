"""Spans that state an answer, in replies that repeat their mark without end, as small models write them."""

import pytest

from evals.graders.answer_spans import MOST_SPANS, answer_spans, boxed


@pytest.mark.parametrize("mark", ["#### ", "the answer is "])
def test_of_a_mark_that_is_repeated_in_a_sentence_without_end_the_first_and_last_spans_are_read(mark):
    spans = answer_spans(f"{mark}7 " + f"{mark}8 " * 1000 + f"{mark}9")
    assert len(spans) == MOST_SPANS
    assert (spans[0][0], spans[-1]) == ("7", "9")


@pytest.mark.parametrize("line", ["#### {}", "Answer: {}", "\\boxed{{{}}}"])
def test_every_line_that_states_an_answer_is_read(line):
    numbers = list(map(str, range(100)))
    assert answer_spans("\n".join(map(line.format, numbers))) == numbers


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        ("\\boxed{1}", ["1"]),
        ("} \\boxed{\\frac{1}{2}} {", ["\\frac{1}{2}"]),
        ("\\boxed{\\boxed{3}}", ["\\boxed{3}", "3"]),
        ("\\boxed{1 \\boxed{2} \\fbox {3}", ["2", "3"]),
        ("\\boxed{1", []),
    ],
)
def test_a_box_holds_what_is_between_its_own_braces(text, contents):
    assert boxed(text) == contents
