"""How far one distribution of answers is from another, and whether it moves with the group as that of humans does.

Distributions are float arrays over the options of one question, which sum to 1.
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

MOVES = 1e-9  # below this, all shifts are rounding


def similarity(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """1 − the Jensen-Shannon divergence in bits, along the last axis: 1 for equal ones, 0 for disjoint ones."""
    middle = (p + q) / 2

    def bits(a: np.ndarray) -> np.ndarray:
        return np.where(a > 0, a * np.log2(np.where(a > 0, a, 1.0) / np.where(middle > 0, middle, 1.0)), 0.0).sum(
            axis=-1
        )

    return 1 - np.clip((bits(p) + bits(q)) / 2, 0.0, 1.0)


def wasserstein(p: np.ndarray, q: np.ndarray, scale: Sequence[float]) -> np.ndarray:
    """The first Wasserstein distance along the last axis, of options at places `scale` between 0 and 1: 0 to 1."""
    order = np.argsort(scale, kind="stable")
    gaps = np.diff(np.asarray(scale, float)[order])
    below = np.cumsum((p - q)[..., order], axis=-1)[..., :-1]
    return (np.abs(below) * gaps).sum(axis=-1)


def steerability(shifts: np.ndarray, human_shifts: np.ndarray) -> tuple[float | None, float | None]:
    """(slope, cosine) of how a model moves with the group, against how humans do.

    A shift is a group's distribution minus that of everybody; both arrays have the shifts of all groups and questions,
    flat. Slope: the least-squares factor of the model's shift on the humans' (1: it moves as far and the same way, 0:
    not at all or at right angles, negative: the wrong way). Cosine: the direction alone; None where a side never moves.
    """
    size = float(human_shifts @ human_shifts)
    if size < MOVES**2:
        return None, None
    along, own = float(shifts @ human_shifts), float(shifts @ shifts)
    return along / size, None if own < MOVES**2 else along / float(np.sqrt(own * size))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's correlation of two figures over the questions; None below three questions or where one is constant."""
    if len(a) < 3:
        return None
    ranks_a, ranks_b = (rankdata(np.round(values, 12)) for values in (a, b))
    centred_a, centred_b = ranks_a - ranks_a.mean(), ranks_b - ranks_b.mean()
    size = float(np.sqrt((centred_a @ centred_a) * (centred_b @ centred_b)))
    return float(centred_a @ centred_b) / size if size else None
