"""Abstention: a threshold on the probability of the most likely label, chosen on the validation split."""

import numpy as np


def threshold_for_coverage(probabilities_NC: np.ndarray, coverage: float) -> float:
    """The highest threshold at which at least the share `coverage` of the rows gets a label."""
    confidence_N = np.sort(probabilities_NC.max(axis=1))[::-1]
    # The confidence of the last row that must be covered; other rows of the same confidence are covered too.
    # Rounded, because 0.55 * 100 is a little more than 55.
    covered = int(np.ceil(round(coverage * len(confidence_N), 6)))
    return float(confidence_N[covered - 1]) if covered else 1.0


def threshold_for_accuracy(probabilities_NC: np.ndarray, targets_N: np.ndarray, accuracy: float) -> float | None:
    """The lowest threshold at which at least the share `accuracy` of the labelled rows is right; None if none is."""
    confidence_N = probabilities_NC.max(axis=1)
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    order = np.argsort(-confidence_N, kind="stable")
    accuracy_N = np.cumsum(right_N[order]) / np.arange(1, len(order) + 1)
    # Rows of equal confidence pass a threshold together, so only the last of them can be the limit.
    last_N = np.append(np.diff(confidence_N[order]) < 0, True)
    good = np.flatnonzero((accuracy_N >= accuracy) & last_N)
    return float(confidence_N[order[good[-1]]]) if len(good) else None


def selective(probabilities_NC: np.ndarray, targets_N: np.ndarray, threshold: float) -> tuple[float, float | None]:
    """(share of rows with a label, accuracy on these rows); the accuracy is None if no row has a label."""
    covered_N = probabilities_NC.max(axis=1) >= threshold
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    return float(covered_N.mean()), float(right_N[covered_N].mean()) if covered_N.any() else None
