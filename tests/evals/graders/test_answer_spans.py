"""Spans that state an answer, in replies that repeat their mark without end, as small models write them."""

import pytest

from nautile.evals.graders.answer_spans import MOST_SPANS, answer_spans, behind_questions, boxed


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
    ("text", "spans"),
    [
        ("#### Step 1\n2 + 2 = 4\n#### Step 2\n4 + 3 = 7\n#### 7", ["7"]),
        ("#### Step 1: Add\n2 + 2 = 4", []),
        ("#### 1. Find the cost\nIt is 4.\n#### Part (b)\nMore.", []),
        ("#### Solution\nIt is 4.", []),
        ("#### The cost of one pen\nIt is 4.", []),
        ("It is 4.\n#### The cost is 4", ["The cost is 4"]),
        ("##### 5\nIt is 4.", []),
        ("#### 12 apples\nQuestion: and now?", ["12 apples"]),
        ("#### $1,200\n#### x = 5\nDone", ["$1,200", "x = 5"]),
        ("#### C\nDone", ["C"]),
        ("3 + 4 = 7 #### 7", ["7"]),
        ("**Final Answer**\n\nParis", ["Paris"]),
        ("### Answer:\n12", ["12", "12"]),
        ("<answer> A </answer> and on", ["A"]),
        ("所以答案是C。", ["C"]),
        ("The **answer** is **2**3", ["2**3"]),
    ],
)
def test_a_heading_is_no_mark_and_a_mark_no_heading(text, spans):
    assert answer_spans(text) == spans


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        ("\\boxed{1}", ["1"]),
        ("} \\boxed{\\frac{1}{2}} {", ["\\frac{1}{2}"]),
        ("\\boxed{\\boxed{3}}", ["3"]),
        ("\\boxed{1 \\boxed{2} \\fbox {3}", ["2", "3"]),
        ("\\boxed{1", []),
    ],
)
def test_a_box_holds_what_is_between_its_own_braces(text, contents):
    assert boxed(text) == contents


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("She has 3. How many has he? He has 4.", "He has 4."),
        ("She has 3. How many has he by 4 p.m.?", ""),
        ("Mr. Hill has 3. How much does Mr. Hill lack?", ""),
        ("How many are left", ""),
        ("How many are left: 3", "How many are left: 3"),
        ("She has 3, so find what he has.", ""),
        ("Find the rest. 7 - 3 = 4. Then compute the price. 4 * 2 = 8", "4 * 2 = 8"),
        ("Compute: 4 * 2 = 8.", "Compute: 4 * 2 = 8."),
        ("Simplify to $4$.", "Simplify to $4$."),
        ("3 + 4 = 7. How many is that?", "3 + 4 = 7. …"),
        ("It is 3. What's your next question?", "It is 3. …"),
        ("It is 3. How can I help you?", "It is 3. …"),
        ("It is 3. Is there more?", "It is 3. …"),
    ],
)
def test_what_stands_before_a_question_for_an_amount_is_the_problem(text, stated):
    assert behind_questions(text).strip() == stated
