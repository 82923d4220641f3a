"""Run an evaluation: ask the items that have no row yet, grade each answer, write its row before the next batch.

The order depends only on the items (shortest prompt first, so that a batch has prompts of similar length). So a resumed
evaluation writes the same rows in the same order as an uninterrupted one, and asks nothing twice. Latencies are written
to `latency.<name>` beside the rows, because they differ between executions.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, silent
from nautile.evals.benchmarks.items import BenchmarkItem, grade
from nautile.evals.graders.grading import NOT_GRADED
from nautile.evals.running.answerers import Answerer, SkippedQuestion
from nautile.evals.running.likelihood import CheckpointScorer, likelihood_prompt, likelihood_row
from nautile.evals.running.rows import RowFile, SampleRow, digest, row_of

TimedRow = tuple[SampleRow, float | None]  # the latency in seconds, if known


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
    batch and, if anything was generated, the metric `evaluate/tokens_per_second`. `label` is the note of the progress.
    Raises `ConfigError` if the file has rows of another model or other questions, `Retryable` if the model stops
    answering (rows so far are kept).
    """

    def ask(batch: Sequence[BenchmarkItem]) -> list[TimedRow]:
        seeds = [sample_seed(seed, item.benchmark, item.index) for item in batch]
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

    return _evaluate_missing(scorer.name, scorer.batch, ask, likelihood_prompt, items, rows_path, emit, label)


def sample_seed(seed: int, benchmark: str, index: int) -> tuple[int, ...]:
    """The seed of one sample, from the run's seed, the benchmark and the item."""
    return seed, int(digest(benchmark)[:7], 16), index


def _evaluate_missing(
    model: str,
    size: int,
    ask: Callable[[Sequence[BenchmarkItem]], list[TimedRow]],
    prompt_of: Callable[[BenchmarkItem], str],
    items: Sequence[BenchmarkItem],
    path: Path,
    emit: Emit,
    label: str,
) -> list[SampleRow]:
    """Call `ask` for the items without a row, `size` at a time, shortest prompt first; return the rows of all items."""
    file, latencies = RowFile(path), RowFile(path.with_name(f"latency.{path.name}"))
    rows_by_item = {(row["benchmark"], row["index"]): row for row in file.rows}
    # A sample may have a latency and no row: latencies are written first.
    timed_items = {(row["benchmark"], row["index"]) for row in latencies.rows}
    # Existing rows must be of this model and these prompts.
    for item in items:
        row = rows_by_item.get((item.benchmark, item.index))
        if row is not None and row["model"] != model:
            raise ConfigError(f"{path} has answers of {row['model']!r}, not of {model!r}; use another file")
        if row is not None and row["prompt_digest"] != digest(prompt_of(item)):
            name = f"{item.benchmark} {item.index}"
            raise ConfigError(f"{path}: {name} was asked with another prompt; delete the file to ask again")
    pending = sorted(
        (item for item in items if (item.benchmark, item.index) not in rows_by_item),
        key=lambda item: (len(prompt_of(item)), item.benchmark, item.index),
    )
    finished, note = len(items) - len(pending), label or ", ".join(dict.fromkeys(item.benchmark for item in items))
    emit("progress", done=finished, total=len(items), unit="samples", note=note)
    tokens, seconds = 0, 0.0
    for first in range(0, len(pending), size):
        # The row of a sample is written once it is graded, so a killed run loses at most one batch of answers.
        batch = pending[first : first + size]
        start = time.monotonic()
        timed_rows = ask(batch)
        seconds += time.monotonic() - start
        rows = [row for row, _ in timed_rows]
        tokens += sum(row["tokens_out"] or 0 for row in rows)
        # Events and latencies are written before the rows, so that every row in the file has been reported.
        for row, latency in timed_rows:
            fields = {key: value for key, value in row.items() if value is not None}
            emit("sample", set=row["benchmark"], **fields, **({} if latency is None else {"latency_s": latency}))
        latencies.append(
            {"benchmark": row["benchmark"], "index": row["index"], "latency_s": round(latency, 4)}
            for row, latency in timed_rows
            if latency is not None and (row["benchmark"], row["index"]) not in timed_items
        )
        file.append(rows)
        rows_by_item |= {(row["benchmark"], row["index"]): row for row in rows}
        finished += len(batch)
        not_graded = sum(row["left_out"] == NOT_GRADED.problem for row in rows_by_item.values())
        missing = f"; {not_graded} replies could not be graded and are left out" if not_graded else ""
        emit("progress", done=finished, total=len(items), unit="samples", note=note + missing)
    if tokens and seconds:
        emit("metric", name="evaluate/tokens_per_second", step=0, value=tokens / seconds, source=note)
    return [rows_by_item[item.benchmark, item.index] for item in items]
