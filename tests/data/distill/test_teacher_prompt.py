import pytest

from common.errors import ConfigError
from configs.distill import DistillConfig, TeacherConfig
from configs.endpoint import EndpointConfig
from data.distill.checks import copied_share, is_repetitive, reject_reason
from data.distill.difficulty import blend_probe, choose_teacher, count_steps, prompt_difficulty
from data.distill.parse_reply import ParsedDocument
from data.distill.prompts import Prompt
from data.distill.teacher_prompt import COMPACT, FULL, TEMPLATES, teacher_request, template_for
from data.records import SynthRecord
from data.retrieval.exemplar_index import Neighbour

PASSAGE = "A hat is a head covering worn for protection since 1800. Hats with spikes are called pickelhaube in Prussia."
PROMPT = Prompt("p", "What is a hat?", "definition", PASSAGE, "We need to say what a hat is: ")
OPEN = Prompt("o", "Write a short text about hats.", "instruction")
GOOD = ParsedDocument(
    "We need to say what a hat is: it is a head covering.", "A hat is a head covering worn for protection."
)


def neighbour(query="How many legs?", reasoning="2 * 4 = 8. 1 * 2 = 2. 8 + 2 = 10.", answer="10", index=0):
    return Neighbour(index, SynthRecord(query, reasoning, answer), 0.5)


NEAR = [neighbour(query=f"Question number {n}?", index=n) for n in range(5)]


def asked(template, prompt=PROMPT):
    return teacher_request(TEMPLATES[template], prompt, NEAR, "teacher", 160, 0.0, 7)


def judged(draft, finish="stop", prompt=PROMPT, template=COMPACT, near=NEAR, **fields):
    config = DistillConfig(prompts=1, teachers=(TeacherConfig(endpoint="t"),), **fields)
    return reject_reason(draft, finish, prompt, near, TEMPLATES[template], config)


@pytest.mark.parametrize("template", [COMPACT, FULL])
def test_a_request_shows_the_five_exemplars_the_passage_and_the_question(template):
    request = asked(template)
    text = request.messages[-1]["content"]
    assert all(f"Question number {n}?" in text for n in range(5))
    assert PASSAGE in text
    assert text.endswith("What is a hat?")
    assert (request.purpose, request.tag, request.seed, request.max_tokens) == ("teacher", "p", 7, 160)
    assert PASSAGE not in asked(template, OPEN).messages[-1]["content"]


def test_the_compact_prompt_begins_the_same_for_all():
    first, second = asked(COMPACT), asked(COMPACT, OPEN)
    assert first.messages[:-1] == second.messages[:-1]
    assert len(first.messages) == 6
    assert "We need to say what a hat is: " in first.grammar


def test_long_exemplars_are_cut_at_a_word():
    near = [neighbour(query="word " * 1000, reasoning="y" * 9000)]
    for name, template in TEMPLATES.items():
        request = teacher_request(template, PROMPT, near, "teacher", 160, 0.0, 0)
        assert len(request.messages[-1]["content"]) < sum(template.exemplar) + 600, name


def test_a_template_is_chosen_by_name_or_by_the_kind_of_endpoint():
    embedded = EndpointConfig(kind="embedded", model="x")
    remote = EndpointConfig(kind="openai", model="x", url="http://127.0.0.1/v1")
    assert template_for(TeacherConfig(endpoint="t"), embedded).name == COMPACT
    assert template_for(TeacherConfig(endpoint="t"), remote).name == FULL
    assert template_for(TeacherConfig(endpoint="t", template=COMPACT), remote).name == COMPACT
    with pytest.raises(ConfigError, match=r"no template 'x'.*nautile-teacher-1"):
        template_for(TeacherConfig(endpoint="t", template="x"), remote)


def test_a_good_document_is_kept():
    assert judged(GOOD) is None
    long_ago = ParsedDocument("Hats are many. Some are warm.", "Hats keep the head warm.")
    assert judged(long_ago, prompt=OPEN, template=FULL) is None
    assert judged(ParsedDocument("3 + 4 = 7.", "7"), prompt=Prompt("s", "3 + 4?", "instruction")) is None


@pytest.mark.parametrize(
    ("draft", "finish", "reason"),
    [
        (None, "stop", "unparsable"),
        (GOOD, "length", "truncated"),
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
def test_each_fault_has_its_reason(draft, finish, reason):
    assert judged(draft, finish) == reason


def test_a_document_that_copies_its_exemplars_is_rejected():
    story = "once upon a time there lived a small grey mouse in a house of stone by the sea"
    near = [neighbour(reasoning=story)]
    assert copied_share(story, near) == 1
    assert (
        judged(ParsedDocument(story, "A mouse lived there."), prompt=OPEN, template=FULL, near=near)
        == "copied_exemplar"
    )
    half = story + " and what it did there nobody knows to this day for it never told anyone at all, not even me"
    assert 0.2 < copied_share(half, near) < 0.5
    assert judged(ParsedDocument(half, "A mouse lived there."), prompt=OPEN, template=FULL, near=near) is None
    assert copied_share("too short for one", near) == 0


def test_a_long_text_may_come_back_to_its_words():
    steps = " ".join(f"Then {n} plus {n} is {2 * n}." for n in range(60))
    assert not is_repetitive(steps)
    assert is_repetitive("it is the same as before " * 30)


def test_a_word_of_the_template_may_be_what_was_asked_about():
    prompt = Prompt("p", "What is JSON?", "definition", "JSON is a format for data.", None)
    draft = ParsedDocument("We need to say what JSON is: a format.", "JSON is a format for data.")
    assert judged(draft, prompt=prompt) is None


def test_difficulty_follows_kind_length_and_steps():
    easy = Prompt("a", "State one fact about salt.", "fact")
    demanding = Prompt("b", "Prove step by step why it holds. " * 12, "instruction")
    long_near = [neighbour(reasoning="One step. " * 25)]
    assert 0 <= prompt_difficulty(easy, NEAR) < 0.3
    assert (
        prompt_difficulty(easy, NEAR)
        < prompt_difficulty(easy, long_near)
        < prompt_difficulty(demanding, long_near)
        <= 1
    )
    assert prompt_difficulty(easy, []) < prompt_difficulty(easy, NEAR)
    # 0.4 * 0.1 + 0.2 * ln 5 / ln 1000 + 0.4 * 3 / 20
    assert prompt_difficulty(easy, NEAR) == pytest.approx(0.04 + 0.2 * 0.23299 + 0.06, abs=1e-4)
    assert count_steps("One. Two!\nThree") == 3


def test_a_teacher_is_chosen_by_its_threshold():
    small, big = TeacherConfig(endpoint="small", up_to=0.4), TeacherConfig(endpoint="big", up_to=0.8)
    assert choose_teacher([big, small], 0.4) is small
    assert choose_teacher([big, small], 0.41) is big
    assert choose_teacher([big, small], 0.95) is big


def test_what_a_probe_found_is_weighed_in():
    assert blend_probe(0.2, None, 0.5) == 0.2
    assert blend_probe(0.2, 1.0, 0.5) == pytest.approx(0.6)
    assert blend_probe(0.2, 0.0, 1.0) == 0


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
    found = judged(ParsedDocument(reasoning, answer), prompt=prompt, template=FULL)
    assert found == (None if kept else "wrong_language")
    assert judged(ParsedDocument(reasoning, answer), prompt=prompt, template=FULL, same_language=False) is None


def test_the_longest_document_is_the_operators_to_set():
    draft = ParsedDocument("One thing after another. Then this.", "Many words " + "x" * 200)
    assert judged(draft, prompt=OPEN, template=FULL) is None
    assert judged(draft, prompt=OPEN, template=FULL, longest_answer=200) == "too_long"
