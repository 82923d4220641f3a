"""The difficulty of prompts, the choice of a teacher, and the agreement of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.configs.distill import TeacherConfig
from nautile.data.distill.ask import (
    SAME_ANSWER,
    agreement,
    blend_probe,
    choose_teacher,
    count_steps,
    mean_agreement,
    prompt_difficulty,
)
from nautile.data.distill.prompts import Prompt
from nautile.data.records import SynthRecord
from nautile.data.retrieval.exemplar_index import Neighbour


def neighbour(query="How many legs?", reasoning="2 * 4 = 8. 1 * 2 = 2. 8 + 2 = 10.", answer="10", index=0):
    return Neighbour(index, SynthRecord(query, reasoning, answer), 0.5)


NEAR = [neighbour(query=f"Question number {n}?", index=n) for n in range(5)]


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


def test_the_disagreement_of_probes_is_weighed_in():
    assert blend_probe(0.2, None, 0.5) == 0.2
    assert blend_probe(0.2, 1.0, 0.5) == pytest.approx(0.6)
    assert blend_probe(0.2, 0.0, 1.0) == 0


@pytest.mark.parametrize(
    ("first", "second", "least", "most"),
    [
        ("Paris.", "paris", 1, 1),
        ("So the answer is 1,200.", "1200", 1, 1),
        ("It is 12", "It is 13", 0, 0),
        ("A hat is a head covering.", "A hat is a covering of the head.", SAME_ANSWER, 0.99),
        ("A hat is a head covering.", "Salt dissolves in water.", 0, 0.2),
        ("", "something", 0, 0),
    ],
)
def test_how_far_two_answers_agree(first, second, least, most):
    assert least <= agreement(first, second) <= most


@given(st.text(), st.text())
def test_agreement_is_a_share_and_has_no_side(first, second):
    assert 0 <= agreement(first, second) == agreement(second, first) <= 1
    assert agreement(first, first) == 1


def test_a_missing_answer_agrees_with_nothing():
    assert mean_agreement(["4", "4", "4"]) == 1
    assert mean_agreement(["4", "4", None]) == pytest.approx(1 / 3)
    assert mean_agreement([None, None]) == 0
