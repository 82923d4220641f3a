"""Calibration of label probabilities: a temperature fitted on the validation split, and the calibration error."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

TEMPERATURES = (0.01, 100.0)


def fit_temperature(logits_NC: np.ndarray, targets_N: np.ndarray) -> float:
    """The temperature T that minimises -Σ log softmax(logits / T)[target] (Guo et al. 2017, arXiv:1706.04599, §4.2).

    `targets_N`: indices of the right labels. T is within `TEMPERATURES`. Raises `ValueError` without rows.
    """
    if not len(targets_N):
        raise ValueError("a temperature cannot be fitted without rows")
    rows = np.arange(len(targets_N))

    def loss(log_temperature: float) -> float:
        return float(-log_softmax(logits_NC / np.exp(log_temperature), axis=1)[rows, targets_N].mean())

    # On a logarithmic scale, on which halving and doubling are equally far.
    low, high = np.log(TEMPERATURES)
    return float(np.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))


def probabilities(logits_NC: np.ndarray, temperature: float | None) -> np.ndarray:
    """softmax(logits / temperature), float64 [N, C]; None stands for a temperature of 1."""
    return softmax(np.asarray(logits_NC, np.float64) / (temperature or 1.0), axis=1)


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
