"""A model's answers to a survey beside humans and baselines: distributions and distances, all with intervals.

Every arm is judged on the same humans. Where the survey has respondents, these are its held-out ones, and what a
baseline knows of humans is of the others; where it has only published shares, the shares are both, which is said.

Intervals are of a bootstrap over people: personas, and humans where their own answers are known, are resampled whole,
with all their questions. A persona that is a respondent is resampled with their answers. The draws of a distance are
shifted to the distance that was measured, because a distance between two resampled distributions is larger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import ConfigError
from configs.survey import SimulateConfig, SurveyConfig
from data.surveys.people import PeopleGroup, Person, groups_of
from data.surveys.reading import MISSING, Respondents, predictors_of, shares
from evals.opinions.baselines import majority, predictions, uniform
from evals.opinions.scores import EVERYBODY, Cell, ScoredCell, arm_scores
from evals.opinions.tables import ARMS

SMALLEST_GROUP = 10  # humans; a smaller group is shown, and not scored


@dataclass(frozen=True)
class Distribution:
    """Shares of the options, [options], and their bootstrap draws, [draws, options] (NaN where nobody was drawn)."""

    shares: np.ndarray
    draws: np.ndarray
    people: int | None  # None: not known

    def fields(self, interval: float) -> dict[str, Any]:
        """As plain data, with percentile intervals; no interval where the draws do not differ."""
        result: dict[str, Any] = {"shares": self.shares.tolist(), "people": self.people}
        if np.ptp(np.nan_to_num(self.draws), axis=0).max(initial=0.0) > 0:
            low, high = np.nanquantile(self.draws, [(1 - interval) / 2, (1 + interval) / 2], axis=0)
            result |= {"low": low.tolist(), "high": high.tolist()}
        return result


class PeopleSample:
    """People in groups, with the weights of their resamples: float32 [draws, people], each row a resample."""

    def __init__(self, people: Sequence[Person], survey: SurveyConfig, by: Sequence[str], label: str) -> None:
        self.size = len(people)
        groups = groups_of(people, by, survey.bands, label)
        everybody = PeopleGroup(*EVERYBODY, np.arange(len(people)))
        self.members: dict[Cell, np.ndarray] = {(group.by, group.name): group.members for group in (everybody, *groups)}
        self.weights = np.zeros((0, len(people)), np.float32)

    def resample(self, draws: int, seed: Sequence[int], whole: bool = False) -> "PeopleSample":
        """Draw the weights; `whole`: all people in each draw, because they are no sample of anybody."""
        if whole:
            self.weights = np.ones((draws, self.size), np.float32)
            return self
        draw = np.random.default_rng(list(seed))
        counts = (np.bincount(draw.integers(0, self.size, self.size), minlength=self.size) for _ in range(draws))
        self.weights = np.stack([count.astype(np.float32) for count in counts])
        return self

    def distribution(self, rows_NK: np.ndarray, cell: Cell) -> Distribution | None:
        """The mean of the group's rows; rows that begin with NaN are of people without an answer. None without rows."""
        members = self.members.get(cell, np.empty(0, int))
        known = members[~np.isnan(rows_NK[members, 0])] if len(members) else members
        if not len(known):
            return None
        weights = self.weights[:, known].astype(float)
        with np.errstate(invalid="ignore"):
            draws = weights @ rows_NK[known] / weights.sum(axis=1, keepdims=True)
        return Distribution(rows_NK[known].mean(axis=0), draws, len(known))


def compare(
    survey: SurveyConfig,
    config: SimulateConfig,
    people: Sequence[Person],
    probabilities: Sequence[np.ndarray],
    respondents: Respondents | None,
    asked: np.ndarray | None = None,
) -> dict[str, Any]:
    """Everybody's and each group's distributions of every arm, and the arms' scores, as plain data.

    `probabilities`: for each question [people, options], NaN for people who were left out. `asked`: the positions among
    the respondents of `people`, if they are respondents; the humans are then these. Raises `ConfigError` for a field
    to group by that the respondents lack.
    """
    # Personas that are the published groups themselves, one each, are no sample.
    groups = respondents is None and config.personas is None
    sample = PeopleSample(people, survey, config.by, "personas").resample(config.draws, (config.seed, 1), whole=groups)
    humans, rows = _humans(survey, config, respondents, asked, sample)
    constants = _constants(survey, respondents)
    fitted = _fitted(survey, config, respondents, asked)
    cells = list(sample.members)
    questions, scored = [], {name: [] for name in ARMS}
    for number, question in enumerate(survey.questions):
        options = len(question.options)
        answered = probabilities[number]
        if asked is not None:  # everything is judged on those who have answered
            answered = np.where(np.isnan(rows[number][:, :1]), np.nan, answered)
            rows[number] = np.where(np.isnan(answered[:, :1]), np.nan, rows[number])
        shown = []
        for cell in cells:
            arms: dict[str, Distribution | None] = {"model": sample.distribution(answered, cell)}
            human = _human_distribution(survey, config, number, cell, humans, rows)
            for name, value in {"uniform": uniform(options), **constants[number]}.items():
                arms[name] = Distribution(value, np.broadcast_to(value, (config.draws, options)), None)
            for name in fitted[number] if humans is not None else ():
                judged = np.where(np.isnan(rows[number][:, :1]), np.nan, fitted[number][name])
                arms[name] = humans.distribution(judged, cell)
            arms["humans"] = human
            fields = {name: arm.fields(config.interval) for name, arm in arms.items() if arm is not None}
            shown.append({"by": cell[0], "group": cell[1], "arms": fields})
            enough = human is not None and (human.people is None or human.people >= SMALLEST_GROUP)
            if enough and arms["model"] is not None:
                # Shares of a number of people that is not published have no bound: their draws are all alike.
                bounded = np.ptp(np.nan_to_num(human.draws), axis=0).max() > 0
                for name in ARMS:
                    if arms.get(name) is not None and (name != "humans" or bounded):
                        arm = arms[name]
                        scored[name].append(ScoredCell(number, cell, arm.shares, arm.draws, human.shares, human.draws))
        questions.append(
            {"name": question.name, "text": question.text, "options": list(question.options),
             "ordered": question.ordered, "scale": list(question.scale), "weight": question.weight, "cells": shown}
        )  # fmt: skip
    published = humans is None
    return {
        "questions": questions,
        "scores": {
            name: arm_scores(survey, config, name, entries, published) for name, entries in scored.items() if entries
        },
        "compared": any(scored.values()),
        "humans": _description(survey, config, sample, humans, respondents, asked, scored),
    }


def _humans(
    survey: SurveyConfig,
    config: SimulateConfig,
    respondents: Respondents | None,
    asked: np.ndarray | None,
    sample: PeopleSample,
) -> tuple[PeopleSample | None, list[np.ndarray]]:
    """The humans that are compared with, and for each question their answers as rows of one 1, NaN if not known."""
    if respondents is None:
        return None, []
    chosen = respondents.held_out if asked is None else asked
    judged = [respondents.people[i] for i in chosen]
    if asked is None:
        for field in config.by:
            if not any(field in person.fields for person in judged):
                raise ConfigError(
                    f"--by {field}: the respondents of survey {survey.name} have no such field to compare by"
                )
        humans = PeopleSample(judged, survey, config.by, "respondents").resample(config.draws, (config.seed, 2))
    else:
        humans = sample
    rows = []
    for number, question in enumerate(survey.questions):
        answers = respondents.answers_NQ[chosen, number]
        one_hot = np.eye(len(question.options))[answers]
        one_hot[answers == MISSING] = np.nan
        rows.append(one_hot)
    return humans, rows


def _constants(survey: SurveyConfig, respondents: Respondents | None) -> list[dict[str, np.ndarray]]:
    """For each question the majority and the overall shares of the other humans, where these are known."""
    constants = []
    for number, question in enumerate(survey.questions):
        if respondents is not None:
            overall = shares(respondents.answers_NQ[respondents.train, number], len(question.options))
        else:
            overall = _published(question.humans)
            if overall is None and question.groups:
                groups = [_published(group) for named in question.groups.values() for group in named.values()]
                overall = np.mean(groups, axis=0)
        constants.append({} if overall is None else {"majority": majority(overall), "overall": overall})
    return constants


def _fitted(
    survey: SurveyConfig, config: SimulateConfig, respondents: Respondents | None, asked: np.ndarray | None
) -> list[dict[str, np.ndarray]]:
    """For each question what the fitted baselines predict of the judged humans; nothing without respondents."""
    if respondents is None:
        return [{} for _ in survey.questions]
    train = [respondents.people[i] for i in respondents.train]
    judged = [respondents.people[i] for i in (respondents.held_out if asked is None else asked)]
    return [
        predictions(
            train,
            respondents.answers_NQ[respondents.train, number],
            judged,
            predictors_of(survey),
            len(question.options),
            config.seed,
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
    """How humans of a group answered; published shares have draws only if the number of people is published."""
    if humans is not None:
        return humans.distribution(rows[number], cell)
    question = survey.questions[number]
    everybody = cell == EVERYBODY
    known = _published(question.humans if everybody else question.groups.get(cell[0], {}).get(cell[1], ()))
    if known is None:
        return None
    people = question.respondents if everybody else None
    draws = np.broadcast_to(known, (config.draws, len(known)))
    if people is not None:
        draw = np.random.default_rng([config.seed, 3, number])
        draws = draw.multinomial(people, known, size=config.draws) / people
    return Distribution(known, draws, people)


def _published(values: Sequence[float]) -> np.ndarray | None:
    """Published shares, which are rounded, made to sum to 1."""
    return np.array(values, float) / sum(values) if values else None


def _description(
    survey: SurveyConfig,
    config: SimulateConfig,
    sample: PeopleSample,
    humans: PeopleSample | None,
    respondents: Respondents | None,
    asked: np.ndarray | None,
    scored: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Who the humans are, in plain data: `kind`, counts; of published shares the groups that no persona is in."""
    if respondents is None:
        kind = "published shares" if any(scored.values()) else "none"
        known = {(by, group): None for q in survey.questions for by in config.by for group in q.groups.get(by, {})}
        unmatched = [f"{by}: {group}" for by, group in known if (by, group) not in sample.members]
        return {"kind": kind, "source": survey.source, "licence": survey.licence, "unmatched_groups": unmatched}
    return {
        "kind": "the same people" if asked is not None else "held-out respondents",
        "source": survey.source,
        "licence": survey.licence,
        "judged": humans.size if humans is not None else 0,
        "train": len(respondents.train),
        "missing": {
            question.name: int((respondents.answers_NQ[:, number] == MISSING).sum())
            for number, question in enumerate(survey.questions)
        },
    }
