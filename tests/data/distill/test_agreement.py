import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.distill.checks import mark_of
from data.distill.difficulty import ALIKE, agreement, majority, mean_agreement


@pytest.mark.parametrize(
    ("one", "other", "least", "most"),
    [
        ("Paris.", "paris", 1, 1),
        ("So the answer is 1,200.", "1200", 1, 1),
        ("It is 12", "It is 13", 0, 0),
        ("A hat is a head covering.", "A hat is a covering of the head.", ALIKE, 0.99),
        ("A hat is a head covering.", "Salt dissolves in water.", 0, 0.2),
        ("", "something", 0, 0),
    ],
)
def test_how_far_two_answers_agree(one, other, least, most):
    assert least <= agreement(one, other) <= most


@given(st.text(), st.text())
def test_agreement_is_a_share_and_has_no_side(one, other):
    assert 0 <= agreement(one, other) == agreement(other, one) <= 1
    assert agreement(one, one) == 1


def test_a_missing_answer_agrees_with_nothing():
    assert mean_agreement(["4", "4", "4"]) == 1
    assert mean_agreement(["4", "4", None]) == pytest.approx(1 / 3)
    assert mean_agreement([None, None]) == 0


def test_the_majority_is_the_first_of_those_that_say_the_same():
    assert majority(["5", "4", "It is 4", "four is 4"]) == (1, 0.75)
    assert majority([None, "4", None]) == (1, pytest.approx(1 / 3))
    assert majority(["1", "2"]) == (0, 0.5)
    assert majority([None, None]) == (None, 0)


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ('{"mark": 70}', 70),
        ('I say {"mark":"100"}.', 100),
        ("85", 85),
        ('{"mark": 101}', None),
        ("good", None),
        ("", None),
    ],
)
def test_a_mark_is_a_number_from_0_to_100(text, mark):
    assert mark_of(text) == mark
