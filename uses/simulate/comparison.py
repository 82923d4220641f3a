"""Compare a model's answers to a survey with humans and baselines: distributions and distances, with intervals.

All arms are compared with the same humans: the survey's held-out respondents (baselines are fitted on the others), or
published shares, which then serve for both, as the card states.

Intervals are from a bootstrap over people, who are resampled with all their answers; a persona that is a respondent
together with the respondent. The draws of a distance are shifted so that their mean is the measured distance, because
resampling itself increases a distance.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from scipy.special import rel_entr
from scipy.stats import rankdata
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from nautile.common.errors import ConfigError
from nautile.evals.scoring.intervals import wilson
from nautile.uses.simulate.config import SimulateConfig, SurveyConfig
from nautile.uses.simulate.people import PeopleGroup, Person, groups_of, text_of
from nautile.uses.simulate.reading import MISSING, Respondents, shares
from nautile.uses.simulate.tables import ARMS

SMALLEST_GROUP = 10  # humans, by their effective size; a smaller group is shown but not scored
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
MOVES = 1e-9  # smaller shifts are rounding errors
TREES, LEAF = 200, 5


@dataclass(frozen=True)
class Distribution:
    """Shares of the options, [options], and their bootstrap draws, [draws, options] (NaN if nobody was drawn)."""

    shares: np.ndarray
    draws: np.ndarray
    people: int | None  # number of people; None: not known
    effective: float | None = None  # of people who weigh alike and say as much (Kish): (Σ w)² / Σ w²; None: not known

    def fields(self, interval: float) -> dict[str, Any]:
        """As plain data, with percentile intervals, or Wilson's for an option that nobody, or everybody, has chosen.

        Without an interval if all draws are equal for another reason.
        """
        result: dict[str, Any] = {"shares": self.shares.tolist(), "people": self.people}
        if self.effective is not None and self.effective != self.people:
            result["effective"] = self.effective
        varies = np.ptp(np.nan_to_num(self.draws), axis=0) > 0
        is_certain = ~varies & np.isin(self.shares, (0.0, 1.0)) & (self.people is not None)
        # Equal draws come from shares whose number of people is unknown: no interval, rather than one of width 0.
        if varies.any() or (len(varies) and is_certain.all()):
            low, high = np.nanquantile(self.draws, [(1 - interval) / 2, (1 + interval) / 2], axis=0)
            z = NormalDist().inv_cdf((1 + interval) / 2)
            for option in np.flatnonzero(is_certain):
                assert self.people is not None
                size = self.people if self.effective is None else self.effective
                low[option], high[option] = wilson(size * self.shares[option], size, z)
            result |= {"low": low.tolist(), "high": high.tolist()}
        return result


class PeopleSample:
    """People in groups, with bootstrap weights, float32 [draws, people]: each row has the counts of one resample.

    A person counts by their own weight in every mean, in the draws times the number of draws of them.
    """

    def __init__(
        self,
        people: Sequence[Person],
        survey: SurveyConfig,
        config: SimulateConfig,
        label: str,
        stream: int,
        whole: bool,
    ) -> None:
        """`stream`: of random numbers. `whole`: every draw has all people, for people who are not a sample."""
        self.size = len(people)
        groups = groups_of(people, config.by, survey.bands, label)
        everybody = PeopleGroup(*EVERYBODY, np.arange(self.size))
        self.members: dict[Cell, np.ndarray] = {(group.by, group.name): group.members for group in (everybody, *groups)}
        self.own_weights = np.array([person.weight for person in people])
        rng = np.random.default_rng([config.seed, stream])
        everybody_once = np.ones(self.size, int)
        counts = (
            everybody_once if whole else np.bincount(rng.integers(0, self.size, self.size), minlength=self.size)
            for _ in range(config.draws)
        )
        self.weights = np.stack([(count * self.own_weights).astype(np.float32) for count in counts])

    def distribution(self, rows_NK: np.ndarray, cell: Cell) -> Distribution | None:
        """The mean of the group's rows; rows that start with NaN belong to people without an answer. None if none is
        left."""
        members = self.members.get(cell, np.empty(0, int))
        members = members[self.own_weights[members] > 0]
        answered = members[~np.isnan(rows_NK[members, 0])] if len(members) else members
        if not len(answered):
            return None
        weights = self.weights[:, answered].astype(float)
        with np.errstate(invalid="ignore"):
            # Each person's row, as often as the person was drawn. A draw may have nobody of a small group.
            draws = weights @ rows_NK[answered] / weights.sum(axis=1, keepdims=True)
        own = self.own_weights[answered]
        return Distribution(
            np.average(rows_NK[answered], axis=0, weights=own), draws, len(answered), effective_size(own)
        )


def compare(
    survey: SurveyConfig,
    config: SimulateConfig,
    people: Sequence[Person],
    probabilities: Sequence[np.ndarray],
    respondents: Respondents | None,
    respondent_indices: np.ndarray | None = None,
) -> dict[str, Any]:
    """Distributions of every arm, for everybody and for each group, and the scores of the arms, as plain data.

    `probabilities`: for each question [people, options], NaN for people who were left out. `respondent_indices`: of
    `people` among the respondents, if they are these. Raises `ConfigError` for a field of `by` that no respondent has.
    """
    # Personas that stand for the published groups, one for each, are not a sample.
    groups = respondents is None and config.personas is None
    sample = PeopleSample(people, survey, config, "personas", 1, whole=groups)
    humans, rows, fitted = _humans(survey, config, respondents, respondent_indices, sample)
    constants = _constants(survey, respondents)

    def human_distribution(number: int, cell: Cell) -> Distribution | None:
        """How the humans of a group answered; published shares vary over the draws only if their number is known."""
        if humans is not None:
            return humans.distribution(rows[number], cell)
        question, everybody = survey.questions[number], cell == EVERYBODY
        published = _published(question.humans if everybody else question.groups.get(cell[0], {}).get(cell[1], ()))
        if published is None:
            return None
        people = question.respondents if everybody else None
        draws = np.broadcast_to(published, (config.draws, len(published)))
        if people is not None:
            # As if as many people as were asked had answered again.
            rng = np.random.default_rng([config.seed, 3, number])
            draws = rng.multinomial(people, published, size=config.draws) / people
        return Distribution(published, draws, people)

    cells = list(sample.members)
    questions: list[dict[str, Any]] = []
    scored: dict[str, list[ScoredCell]] = {name: [] for name in ARMS}
    for number, question in enumerate(survey.questions):
        options = len(question.options)
        model_rows = probabilities[number]
        if respondent_indices is not None:  # compare only people who answered, and whom the model was asked about
            model_rows = np.where(np.isnan(rows[number][:, :1]), np.nan, model_rows)
            rows[number] = np.where(np.isnan(model_rows[:, :1]), np.nan, rows[number])
        cell_results = []
        for cell in cells:
            arms: dict[str, Distribution | None] = {"model": sample.distribution(model_rows, cell)}
            human = human_distribution(number, cell)
            for name, value in {"uniform": np.full(options, 1 / options), **constants[number]}.items():
                arms[name] = Distribution(value, np.broadcast_to(value, (config.draws, options)), None)
            if humans is not None:
                for name, value in fitted[number].items():
                    predicted = np.where(np.isnan(rows[number][:, :1]), np.nan, value)
                    arms[name] = humans.distribution(predicted, cell)
            arms["humans"] = human
            fields = {name: arm.fields(config.interval) for name, arm in arms.items() if arm is not None}
            cell_results.append({"by": cell[0], "group": cell[1], "arms": fields})
            if (
                human is not None
                and (human.people is None or (human.effective or human.people) >= SMALLEST_GROUP)
                and arms["model"] is not None
            ):
                # If the number of people is not published, all draws of the humans are equal and give no bound.
                has_bound = np.ptp(np.nan_to_num(human.draws), axis=0).max() > 0
                for name in ARMS:
                    arm = arms.get(name)
                    if arm is not None and (name != "humans" or has_bound):
                        scored[name].append(ScoredCell(number, cell, arm.shares, arm.draws, human.shares, human.draws))
        questions.append(
            {"name": question.name, "text": question.text, "options": list(question.options),
             "ordered": question.ordered, "scale": list(question.scale), "weight": question.weight,
             "cells": cell_results}
        )  # fmt: skip
    published = humans is None
    return {
        "questions": questions,
        "scores": {
            name: arm_scores(survey, config, name, entries, published) for name, entries in scored.items() if entries
        },
        "compared": any(scored.values()),
        "humans": _description(survey, config, sample, humans, respondents, respondent_indices, scored),
    }


def effective_size(weights: np.ndarray) -> float:
    """Kish's effective sample size of people with these weights: their number where all weigh alike."""
    if not np.ptp(weights):
        return float(len(weights))
    return float(weights.sum() ** 2 / (weights**2).sum())


def _humans(
    survey: SurveyConfig,
    config: SimulateConfig,
    respondents: Respondents | None,
    respondent_indices: np.ndarray | None,
    sample: PeopleSample,
) -> tuple[PeopleSample | None, list[np.ndarray], list[dict[str, np.ndarray]]]:
    """The humans to compare with; for each question their answers as one-hot rows (NaN if there is no answer), and
    what the fitted baselines predict for them. (None, [], []) without respondents."""
    if respondents is None:
        return None, [], []
    indices = respondents.held_out if respondent_indices is None else respondent_indices
    people = [respondents.people[i] for i in indices]
    if respondent_indices is None:
        for field in config.by:
            if not any(field in person.fields for person in people):
                raise ConfigError(
                    f"--by {field}: the respondents of survey {survey.name} have no such field to compare by"
                )
        humans = PeopleSample(people, survey, config, "respondents", 2, whole=False)
    else:
        humans = sample
    train = [respondents.people[i] for i in respondents.train]
    train_answers_NQ, weights = respondents.answers_NQ[respondents.train], respondents.weights[respondents.train]
    rows, fitted = [], []
    for number, question in enumerate(survey.questions):
        options, answers = len(question.options), respondents.answers_NQ[indices, number]
        # `MISSING` is -1 and takes the last row for a moment; the next line corrects it.
        one_hot = np.eye(options)[answers]
        one_hot[answers == MISSING] = np.nan
        rows.append(one_hot)
        fields, seed = survey.persona_fields, config.seed
        fitted.append(predictions(train, train_answers_NQ[:, number], people, fields, options, seed, weights))
    return humans, rows, fitted


def _constants(survey: SurveyConfig, respondents: Respondents | None) -> list[dict[str, np.ndarray]]:
    """For each question the `majority` and `overall` shares of the humans in training, if known."""
    constants = []
    for number, question in enumerate(survey.questions):
        if respondents is not None:
            overall = shares(
                respondents.answers_NQ[respondents.train, number],
                len(question.options),
                respondents.weights[respondents.train],
            )
        else:
            overall = _published(question.humans)
            groups = [_published(group) for named in question.groups.values() for group in named.values()]
            known_groups = [group for group in groups if group is not None]
            if overall is None and known_groups:
                overall = np.mean(known_groups, axis=0)
        constants.append({} if overall is None else {"majority": majority(overall), "overall": overall})
    return constants


def _published(values: Sequence[float]) -> np.ndarray | None:
    """Published shares, normalised to sum to 1 because they are rounded."""
    return np.array(values, float) / sum(values) if values else None


def _description(
    survey: SurveyConfig,
    config: SimulateConfig,
    sample: PeopleSample,
    humans: PeopleSample | None,
    respondents: Respondents | None,
    respondent_indices: np.ndarray | None,
    scored: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Who the humans are, as plain data: `kind` and counts; for published shares the groups without a persona."""
    if respondents is None:
        kind = "published shares" if any(scored.values()) else "none"
        groups = {(by, group): None for q in survey.questions for by in config.by for group in q.groups.get(by, {})}
        unmatched = [f"{by}: {group}" for by, group in groups if (by, group) not in sample.members]
        return {"kind": kind, "source": survey.source, "licence": survey.licence, "unmatched_groups": unmatched}
    return {
        "kind": "the same people" if respondent_indices is not None else "held-out respondents",
        "source": survey.source,
        "licence": survey.licence,
        "judged": humans.size if humans is not None else 0,
        "train": len(respondents.train),
        "weighted": bool(np.ptp(respondents.weights) > 0),
        "effective": effective_size(humans.own_weights) if humans is not None else 0.0,
        "missing": {
            question.name: int((respondents.answers_NQ[:, number] == MISSING).sum())
            for number, question in enumerate(survey.questions)
        },
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


def similarity(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """1 − the Jensen-Shannon divergence in bits, along the last axis: 1 for equal distributions, 0 for disjoint."""
    middle = (p + q) / 2
    divergence = (rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=-1) / 2 / np.log(2)
    return 1 - np.clip(divergence, 0.0, 1.0)


def wasserstein(p: np.ndarray, q: np.ndarray, scale: Sequence[float]) -> np.ndarray:
    """The first Wasserstein distance along the last axis, 0 to 1, of options at positions `scale` between 0 and 1."""
    order = np.argsort(scale, kind="stable")
    gaps = np.diff(np.asarray(scale, float)[order])
    # How much must be moved across each gap between neighbouring options, in either direction.
    below = np.cumsum((p - q)[..., order], axis=-1)[..., :-1]
    return (np.abs(below) * gaps).sum(axis=-1)


def steerability(shifts: np.ndarray, human_shifts: np.ndarray) -> tuple[float | None, float | None]:
    """(slope, cosine) of a model's shifts between groups against those of humans.

    A shift is a group's distribution minus that of everybody; both arrays have those of all groups and questions.
    Slope: the least-squares factor from the humans' shifts to the model's. Cosine: the direction only. None if a side
    has no shifts.
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


def majority(shares: np.ndarray) -> np.ndarray:
    """All probability on the most frequent option (of equal ones the first), [options]."""
    return np.eye(len(shares))[int(np.argmax(shares))]


def predictions(
    train: Sequence[Person],
    answers: np.ndarray,
    people: Sequence[Person],
    fields: Sequence[str],
    options: int,
    seed: int,
    weights: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Predict with a logistic regression and a random forest on the fields: name -> probabilities [people, options].

    Numbers are standardised, other values one-hot encoded; values that are not in training are ignored. `answers` and
    `weights` are those of `train`; MISSING ones and people without weight are left out.
    """
    weights = np.ones(len(train)) if weights is None else weights
    answered = np.flatnonzero((answers != MISSING) & (weights > 0))
    if not len(answered):
        return {}
    table = _table([train[i] for i in answered.tolist()], fields)
    # A column is numeric if it is in all of training; a single "unknown" makes it one of words.
    numbers = [i for i, column in enumerate(zip(*table, strict=True)) if all(map(_is_number, column))]
    words = [i for i in range(len(fields)) if i not in numbers]
    kinds = (("numbers", StandardScaler(), numbers), ("words", OneHotEncoder(handle_unknown="ignore"), words))
    columns = [kind for kind in kinds if kind[2]]
    people_table = _table(people, fields)
    results = {}
    for name, classifier in (
        ("regression", LogisticRegression(max_iter=1000)),
        ("forest", RandomForestClassifier(TREES, min_samples_leaf=LEAF, random_state=seed, n_jobs=1)),
    ):
        probabilities = np.zeros((len(people), options))
        classes = np.unique(answers[answered])
        # A regression needs two classes.
        if len(classes) == 1:
            probabilities[:, classes[0]] = 1.0
        else:
            model = Pipeline([("fields", ColumnTransformer(columns)), ("model", classifier)]).fit(
                _frame(table, numbers),
                answers[answered],
                model__sample_weight=weights[answered] / weights[answered].mean(),
            )
            probabilities[:, model.classes_] = model.predict_proba(_frame(people_table, numbers))
        results[name] = probabilities
    return results


def _table(people: Sequence[Person], fields: Sequence[str]) -> list[list[Any]]:
    """The fields of each person; numeric values as floats, others as text."""
    rows: list[list[Any]] = [[person.fields.get(field) for field in fields] for person in people]
    return [[float(value) if _is_number(value) else text_of(value) for value in row] for row in rows]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return False
    try:
        return bool(np.isfinite(float(value)))
    except (TypeError, ValueError):
        return False


def _frame(table: Sequence[Sequence[Any]], numbers: Sequence[int]) -> np.ndarray:
    """An object array; in a column that is numeric in training, other values become 0."""
    frame = np.empty((len(table), len(table[0])), object)
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            frame[i, j] = (value if _is_number(value) else 0.0) if j in numbers else text_of(value)
    return frame
