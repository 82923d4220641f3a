import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.distill.difficulty import SAME_ANSWER, agreement, mean_agreement


@pytest.mark.parametrize(
    ("one", "other", "least", "most"),
    [
        ("Paris.", "paris", 1, 1),
        ("So the answer is 1,200.", "1200", 1, 1),
        ("It is 12", "It is 13", 0, 0),
        ("A hat is a head covering.", "A hat is a covering of the head.", SAME_ANSWER, 0.99),
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
