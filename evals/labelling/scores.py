"""Scores of labelled texts over several seeds: accuracy, macro-F1 and calibration, with intervals; confusion."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from evals.labelling.abstention import selective
from evals.labelling.calibration import expected_calibration_error

DRAWS = 1000


class Interval(NamedTuple):
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def score_seeds(
    probabilities_SNC: Sequence[np.ndarray], targets_N: np.ndarray, thresholds_S: Sequence[float], seed: int = 0
) -> dict[str, Any]:
    """Scores of S runs on the same N rows, as JSON data.

    `accuracy` and `macro_f1` are means over the runs with intervals over runs and rows; `ece`, `coverage` and
    `accuracy_covered` (of the rows that `thresholds_S` let through; None if none) are means over the runs.
    """
    labels = probabilities_SNC[0].shape[1]
    predicted_SN = np.stack([p.argmax(axis=1) for p in probabilities_SNC])
    accuracy, macro_f1 = intervals(predicted_SN, targets_N, labels, seed)
    covered = [selective(p, targets_N, t) for p, t in zip(probabilities_SNC, thresholds_S, strict=True)]
    known = [share for _, share in covered if share is not None]
    return {
        "rows": len(targets_N),
        "seeds": len(predicted_SN),
        "accuracy": accuracy._asdict(),
        "macro_f1": macro_f1._asdict(),
        "accuracy_by_seed": [float((row == targets_N).mean()) for row in predicted_SN],
        "ece": float(np.mean([expected_calibration_error(p, targets_N) for p in probabilities_SNC])),
        "coverage": float(np.mean([share for share, _ in covered])),
        "accuracy_covered": float(np.mean(known)) if known else None,
    }


def intervals(predicted_SN: np.ndarray, targets_N: np.ndarray, labels: int, seed: int) -> tuple[Interval, Interval]:
    """Accuracy and macro-F1: the mean over the S runs, and a bootstrap that draws runs and rows, both with return.

    F1 of a label without rows and without predictions is left out of the mean, as scikit-learn's of the labels present.
    """
    rng = np.random.default_rng(seed)
    seeds, rows = predicted_SN.shape
    drawn = np.zeros((DRAWS, 2))
    for draw in range(DRAWS):
        runs, items = rng.integers(seeds, size=seeds), rng.integers(rows, size=rows)
        drawn[draw] = _means(predicted_SN[runs][:, items], targets_N[items], labels)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    values = _means(predicted_SN, targets_N, labels)
    return tuple(Interval(*map(float, part)) for part in zip(values, low, high, strict=True))  # type: ignore[return-value]


def lead(right_SN: np.ndarray, other_SN: np.ndarray, seed: int = 0) -> dict[str, float]:
    """The lead in accuracy over another arm on the same N rows, each with S runs or one; True: right.

    Returns `lead`, `low`, `high` and `p`. A bootstrap draws runs and rows, the two arms' answers to a row together; p
    is twice the share of draws in which the lead is zero or reversed, at least 1 / DRAWS.
    """
    rng = np.random.default_rng(seed)
    difference_SN = right_SN.astype(float) - other_SN
    seeds, rows = difference_SN.shape
    drawn = np.zeros(DRAWS)
    for draw in range(DRAWS):
        runs, items = rng.integers(seeds, size=seeds), rng.integers(rows, size=rows)
        drawn[draw] = difference_SN[runs][:, items].mean()
    low, high = np.quantile(drawn, [0.025, 0.975])
    p = max(2 * min(float(np.mean(drawn <= 0)), float(np.mean(drawn >= 0))), 1 / DRAWS)
    return {"lead": float(difference_SN.mean()), "low": float(low), "high": float(high), "p": min(1.0, p)}


def confusion(predicted_N: np.ndarray, targets_N: np.ndarray, labels: int) -> np.ndarray:
    """Counts [right label, predicted label]."""
    return np.bincount(targets_N * labels + predicted_N, minlength=labels * labels).reshape(labels, labels)


def _means(predicted_SN: np.ndarray, targets_N: np.ndarray, labels: int) -> tuple[float, float]:
    """Accuracy and macro-F1, each the mean over the runs."""
    seeds = len(predicted_SN)
    cells = (np.arange(seeds)[:, None] * labels + targets_N) * labels + predicted_SN
    counts_SCC = np.bincount(cells.ravel(), minlength=seeds * labels * labels).reshape(seeds, labels, labels)
    right_SC = np.diagonal(counts_SCC, axis1=1, axis2=2)
    total_SC = counts_SCC.sum(axis=1) + counts_SCC.sum(axis=2)
    present_SC = total_SC > 0
    f1_SC = np.where(present_SC, 2 * right_SC / np.maximum(total_SC, 1), 0.0)
    return float(right_SC.sum() / predicted_SN.size), float((f1_SC.sum(axis=1) / present_SC.sum(axis=1)).mean())
