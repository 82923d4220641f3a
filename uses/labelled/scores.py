"""Scores of a classifier over several seeds: accuracy, macro-F1, calibration error, leads, confusion matrix."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nautile.evals.scoring.intervals import wilson
from nautile.uses.labelled.abstention import selective
from nautile.uses.labelled.calibration import expected_calibration_error

DRAWS = 1000


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def score_seeds(
    probabilities_SNC: Sequence[np.ndarray], targets_N: np.ndarray, thresholds_S: Sequence[float], seed: int = 0
) -> dict[str, Any]:
    """Scores of S runs on the same N rows, as JSON data.

    `accuracy` and `macro_f1` are means over the runs, with intervals over runs and rows. `ece`, `coverage` and
    `accuracy_covered` (on the rows whose probability reaches `thresholds_S`; None if none) are means over the runs.
    """
    labels = probabilities_SNC[0].shape[1]
    predicted_SN = np.stack([p.argmax(axis=1) for p in probabilities_SNC])
    accuracy, macro_f1 = intervals(predicted_SN, targets_N, labels, seed)
    covered = [selective(p, targets_N, t) for p, t in zip(probabilities_SNC, thresholds_S, strict=True)]
    accuracies = [share for _, share in covered if share is not None]
    return {
        "rows": len(targets_N),
        "seeds": len(predicted_SN),
        "accuracy": accuracy._asdict(),
        "macro_f1": macro_f1._asdict(),
        "accuracy_by_seed": [float((row == targets_N).mean()) for row in predicted_SN],
        "ece": float(np.mean([expected_calibration_error(p, targets_N) for p in probabilities_SNC])),
        "coverage": float(np.mean([share for share, _ in covered])),
        "accuracy_covered": float(np.mean(accuracies)) if accuracies else None,
    }


def intervals(predicted_SN: np.ndarray, targets_N: np.ndarray, labels: int, seed: int) -> tuple[Interval, Interval]:
    """Accuracy and macro-F1 as means over the S runs, with bootstrap intervals over runs and rows.

    Resamples of rows that are all right, or all wrong, are so too. So the interval of the accuracy is at least Wilson's
    over the rows, and that of a macro-F1 of 0 or 1 the mean of Wilson's of each label's recall.

    Macro-F1 leaves out labels that have neither rows nor predictions, as scikit-learn does.
    """
    rng = np.random.default_rng(seed)
    # Runs and rows are both resampled: another seed gives another run, and the test rows are a sample too.
    seeds, rows = predicted_SN.shape
    samples = np.zeros((DRAWS, 2))
    for draw in range(DRAWS):
        runs, items = rng.integers(seeds, size=seeds), rng.integers(rows, size=rows)
        samples[draw] = _means(predicted_SN[runs][:, items], targets_N[items], labels)
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    accuracy, macro_f1 = _means(predicted_SN, targets_N, labels)
    # Rounded: the mean over runs may exceed the rows by an error of rounding.
    wilson_low, wilson_high = wilson(min(rows, round(accuracy * rows, 6)), rows)
    f1_low, f1_high = float(low[1]), float(high[1])
    if f1_low == f1_high:
        parts = [part["interval"] for part in recalls(predicted_SN[0], targets_N, range(labels)) if part["rows"]]
        f1_low = min(f1_low, sum(part[0] for part in parts) / len(parts))
        f1_high = max(f1_high, sum(part[1] for part in parts) / len(parts))
    return (
        Interval(accuracy, min(float(low[0]), wilson_low), max(float(high[0]), wilson_high)),
        Interval(macro_f1, f1_low, f1_high),
    )


def recalls(predicted_N: np.ndarray, targets_N: np.ndarray, labels: Sequence[Any]) -> list[dict[str, Any]]:
    """For each label the rows that have it, how many of them are given it, the share, and its 95 % Wilson interval.

    Share and interval are None for a label without rows.
    """
    result = []
    for number, label in enumerate(labels):
        rows = int((targets_N == number).sum())
        right = int(((targets_N == number) & (predicted_N == number)).sum())
        share, interval = (right / rows, list(wilson(right, rows))) if rows else (None, None)
        result.append({"label": label, "rows": rows, "right": right, "recall": share, "interval": interval})
    return result


def lead(right_SN: np.ndarray, other_SN: np.ndarray, seed: int = 0) -> dict[str, float]:
    """The lead in accuracy over another arm on the same N rows. True in an array: the row is right.

    Each arm has S runs or a single one. Returns `lead`, `low`, `high` and `p`. The bootstrap resamples runs and rows,
    the two arms' answers to a row together; p is twice the share of draws in which the lead is zero or reversed, at
    least 1 / DRAWS.
    """
    rng = np.random.default_rng(seed)
    # An arm with a single run is broadcast over the runs of the other.
    difference_SN = right_SN.astype(float) - other_SN
    seeds, rows = difference_SN.shape
    leads = np.zeros(DRAWS)
    for draw in range(DRAWS):
        runs, items = rng.integers(seeds, size=seeds), rng.integers(rows, size=rows)
        leads[draw] = difference_SN[runs][:, items].mean()
    low, high = np.quantile(leads, [0.025, 0.975])
    if low == high:
        # All rows differ alike, mostly not at all: as wide as if one more had been won or lost (`intervals.paired`).
        half = 1.96 / (rows + 2)
        low, high = max(-1.0, low - half), min(1.0, high + half)
    p = max(2 * min(float(np.mean(leads <= 0)), float(np.mean(leads >= 0))), 1 / DRAWS)
    return {"lead": float(difference_SN.mean()), "low": float(low), "high": float(high), "p": min(1.0, p)}


def confusion(predicted_N: np.ndarray, targets_N: np.ndarray, labels: int) -> np.ndarray:
    """Counts [right label, predicted label]."""
    return np.bincount(targets_N * labels + predicted_N, minlength=labels * labels).reshape(labels, labels)


def _means(predicted_SN: np.ndarray, targets_N: np.ndarray, labels: int) -> tuple[float, float]:
    """Accuracy and macro-F1, each the mean over the runs."""
    seeds = len(predicted_SN)
    # The confusion matrices of all runs by one bincount over (run, target, prediction).
    cells = (np.arange(seeds)[:, None] * labels + targets_N) * labels + predicted_SN
    counts_SCC = np.bincount(cells.ravel(), minlength=seeds * labels * labels).reshape(seeds, labels, labels)
    right_SC = np.diagonal(counts_SCC, axis1=1, axis2=2)
    total_SC = counts_SCC.sum(axis=1) + counts_SCC.sum(axis=2)
    present_SC = total_SC > 0
    f1_SC = np.where(present_SC, 2 * right_SC / np.maximum(total_SC, 1), 0.0)
    return float(right_SC.sum() / predicted_SN.size), float((f1_SC.sum(axis=1) / present_SC.sum(axis=1)).mean())
