import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.evals.graders import choices
from nautile.evals.graders.grading import grade_choice

OPTIONS = ("knife", "fork", "spoon", "cup")

# answer, strict, lenient; the right option is C, a spoon
HARD = [
    ("C", True, True),
    ("c", True, True),
    ("(c) spoon", True, True),
    ("c. spoon", True, True),
    ("C) a spoon", True, True),
    ("C spoon", True, True),
    ("C: spoon", True, True),
    ("C - spoon", True, True),
    ("$C$", True, True),
    ("→ C", True, True),
    ("Ⓒ", True, True),
    ("Ｃ", True, True),
    ("С", False, False),  # a Cyrillic letter
    ("$\\boxed{\\text{(C)}}$", True, True),
    ("\\boxed{A} or \\boxed{C}", False, True),
    ("the answer is c", True, True),
    ("The answer is (C) a spoon.", True, True),
    ("The answer is: \n\nC", True, True),
    ("**Answer:** C", True, True),
    ("**Answer**: C", True, True),
    ("The correct option is C.", True, True),
    ("The correct answer is option c", True, True),
    ("The answer to the question is C", True, True),
    ("The answer is C because A is too small.", True, True),
    ("The answer is C, not A.", True, True),
    ("The answer is C rather than A or B", True, True),
    ("The answer is A or C.", False, True),
    ("The answer is A. No, the answer is C.", False, True),
    ("The answer is C. No, the answer is A.", False, False),
    ("A person would use a spoon, so C", True, True),
    ("A spoon, so C", True, True),
    ("I think it is C", True, True),
    ("e.g. C", True, True),
    ("Vitamin A is good, so C", True, True),
    ("A is wrong, so C", True, True),
    ("It isn't A; it is C", True, True),
    ("not A but C", True, True),
    ("Not A, not B, so C", True, True),
    ("C (not A)", True, True),
    ("It is not C", False, False),
    ("I don't think the answer is C.", False, False),
    ("I do not believe it is B or C", False, False),
    ("The wrong answer is C", False, False),
    ("C is the wrong answer", False, False),
    ("C can be ruled out", False, False),
    ("Eliminate A, B and D. So C", True, True),
    ("C does not work", False, False),
    ("C doesn't fit", False, False),
    ("anything but C", False, False),
    ("The answer is all but C", False, False),
    ("C++", False, False),
    ("37 degrees C", False, False),
    ("C: spoon\n\nA knife cuts, and a fork pierces.", True, True),
    ("Is it A? No. It is C.", True, True),
    ("C, since A and B are wrong", True, True),
    ("A or C", False, True),
    ("A and C", False, True),
    ("Both A and C", False, True),
    ("A, C", False, True),
    ("A\nC", False, True),
    ("A, B, C and D", False, False),
    ("C C C", True, True),
    ("C\n\nBecause a spoon is used.", True, True),
    ("Definitely C, 100%", True, True),
    ("spoon", True, True),
    ("Spoon.", True, True),
    ("a spoon", False, False),
    ("spoon or fork", False, False),
    ("fork", False, False),
    ("All of the above", False, False),
    ("AC", False, False),
    ("A.C.", False, False),
    ("U.S.A.", False, False),
    ("c'est la vie", False, False),
    ("E", False, False),
    ("3", False, False),
    ("third", False, False),
    ("The answer is a spoon", False, False),
    ("I do not know", False, False),
    ("", False, False),
    (" \n", False, False),
]


@pytest.mark.parametrize(("answer", "strict", "lenient"), HARD)
def test_hard_choices(reply, answer, strict, lenient):
    verdict = grade_choice(reply(answer), "C", "ABCD", OPTIONS)
    assert (verdict.strict, verdict.lenient) == (strict, lenient), verdict


VITAMINS = ("vitamin A", "vitamin C", "vitamin D", "vitamin K")
BLOOD = ("O", "A", "B", "AB")

# answer, right letter, options, strict; nothing else in the reply, so lenient is the same
NAMES = [
    ("B. Vitamin C", "B", VITAMINS, True),
    ("B) vitamin C", "B", VITAMINS, True),
    ("The answer is (B) vitamin C.", "B", VITAMINS, True),
    ("The answer is B, vitamin C.", "B", VITAMINS, True),
    ("The answer is vitamin C.", "B", VITAMINS, True),
    ("Vitamin C", "B", VITAMINS, True),
    ("Vitamin C", "C", VITAMINS, False),
    ("vitamin D", "C", VITAMINS, True),
    ("Vitamin C is in oranges, so B", "B", VITAMINS, True),
    ("B", "B", VITAMINS, True),
    ("B", "B", BLOOD, True),
    ("B", "C", BLOOD, False),
    ("AB", "D", BLOOD, True),
    ("D. a 10 C rise", "D", ("a 1 C rise", "a 5 C rise", "a fall", "a 10 C rise"), True),
    ("Both A and B", "C", ("one", "two", "Both A and B", "neither"), True),
    ("C. Both A and B", "C", ("one", "two", "Both A and B", "neither"), True),
    ("Vitamin C is in oranges", "C", OPTIONS, False),
    ("Hepatitis B", "B", OPTIONS, False),
    ("Plan B", "B", OPTIONS, False),
    ("Type B", "B", OPTIONS, False),
    ("Grade C", "C", OPTIONS, False),
    ("Mel B", "B", OPTIONS, False),
    ("D-day", "D", OPTIONS, False),
    ("C note", "C", OPTIONS, False),
    ("20 C", "C", OPTIONS, False),
    ("20°C", "C", OPTIONS, False),
    ("Type A blood", "A", OPTIONS, False),
    ("Oranges contain vitamin C, so A.", "A", OPTIONS, True),
    ("B cells make antibodies, so D", "D", OPTIONS, True),
    ("A is wrong because it is small. B is the answer.", "B", OPTIONS, True),
    ("C is incorrect; D is correct.", "D", OPTIONS, True),
    ("It can't be A, B or C, so it must be D.", "D", OPTIONS, True),
    ("A isn't right. C", "C", OPTIONS, True),
    ("not A, C", "C", OPTIONS, True),
    ("answer b", "B", OPTIONS, True),
    ("fork is the answer", "B", OPTIONS, True),
    ("A or B?", "B", OPTIONS, False),
    ("C?", "C", OPTIONS, True),
    ("Is the answer: C?", "C", OPTIONS, False),
    ("I doubt it is C", "C", OPTIONS, False),
    ("The answer is unlikely to be C", "C", OPTIONS, False),
    ("The answer is *not* C", "C", OPTIONS, False),
    ("~~B~~ C", "C", OPTIONS, True),
    ("~~C~~", "C", OPTIONS, False),
    ("答案不是C", "C", OPTIONS, False),
    ("C是错的", "C", OPTIONS, False),
    ("不是B，选C", "C", OPTIONS, True),
    ("正解はCではない", "C", OPTIONS, False),
    ("Nicht C", "C", OPTIONS, False),
]


@pytest.mark.parametrize(("answer", "letter", "options", "right"), NAMES)
def test_a_letter_in_a_name_a_denial_or_a_question_is_no_answer(reply, answer, letter, options, right):
    verdict = grade_choice(reply(answer), letter, "ABCD", options)
    assert (verdict.strict, verdict.lenient) == (right, right), verdict


@pytest.mark.parametrize(
    "text",
    [
        "A, " * 10_000,
        "word " * 10_000,
        "is it A " * 4000 + "?",
        "not A or " * 4000,
        f"A.{' ' * 1500}B",
        f"A.{' ' * 50_000}B",
        f"A{chr(10) * 50_000}B",
        "A" + "\n " * 25_000 + "B",
        "####" * 3000,
        "the answer is " * 1000,
        "\\boxed{" * 5000,
        "\\boxed{" * 2500 + "B" + "}" * 2500,
    ],
)
def test_a_long_reply_is_read_in_linear_time(text):
    began = time.process_time()
    choices.candidates(text, "ABCD", OPTIONS)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("answer", "result"),
    [("A", ["A"]), ("a", ["A"]), ("A is right", ["A"]), ("A, because", ["A"]), ("A tale", []), ("A Tale of A", ["A"])],
)
def test_the_article_is_no_option(answer, result):
    assert choices.candidates(answer, "ABCD") == result


@pytest.mark.parametrize(
    ("answer", "result"), [("I", ["I"]), ("I is right", ["I"]), ("I think B", ["B"]), ("I.", ["I"])]
)
def test_the_pronoun_is_no_option(answer, result):
    assert choices.candidates(answer, "ABCDEFGHIJ") == result


@pytest.mark.slow
@given(st.text(), st.integers(2, 10))
def test_no_text_breaks_the_parser(text, count):
    letters = "ABCDEFGHIJ"[:count]
    assert set(choices.candidates(text, letters, [text] * count)) <= set(letters)


FORMS = [
    "{}", "({})", "[{}]", "{}.", "{})", "'{}'", "`{}`", "**{}**", "{}:", "\\boxed{{{}}}", "\\( {} \\)", "$ {} $",
    "\\text{{{}}}", "is \\boxed{{\\text{{({})}}}}.", "<answer> {} </answer>", "The answer is {}.", "Answer: {} (one)",
    "Answer: {} [one]", "It is {} (one).", "{} - one", "{} = one", "{} → one", "{}, because it fits", "{} is right",
    "{} or nothing", "{} which is one", "{}\n\nBecause it fits", "option {} fits best", "Option({})", "### Answer\n{}",
    "#### {}", "Final Answer: {}", "The correct option is {} because of it", "答案是{}。", "选{}吧", "正解は{}です",
    "정답은 {}입니다", "({}) one", "{} ; one", "__{}__", "[[{}]]",
    "{}</answer>", "{}が正しい", "The answer is “{}”", "> {}", "{} is the correct answer", "<b>{}</b>",
]  # fmt: skip
LETTERS = "ABCDEFGHIJ"


@pytest.mark.parametrize("form", FORMS)
def test_all_letters_are_read_alike(form):
    assert {letter: choices.candidates(form.format(letter), LETTERS) for letter in LETTERS} == {
        letter: [letter] for letter in LETTERS
    }


@pytest.mark.parametrize(
    "form", ["{}", "({})", "[{}]", "{}.", "{})", "\\boxed{{{}}}", "option {}", "the answer is ({})"]
)
def test_all_lower_case_letters_are_read_alike(form):
    assert {letter: choices.candidates(form.format(letter.lower()), LETTERS) for letter in LETTERS} == {
        letter: [letter] for letter in LETTERS
    }


FORMULAS = [
    "\\frac{{{}}}{{24}}", "k_{{{}}}", "f({})", "P({})", "x^{{{}}}", "k_{{\\text{{{}}}}}", "\\sqrt{{{}}}", "2({})",
    "\\sin({})", "\\mathcal{{{}}}", "g_{}",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMULAS)
def test_a_letter_of_a_formula_is_no_option(form):
    letters = [*LETTERS, *LETTERS.lower()]
    assert {letter: choices.candidates(f"Since {form.format(letter)} < 1, (B)", LETTERS) for letter in letters} == {
        letter: ["B"] for letter in letters
    }


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("C. No, A. Actually C.", ["A", "C"]),
        ("The answer is A. The answer is B. The answer is A.", ["B", "A"]),
        ('A "smart" person uses a spoon, so C', ["C"]),
        ("A vitamin C tablet, so B", ["B"]),
        ("A knife", []),
    ],
)
def test_the_last_mention_is_the_last(text, letters):
    assert choices.candidates(text, "ABCD") == letters


def test_the_text_of_an_option_behind_its_letter(reply):
    assert grade_choice(reply("Answer: A knife"), "A", "ABCD", OPTIONS).strict
    assert not grade_choice(reply("Answer: A spoon"), "A", "ABCD", OPTIONS).strict
