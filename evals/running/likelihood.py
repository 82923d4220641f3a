"""Answer multiple-choice questions by likelihood: the log-probability of each option's text after the question.

There are no letters and no chat template, so a base model can be compared with one that was trained to answer. The
model's choice is the option with the highest log-probability per byte (`acc_norm` of common harnesses); the option with
the highest sum is recorded too. Nothing is generated, so nothing can fail to parse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nautile.configs.evaluation import EvaluateConfig
from nautile.configs.model import TokenizerConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.answerers import load_checkpoint
from nautile.evals.running.rows import SampleRow, digest

PROMPT = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class OptionLikelihoods:
    """The log-probability of each option in nats, and its length in bytes. `tokens_in`: tokens of the question."""

    logprobs: tuple[float, ...]
    lengths: tuple[int, ...]
    tokens_in: int

    @property
    def by_bytes(self) -> int:
        """Index of the option with the highest log-probability per byte; of equal ones the first."""
        return int(np.argmax([logprob / max(1, n) for logprob, n in zip(self.logprobs, self.lengths, strict=True)]))

    @property
    def by_sum(self) -> int:
        return int(np.argmax(self.logprobs))


class CheckpointScorer:
    """Computes likelihoods from a `checkpoint` folder: `batch` questions per call, `config.batch` options per forward.

    Raises `ConfigError` as `CheckpointAnswerer`.
    """

    def __init__(self, folder: Path, config: EvaluateConfig, tokenizer: TokenizerConfig | None = None) -> None:
        self._params, self._model, checkpoint_tokenizer, self.name = load_checkpoint(folder, tokenizer)
        self._tokenizer = tokenizer_for(checkpoint_tokenizer)
        self._rows = config.batch
        self.batch = 4 * config.batch  # enough options to fill batches of every length

    def weigh(self, items: Sequence[BenchmarkItem]) -> list[OptionLikelihoods | None]:
        """Return the likelihoods of each item's options; None if question and option do not fit the context."""
        from nautile.model.decoding.scoring import continuation_logprobs

        prompts = [self._tokenizer.encode(PROMPT.format(question=item.question)) for item in items]
        # The space belongs to the option, as in running text. Encoded apart, the question has the same ids for all
        # options.
        options = [[self._tokenizer.encode(f" {option}") for option in item.options] for item in items]
        fits = [
            len(ids) + max(map(len, texts)) <= self._model.context for ids, texts in zip(prompts, options, strict=True)
        ]
        # Options of questions that do not fit are not computed; the others are read back in the same order.
        sequences = [
            (ids + text, len(ids))
            for ids, texts, fit in zip(prompts, options, fits, strict=True)
            for text in texts
            if fit
        ]
        sums = iter(continuation_logprobs(self._params, self._model, sequences, self._rows).tolist())
        return [
            OptionLikelihoods(
                logprobs=tuple(next(sums) for _ in item.options),
                lengths=tuple(len(option.encode()) for option in item.options),
                tokens_in=len(ids),
            )
            if fit
            else None
            for item, ids, fit in zip(items, prompts, fits, strict=True)
        ]


def with_options(items: Sequence[BenchmarkItem]) -> list[BenchmarkItem]:
    """Select the items that have options and a bare question."""
    return [item for item in items if item.options and item.question]


def likelihood_prompt(item: BenchmarkItem) -> str:
    """The question with all its options; identifies what the model was asked, as one text."""
    return "\n".join([PROMPT.format(question=item.question), *(f" {option}" for option in item.options)])


def likelihood_row(item: BenchmarkItem, model: str, likelihoods: OptionLikelihoods | None) -> SampleRow:
    """Build a sample's row with the fields of a generated sample; both verdicts grade the choice per byte."""
    row: dict[str, Any] = {
        "benchmark": item.benchmark,
        "index": item.index,
        "id": item.id,
        "category": item.category,
        "model": model,
        "way": "likelihood",
        "prompt": likelihood_prompt(item),
        "prompt_digest": digest(likelihood_prompt(item)),
        "expected": item.right_letter,
        "chance": 1 / len(item.options),
        "screened": item.screened,
        "options": list(item.options),
        "left_out": None if likelihoods else "too_long",
        "problem": None,
        "truncated": False,
        "finished_thinking": True,
        "tokens_out": 0,
        "tokens_in": likelihoods.tokens_in if likelihoods else None,
    }
    if likelihoods is None:  # not asked: the fields of the result are None
        return row | dict.fromkeys(("logprobs", "bytes", "parsed", "strict", "lenient", "strict_by_sum"))
    by_bytes, by_sum = item.letters[likelihoods.by_bytes], item.letters[likelihoods.by_sum]
    is_right = by_bytes == item.right_letter
    return row | {
        "logprobs": [round(logprob, 6) for logprob in likelihoods.logprobs],
        "bytes": list(likelihoods.lengths),
        "parsed": by_bytes,
        "strict": is_right,
        "lenient": is_right,
        "strict_by_sum": by_sum == item.right_letter,
    }
