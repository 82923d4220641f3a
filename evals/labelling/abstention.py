"""When a model should give no label: a threshold on the probability of the likeliest, set on the validation split."""

import numpy as np


def threshold_for_coverage(probabilities_NC: np.ndarray, coverage: float) -> float:
    """The highest threshold that lets at least `coverage` of the rows through."""
    confidence_N = np.sort(probabilities_NC.max(axis=1))[::-1]
    kept = int(np.ceil(coverage * len(confidence_N)))
    return float(confidence_N[kept - 1]) if kept else 1.0


def threshold_for_accuracy(probabilities_NC: np.ndarray, targets_N: np.ndarray, accuracy: float) -> float | None:
    """The lowest threshold over which at least `accuracy` of the rows are right; None if there is none."""
    confidence_N = probabilities_NC.max(axis=1)
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    order = np.argsort(-confidence_N, kind="stable")
    accuracy_N = np.cumsum(right_N[order]) / np.arange(1, len(order) + 1)
    # Rows of one confidence are let through together.
    last_N = np.append(np.diff(confidence_N[order]) < 0, True)
    good = np.flatnonzero((accuracy_N >= accuracy) & last_N)
    return float(confidence_N[order[good[-1]]]) if len(good) else None


def selective(probabilities_NC: np.ndarray, targets_N: np.ndarray, threshold: float) -> tuple[float, float | None]:
    """(share of rows with a label, accuracy on them); the accuracy is None where no row has a label."""
    kept_N = probabilities_NC.max(axis=1) >= threshold
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    return float(kept_N.mean()), float(right_N[kept_N].mean()) if kept_N.any() else None
