"""Agreement of two labellers on the same texts: accuracy and Cohen's kappa, with bootstrap intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import confusion_matrix

from nautile.evals.scoring.intervals import wilson
from nautile.uses.labelled.scores import Interval

DRAWS = 4000


def agreement(people: Sequence[str], teacher: Sequence[str], labels: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Agreement of a teacher with people on the same texts, as JSON data.

    `kappa` is Cohen's (1960): agreement beyond that of two labellers who choose at random, with the same label
    frequencies; 0 if both use only one label. Raises `ValueError` for no texts.
    """
    if not len(people):
        raise ValueError("agreement needs at least one text")
    counts = confusion_matrix(people, teacher, labels=list(labels))
    total = int(counts.sum())
    # Resampling texts with replacement makes the counts of the table's cells multinomial.
    resampled = np.random.default_rng(seed).multinomial(total, counts.ravel() / total, size=DRAWS)
    values = _accuracy_and_kappa(counts[None])[0]
    low, high = np.quantile(_accuracy_and_kappa(resampled.reshape(DRAWS, *counts.shape)), [0.025, 0.975], axis=0)
    accuracy, kappa = (Interval(*map(float, part)) for part in zip(values, low, high, strict=True))
    if accuracy.low == accuracy.high:  # texts that all agree, or none: every resample is the same
        ends = wilson(int(np.trace(counts)), total)
        # The same bounds of the observed agreement in Cohen's formula, with the labellers' frequencies as they are.
        expected = float(counts.sum(axis=1) @ counts.sum(axis=0)) / total**2
        scale = 1 - expected if expected < 1 - 1e-12 else 1.0
        by_chance = [kappa.value + (end - accuracy.value) / scale for end in ends]
        accuracy, kappa = Interval(accuracy.value, *ends), Interval(kappa.value, max(-1.0, by_chance[0]), by_chance[1])
    return {
        "rows": total,
        "accuracy": accuracy._asdict(),
        "kappa": kappa._asdict(),
        "labels": list(labels),
        "confusion": counts.tolist(),  # rows: people's labels; columns: the teacher's
    }


def _accuracy_and_kappa(counts_DLL: np.ndarray) -> np.ndarray:
    """(accuracy, kappa) of each of D tables of counts of L labels, [D, 2]."""
    shares = counts_DLL / counts_DLL.sum(axis=(1, 2), keepdims=True)
    observed = np.trace(shares, axis1=1, axis2=2)
    expected = np.sum(shares.sum(axis=1) * shares.sum(axis=2), axis=1)
    # Where both labellers use one and the same label, chance explains everything, and 0 / 0 becomes 0.
    kappa = np.divide(observed - expected, 1 - expected, out=np.zeros_like(observed), where=expected < 1 - 1e-12)
    return np.stack([observed, kappa], axis=1)
