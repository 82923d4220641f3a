import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.data.chat_template import ParsedReply
from nautile.evals.graders import instructions
from nautile.evals.graders.instructions import _registry, are_compatible, check_known, describe, grade_instructions

# One answer that keeps each instruction, one that breaks it: every one of IFEval's 25.
KEPT_AND_BROKEN = {
    "keywords:existence": ({"keywords": ["sea"]}, "The sea.", "The land."),
    "keywords:frequency": ({"keyword": "sea", "frequency": 2, "relation": "at least"}, "sea sea", "sea"),
    "keywords:forbidden_words": ({"forbidden_words": ["sea"]}, "Land.", "Sea."),
    "keywords:letter_frequency": ({"letter": "z", "let_frequency": 2, "let_relation": "at least"}, "zzz", "z"),
    "language:response_language": (
        {"language": "de"},
        "Das ist ein ganz gewöhnlicher deutscher Satz.",
        "This is quite an ordinary English sentence.",
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        "One. Two.",
        "It rains. He sleeps. They sing.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "One.\n***\nTwo.", "One."),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "sea"},
        "One.\n\nSea two.",
        "One.\n\nTwo.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] and [b]", "[a]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Yes.\nP.S. No.", "Yes."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n* b", "* a"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 1}, "*sea*", "sea"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    "detectable_format:json_format": ({}, '{"a": 1}', "a: 1"),
    "detectable_format:title": ({}, "<<Sea>> text", "Sea text"),
    "combination:two_responses": ({}, "One.\n******\nTwo.", "One."),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Write."}, "Write. Done.", "Done."),
    "startend:end_checker": ({"end_phrase": "The end."}, "Sea. The end.", "Sea."),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "SEA AND",
        "SEA and",
    ),
    "change_case:english_capital": ({}, "THIS IS AN ENGLISH SENTENCE.", "This is an English sentence."),
    "change_case:english_lowercase": ({}, "this is an english sentence.", "This is an English sentence."),
    "punctuation:no_comma": ({}, "One two.", "One, two."),
    "startend:quotation": ({}, '"Sea."', "Sea."),
}


def test_every_checker_of_ifeval_is_exercised():
    assert set(KEPT_AND_BROKEN) == set(_registry())


@pytest.mark.parametrize("name", KEPT_AND_BROKEN)
def test_kept_and_broken(reply, name):
    arguments, kept, broken = KEPT_AND_BROKEN[name]
    assert describe(name, arguments)
    right, followed = grade_instructions(reply(kept), "Write.", [name], [arguments])
    assert (right.strict, right.lenient, right.problem) == (True, True, None)
    assert [(item.instruction, item.strict) for item in followed] == [(name, True)]
    assert not grade_instructions(reply(broken), "Write.", [name], [arguments])[0].strict


def test_all_must_be_kept_and_each_is_reported(reply):
    names, arguments = ["punctuation:no_comma", "startend:quotation"], [{}, {}]
    verdict, followed = grade_instructions(reply("No comma."), "Write.", names, arguments)
    assert (verdict.strict, verdict.parsed) == (False, "1/2 instructions")
    assert [item.strict for item in followed] == [True, False]


def test_lenient_forgives_a_first_line_and_asterisks(reply):
    verdict, _ = grade_instructions(reply('Sure:\n"Sea."'), "Write.", ["startend:quotation"], [{}])
    assert (verdict.strict, verdict.lenient) == (False, True)


def test_nothing_said_keeps_no_instruction(reply):
    assert grade_instructions(reply(""), "Write.", ["punctuation:no_comma"], [{}])[0].problem == "no_answer"
    verdict, followed = grade_instructions(
        ParsedReply("Sea", None, False, False), "Write.", ["punctuation:no_comma"], [{}]
    )
    assert (verdict.problem, verdict.lenient, followed[0].lenient) == ("unfinished", False, False)


@pytest.mark.parametrize(
    ("names", "strict", "problem"),
    [
        (["startend:quotation"], None, "not_graded"),
        (["punctuation:no_comma", "startend:quotation"], None, "not_graded"),
        (["punctuation:no_comma", "startend:quotation", "detectable_format:title"], False, None),
    ],
)
def test_a_checker_that_fails_is_no_verdict_unless_another_decides(reply, monkeypatch, names, strict, problem):
    def fail(self, value):
        raise IndexError("list index out of range")

    monkeypatch.setattr(_registry()["startend:quotation"], "check_following", fail)
    verdict, followed = grade_instructions(reply("No comma."), "Write.", names, [{} for _ in names])
    assert (verdict.strict, verdict.problem) == (strict, problem)
    assert [(item.strict, item.lenient) for item in followed if item.instruction == "startend:quotation"] == [
        (None,) * 2
    ]
    unfinished = ParsedReply("", "No comma.", False, False)
    assert grade_instructions(unfinished, "Write.", names, [{} for _ in names])[0].strict is False


@given(st.text(min_size=1))
def test_no_text_breaks_a_checker_and_strict_implies_lenient(text):
    names = [name for name in KEPT_AND_BROKEN if not name.startswith(("change_case", "language"))]
    arguments = [KEPT_AND_BROKEN[name][0] for name in names]
    verdict, followed = grade_instructions(ParsedReply("", text, True, True), "Write.", names, arguments)
    assert verdict.lenient or not verdict.strict
    assert all(item.lenient or not item.strict for item in followed)


@settings(max_examples=25)
@given(st.text(min_size=1, max_size=60), st.text(" \t\n\r", max_size=3), st.text(" \t\n\r", max_size=3))
def test_surrounding_white_space_changes_nothing(text, before, after):
    names = [name for name in KEPT_AND_BROKEN if not name.startswith(("change_case", "language"))]
    arguments = [KEPT_AND_BROKEN[name][0] for name in names]
    bare = grade_instructions(ParsedReply("", text.strip(), True, True), "Write.", names, arguments)
    padded = ParsedReply("", before + text.strip() + after, True, True)
    assert grade_instructions(padded, "Write.", names, arguments) == bare


@pytest.mark.parametrize("text", ["!!!", "1", "\u200b", "𝔘𝔫𝔦", "a" * 5000])
def test_the_language_checkers_take_odd_text(reply, text):
    names = [name for name in KEPT_AND_BROKEN if name.startswith(("change_case", "language"))]
    grade_instructions(reply(text), "Write.", names, [KEPT_AND_BROKEN[name][0] for name in names])


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        (["keywords:sea"], [{}], "no instruction 'keywords:sea'"),
        (["punctuation:no_comma"], [], "1 instructions but 0 sets"),
        ([], [], "is empty"),
        (["length_constraints:number_words"], [{"relation": "under"}], "refuses its arguments"),
        (["combination:repeat_prompt"], [{}], "refuses its arguments"),
        (["punctuation:no_comma"], [None], "the arguments of 'punctuation:no_comma' are no object, but NoneType"),
        (["keywords:existence"], [{"keywords": [5]}], "a keyword that is not a valid regular expression"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(names, arguments, message):
    with pytest.raises(ConfigError, match=f"record 7.*{message}"):
        check_known(names, arguments, "record 7")


def test_conflicts_are_ifevals_own():
    assert are_compatible("punctuation:no_comma", "startend:quotation")
    assert not are_compatible("change_case:english_capital", "change_case:english_lowercase")


@pytest.mark.parametrize(("letter", "kept"), [("#", "# one\n## two"), ("!", "One! Two! Three!")])
def test_a_letter_that_ifeval_would_replace_at_random_is_the_prompts(letter, kept):
    arguments = {"letter": letter, "let_frequency": 3, "let_relation": "at least"}
    verdicts = [
        grade_instructions(ParsedReply("", text, True, True), "?", ["keywords:letter_frequency"], [arguments])[0].strict
        for text in (kept, "No such letter in a long text of many words.") * 8
    ]
    assert verdicts == [True, False] * 8


def test_what_ifeval_draws_is_drawn_the_same_each_time():
    arguments = {"num_paragraphs": 4, "nth_paragraph": 9, "first_word": "sea"}
    text = "Sea one.\n\nTwo.\n\nSea three.\n\nFour."
    name = "length_constraints:nth_paragraph_first_word"
    assert len({describe(name, arguments) for _ in range(20)}) == 1
    verdicts = {
        grade_instructions(ParsedReply("", text, True, True), "?", [name], [arguments])[0].strict for _ in range(20)
    }
    assert len(verdicts) == 1


def test_a_keyword_that_is_no_pattern_is_refused_with_its_record_and_never_raises_while_grading():
    name, arguments = "keywords:existence", {"keywords": ["(x"]}
    with pytest.raises(
        ConfigError,
        match="record 3: instruction 'keywords:existence' has a keyword that is not a valid regular expression",
    ):
        check_known([name], [arguments], "ifeval: record 3")
    assert not grade_instructions(ParsedReply("", "An (x.", True, True), "?", [name], [arguments])[0].strict


@pytest.mark.parametrize(
    ("name", "arguments", "character"),
    [("detectable_content:number_placeholders", {"num_placeholders": 2}, "["), ("detectable_format:title", {}, "<")],
)
def test_a_search_that_is_quadratic_in_a_long_reply_is_ended_and_not_graded(monkeypatch, name, arguments, character):
    monkeypatch.setattr(instructions, "_LONG_S", 0.05)
    reply = ParsedReply("", character * 100_000, True, True)
    verdict, (result,) = grade_instructions(reply, "Write.", [name], [arguments])
    assert (verdict.strict, verdict.problem, result.strict) == (None, "not_graded", None)


@pytest.mark.parametrize("name", sorted(KEPT_AND_BROKEN))
def test_long_replies_are_searched_with_the_same_results(monkeypatch, name):
    arguments, kept, broken = KEPT_AND_BROKEN[name]
    monkeypatch.setattr(instructions, "_LONG", 0)
    for text, follows in ((kept, True), (broken, False)):
        _, (result,) = grade_instructions(ParsedReply("", text, True, True), "Write.", [name], [arguments])
        assert result.strict is follows


@pytest.mark.parametrize(
    ("name", "arguments", "character"),
    [
        ("language:response_language", {"language": "de"}, "1"),
        ("change_case:english_capital", {}, "Ⅷ"),
        ("change_case:english_lowercase", {}, "ⅷ"),
    ],
)
def test_a_reply_whose_language_is_unknown_is_not_logged_as_a_whole(caplog, capfd, name, arguments, character):
    reply = ParsedReply("", character * 4000, True, True)
    _, (result,) = grade_instructions(reply, "Write.", [name], [arguments])
    assert result.strict  # as IFEval counts it
    assert "Unable to detect language" in caplog.text
    assert character * 90 not in caplog.text + "".join(capfd.readouterr())
