"""Option probabilities of a checkpoint for each persona and question, by likelihood: nothing is sampled.

The probability of an option in one order is its likelihood divided by the sum over all options (a softmax of their
log-probabilities). The mean over several orders removes most of the effect of an option's position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nautile.common.errors import ConfigError
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.running.answerers import load_checkpoint
from nautile.uses.labelled.verbalised import ContinuationScorer, Group
from nautile.uses.simulate.config import SimulateConfig, SurveyConfig
from nautile.uses.simulate.people import Person
from nautile.uses.simulate.prompts import SurveyPrompts


@dataclass(frozen=True)
class Opinion:
    """One persona's option probabilities for one question, options in the survey's order, float64 [orders, options].

    None: the prompt is longer than the model's context.
    """

    by_order: np.ndarray | None

    @property
    def mean(self) -> np.ndarray | None:
        """Averaged over the orders, [options]."""
        return None if self.by_order is None else self.by_order.mean(axis=0)


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

    def opinions(self, people: Sequence[Person]) -> list[list[Opinion]]:
        """The opinions of each person, one per question."""
        prompts = self._prompts
        groups: list[Group] = []
        fits: list[bool] = []
        # All questions in all orders of a persona that fits; its opinions are None otherwise.
        for person in people:
            persona = prompts.persona(person)
            fits.append(len(prompts.beginning) + len(persona) + prompts.longest <= self._model.context)
            if fits[-1]:
                groups += [
                    (persona + prompts.question(number, order), prompts.continuations(number, order))
                    for number, orders in enumerate(prompts.orders)
                    for order in range(len(orders))
                ]
        # Flat over persons, questions and orders, and read back in the same order below.
        logprobs = iter(self._scorer.logprobs(prompts.beginning, groups) if groups else ())
        return [
            [Opinion(np.stack([softmax(next(logprobs)) for _ in orders]) if fit else None) for orders in prompts.orders]
            for fit in fits
        ]


def softmax(logprobs: np.ndarray) -> np.ndarray:
    """The probabilities of the options, normalised over the options alone, float64 [options]."""
    shifted = np.exp(np.asarray(logprobs, np.float64) - np.max(logprobs))
    return shifted / shifted.sum()


def position_bias(by_order_NOK: np.ndarray, orders: Sequence[Sequence[int]]) -> dict[str, object]:
    """How much the position of an option affects its probability.

    `by_order_NOK`: [people, orders, options in the survey's order]. Returns `by_place`: the mean probability of each
    position; `bias`: the largest distance of these from 1 / options; `spread`: the mean total variation between a
    person's distribution in one order and its mean over the orders. Without position bias these are 1 / options, 0 and
    0. `balanced`: whether each option is in each position equally often; if not, `by_place` also reflects preferences
    for options.
    """
    orders_OK = np.array(orders)
    options = orders_OK.shape[1]
    # From the survey's order of the options to that of the prompt: entry k is what the option in place k got.
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
