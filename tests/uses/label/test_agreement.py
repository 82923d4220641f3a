"""Agreement with people: the library's figures, intervals that hold them, and the tables without information."""

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from nautile.evals.scoring.intervals import wilson
from nautile.uses.label.stage import agreement

LABELS = ("a", "b", "c")


def test_kappa_is_the_librarys_and_lies_in_its_interval():
    draw = np.random.default_rng(1)
    people = draw.choice(LABELS, 200, p=[0.6, 0.3, 0.1])
    teacher = np.where(draw.random(200) < 0.7, people, draw.choice(LABELS, 200))
    measured = agreement(people, teacher, LABELS)
    assert measured["kappa"]["value"] == pytest.approx(cohen_kappa_score(people, teacher))
    assert measured["accuracy"]["value"] == pytest.approx(np.mean(people == teacher))
    for name, width in (("accuracy", 0.2), ("kappa", 0.3)):
        value, low, high = measured[name].values()
        assert low < value < high
        assert high - low < width
    assert np.sum(measured["confusion"]) == 200


def test_perfect_agreement_on_a_few_texts_is_not_certain():
    measured = agreement(["a", "b", "a", "c"], ["a", "b", "a", "c"], LABELS)
    assert (measured["accuracy"]["value"], measured["kappa"]["value"]) == (1.0, 1.0)
    assert measured["accuracy"]["low"] == pytest.approx(wilson(4, 4)[0])
    expected = (2 * 2 + 1 + 1) / 16
    assert measured["kappa"]["low"] == pytest.approx(1 - (1 - wilson(4, 4)[0]) / (1 - expected))
    assert measured["accuracy"]["high"] == measured["kappa"]["high"] == 1.0
    never = agreement(["a", "b"], ["b", "a"], LABELS)
    assert never["accuracy"]["high"] == pytest.approx(wilson(0, 2)[1])


def test_a_teacher_with_one_label_for_all_agrees_by_chance_alone():
    measured = agreement(["a", "b", "a"], ["a"] * 3, LABELS)
    assert measured["kappa"]["value"] == 0
    assert agreement(["a"] * 3, ["a"] * 3, LABELS)["kappa"]["value"] == 0
    with pytest.raises(ValueError, match="at least one"):
        agreement([], [], LABELS)
