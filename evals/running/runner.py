"""Run an evaluation: ask the items that have no row yet, grade each answer, write its row before the next batch.

The order depends only on the items (shortest prompt first, so that a batch has prompts of similar length). So a resumed
evaluation writes the same rows in the same order as an uninterrupted one, and asks nothing twice. Latencies are written
to `latency.<name>` beside the rows, because they differ between executions.

A question with options can also be answered by likelihood: the log-probability of each option's text after the
question. There are no letters and no chat template, so a base model can be compared with one that was trained to
answer. The model's choice is the option with the highest log-probability per byte (`acc_norm` of common harnesses); the
option with the highest sum is recorded too. Nothing is generated, so nothing can fail to parse.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, silent
from nautile.configs.evaluation import EvaluateConfig
from nautile.configs.model import TokenizerConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.benchmarks.items import BenchmarkItem, GradedReply, grade
from nautile.evals.graders.grading import NOT_GRADED
from nautile.evals.running.answerers import Answer, Answerer, SkippedQuestion, load_checkpoint
from nautile.evals.running.rows import RowFile, SampleRow, digest

TimedRow = tuple[SampleRow, float | None]  # the latency in seconds, if known
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


def evaluate(
    answerer: Answerer,
    items: Sequence[BenchmarkItem],
    rows_path: Path,
    seed: int = 0,
    emit: Emit = silent,
    label: str = "",
) -> list[SampleRow]:
    """Generate and grade an answer for each item; items that have a row in the file are not asked again.

    Returns the rows of all `items`, in their order. Emits a `sample` per new row (set: the benchmark), `progress` per
    batch with the note `label`, and the metric `evaluate/tokens_per_second`. Raises `ConfigError` if the file has rows
    of another model or other questions, `Retryable` if the model stops answering (rows so far are kept).
    """

    def ask(batch: Sequence[BenchmarkItem]) -> list[TimedRow]:
        seeds = [sample_seed(seed, item) for item in batch]
        answers = answerer.answer([item.prompt for item in batch], seeds)
        rows: list[TimedRow] = []
        for item, answer in zip(batch, answers, strict=True):
            if isinstance(answer, SkippedQuestion):
                rows.append((row_of(item, answerer.name, answer, None), None))
            else:
                rows.append((row_of(item, answerer.name, answer, grade(item, answer.reply)), answer.latency_s))
        return rows

    return _evaluate_missing(
        answerer.name, answerer.batch, ask, lambda item: item.prompt, items, rows_path, emit, label
    )


def score_options(
    scorer: CheckpointScorer,
    items: Sequence[BenchmarkItem],
    rows_path: Path,
    emit: Emit = silent,
    label: str = "likelihood",
) -> list[SampleRow]:
    """Evaluate items with options by the likelihood of each option. A sample's latency is its batch's."""

    def ask(batch: Sequence[BenchmarkItem]) -> list[TimedRow]:
        start = time.monotonic()
        likelihoods = scorer.weigh(batch)
        seconds = time.monotonic() - start
        return [
            (likelihood_row(item, scorer.name, options), seconds)
            for item, options in zip(batch, likelihoods, strict=True)
        ]

    # Options share rows in the model, so the last digits of a likelihood depend on its batch: an interrupted batch is
    # computed again as it was.
    return _evaluate_missing(
        scorer.name, scorer.batch, ask, likelihood_prompt, items, rows_path, emit, label, whole_batches=True
    )


def with_samples(items: Sequence[BenchmarkItem], samples: int) -> list[BenchmarkItem]:
    """Each item so many times, to be answered by sampling; `sample` tells them apart."""
    return [replace(item, sample=number) for item in items for number in range(samples)]


def sample_seed(seed: int, item: BenchmarkItem) -> tuple[int, ...]:
    """The seed of one answer, from the run's seed, the benchmark, the item and the number of the sample."""
    number = () if item.sample is None else (item.sample,)
    return seed, int(digest(item.benchmark)[:7], 16), item.index, *number


def _place(row: SampleRow) -> tuple[str, int, int | None]:
    return row["benchmark"], row["index"], row.get("sample")


def _place_of(item: BenchmarkItem) -> tuple[str, int, int | None]:
    return item.benchmark, item.index, item.sample


def _evaluate_missing(
    model: str,
    size: int,
    ask: Callable[[Sequence[BenchmarkItem]], list[TimedRow]],
    prompt_of: Callable[[BenchmarkItem], str],
    items: Sequence[BenchmarkItem],
    path: Path,
    emit: Emit,
    label: str,
    whole_batches: bool = False,
) -> list[SampleRow]:
    """Call `ask` for the items without a row, `size` at a time, shortest prompt first; return the rows of all items.

    whole_batches: the batches are those of all items, and one without some of its rows is asked whole.
    """
    file, latencies = RowFile(path), RowFile(path.with_name(f"latency.{path.name}"))
    rows_by_item = {_place(row): row for row in file.rows}
    # A sample may have a latency and no row: latencies are written first.
    timed_items = {_place(row) for row in latencies.rows}
    for item in items:
        row = rows_by_item.get(_place_of(item))
        if row is not None and row["model"] != model:
            raise ConfigError(f"{path} has answers of {row['model']!r}, not of {model!r}; use another file")
        if row is not None and row["prompt_digest"] != digest(prompt_of(item)):
            name = f"{item.benchmark} {item.index}"
            raise ConfigError(f"{path}: {name} was asked with another prompt; delete the file to ask again")
    # The samples of an item are adjacent: the generator computes their common prompt once.
    ordered = sorted(items, key=lambda item: (len(prompt_of(item)), item.benchmark, item.index, item.sample or 0))
    pending = [item for item in ordered if _place_of(item) not in rows_by_item]
    finished, note = len(items) - len(pending), label or ", ".join(dict.fromkeys(item.benchmark for item in items))
    emit("progress", done=finished, total=len(items), unit="samples", note=note)
    tokens, seconds = 0, 0.0
    asked = ordered if whole_batches else pending
    for first in range(0, len(asked), size):
        # The row of a sample is written once it is graded, so a killed run loses at most one batch of answers.
        batch = asked[first : first + size]
        if all(_place_of(item) in rows_by_item for item in batch):
            continue
        start = time.monotonic()
        timed_rows = [timed for timed in ask(batch) if _place(timed[0]) not in rows_by_item]
        seconds += time.monotonic() - start
        rows = [row for row, _ in timed_rows]
        tokens += sum(row["tokens_out"] or 0 for row in rows)
        # Events and latencies are written before the rows, so that every row in the file has been reported.
        for row, latency in timed_rows:
            if "sample" in row:  # the catalog has one row for a question: these are in the file alone
                continue
            fields = {key: value for key, value in row.items() if value is not None}
            emit("sample", set=row["benchmark"], **fields, **({} if latency is None else {"latency_s": latency}))
        latencies.append(
            {name: row[name] for name in ("benchmark", "index", "sample") if name in row}
            | {"latency_s": round(latency, 4)}
            for row, latency in timed_rows
            if latency is not None and _place(row) not in timed_items
        )
        file.append(rows)
        rows_by_item |= {_place(row): row for row in rows}
        finished += len(rows)
        not_graded = sum(row["left_out"] == NOT_GRADED.problem for row in rows_by_item.values())
        missing = f"; {not_graded} replies could not be graded and are left out" if not_graded else ""
        emit("progress", done=finished, total=len(items), unit="samples", note=note + missing)
    if tokens and seconds:
        emit("metric", name="evaluate/tokens_per_second", step=0, value=tokens / seconds, source=note)
    return [rows_by_item[_place_of(item)] for item in items]


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


def row_of(item: BenchmarkItem, model: str, answer: Answer | SkippedQuestion, graded: GradedReply | None) -> SampleRow:
    """Build a sample's row. If the question was not asked, `left_out` is the reason and the verdicts are None.

    A reply that could not be graded (`NOT_GRADED`) is left out for that reason; the row has the reply all the same.
    """
    row: SampleRow = {
        "benchmark": item.benchmark,
        "index": item.index,
        "id": item.id,
        "category": item.category,
        "model": model,
        "prompt": item.prompt,
        "prompt_digest": digest(item.prompt),
        "expected": item.expected,
        "chance": item.chance,
        "screened": item.screened,
        "left_out": answer.reason if isinstance(answer, SkippedQuestion) else None,
        "tokens_in": answer.tokens_in,
        **({} if item.sample is None else {"sample": item.sample}),
    }
    # A skipped question has all fields, so that rows have one schema.
    if isinstance(answer, SkippedQuestion) or graded is None:
        reply_fields = ("output", "reasoning", "answer", "finished_thinking", "finished", "truncated", "tokens_out")
        return row | dict.fromkeys((*reply_fields, "parsed", "problem", "strict", "lenient"))
    reply, verdict = answer.reply, graded.verdict
    # A row without one of its verdicts counts in no score, or both scores would be of different questions.
    is_graded = verdict.strict is not None and verdict.lenient is not None
    return row | {
        "left_out": None if is_graded else NOT_GRADED.problem,
        "output": answer.output,
        "reasoning": reply.reasoning,
        "answer": reply.answer,
        "finished_thinking": reply.finished_thinking,
        "finished": reply.finished,
        "truncated": answer.truncated,
        "tokens_out": answer.tokens_out,
        "parsed": verdict.parsed,
        "problem": verdict.problem,
        "strict": verdict.strict if is_graded else None,
        "lenient": verdict.lenient if is_graded else None,
        **graded.details,
    }
