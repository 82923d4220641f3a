"""The checks of a teacher's document, each with its reason for rejection."""

import re
from collections import Counter
from random import Random

import pytest

from nautile.configs.distill import DistillConfig, TeacherConfig
from nautile.data.distill.checks import (
    copied_share,
    is_grounded,
    is_refusal,
    is_repetitive,
    leaks_template,
    reject_reason,
)
from nautile.data.distill.parse_reply import ParsedDocument
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.teacher_prompt import COMPACT, FULL, TEMPLATES
from nautile.data.records import SynthRecord
from nautile.data.retrieval.exemplar_index import Neighbour
from tests.support.samples.ordinary_replies import LEAKS, REFUSALS, ordinary_documents
from tests.support.samples.ordinary_replies import PASSAGE as LEAKED_PASSAGE

PASSAGE = "A hat is a head covering worn for protection since 1800. Hats with spikes are called pickelhaube in Prussia."
PROMPT = Prompt("p", "What is a hat?", "definition", PASSAGE, "We need to say what a hat is: ")
OPEN = Prompt("o", "Write a short text about hats.", "instruction")
GOOD = ParsedDocument(
    "We need to say what a hat is: it is a head covering.", "A hat is a head covering worn for protection."
)


def neighbour(query="How many legs?", reasoning="2 * 4 = 8. 1 * 2 = 2. 8 + 2 = 10.", answer="10", index=0):
    return Neighbour(index, SynthRecord(query, reasoning, answer), 0.5)


NEAR = [neighbour(query=f"Question number {n}?", index=n) for n in range(5)]


def reason_for(document, finish="stop", prompt=PROMPT, template=COMPACT, near=NEAR, **fields):
    config = DistillConfig(prompts=1, teachers=(TeacherConfig(endpoint="t"),), **fields)
    return reject_reason(document, finish, prompt, near, TEMPLATES[template], config)


def test_a_good_document_is_kept():
    assert reason_for(GOOD) is None
    long_ago = ParsedDocument("Hats are many. Some are warm.", "Hats keep the head warm.")
    assert reason_for(long_ago, prompt=OPEN, template=FULL) is None
    assert reason_for(ParsedDocument("3 + 4 = 7.", "7"), prompt=Prompt("s", "3 + 4?", "instruction")) is None


@pytest.mark.parametrize(
    ("document", "finish", "reason"),
    [
        (None, "stop", "unparsable"),
        (GOOD, "length", "cut_in_reply"),
        (ParsedDocument("", GOOD.answer), "stop", "empty"),
        (ParsedDocument(GOOD.reasoning, ""), "stop", "empty"),
        (ParsedDocument(GOOD.reasoning, "A hat is a hat."), "stop", "too_short"),
        (ParsedDocument(GOOD.reasoning, "It is a head covering " + "worn " * 120), "stop", "too_long"),
        (ParsedDocument(GOOD.reasoning, "A hat is a head covering worn for ."), "stop", "truncated"),
        (ParsedDocument(GOOD.reasoning, "A hat is a head covering and..."), "stop", "truncated"),
        (ParsedDocument(GOOD.reasoning, "A hat is a head covering " + "of wool " * 23 + "w."), "stop", "truncated"),
        (ParsedDocument(GOOD.reasoning, "I'm sorry, but I cannot help with hats."), "stop", "refusal"),
        (ParsedDocument("The passage says what a hat is.", GOOD.answer), "stop", "leaked_template"),
        (ParsedDocument(GOOD.reasoning, "A hat is a head covering <|im_end|>"), "stop", "leaked_template"),
        (
            ParsedDocument(GOOD.reasoning, "It is a head covering, it is a head covering, it is a head covering."),
            "stop",
            "repeated",
        ),
        (ParsedDocument(GOOD.reasoning, "A hat is a head covering from France."), "stop", "ungrounded"),
        (ParsedDocument(GOOD.reasoning, "A hat is a head covering worn since 1900."), "stop", "ungrounded"),
        (ParsedDocument(GOOD.reasoning, "Kibera is a head covering worn for protection."), "stop", "ungrounded"),
    ],
)
def test_each_fault_has_its_reason(document, finish, reason):
    assert reason_for(document, finish) == reason


def test_a_document_that_copies_its_exemplars_is_rejected():
    story = "once upon a time there lived a small grey mouse in a house of stone by the sea"
    near = [neighbour(reasoning=story)]
    assert copied_share(story, near) == 1
    assert (
        reason_for(ParsedDocument(story, "A mouse lived there."), prompt=OPEN, template=FULL, near=near)
        == "copied_exemplar"
    )
    half = story + " and what it did there nobody knows to this day for it never told anyone at all, not even me"
    assert 0.2 < copied_share(half, near) < 0.5
    assert reason_for(ParsedDocument(half, "A mouse lived there."), prompt=OPEN, template=FULL, near=near) is None
    assert copied_share("too short for one", near) == 0


def test_a_long_text_may_repeat_its_words():
    steps = " ".join(f"Then {n} plus {n} is {2 * n}." for n in range(60))
    assert not is_repetitive(steps)
    assert is_repetitive("it is the same as before " * 30)


def plain_grams(text, length):
    words = [word.lower() for word in re.findall(r"\w+", text)]
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def test_checks_that_count_words_follow_their_definitions():
    """On texts of few words, which repeat and copy one another, and where sentences begin with names."""
    random, kinds = Random(1), Counter()
    for n in range(600):
        words = ["a", "b", "The", "x1", "İ", "5", "Ada", "Bob,", "end.", "Of", "Σς"][: random.randrange(2, 12)]
        texts = [
            " ".join(random.choices(words, k=random.choice((3, 9, 30, 500 if n % 20 == 0 else 60)))) for _ in range(4)
        ]
        reasoning, answer, passage, shown = texts
        grams = plain_grams(reasoning, 4)
        counted, times = Counter(grams), max(3, len(re.findall(r"\w+", reasoning)) // 100)
        single = plain_grams(reasoning, 1)
        poor = 24 <= len(single) <= 400 and len(set(single)) / len(single) < 0.2
        repeats = max(counted.values(), default=0) >= times
        assert is_repetitive(reasoning) == (repeats or poor)
        copied, own = set(plain_grams(shown, 8)) | set(plain_grams(passage, 8)), set(plain_grams(answer, 8))
        share = len(copied & own) / len(own) if own else 0
        assert copied_share(answer, [neighbour(shown, passage, "10")]) == share
        known = {word for (word,) in plain_grams(f"{passage} What?", 1)}
        invented = [
            name
            for sentence in re.split(r"(?<=[.:!?])\s+", f"{reasoning} {answer}")
            for name in re.finditer(r"\b[A-Z][\w'’-]*|\d[\d.,]*", sentence)
            if not {w for (w,) in plain_grams(name[0], 1)} <= known | ({"the", "of"} if name.start() == 0 else set())
        ]
        assert is_grounded(ParsedDocument(reasoning, answer), Prompt("g", "What?", "definition", passage)) == (
            not invented
        )
        kinds.update(
            repeats=repeats, poor=poor, copied=0 < share < 1, invented=bool(invented), rich=not (repeats or poor)
        )
    assert min(kinds.values()) > 20, kinds
    assert kinds["invented"] < 550


def test_a_word_of_the_template_may_stand_in_the_question():
    prompt = Prompt("p", "What is JSON?", "definition", "JSON is a format for data.", None)
    document = ParsedDocument("We need to say what JSON is: a format.", "JSON is a format for data.")
    assert reason_for(document, prompt=prompt) is None


def test_ordinary_documents_are_neither_leaks_nor_refusals():
    """A rejected document was paid for, and the share of rejects can stop a run: under 0.5 % of a thousand."""
    documents = list(ordinary_documents(1000))
    assert len({(prompt.query, document.answer) for prompt, document in documents}) > 900
    rejected = [
        (prompt.query, document)
        for prompt, document in documents
        if is_refusal(document, prompt) or leaks_template(f"{document.reasoning}\n{document.answer}", prompt)
    ]
    assert len(rejected) < 5, rejected[:5]


@pytest.mark.parametrize(("text", "has_passage"), LEAKS)
def test_what_only_the_teacher_was_shown_is_a_leak(text, has_passage):
    prompt = Prompt("l", "What is a hat?", "definition", LEAKED_PASSAGE if has_passage else None)
    assert leaks_template(text, prompt)
    assert leaks_template(f"A hat is a head covering.\n{text}", prompt)


@pytest.mark.parametrize("answer", REFUSALS)
def test_a_refusal_is_a_refusal_of_what_was_asked(answer):
    asked = Prompt("r", "Tell me all about hats.", "instruction")
    assert is_refusal(ParsedDocument("We look at what is asked.", answer), asked)
    assert is_refusal(ParsedDocument(answer, "Nothing."), asked)
    letter = f"Dear Ada, thank you for your kind lines, which came on Monday. {'We were glad of them. ' * 6}{answer}"
    assert not is_refusal(ParsedDocument("We look at what is asked.", letter), asked)


GERMAN = "Ein Hut ist eine Kopfbedeckung, die man zum Schutz oder zur Zierde trägt, und das seit langer Zeit."
ENGLISH = "A hat is a head covering that people wear for protection or as an ornament, and have worn for ages."


@pytest.mark.parametrize(
    ("query", "reasoning", "answer", "kept"),
    [
        ("Please tell me in a few words what a hat is and what it is for.", ENGLISH, ENGLISH[:-1] + " now.", True),
        ("Please tell me in a few words what a hat is and what it is for.", GERMAN, ENGLISH, False),
        ("Please tell me in a few words what a hat is and what it is for.", ENGLISH, GERMAN, False),
        ("Please translate this for me into German: a hat is a head covering.", ENGLISH, GERMAN, True),
        (
            "Erkläre mir bitte mit wenigen Worten, was ein Hut ist und wozu er dient.",
            GERMAN,
            GERMAN[:-1] + " so.",
            True,
        ),
        ("Hut?", ENGLISH, GERMAN, True),
    ],
)
def test_a_document_keeps_to_the_language_of_its_query(query, reasoning, answer, kept):
    prompt = Prompt("l", query, "instruction")
    reason = reason_for(ParsedDocument(reasoning, answer), prompt=prompt, template=FULL)
    assert reason == (None if kept else "wrong_language")
    assert reason_for(ParsedDocument(reasoning, answer), prompt=prompt, template=FULL, same_language=False) is None
