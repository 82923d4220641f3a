"""Distances between distributions of answers, and steerability: whether a model shifts between groups as humans do.

Distributions are float arrays over the options of a question, which sum to 1.
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

MOVES = 1e-9  # smaller shifts are rounding errors


def similarity(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """1 − the Jensen-Shannon divergence in bits, along the last axis: 1 for equal distributions, 0 for disjoint."""
    middle = (p + q) / 2

    def bits(a: np.ndarray) -> np.ndarray:
        return np.where(a > 0, a * np.log2(np.where(a > 0, a, 1.0) / np.where(middle > 0, middle, 1.0)), 0.0).sum(
            axis=-1
        )

    return 1 - np.clip((bits(p) + bits(q)) / 2, 0.0, 1.0)


def wasserstein(p: np.ndarray, q: np.ndarray, scale: Sequence[float]) -> np.ndarray:
    """The first Wasserstein distance along the last axis, 0 to 1, of options at positions `scale` between 0 and 1."""
    order = np.argsort(scale, kind="stable")
    gaps = np.diff(np.asarray(scale, float)[order])
    # How much must be moved across each gap between neighbouring options, in either direction.
    below = np.cumsum((p - q)[..., order], axis=-1)[..., :-1]
    return (np.abs(below) * gaps).sum(axis=-1)


def steerability(shifts: np.ndarray, human_shifts: np.ndarray) -> tuple[float | None, float | None]:
    """(slope, cosine) of a model's shifts between groups against those of humans.

    A shift is a group's distribution minus that of everybody; both arrays have the shifts of all groups and questions,
    flattened. Slope: the least-squares factor from the humans' shifts to the model's (1: equally far in the same
    direction; 0: none or orthogonal; negative: opposite). Cosine: the direction only. None if a side has no shifts.
    """
    size = float(human_shifts @ human_shifts)
    if size < MOVES**2:
        return None, None
    product, model_size = float(shifts @ human_shifts), float(shifts @ shifts)
    return product / size, None if model_size < MOVES**2 else product / float(np.sqrt(model_size * size))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation over questions; None for fewer than three questions or a constant side."""
    if len(a) < 3:
        return None
    ranks_a, ranks_b = (rankdata(np.round(values, 12)) for values in (a, b))
    centred_a, centred_b = ranks_a - ranks_a.mean(), ranks_b - ranks_b.mean()
    size = float(np.sqrt((centred_a @ centred_a) * (centred_b @ centred_b)))
    return float(centred_a @ centred_b) / size if size else None
