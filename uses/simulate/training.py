"""Turn a survey's human answers into training rows for `nautile tune` (form "opinions"): prompt, options, shares.

The prompts are the same as in `nautile simulate`. Held-out respondents are in no row. The method is that of SubPOP
(Suh et al. 2025, arXiv:2502.16761, §3): forward KL to the answer distributions of groups.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.data.table import is_missing
from nautile.uses.simulate.config import SimulateConfig, SurveyConfig
from nautile.uses.simulate.people import Person, group_name, persona_text
from nautile.uses.simulate.prompts import LETTERS, option_orders, question_words
from nautile.uses.simulate.reading import Respondents, declared_groups, shares

FEWEST = 10  # people of a group that is trained on


def training_rows(
    survey: SurveyConfig, config: SimulateConfig, respondents: Respondents | None
) -> tuple[list[dict[str, Any]], int]:
    """Build the training rows; returns (rows, number of people left out because their group is smaller than `FEWEST`).

    There is a row for each training respondent and question, with the shares of the people who are alike in all fields
    of `by` (of all people without `by`); for published shares, a row for each group and question. The order of the
    options in a row is random. Raises `ConfigError` for a survey without human answers.
    """
    orders = [option_orders(len(q.options), config.orders, config.seed, q.name) for q in survey.questions]
    rows, left_out_count = [], 0
    targets = list(_published(survey) if respondents is None else _of_respondents(survey, config, respondents))
    if not targets:
        raise ConfigError(f"survey {survey.name}: has no human answers by group, so there is nothing to learn from")
    preface = " ".join(survey.preface.split())
    # A stream of its own, so that the order of the options is independent of the other draws with this seed.
    draw = np.random.default_rng([config.seed, 4])
    for person, by_question in targets:
        left_out_count += by_question is None
        for number, human in enumerate(by_question or ()):
            if human is None:
                continue
            question, order = survey.questions[number], orders[number][draw.integers(len(orders[number]))]
            words = [preface, persona_text(survey, person), question_words(question, order, config.answer)]
            answers = [" ".join(question.options[i].split()) for i in order]
            rows.append(
                {
                    "prompt": "\n\n".join(part for part in words if part),
                    "options": list(LETTERS[: len(order)]) if config.answer == "letter" else answers,
                    "shares": [float(human[i]) for i in order],
                    "source": person.id,
                }
            )
    return rows, left_out_count


def _of_respondents(
    survey: SurveyConfig, config: SimulateConfig, respondents: Respondents
) -> Iterator[tuple[Person, list[np.ndarray | None] | None]]:
    """Each training respondent with the shares of their group for each question; None for too small a group."""
    train = [respondents.people[i] for i in respondents.train]
    answers_NQ = respondents.answers_NQ[respondents.train]
    for field in config.by:
        if without_field := next((person for person in train if is_missing(person.fields.get(field))), None):
            raise ConfigError(f"--by {field}: respondent {without_field.id} of survey {survey.name} has no such field")
    weights = respondents.weights[respondents.train]
    names = [tuple(_group(person, field, survey) for field in config.by) for person in train]
    members: dict[tuple[str, ...], list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    group_shares = {
        name: [
            shares(answers_NQ[own, number], len(q.options), weights[own]) for number, q in enumerate(survey.questions)
        ]
        for name, own in members.items()
        if len(own) >= FEWEST
    }
    for person, name in zip(train, names, strict=True):
        yield person, group_shares.get(name)


def _group(person: Person, field: str, survey: SurveyConfig) -> str:
    value = person.fields[field]
    try:
        return group_name(value, survey.bands.get(field))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"--by {field}: respondent {person.id} of survey {survey.name} has {value!r}, which has no band"
        ) from None


def _published(survey: SurveyConfig) -> Iterator[tuple[Person, list[np.ndarray | None] | None]]:
    for person in declared_groups(survey):
        by, _, group = person.id.partition("=")
        by_question = [question.groups.get(by, {}).get(group) for question in survey.questions]
        yield person, [None if values is None else np.array(values) / sum(values) for values in by_question]
