"""Asks the items that have no row yet, grades each answer, and writes its row before the next batch is asked.

The order is fixed by the items alone (shortest prompt first, so that batches are even), so a continued evaluation
writes the rows that an uninterrupted one would have written, in the same order, and asks nothing twice. How long each
sample took is a row of its own in `latency.<name>` beside them, for that changes from one execution to the next.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.errors import ConfigError
from common.events import Emit, silent
from evals.benchmarks.items import Item, grade
from evals.running.answerers import Answer, Answerer, Unasked
from evals.running.likelihood import CheckpointScorer, likelihood_prompt, likelihood_row
from evals.running.rows import Row, RowFile, digest, row_of

Timed = tuple[Row, float | None]


def evaluate(
    answerer: Answerer, items: Sequence[Item], rows_path: Path, seed: int = 0, emit: Emit = silent, label: str = ""
) -> list[Row]:
    """Rows of all `items`, in the order of `items`; those already in the file are not asked again.

    Emits a `sample` per new row (set: the benchmark), `progress` per batch and, where anything was generated, the
    metric `evaluate/tokens_per_second`. `label` names what is under way.
    Raises `ConfigError` when the file holds rows of another model or of other questions; `Retryable` when the model
    stops answering (rows so far are kept).
    """

    def ask(batch: Sequence[Item]) -> list[Timed]:
        seeds = [sample_seed(seed, item.benchmark, item.index) for item in batch]
        answers = answerer.answer([item.prompt for item in batch], seeds)
        return [_graded(item, answerer.name, answer) for item, answer in zip(batch, answers, strict=True)]

    return _work_off(answerer.name, answerer.batch, ask, lambda item: item.prompt, items, rows_path, emit, label)


def weigh(
    scorer: CheckpointScorer, items: Sequence[Item], rows_path: Path, emit: Emit = silent, label: str = "likelihood"
) -> list[Row]:
    """The same by the likelihood of each option, for `items` with options. A sample's latency is its batch's."""

    def ask(batch: Sequence[Item]) -> list[Timed]:
        started = time.monotonic()
        weighed = scorer.weigh(batch)
        took = time.monotonic() - started
        return [(likelihood_row(item, scorer.name, one), took) for item, one in zip(batch, weighed, strict=True)]

    return _work_off(scorer.name, scorer.batch, ask, likelihood_prompt, items, rows_path, emit, label)


def sample_seed(seed: int, benchmark: str, index: int) -> tuple[int, ...]:
    """What fixes the draw of one sample: the run's seed, the benchmark, the item."""
    return seed, int(digest(benchmark)[:7], 16), index


def _work_off(
    model: str,
    size: int,
    ask: Callable[[Sequence[Item]], list[Timed]],
    prompt_of: Callable[[Item], str],
    items: Sequence[Item],
    path: Path,
    emit: Emit,
    label: str,
) -> list[Row]:
    """Rows of all `items`; `ask` is given those that have none, `size` at a time, in order of their prompts' length."""
    file, latencies = RowFile(path), RowFile(path.with_name(f"latency.{path.name}"))
    done = {(row["benchmark"], row["index"]): row for row in file.rows}
    for item in items:
        if (row := done.get((item.benchmark, item.index))) is not None:
            _belongs(row, item, prompt_of(item), model, path)
    waiting = sorted(
        (item for item in items if (item.benchmark, item.index) not in done),
        key=lambda item: (len(prompt_of(item)), item.benchmark, item.index),
    )
    finished, note = len(items) - len(waiting), label or ", ".join(dict.fromkeys(item.benchmark for item in items))
    emit("progress", done=finished, total=len(items), unit="samples", note=note)
    tokens, spent = 0, 0.0
    for first in range(0, len(waiting), size):
        batch = waiting[first : first + size]
        started = time.monotonic()
        answered = ask(batch)
        spent += time.monotonic() - started
        rows = [row for row, _ in answered]
        tokens += sum(row["tokens_out"] or 0 for row in rows)
        # Events and times first: a row in the file is then always one that was reported, and none needs it twice.
        for row, latency in answered:
            known = {key: value for key, value in row.items() if value is not None}
            emit("sample", set=row["benchmark"], **known, **({} if latency is None else {"latency_s": latency}))
        latencies.append(
            {"benchmark": row["benchmark"], "index": row["index"], "latency_s": round(latency, 4)}
            for row, latency in answered
            if latency is not None
        )
        file.append(rows)
        done |= {(row["benchmark"], row["index"]): row for row in rows}
        finished += len(batch)
        emit("progress", done=finished, total=len(items), unit="samples", note=note)
    if tokens and spent:
        emit("metric", name="evaluate/tokens_per_second", step=0, value=tokens / spent, source=note)
    return [done[item.benchmark, item.index] for item in items]


def _graded(item: Item, model: str, answer: Answer | Unasked) -> Timed:
    if isinstance(answer, Unasked):
        return row_of(item, model, answer, None), None
    return row_of(item, model, answer, grade(item, answer.reply)), answer.latency_s


def _belongs(row: Row, item: Item, prompt: str, model: str, path: Path) -> None:
    if row["model"] != model:
        raise ConfigError(f"{path}: holds answers of {row['model']!r}, not of {model!r}; give it another file")
    if row["prompt_digest"] != digest(prompt):
        raise ConfigError(
            f"{path}: {item.benchmark} {item.index} was asked with another prompt; delete the file to ask it anew"
        )
