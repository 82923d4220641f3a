"""Overlap with held-out questions, against a naive form that looks at every n-gram; and the questions artifact."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.data.screening import words
from nautile.data.screening.contamination import (
    SHORTEST,
    ContaminationIndex,
    HeldOutQuestion,
    load_contamination_index,
    read_questions,
    write_questions,
)

QUESTION = "Natalia sold clips to forty eight of her friends in April and then sold half as many clips in May"


def test_a_copied_question_is_found_and_named():
    held = ContaminationIndex(
        [
            HeldOutQuestion("gsm8k", "17", QUESTION),
            HeldOutQuestion("arc", "3", "Which of these is a mineral found in sand"),
        ]
    )
    hits = held.hits(f"Once upon a time: {QUESTION.upper().replace(' ', ',  ')}! The end.")
    assert [(hit.benchmark, hit.example, hit.share) for hit in hits] == [("gsm8k", "17", 1.0)]
    assert hits[0].words.startswith("natalia sold clips")
    part = held.hits(" ".join(QUESTION.split()[2:16]))
    assert [hit.example for hit in part] == ["17"]
    assert 0 < part[0].share < 1


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(lambda text: text.replace("i", "i\u00ad"), id="soft hyphens"),
        pytest.param(lambda text: text.replace("li", "l\u00ad\ni"), id="soft hyphens at the ends of lines"),
        *(
            pytest.param(lambda text, c=c: c.join(text), id=f"U+{ord(c):04X} between all letters")
            for c in "\u200b\u200c\u200d\u2060\ufeff\ufe0f\u034f"
        ),
        pytest.param(lambda text: text.replace(" ", " \u200b"), id="zero-width spaces beside spaces"),
        pytest.param(lambda text: unicodedata.normalize("NFD", text), id="decomposed"),
        pytest.param(
            lambda text: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text), id="full-width"
        ),
        pytest.param(lambda text: text.replace("fi", "\ufb01"), id="ligatures"),
        pytest.param(lambda text: text.replace(" ", "\u00a0"), id="no-break spaces"),
        pytest.param(lambda text: text.replace("f", "f\u0332"), id="lines under letters"),
        pytest.param(lambda text: re.sub(r"(\w+)", r"_\1_", text), id="emphasis"),
        pytest.param(lambda text: re.sub(r"(\w+)", r"[**\1**](https://x.org/a_b)", text), id="links"),
        pytest.param(lambda text: text.replace(" ", "&nbsp;").replace("o", "&#111;"), id="entities"),
        pytest.param(lambda text: re.sub(r"(\w+)", r"<b>\1</b><br/>", text), id="tags"),
        pytest.param(lambda text: re.sub(r"(\w+)", r'<a href="y" title="at the sea">\1</a>', text), id="tags of links"),
        pytest.param(lambda text: re.sub(r"(\w+)", r"\\textbf{\1}\\quad ", text), id="LaTeX"),
    ],
)
def test_a_question_is_found_however_its_letters_are_written(written):
    question = "At the caf\u00e9 in Z\u00fcrich Zo\u00eb finds fifty five official files; how many did Jos\u00e9 order?"
    for held_text, text in ((question, written(question)), (written(question), question)):
        held = ContaminationIndex([HeldOutQuestion("gsm8k", "17", held_text)])
        hits = held.hits(f"Before it, {text} and after it.")
        assert [(hit.example, hit.share) for hit in hits] == [("17", 1.0)]


def test_a_text_in_an_attribute_is_screened_too():
    held = ContaminationIndex([HeldOutQuestion("gsm8k", "17", QUESTION)])
    assert held.hits(f'<img alt="{QUESTION}"/>')
    assert held.hits(f"a <b {QUESTION} c> d &{'#' + '9' * 5000};")


def test_short_questions_match_whole_and_the_shortest_are_left_out():
    held = ContaminationIndex(
        [HeldOutQuestion("trivia", "1", "Who wrote the opera Aida?"), HeldOutQuestion("trivia", "2", "Why?")]
    )
    assert held.too_short == 1
    assert [hit.example for hit in held.hits("Tell me: who wrote the opera Aida and when?")] == ["1"]
    assert held.hits("Who wrote the opera Carmen?") == []


def test_boilerplate_of_a_benchmark_is_no_evidence_and_what_is_its_own_is():
    opener = "Choose the letter of the option that answers the following question in the best way of all"
    own = "why does a ship of iron float on the sea while a nail of iron sinks in it"
    questions = [HeldOutQuestion("mmlu", str(n), f"{opener} number {n}") for n in range(11)]
    held = ContaminationIndex([*questions, HeldOutQuestion("mmlu", "float", f"{opener} {own}")])
    assert held.hits(f"Instructions: {opener}.") == []
    assert held.boilerplate == 0
    [hit] = held.hits(f"They asked {own}")
    assert (hit.example, hit.share < 1) == ("float", True)
    assert [hit.example for hit in held.hits(questions[3].text)] == ["3"]
    few = ContaminationIndex(
        [*questions[:9], HeldOutQuestion("mmlu", "float", f"{opener} {own}"), HeldOutQuestion("arc", "0", opener)]
    )
    assert len(few.hits(f"Instructions: {opener}.")) == 11  # ten of one benchmark and one of another are not many
    every = ContaminationIndex([HeldOutQuestion("mmlu", str(n), opener) for n in range(11)])
    assert (every.boilerplate, every.hits(opener)) == (11, [])


def naive(
    questions: list[HeldOutQuestion], texts: list[str], ngram: int, common: int
) -> list[dict[tuple[str, str], float]]:
    """Every n-gram of every text looked up in every question: the share by question."""

    def words_in(text: str) -> list[str]:
        return re.findall(r"\w+", text.casefold())

    def every(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
        return zip(*(words[offset:] for offset in range(length)), strict=False)

    evidence = []
    for question in questions:
        words = words_in(question.text)
        whole = question.whole or len(words) < ngram
        evidence.append(set() if len(words) < SHORTEST else set(every(words, len(words) if whole else ngram)))
    uses: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for question, own in zip(questions, evidence, strict=True):
        for gram in own:
            uses[question.benchmark, gram] += 1
    boilerplate = {gram for (_, gram), count in uses.items() if count > common}
    evidence = [own - boilerplate for own in evidence]
    shares = []
    for text in texts:
        there = {gram for length in {len(g) for own in evidence for g in own} for gram in every(words_in(text), length)}
        shares.append(
            {
                (q.benchmark, q.example): len(own & there) / len(own)
                for q, own in zip(questions, evidence, strict=True)
                if own & there
            }
        )
    return shares


PIECE = st.lists(st.sampled_from(["Sea", "\u00c9cume", "thermodynamically", "3", "wave"]), min_size=3, max_size=9)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data(), st.sampled_from([6, 8, 13]), st.integers(1, 3), st.booleans())
def test_no_hit_is_lost_and_none_made_up(data, ngram, common, small_blocks):
    pieces = data.draw(st.lists(PIECE.map(" ".join), min_size=1, max_size=4))  # few, so that questions and texts share
    some = st.lists(st.sampled_from(pieces), max_size=5).map(", ".join)
    questions = [
        HeldOutQuestion(data.draw(st.sampled_from("ab")), str(n), text, data.draw(st.booleans()))
        for n, text in enumerate(data.draw(st.lists(some, max_size=6)))
    ]
    texts = data.draw(st.lists(some, max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "BLOCK", 30 if small_blocks else 1 << 18)
        hits_by_text = ContaminationIndex(questions, ngram, common).screen(texts)
    shares = [{(hit.benchmark, hit.example): hit.share for hit in hits} for hits in hits_by_text]
    assert shares == [pytest.approx(expected) for expected in naive(questions, texts, ngram, common)]
    assert all(hits == sorted(hits, key=lambda hit: (-hit.share, hit.benchmark, hit.example)) for hits in hits_by_text)


def test_questions_come_back_as_they_were_and_are_searched_for(tmp_path):
    odd = "Wie heißt der Fluß in Köln, an dem der Dom steht?\u2028 Und\nwarum\u0085?"
    questions = [
        HeldOutQuestion("arc", "7", odd),
        HeldOutQuestion("generated", "0", "a b c d e f", whole=True),
        HeldOutQuestion("b", "", ""),
    ]
    write_questions(tmp_path, questions)
    assert read_questions(tmp_path) == questions
    assert [hit.example for hit in load_contamination_index(tmp_path).hits(f"Quiz: {odd.upper()}")] == ["7"]
    assert load_contamination_index(None) is None


def test_damage_is_refused_by_line_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*--only held_out"):
        read_questions(tmp_path)
    for line in ("{", '{"benchmark": "arc"}', "[]", "7"):
        (tmp_path / "questions.jsonl").write_text(f'{{"benchmark": "a", "example": "1", "text": "t"}}\n{line}\n')
        with pytest.raises(ConfigError, match=r"line 2 is not a question.*--only held_out"):
            read_questions(tmp_path)
