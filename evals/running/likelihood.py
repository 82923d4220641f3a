"""The second way to ask a multiple-choice question: how likely is each option's text after the question, with no
letters and no chat template, so that a base model can be compared with one that has learnt to answer.

The option with the highest log-probability per byte is the model's choice (the usual `acc_norm`); the one with the
highest sum stands beside it. Nothing is generated, so nothing can fail to be parsed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.evaluation import EvaluateConfig
from configs.model import TokenizerConfig
from data.tokenizer import tokenizer_for
from evals.benchmarks.items import Item
from evals.running.answerers import load_checkpoint
from evals.running.rows import Row, digest

PROMPT = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Weighed:
    """Of each option: its log-probability in nats, and its bytes. `tokens_in`: of the question."""

    logprobs: tuple[float, ...]
    lengths: tuple[int, ...]
    tokens_in: int

    @property
    def by_bytes(self) -> int:
        """The option of the highest log-probability per byte; the first of equals."""
        return int(np.argmax([logprob / max(1, n) for logprob, n in zip(self.logprobs, self.lengths, strict=True)]))

    @property
    def by_sum(self) -> int:
        return int(np.argmax(self.logprobs))


class CheckpointScorer:
    """A `checkpoint` folder, `batch` questions at a time, their options `config.batch` rows at a time.

    Raises `ConfigError` as `CheckpointAnswerer` does.
    """

    def __init__(self, folder: Path, config: EvaluateConfig, tokenizer: TokenizerConfig | None = None) -> None:
        self._params, self._model, found, self.name = load_checkpoint(folder, tokenizer)
        self._tokenizer = tokenizer_for(found)
        self._rows = config.batch
        self.batch = 4 * config.batch  # enough options to fill rows of every length

    def weigh(self, items: Sequence[Item]) -> list[Weighed | None]:
        """Each item's options weighed; None where one of them does not fit the model's context with its question."""
        from model.decoding.scoring import continuation_logprobs

        asked = [self._tokenizer.encode(PROMPT.format(question=item.question)) for item in items]
        options = [[self._tokenizer.encode(f" {option}") for option in item.options] for item in items]
        fits = [
            len(ids) + max(map(len, texts)) <= self._model.context for ids, texts in zip(asked, options, strict=True)
        ]
        sequences = [
            (ids + text, len(ids))
            for ids, texts, fit in zip(asked, options, fits, strict=True)
            for text in texts
            if fit
        ]
        sums = iter(continuation_logprobs(self._params, self._model, sequences, self._rows).tolist())
        return [
            Weighed(
                logprobs=tuple(next(sums) for _ in item.options),
                lengths=tuple(len(option.encode()) for option in item.options),
                tokens_in=len(ids),
            )
            if fit
            else None
            for item, ids, fit in zip(items, asked, fits, strict=True)
        ]


def weighable(items: Sequence[Item]) -> list[Item]:
    """Those of `items` that have options to weigh."""
    return [item for item in items if item.options and item.question]


def likelihood_prompt(item: Item) -> str:
    """All that the model is shown: the question, and under it each option that may follow."""
    return "\n".join([PROMPT.format(question=item.question), *(f" {option}" for option in item.options)])


def likelihood_row(item: Item, model: str, weighed: Weighed | None) -> Row:
    """The row of one sample, in the shape of a generated one: both verdicts are of the choice by bytes."""
    row: dict[str, Any] = {
        "benchmark": item.benchmark,
        "index": item.index,
        "id": item.id,
        "category": item.category,
        "model": model,
        "way": "likelihood",
        "prompt": likelihood_prompt(item),
        "prompt_digest": digest(likelihood_prompt(item)),
        "expected": item.expected,
        "chance": item.chance,
        "options": list(item.options),
        "left_out": None if weighed else "too_long",
        "problem": None,
        "truncated": False,
        "finished_thinking": True,
        "tokens_out": 0,
        "tokens_in": weighed.tokens_in if weighed else None,
    }
    if weighed is None:
        return row | dict.fromkeys(("logprobs", "bytes", "parsed", "strict", "lenient", "strict_by_sum"))
    picked, by_sum = item.letters[weighed.by_bytes], item.letters[weighed.by_sum]
    right = picked == item.expected
    return row | {
        "logprobs": [round(one, 6) for one in weighed.logprobs],
        "bytes": list(weighed.lengths),
        "parsed": picked,
        "strict": right,
        "lenient": right,
        "strict_by_sum": by_sum == item.expected,
    }
