"""The scores of one arm: its distances from humans over all questions and groups, each with a bootstrap interval."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nautile.uses.simulate.config import SimulateConfig, SurveyConfig
from nautile.uses.simulate.distances import rank_correlation, similarity, steerability, wasserstein

EVERYBODY = ("", "all")
Cell = tuple[str, str]  # field and group
# The range of each score. Scores are weighted means over the questions, of everybody or over all groups.
LIMITS: dict[str, tuple[float, float]] = {
    "similarity": (0.0, 1.0),  # 1 − JSD, of everybody
    "wasserstein": (0.0, 1.0),  # of everybody, over the ordered questions
    "group_similarity": (0.0, 1.0),
    "group_wasserstein": (0.0, 1.0),
    "gap": (0.0, 1.0),  # 1 − JSD of the best group of a field minus that of the worst; the largest of the fields
    "slope": (-np.inf, np.inf),  # steerability
    "cosine": (-1.0, 1.0),
    "rank": (-1.0, 1.0),  # Spearman's correlation over the questions, of everybody's mean position on the scale
}


class ScoredCell(NamedTuple):
    """Distributions of one question and group: measured shares, [options], and their draws, [draws, options]."""

    number: int  # of the question
    cell: Cell
    shares: np.ndarray
    draws: np.ndarray
    human_shares: np.ndarray
    human_draws: np.ndarray


def arm_scores(
    survey: SurveyConfig, config: SimulateConfig, name: str, cells: Sequence[ScoredCell], published: bool
) -> dict[str, dict[str, float] | None]:
    """The scores of an arm, each with `value`, `low`, `high`; None if it cannot be computed.

    For humans against humans each draw is compared with the humans themselves, and the value is the mean of the draws.
    With published shares the overall arm equals the humans of the cell `EVERYBODY`, which is then not scored.
    """
    bound = name == "humans"
    measured, resampled = {}, {}
    for entry in cells:
        if published and name in ("overall", "majority") and entry.cell == EVERYBODY:
            continue
        place = (entry.number, entry.cell)
        measured[place] = (entry.shares[None], entry.human_shares[None])
        # Humans against humans: only one side is drawn, because both would be the same draw.
        resampled[place] = (entry.draws, entry.human_shares[None] if bound else entry.human_draws)
    estimates, draws = figures(survey, measured), figures(survey, resampled)
    return {name: _interval(estimates[name], draws[name], config.interval, bound, LIMITS[name]) for name in LIMITS}


def figures(
    survey: SurveyConfig, cells: Mapping[tuple[int, Cell], tuple[np.ndarray, np.ndarray]]
) -> dict[str, np.ndarray | None]:
    """All scores for pairs of distributions (arm's, humans'), each [draws, options]: name -> [draws] or None."""
    weights = [question.weight for question in survey.questions]
    # `p` and `q` may have one row or one for each draw; numpy broadcasts the single one.
    similarities = {place: similarity(p, q) for place, (p, q) in cells.items()}
    distances = {
        place: wasserstein(p, q, survey.questions[place[0]].scale)
        for place, (p, q) in cells.items()
        if survey.questions[place[0]].ordered
    }

    def mean(values: Mapping[tuple[int, Cell], np.ndarray], includes: Callable[[Cell], bool]) -> np.ndarray | None:
        chosen = [(value, weights[number]) for (number, cell), value in values.items() if includes(cell)]
        if not chosen:
            return None
        # If a draw has nobody of a small group, its mean is over the other groups.
        stacked = np.ma.masked_invalid(np.stack([value for value, _ in chosen]))
        return np.ma.filled(np.ma.average(stacked, axis=0, weights=[weight for _, weight in chosen]), np.nan)

    # The gap of a field is the difference between its best and its worst group.
    groups = list(dict.fromkeys(cell for _, cell in cells if cell != EVERYBODY))
    gaps = []
    for field in dict.fromkeys(by for by, _ in groups):
        by_group: list[Any] = [mean(similarities, partial(operator.eq, group)) for group in groups if group[0] == field]
        if len(by_group) > 1:
            gaps.append(np.fmax.reduce(by_group) - np.fmin.reduce(by_group))
    steered = _each_draw(_shifts(survey, cells), steerability)
    ranked = _each_draw(_mean_places(survey, cells), lambda a, b: (rank_correlation(a, b),))
    return {
        "similarity": mean(similarities, lambda cell: cell == EVERYBODY),
        "wasserstein": mean(distances, lambda cell: cell == EVERYBODY),
        "group_similarity": mean(similarities, lambda cell: cell != EVERYBODY),
        "group_wasserstein": mean(distances, lambda cell: cell != EVERYBODY),
        "gap": np.fmax.reduce(gaps) if gaps else None,
        "slope": None if steered is None else steered[0],
        "cosine": None if steered is None else steered[1],
        "rank": None if ranked is None else ranked[0],
    }


def _shifts(survey: SurveyConfig, cells: Mapping[tuple[int, Cell], Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(shift of the arm, shift of the humans) from everybody to each group, by question, weighted.

    If everybody's shares are not published, the mean of the groups is used instead, on both sides. In a draw without
    anybody of a group, both its shifts are 0.
    """
    parts = []
    means: dict[int, Any] = {}
    for number in {number for number, _ in cells}:
        groups = [pair for (other, cell), pair in cells.items() if other == number and cell != EVERYBODY]
        if groups:
            mean = tuple(np.mean(np.stack(np.broadcast_arrays(*side)), axis=0) for side in zip(*groups, strict=True))
            means[number] = cells.get((number, EVERYBODY), mean)
    for (number, cell), (p, q) in cells.items():
        if cell != EVERYBODY:
            everybody_p, everybody_q = means[number]
            # The root on both sides: their products, which slope and cosine are made of, then carry the weight once.
            root = np.sqrt(survey.questions[number].weight)
            arm, human = np.broadcast_arrays(p - everybody_p, q - everybody_q)
            is_drawn = np.isfinite(arm) & np.isfinite(human)
            parts.append((np.where(is_drawn, root * arm, 0.0), np.where(is_drawn, root * human, 0.0)))
    return parts


def _mean_places(survey: SurveyConfig, cells: Mapping[tuple[int, Cell], Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(arm's, humans') mean position of everybody on the scale, for ordered questions and those with two options."""
    parts = []
    for number, question in enumerate(survey.questions):
        if (number, EVERYBODY) in cells and (question.ordered or len(question.options) == 2):
            p, q = cells[number, EVERYBODY]
            parts.append(((p @ question.scale)[:, None], (q @ question.scale)[:, None]))
    return parts


def _each_draw(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], figures: Callable[..., Sequence[float | None]]
) -> np.ndarray | None:
    """Apply `figures` to the concatenated sides of all parts, for each draw: [figures, draws], NaN for None."""
    if not parts:
        return None
    count = max(len(side) for part in parts for side in part)
    sides = [
        np.concatenate([np.broadcast_to(part[i], (count, part[i].shape[1])) for part in parts], axis=1) for i in (0, 1)
    ]
    rows = [[np.nan if v is None else v for v in figures(a, b)] for a, b in zip(*sides, strict=True)]
    return np.array(rows, float).T


def _interval(
    estimate: np.ndarray | None, draws: np.ndarray | None, interval: float, bound: bool, limits: tuple[float, float]
) -> dict[str, float] | None:
    """The percentiles of the draws, shifted so that their mean is the estimate, and clipped to `limits`.

    For a `bound` the draws are not shifted, and the value is their mean.
    """
    if estimate is None or draws is None or not np.isfinite(estimate[0]):
        return None
    finite = draws[np.isfinite(draws)]
    if not len(finite):
        return None
    low, high = np.quantile(finite, [(1 - interval) / 2, (1 + interval) / 2])
    value = float(estimate[0])
    if bound:
        value = float(finite.mean())
    else:
        low, high = np.clip([value + low - finite.mean(), value + high - finite.mean()], *limits)
    return {"value": value, "low": float(low), "high": float(high)}
