"""Calibration, abstention, scores and confusion, against scikit-learn where it has them."""

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score

from nautile.data.label_set import LabelSet
from nautile.evals.scoring.intervals import wilson
from nautile.uses.labelled.scores import (
    DRAWS,
    SHOWING_ERRORS,
    TEMPERATURES,
    best_thresholds,
    calibration_evidence,
    calibration_note,
    confusion,
    expected_calibration_error,
    fit_temperature,
    intervals,
    label_probabilities,
    lead,
    probabilities,
    rarest,
    recall_rows,
    recalls,
    reliability,
    score_label_sets,
    score_seeds,
    selective,
    threshold_for_accuracy,
    threshold_for_coverage,
)


def sure(confidence, right, labels=2):
    """Probabilities of rows with the given confidence in label 0, and targets that make them right or wrong."""
    rest = (1 - np.asarray(confidence)) / (labels - 1)
    return np.stack([confidence, *[rest] * (labels - 1)], axis=1), np.where(right, 0, 1)


def test_the_temperature_of_logits_that_were_scaled_is_found():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, 3)) * 2
    targets = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)  # draws from softmax(logits)
    assert fit_temperature(5 * logits, targets) == pytest.approx(5, rel=0.06)
    assert expected_calibration_error(probabilities(5 * logits, 5.0), targets) < 0.03
    assert expected_calibration_error(probabilities(5 * logits, None), targets) > 0.1


def test_the_calibration_error_by_hand():
    p, targets = sure([0.9, 0.9, 0.6, 0.6], [True, False, True, True])
    assert expected_calibration_error(p, targets) == pytest.approx(0.5 * 0.4 + 0.5 * 0.4)
    assert [(part["count"], part["accuracy"]) for part in reliability(p, targets)] == [(2, 1.0), (2, 0.5)]


def test_thresholds_for_a_coverage_and_for_an_accuracy():
    p, targets = sure([0.9, 0.8, 0.7, 0.6], [True, True, False, True])
    assert threshold_for_coverage(p, 0.5) == 0.8
    assert selective(p, targets, 0.8) == (0.5, 1.0)
    assert threshold_for_accuracy(p, targets, 0.7) == 0.6
    assert threshold_for_accuracy(p, targets, 0.9) == 0.8
    assert threshold_for_accuracy(*sure([0.9], [False]), 0.5) is None
    assert selective(p, targets, 0.95) == (0.0, None)


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_coverage_of_so_many_of_a_hundred_rows_covers_no_row_more(percent):
    p, targets = sure(np.linspace(0.995, 0.5, 100), [True] * 100)
    share, _ = selective(p, targets, threshold_for_coverage(p, percent / 100))
    assert share == percent / 100


def test_scores_are_those_of_scikit_learn_and_intervals_hold_them():
    rng = np.random.default_rng(1)
    targets = rng.integers(3, size=200)
    runs = [np.where(rng.random(200) < 0.7, targets, rng.integers(3, size=200)) for _ in range(3)]
    accuracy, macro = intervals(np.stack(runs), targets, 4, seed=0)  # the fourth label never occurs
    assert accuracy.value == pytest.approx(np.mean([(run == targets).mean() for run in runs]))
    assert macro.value == pytest.approx(np.mean([f1_score(targets, run, average="macro") for run in runs]))
    assert accuracy.low < accuracy.value < accuracy.high < accuracy.low + 0.2
    assert (confusion(runs[0], targets, 3) == confusion_matrix(targets, runs[0])).all()
    scores = score_seeds([np.eye(3)[run] for run in runs], targets, [0.5] * 3)
    assert scores["accuracy_covered"] == pytest.approx(accuracy.value)
    assert (scores["coverage"], scores["rows"], scores["seeds"]) == (1.0, 200, 3)
    assert scores["ece"] == pytest.approx(1 - accuracy.value)


@pytest.mark.parametrize("seeds", [1, 3])
def test_rows_that_are_all_right_or_all_wrong_have_an_interval(seeds):
    targets = np.array([0] * 41 + [1] * 2)
    accuracy, macro = intervals(np.stack([targets] * seeds), targets, 2, seed=0)
    assert (accuracy.value, accuracy.high) == (macro.value, macro.high) == (1.0, 1.0)
    assert accuracy.low == pytest.approx(wilson(43, 43)[0])
    assert macro.low == pytest.approx((wilson(41, 41)[0] + wilson(2, 2)[0]) / 2), "two rows say little about a label"
    accuracy, macro = intervals(np.stack([1 - targets] * seeds), targets, 2, seed=0)
    assert (accuracy.value, accuracy.low) == (macro.value, macro.low) == (0.0, 0.0)
    assert accuracy.high == pytest.approx(wilson(0, 43)[1])
    assert macro.high > accuracy.high


def test_recall_is_shown_for_each_label():
    targets = np.array([0] * 95 + [1] * 5)
    always_the_first = np.zeros(100, int)
    first, second, third = recalls(always_the_first, targets, ("common", "rare", "absent"))
    assert first == {
        "label": "common", "rows": 95, "right": 95, "recall": 1.0, "interval": list(wilson(95, 95)), "given": 100,
        "precision": 0.95, "precision_interval": list(wilson(95, 100)),
    }  # fmt: skip
    assert (second["rows"], second["right"], second["recall"]) == (5, 0, 0.0)
    assert [third[name] for name in ("recall", "interval", "precision", "precision_interval")] == [None] * 4
    assert recall_rows({"recall": [first, third]}) == [
        ("common", "95", "95", "100.0 [96.1, 100.0]", "100", "95.0 [88.8, 97.8]"),
        ("absent", "0", "0", "—", "0", "—"),
    ]
    several = np.array([[True, False], [True, True], [False, False]])
    by_label = recalls(several[:, ::-1], several, ("a", "b"))
    assert [(part["rows"], part["given"], part["right"]) for part in by_label] == [(2, 1, 1), (1, 2, 1)]
    assert recall_rows({}) == []


@pytest.mark.parametrize("rows", [2, 10, 43])
def test_a_few_rows_that_are_all_right_make_no_certainty(rows):
    """As if one more row had been wrong: not even twice as sure as the rows say, and no row is at 1."""
    rng = np.random.default_rng(rows)
    targets = rng.integers(3, size=rows)
    logits = rng.normal(size=(rows, 3)) + 8 * np.eye(3)[targets]
    temperature = fit_temperature(logits, targets)
    shares = probabilities(logits, temperature)
    assert (shares.argmax(axis=1) == targets).all()
    assert 1 - shares.max(axis=1).mean() > 0.5 / (rows + 2)
    assert shares.max() < 1 - 1e-4
    assert probabilities(3 * logits, temperature).max() < 1.0, "nor any other text"
    evidence = calibration_evidence(logits, targets, temperature)
    assert evidence == {"validation_rows": rows, "validation_errors": 0, "calibrated": False}


def test_calibrated_is_what_the_validation_rows_show():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(400, 3)) * 2
    targets = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)  # draws from softmax(logits)
    temperature = fit_temperature(logits, targets)
    shown = calibration_evidence(logits, targets, temperature)
    assert shown["calibrated"]
    assert shown["validation_errors"] >= SHOWING_ERRORS
    assert not calibration_evidence(logits[:60], targets[:60], temperature)["calibrated"], "too few rows"
    assert not calibration_evidence(logits, targets, 0.2)["calibrated"], "too sure"
    assert not calibration_evidence(logits, targets, 20.0)["calibrated"], "not sure enough"
    assert not calibration_evidence(1e-4 * logits, targets, TEMPERATURES[0])["calibrated"], "at the limit"


def test_a_note_says_what_is_known_of_the_calibration():
    def note(rows, errors, calibrated, **fields):
        shown = {"validation_rows": rows, "validation_errors": errors, "calibrated": calibrated}
        return calibration_note(LabelSet(form="label", method="head", labels=("a", "b"), **shown, **fields))

    assert note(400, 31, True) == "the probabilities are calibrated on its 400 validation rows, 31 of them wrong"
    assert note(10, 0, False).startswith("whether the probabilities are calibrated is not known: its 10")
    assert note(None, None, None) == "whether the probabilities are calibrated is not recorded"
    assert "its 20 decisions on validation rows" in note(20, 0, False, multi_label=True, thresholds=(0.5, 0.5))


def test_a_lead_lies_in_its_interval_whatever_the_seeds_agree_on():
    rng = np.random.default_rng(0)
    other_SN = rng.random((3, 400)) < 0.5
    own_SN = other_SN | (rng.random((3, 400)) < 0.2)
    won = lead(own_SN, other_SN)
    assert won["lead"] == pytest.approx(np.mean(own_SN) - np.mean(other_SN))
    assert won["low"] < won["lead"] < won["high"]
    assert won["p"] == 1 / DRAWS
    same = lead(own_SN[:1], own_SN[:1])
    half = pytest.approx(1.96 / 402)  # one more row won or lost
    assert same == {"lead": 0.0, "low": -half.expected, "high": half, "p": 1.0}
    # As wide as the normal interval of 400 rows drawn once, and no wider than that of a single run by much.
    by_row = (own_SN.astype(float) - other_SN).mean(axis=0)
    assert won["high"] - won["low"] == pytest.approx(2 * 1.96 * by_row.std() / 20, rel=0.4)


def test_the_rarest_label_has_a_column_where_labels_are_imbalanced():
    assert rarest({"a": 95, "b": 5}) == "b"
    assert rarest({"a": 60, "b": 40}) is None
    targets = np.array([0] * 95 + [1] * 5)
    found = np.where(np.arange(100) < 97, 0, 1)  # three of the five rare rows
    scores = score_seeds([np.eye(2)[found]], targets, [0.5], rare=1)
    assert scores["rare_recall"]["value"] == 0.6
    assert scores["rare_recall"]["low"] <= wilson(3, 5)[0]
    assert score_seeds([np.eye(2)[found[:95]]], targets[:95], [0.5], rare=1)["rare_recall"] is None


def test_scores_of_several_labels_are_those_of_scikit_learn():
    rng = np.random.default_rng(3)
    has = rng.random((200, 4)) < [0.5, 0.2, 0.05, 0.0]
    runs = [np.where(rng.random(has.shape) < 0.85, has, ~has) for _ in range(2)]
    scores = score_label_sets([run.astype(float) for run in runs], has, [[0.5] * 4] * 2)
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro")):
        expected = np.mean([f1_score(has, run, average=average, zero_division=0.0) for run in runs])
        assert scores[name]["value"] == pytest.approx(expected)
        assert scores[name]["low"] < expected < scores[name]["high"]
    assert scores["accuracy"]["value"] == pytest.approx(np.mean([(run == has).all(axis=1).mean() for run in runs]))


def test_a_threshold_for_each_label_has_the_highest_f1_of_the_rows():
    rng = np.random.default_rng(4)
    has = rng.random((300, 3)) < [0.5, 0.1, 0.0]
    shares = label_probabilities(rng.normal(size=has.shape) + 2 * has - 1, 1.0).round(2)  # rounded: some are equal
    thresholds = best_thresholds(shares, has)
    assert thresholds[2] == 0.5, "no row has the third label"
    for label in (0, 1):
        reached = f1_score(has[:, label], shares[:, label] >= thresholds[label])
        assert reached == max(f1_score(has[:, label], shares[:, label] >= t) for t in np.unique(shares[:, label]))
