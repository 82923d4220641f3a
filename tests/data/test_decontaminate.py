"""Overlap with held-out questions."""

from hypothesis import given
from hypothesis import strategies as st

from data.decontaminate import Contamination, HeldOut

QUESTION = "Natalia sold clips to forty eight of her friends in April and then sold half as many clips in May"
WORDS = st.lists(st.sampled_from(["sea", "shell", "pearl", "wave", "tide"]), min_size=0, max_size=40)


def test_a_copied_question_is_found_and_named():
    held = Contamination(
        [HeldOut("gsm8k", "17", QUESTION), HeldOut("arc", "3", "Which of these is a mineral found in sand")]
    )
    hits = held.hits(f"Once upon a time: {QUESTION.upper().replace(' ', ',  ')}! The end.")
    assert [(hit.benchmark, hit.example, hit.share) for hit in hits] == [("gsm8k", "17", 1.0)]
    assert hits[0].words.startswith("natalia sold clips")
    part = held.hits(" ".join(QUESTION.split()[2:16]))
    assert [hit.example for hit in part] == ["17"]
    assert 0 < part[0].share < 1


def test_clean_text_and_twelve_shared_words_are_no_hit():
    held = Contamination([HeldOut("gsm8k", "17", QUESTION)])
    assert held.hits("Nothing of the kind.") == []
    assert held.hits(" ".join(QUESTION.split()[:12]) + " something else") == []


def test_short_questions_match_whole_and_the_shortest_are_left_out():
    held = Contamination([HeldOut("trivia", "1", "Who wrote the opera Aida?"), HeldOut("trivia", "2", "Why?")])
    assert held.too_short == 1
    assert [hit.example for hit in held.hits("Tell me: who wrote the opera Aida and when?")] == ["1"]
    assert held.hits("Who wrote the opera Carmen?") == []


@given(question=WORDS, before=WORDS, after=WORDS)
def test_a_question_is_found_wherever_it_stands(question, before, after):
    held = Contamination([HeldOut("b", "1", " ".join(question))], ngram=6)
    hits = held.hits(" ".join([*before, *question, *after]))
    assert bool(hits) == (len(question) >= 5)
    assert all(hit.share == 1 for hit in hits)
