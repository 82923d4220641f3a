"""Compare a model's answers to a survey with humans and baselines: distributions and distances, with intervals.

All arms are compared with the same humans. If the survey has respondents, these are the held-out ones, and baselines
are fitted on the others. If it has only published shares, these serve for both, which the card states.

Intervals are from a bootstrap over people: personas, and humans whose individual answers are known, are resampled with
all their answers. A persona that is a respondent is resampled together with the respondent. The draws of a distance are
shifted so that their mean is the measured distance, because resampling itself increases a distance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.evals.scoring.intervals import wilson
from nautile.uses.simulate.baselines import majority, predictions, uniform
from nautile.uses.simulate.config import SimulateConfig, SurveyConfig
from nautile.uses.simulate.people import PeopleGroup, Person, groups_of
from nautile.uses.simulate.reading import MISSING, Respondents, shares
from nautile.uses.simulate.scores import EVERYBODY, Cell, ScoredCell, arm_scores
from nautile.uses.simulate.tables import ARMS

SMALLEST_GROUP = 10  # humans; a smaller group is shown but not scored


@dataclass(frozen=True)
class Distribution:
    """Shares of the options, [options], and their bootstrap draws, [draws, options] (NaN if nobody was drawn)."""

    shares: np.ndarray
    draws: np.ndarray
    people: int | None  # number of people; None: not known

    def fields(self, interval: float) -> dict[str, Any]:
        """As plain data, with percentile intervals, or Wilson's for an option that nobody, or everybody, has chosen.

        Without an interval if all draws are equal for another reason.
        """
        result: dict[str, Any] = {"shares": self.shares.tolist(), "people": self.people}
        varies = np.ptp(np.nan_to_num(self.draws), axis=0) > 0
        is_certain = ~varies & np.isin(self.shares, (0.0, 1.0)) & (self.people is not None)
        # Equal draws come from shares whose number of people is unknown: no interval, rather than one of width 0.
        if varies.any() or (len(varies) and is_certain.all()):
            low, high = np.nanquantile(self.draws, [(1 - interval) / 2, (1 + interval) / 2], axis=0)
            z = NormalDist().inv_cdf((1 + interval) / 2)
            for option in np.flatnonzero(is_certain):
                assert self.people is not None
                low[option], high[option] = wilson(self.people * self.shares[option], self.people, z)
            result |= {"low": low.tolist(), "high": high.tolist()}
        return result


class PeopleSample:
    """People in groups, with bootstrap weights, float32 [draws, people]: each row has the counts of one resample.

    A person counts by their own weight in every mean, in the draws times the number of draws of them.
    """

    def __init__(self, people: Sequence[Person], survey: SurveyConfig, by: Sequence[str], label: str) -> None:
        self.size = len(people)
        groups = groups_of(people, by, survey.bands, label)
        everybody = PeopleGroup(*EVERYBODY, np.arange(len(people)))
        self.members: dict[Cell, np.ndarray] = {(group.by, group.name): group.members for group in (everybody, *groups)}
        self.own_weights = np.array([person.weight for person in people])
        self.weights = np.zeros((0, len(people)), np.float32)

    def resample(self, draws: int, seed: Sequence[int], whole: bool = False) -> "PeopleSample":
        """Draw the weights. `whole`: every draw has all people, for people who are not a sample."""
        if whole:
            self.weights = np.broadcast_to(self.own_weights.astype(np.float32), (draws, self.size))
            return self
        rng = np.random.default_rng(list(seed))
        counts = (np.bincount(rng.integers(0, self.size, self.size), minlength=self.size) for _ in range(draws))
        self.weights = np.stack([(count * self.own_weights).astype(np.float32) for count in counts])
        return self

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
        shares = np.average(rows_NK[answered], axis=0, weights=self.own_weights[answered])
        return Distribution(shares, draws, len(answered))


def compare(
    survey: SurveyConfig,
    config: SimulateConfig,
    people: Sequence[Person],
    probabilities: Sequence[np.ndarray],
    respondents: Respondents | None,
    respondent_indices: np.ndarray | None = None,
) -> dict[str, Any]:
    """Distributions of every arm, for everybody and for each group, and the scores of the arms, as plain data.

    `probabilities`: for each question [people, options], NaN for people who were left out. `respondent_indices`: if
    `people` are respondents, their positions among these; they are then also the humans. Raises `ConfigError` for a
    field to group by that the respondents do not have.
    """
    # Personas that stand for the published groups, one for each, are not a sample.
    groups = respondents is None and config.personas is None
    sample = PeopleSample(people, survey, config.by, "personas").resample(config.draws, (config.seed, 1), whole=groups)
    humans, rows = _humans(survey, config, respondents, respondent_indices, sample)
    constants = _constants(survey, respondents)
    fitted = _fitted(survey, config, respondents, respondent_indices)
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
            human = _human_distribution(survey, config, number, cell, humans, rows)
            for name, value in {"uniform": uniform(options), **constants[number]}.items():
                arms[name] = Distribution(value, np.broadcast_to(value, (config.draws, options)), None)
            if humans is not None:
                for name, value in fitted[number].items():
                    predicted = np.where(np.isnan(rows[number][:, :1]), np.nan, value)
                    arms[name] = humans.distribution(predicted, cell)
            arms["humans"] = human
            fields = {name: arm.fields(config.interval) for name, arm in arms.items() if arm is not None}
            cell_results.append({"by": cell[0], "group": cell[1], "arms": fields})
            # Score every arm against the humans of this cell, if there are enough of them.
            if (
                human is not None
                and (human.people is None or human.people >= SMALLEST_GROUP)
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


def _humans(
    survey: SurveyConfig,
    config: SimulateConfig,
    respondents: Respondents | None,
    respondent_indices: np.ndarray | None,
    sample: PeopleSample,
) -> tuple[PeopleSample | None, list[np.ndarray]]:
    """The humans to compare with, and for each question their answers as one-hot rows, NaN if there is no answer.

    (None, []) without respondents.
    """
    if respondents is None:
        return None, []
    indices = respondents.held_out if respondent_indices is None else respondent_indices
    people = [respondents.people[i] for i in indices]
    if respondent_indices is None:
        for field in config.by:
            if not any(field in person.fields for person in people):
                raise ConfigError(
                    f"--by {field}: the respondents of survey {survey.name} have no such field to compare by"
                )
        humans = PeopleSample(people, survey, config.by, "respondents").resample(config.draws, (config.seed, 2))
    else:
        humans = sample
    rows = []
    for number, question in enumerate(survey.questions):
        answers = respondents.answers_NQ[indices, number]
        # `MISSING` is -1 and takes the last row for a moment; the next line corrects it.
        one_hot = np.eye(len(question.options))[answers]
        one_hot[answers == MISSING] = np.nan
        rows.append(one_hot)
    return humans, rows


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


def _fitted(
    survey: SurveyConfig, config: SimulateConfig, respondents: Respondents | None, respondent_indices: np.ndarray | None
) -> list[dict[str, np.ndarray]]:
    """For each question the predictions of the fitted baselines for the humans; empty without respondents."""
    if respondents is None:
        return [{} for _ in survey.questions]
    train = [respondents.people[i] for i in respondents.train]
    indices = respondents.held_out if respondent_indices is None else respondent_indices
    people = [respondents.people[i] for i in indices]
    return [
        predictions(
            train,
            respondents.answers_NQ[respondents.train, number],
            people,
            survey.persona_fields,
            len(question.options),
            config.seed,
            respondents.weights[respondents.train],
        )
        for number, question in enumerate(survey.questions)
    ]


def _human_distribution(
    survey: SurveyConfig,
    config: SimulateConfig,
    number: int,
    cell: Cell,
    humans: PeopleSample | None,
    rows: Sequence[np.ndarray],
) -> Distribution | None:
    """How the humans of a group answered; published shares vary over the draws only if their number is published."""
    if humans is not None:
        return humans.distribution(rows[number], cell)
    question = survey.questions[number]
    everybody = cell == EVERYBODY
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
        "missing": {
            question.name: int((respondents.answers_NQ[:, number] == MISSING).sum())
            for number, question in enumerate(survey.questions)
        },
    }
