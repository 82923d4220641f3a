import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nautile.data.chat_template import ParsedReply
from nautile.evals.graders.grading import grade_choice, grade_exact, grade_number, grade_text, trivia_form

SPACE = st.text(" \t\n\r\u00a0", max_size=4)
BITS = [
    "12",
    "13",
    " or ",
    "A",
    " C",
    "\\boxed{",
    "}",
    "the answer is ",
    "Paris",
    "not ",
    "\n",
    ". ",
    "50%",
    "a ",
    "#### ",
]
ANSWERS = st.one_of(st.text(), st.lists(st.sampled_from(BITS), max_size=8).map("".join))
REPLIES = st.builds(
    lambda answer, reasoning, thought, done: ParsedReply(reasoning, answer if thought else None, thought, done),
    ANSWERS,
    ANSWERS,
    st.booleans(),
    st.booleans(),
)

GRADERS = {
    "number": lambda reply: grade_number(reply, "12"),
    "choice": lambda reply: grade_choice(reply, "C", "ABCD", ("Paris", "13", "12", "Rome")),
    "exact": lambda reply: grade_exact(reply, ["Paris", "A", "City of Light"]),
    "text": lambda reply: grade_text(reply, "Paris"),
}


@pytest.mark.parametrize("kind", GRADERS)
@given(reply=REPLIES)
@example(reply=ParsedReply("12 C Paris", None, False, False))
@example(reply=ParsedReply("12 C Paris", "", True, True))
def test_strict_implies_lenient_and_nothing_raises(kind, reply):
    verdict = GRADERS[kind](reply)
    assert verdict.lenient or not verdict.strict
    assert not (verdict.strict and verdict.problem)
    assert not verdict.strict or reply.finished_thinking
    assert (verdict.problem == "unfinished") == (not reply.finished_thinking)


@pytest.mark.parametrize("kind", GRADERS)
@given(answer=ANSWERS, before=SPACE, after=SPACE)
def test_surrounding_white_space_changes_nothing(kind, answer, before, after):
    bare = GRADERS[kind](ParsedReply("", answer.strip(), True, True))
    assert GRADERS[kind](ParsedReply("", before + answer.strip() + after, True, True)) == bare


@pytest.mark.parametrize("kind", GRADERS)
def test_unfinished_thinking_is_wrong_however_right_it_is(kind):
    right = {"number": "12", "choice": "C", "exact": "Paris", "text": "Paris"}[kind]
    verdict = GRADERS[kind](ParsedReply(right, None, False, False))
    assert (verdict.strict, verdict.lenient, verdict.problem) == (False, True, "unfinished")


def test_only_the_answer_counts_when_there_is_one(reply):
    verdict = grade_number(reply("13", reasoning="the answer is 12"), "12")
    assert (verdict.strict, verdict.lenient) == (False, False)


def test_a_number_is_expected_to_be_one():
    with pytest.raises(ValueError, match="is not a single number"):
        grade_number(ParsedReply("", "1", True, True), "many")


def test_an_article_is_not_accepted_for_paris(reply):
    assert not grade_exact(reply("a"), ["Paris"]).lenient
    assert not grade_exact(reply(""), ["", "!"]).lenient


def test_trivia_form_is_the_benchmarks_own():
    assert trivia_form("  The  Beatles' Abbey_Road! ") == "beatles abbey road"
    assert trivia_form("The The") == "the the"


@pytest.mark.parametrize(
    ("answer", "strict"),
    [
        ("ainomma", True),
        ("Ainomma.", True),
        ('"ainomma"', True),
        ("ammonia", False),
        ("ainomma ammonia", False),
        ("“ainomma”", True),
        ("«ainomma»", True),
        ("\\boxed{\\texttt{ainomma}}", True),
        ("aino\u00admma\u200b", True),
        ("The wrong answer is ainomma", False),
    ],
)
def test_text_answers_are_compared_whole(reply, answer, strict):
    assert grade_text(reply(answer), "ainomma").strict is strict


def test_lists_keep_their_signs(reply):
    assert not grade_text(reply("['81.0', '2.0']"), "['-81.0', '2.0']").lenient
