"""Prompts of a survey as token ids, probabilities of its options by likelihood, and training rows of the same words.

A prompt consists of pieces: the preface, a persona, and a question with its options in some order. They end where the
tokenizer would split the whole text anyway, so that common parts have the same ids (which a prefix cache needs).

The probability of an option in one order is its likelihood divided by the sum over all options. The mean over several
orders removes most of the effect of an option's position.

Training rows are for `nautile tune` (form "opinions"), by the method of SubPOP (Suh et al. 2025, arXiv:2502.16761, §3):
forward KL to the answer distributions of groups. Held-out respondents are in no row.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from nautile.common.errors import ConfigError
from nautile.data.chat_template import encode_direct_reply, encode_prompt_end, encode_prompt_start
from nautile.data.table import is_missing
from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.evals.running.answerers import load_checkpoint
from nautile.uses.labelled.prompts import ContinuationScorer, Group
from nautile.uses.simulate.config import QuestionConfig, SimulateConfig, SurveyConfig
from nautile.uses.simulate.people import Person, group_name, persona_text
from nautile.uses.simulate.reading import Respondents, declared_groups, shares

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FEWEST = 10  # people of a group that is trained on


def option_orders(options: int, limit: int, seed: int, name: str) -> list[tuple[int, ...]]:
    """Orders of a question's options: all permutations if there are at most `limit`, else rotations of random ones.

    The rotations of a permutation put each option into each position once, so that a position bias cancels out; with a
    `limit` below `options` only in part. `name`: of the question, a part of the seed.
    """
    count = 1
    for factor in range(2, options + 1):
        count *= factor
        if count > limit:
            break
    if count <= limit:
        return list(itertools.permutations(range(options)))
    draw = np.random.default_rng([seed, *name.encode()])
    limit -= limit % options if limit >= options else 0
    orders: dict[tuple[int, ...], None] = {}
    while len(orders) < limit:
        base = draw.permutation(options).tolist()
        starts = range(options) if limit - len(orders) >= options else draw.permutation(options)[: limit - len(orders)]
        orders |= dict.fromkeys(tuple(base[start:] + base[:start]) for start in starts)
    return list(orders)[:limit]


def question_words(question: QuestionConfig, order: Sequence[int], answer: str) -> str:
    """The text of a question with its options in the given order; each has a letter if `answer` is "letter"."""
    options = [" ".join(question.options[i].split()) for i in order]
    if answer == "letter":
        lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
        ending = "Answer with the letter of the option alone."
    else:
        lines, ending = [f"- {option}" for option in options], "Answer with one of the options alone."
    return "\n".join([" ".join(question.text.split()), *lines, ending])


class SurveyPrompts:
    """Token ids of a survey's prompts for one tokenizer; every piece is encoded once."""

    def __init__(self, survey: SurveyConfig, config: SimulateConfig, tokenizer: Tokenizer) -> None:
        self.survey, self.config, self._tokenizer = survey, config, tokenizer
        self.orders = [option_orders(len(q.options), config.orders, config.seed, q.name) for q in survey.questions]
        preface = " ".join(survey.preface.split())
        opening = f"{preface}\n\n" if preface else ""
        chat = config.template == "chat"
        self.beginning = encode_prompt_start(tokenizer, opening) if chat else tokenizer.encode(opening)
        self._questions = [
            [self._question(question, order) for order in orders]
            for question, orders in zip(survey.questions, self.orders, strict=True)
        ]
        self._answers = [self._continuations(question) for question in survey.questions]

    def persona(self, person: Person) -> list[int]:
        """Token ids of a persona, which follow `beginning`."""
        return self._tokenizer.encode(f"{persona_text(self.survey, person)}\n\n")

    def question(self, number: int, order: int) -> list[int]:
        """Token ids of a question in one of its orders, which follow a persona's, up to the beginning of the answer."""
        return self._questions[number][order]

    def continuations(self, number: int, order: int) -> list[list[int]]:
        """Token ids of the answers whose probabilities are compared, one per option in the survey's order."""
        if self.config.answer == "text":
            return self._answers[number]
        letters = self._answers[number]  # by position in the prompt
        option_at = self.orders[number][order]
        return [letters[option_at.index(option)] for option in range(len(option_at))]

    @property
    def longest(self) -> int:
        """Number of ids of the longest question with its longest answer."""
        return max(
            max(map(len, questions)) + max(map(len, answers))
            for questions, answers in zip(self._questions, self._answers, strict=True)
        )

    def _question(self, question: QuestionConfig, order: Sequence[int]) -> list[int]:
        words = question_words(question, order, self.config.answer)
        if self.config.template == "plain":
            return self._tokenizer.encode(f"{words}\nAnswer:")
        # After the line break that begins every reply a letter is one token, so one forward pass scores all letters.
        start_of_reply = self._tokenizer.encode("\n") if self.config.answer == "letter" else []
        return [*encode_prompt_end(self._tokenizer, words), *start_of_reply]

    def _continuations(self, question: QuestionConfig) -> list[list[int]]:
        """Ids of the letter of each position, or of each option's text with its end, so that no answer is a prefix."""
        encode, plain = self._tokenizer.encode, self.config.template == "plain"
        if self.config.answer == "letter":
            return [encode(f" {letter}" if plain else letter) for letter in LETTERS[: len(question.options)]]
        options = [" ".join(option.split()) for option in question.options]
        if plain:
            return [encode(f" {option}\n") for option in options]
        return [encode_direct_reply(self._tokenizer, option) for option in options]


class OpinionScorer:
    """Computes opinions with a `checkpoint` folder. Raises `ConfigError` if it cannot be read or no question fits."""

    def __init__(self, folder: Path, survey: SurveyConfig, config: SimulateConfig) -> None:
        params, self._model, tokenizer, self.name = load_checkpoint(folder, None)
        self._prompts = SurveyPrompts(survey, config, tokenizer_for(tokenizer))
        shortest = len(self._prompts.beginning) + self._prompts.longest
        if shortest > self._model.context:
            raise ConfigError(
                f"survey {survey.name}: its preface and its longest question have {shortest} tokens, more than the "
                f"context of {self._model.context} of {self.name}, without any persona"
            )
        from nautile.model.decoding.scoring import SharedPrefixScorer

        self._scorer: ContinuationScorer = SharedPrefixScorer(params, self._model, config.rows_at_once)

    @property
    def orders(self) -> list[list[tuple[int, ...]]]:
        """The orders of each question's options: positions in the survey's order."""
        return self._prompts.orders

    def tokens_over(self, person: Person) -> int:
        """By how many tokens a persona is too long for the model's context, beside the longest question; 0: it fits."""
        prompts = self._prompts
        taken = len(prompts.beginning) + len(prompts.persona(person)) + prompts.longest
        return max(0, taken - self._model.context)

    def opinions(self, people: Sequence[Person]) -> list[list[np.ndarray | None]]:
        """For each person and question the probabilities [orders, options], options in the survey's order, float64.

        None: the prompt is longer than the model's context.
        """
        prompts = self._prompts
        groups: list[Group] = []
        fits: list[bool] = []
        for person in people:
            fits.append(not self.tokens_over(person))
            if fits[-1]:
                persona = prompts.persona(person)
                groups += [
                    (persona + prompts.question(number, order), prompts.continuations(number, order))
                    for number, orders in enumerate(prompts.orders)
                    for order in range(len(orders))
                ]
        # Flat over persons, questions and orders, and read back in the same order below.
        logprobs = iter(self._scorer.logprobs(prompts.beginning, groups) if groups else ())
        return [
            [softmax(np.stack([next(logprobs) for _ in orders]), axis=1) if fit else None for orders in prompts.orders]
            for fit in fits
        ]


def position_bias(by_order_NOK: np.ndarray, orders: Sequence[Sequence[int]]) -> dict[str, object]:
    """How much the position of an option affects its probability.

    `by_order_NOK`: [people, orders, options in the survey's order]. Returns `by_place`: the mean probability of each
    position; `bias`: the largest distance of these from 1 / options; `spread`: the mean total variation between a
    person's distribution in one order and its mean over the orders; `balanced`: whether each option is in each position
    equally often (if not, `by_place` also reflects preferences for options).
    """
    orders_OK = np.array(orders)
    options = orders_OK.shape[1]
    placed_NOK = np.take_along_axis(by_order_NOK, np.broadcast_to(orders_OK, by_order_NOK.shape), axis=2)
    by_place = placed_NOK.mean(axis=(0, 1))
    spread = 0.5 * np.abs(by_order_NOK - by_order_NOK.mean(axis=1, keepdims=True)).sum(axis=2).mean()
    counts = np.stack([np.bincount(orders_OK[:, place], minlength=options) for place in range(options)])
    return {
        "by_place": by_place.tolist(),
        "bias": float(np.abs(by_place - 1 / options).max()),
        "spread": float(spread),
        "orders": len(orders),
        "balanced": bool((counts == counts[0, 0]).all()),
    }


def training_rows(
    survey: SurveyConfig, config: SimulateConfig, respondents: Respondents | None
) -> tuple[list[dict[str, Any]], int]:
    """Build the training rows; returns (rows, number of people left out because their group is smaller than `FEWEST`).

    A row is a training respondent and question, with the shares of the people who are alike in all fields of `by`; or a
    published group and question. Their options are in random order. Raises `ConfigError` for a survey without answers.
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
