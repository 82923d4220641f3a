"""Calibration of label probabilities: a temperature fitted on the validation split, and the calibration error.

Validation rows that are all right would be best explained by probabilities of 1. So the temperature is fitted as if one
more row had been wrong, and a classifier counts as calibrated only where its validation rows show it.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from nautile.evals.scoring.intervals import wilson

TEMPERATURES = (0.05, 100.0)
# What validation rows must have to show a calibration: without errors nothing says how often a probability is wrong.
SHOWING_ROWS, SHOWING_ERRORS = 100, 5


def fit_temperature(logits_NC: np.ndarray, targets_N: np.ndarray) -> float:
    """The temperature T that minimises -Σ log softmax(logits / T)[target] (Guo et al. 2017, arXiv:1706.04599, §4.2).

    The targets are smoothed as by Platt (1999): of N rows each has the right label with the weight (N + 1) / (N + 2),
    and the others share the rest. `targets_N`: indices of the right labels. T is within `TEMPERATURES`. Raises
    `ValueError` without rows.
    """
    if not len(targets_N):
        raise ValueError("a temperature cannot be fitted without rows")
    rows, labels = np.arange(len(targets_N)), logits_NC.shape[1]
    rest = 1 / (len(targets_N) + 2) / max(1, labels - 1)
    weights_NC = np.full(logits_NC.shape, rest)
    weights_NC[rows, targets_N] = 1 - rest * (labels - 1)

    def loss(log_temperature: float) -> float:
        return float(-(weights_NC * log_softmax(logits_NC / np.exp(log_temperature), axis=1)).sum(axis=1).mean())

    # On a logarithmic scale, on which halving and doubling are equally far.
    low, high = np.log(TEMPERATURES)
    return float(np.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))


def probabilities(logits_NC: np.ndarray, temperature: float | None) -> np.ndarray:
    """softmax(logits / temperature), float64 [N, C]; None stands for a temperature of 1."""
    return softmax(np.asarray(logits_NC, np.float64) / (temperature or 1.0), axis=1)


@dataclass(frozen=True)
class CalibrationEvidence:
    """What the validation rows show: their number, how many of them are labelled wrongly, and whether that is enough.

    `calibrated`: there are `SHOWING_ROWS` rows and `SHOWING_ERRORS` errors, the temperature is not at its limit, and
    the mean probability of the given labels lies in the interval of the accuracy.
    """

    rows: int
    errors: int
    calibrated: bool


def calibration_evidence(logits_NC: np.ndarray, targets_N: np.ndarray, temperature: float) -> CalibrationEvidence:
    """What the rows on which a temperature was fitted say about the probabilities."""
    shares_NC = probabilities(logits_NC, temperature)
    rows, right = len(targets_N), int((shares_NC.argmax(axis=1) == targets_N).sum())
    low, high = wilson(right, rows)
    is_inside = 1.01 * TEMPERATURES[0] < temperature < 0.99 * TEMPERATURES[1]
    is_right = low <= float(shares_NC.max(axis=1).mean()) <= high
    has_enough = rows >= SHOWING_ROWS and rows - right >= SHOWING_ERRORS
    return CalibrationEvidence(rows, rows - right, has_enough and is_inside and is_right)


@dataclass(frozen=True)
class ReliabilityBin:
    """The predictions with a confidence in [low, high): their number, mean confidence and accuracy."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def reliability(probabilities_NC: np.ndarray, targets_N: np.ndarray, bins: int = 15) -> list[ReliabilityBin]:
    """The non-empty bins of a reliability diagram, of equal width, by the probability of the most likely label."""
    confidence_N = probabilities_NC.max(axis=1)
    right_N = probabilities_NC.argmax(axis=1) == targets_N
    index_N = np.minimum((confidence_N * bins).astype(int), bins - 1)
    return [
        ReliabilityBin(
            b / bins,
            (b + 1) / bins,
            int(inside.sum()),
            float(confidence_N[inside].mean()),
            float(right_N[inside].mean()),
        )
        for b in range(bins)
        if (inside := index_N == b).any()
    ]


def expected_calibration_error(probabilities_NC: np.ndarray, targets_N: np.ndarray, bins: int = 15) -> float:
    """Σ share of a bin · |accuracy - confidence| (Guo et al. 2017, equation 3), 0 to 1."""
    parts = reliability(probabilities_NC, targets_N, bins)
    return sum(part.count * abs(part.accuracy - part.confidence) for part in parts) / len(targets_N)
