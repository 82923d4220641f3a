"""Asks the items that have no row yet, grades each answer, and writes its row before the next batch is asked.

The order is fixed by the items alone (shortest prompt first, so that batches are even), so a continued evaluation
writes the rows that an uninterrupted one would have written, in the same order, and asks nothing twice.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from configs.emit import Emit, silent
from configs.section import ConfigError
from evals.answerers import Answer, Answerer, Unasked
from evals.items import Item, grade
from evals.rows import Row, RowFile, digest, row_of


def evaluate(
    answerer: Answerer, items: Sequence[Item], rows_path: Path, seed: int = 0, emit: Emit = silent, label: str = ""
) -> list[Row]:
    """Rows of all `items`, in the order of `items`; those already in the file are not asked again.

    Emits a `sample` per new row (set: the benchmark), `progress` per batch and, where anything was generated, the
    metric `evaluate/tokens_per_second`. `label` names what is under way.
    Raises `ConfigError` when the file holds rows of another model or of other questions; `Retryable` when the model
    stops answering (rows so far are kept).
    """
    file = RowFile(rows_path)
    done = {(row["benchmark"], row["index"]): row for row in file.rows}
    for item in items:
        if (row := done.get((item.benchmark, item.index))) is not None:
            _belongs(row, item, answerer, rows_path)
    waiting = sorted(
        (item for item in items if (item.benchmark, item.index) not in done),
        key=lambda item: (len(item.prompt), item.benchmark, item.index),
    )
    finished, note = len(items) - len(waiting), label or ", ".join(dict.fromkeys(item.benchmark for item in items))
    emit("progress", done=finished, total=len(items), unit="samples", note=note)
    tokens, spent = 0, 0.0
    for first in range(0, len(waiting), answerer.batch):
        batch = waiting[first : first + answerer.batch]
        started = time.monotonic()
        answers = answerer.answer(
            [item.prompt for item in batch], [sample_seed(seed, item.benchmark, item.index) for item in batch]
        )
        spent += time.monotonic() - started
        tokens += sum(answer.tokens_out or 0 for answer in answers if isinstance(answer, Answer))
        rows = [_graded(item, answerer.name, answer) for item, answer in zip(batch, answers, strict=True)]
        # Events first: a row in the file is then always one that was reported, and none needs reporting twice.
        for row, answer in zip(rows, answers, strict=True):
            known = {key: value for key, value in row.items() if value is not None}
            timed = {"latency_s": answer.latency_s} if isinstance(answer, Answer) and answer.latency_s else {}
            emit("sample", set=row["benchmark"], **known, **timed)
        file.append(rows)
        done |= {(row["benchmark"], row["index"]): row for row in rows}
        finished += len(batch)
        emit("progress", done=finished, total=len(items), unit="samples", note=note)
    if tokens and spent:
        emit("metric", name="evaluate/tokens_per_second", step=0, value=tokens / spent, source=note)
    return [done[item.benchmark, item.index] for item in items]


def sample_seed(seed: int, benchmark: str, index: int) -> tuple[int, ...]:
    """What fixes the draw of one sample: the run's seed, the benchmark, the item."""
    return seed, int(digest(benchmark)[:7], 16), index


def _graded(item: Item, model: str, answer: Answer | Unasked) -> Row:
    return row_of(item, model, answer, grade(item, answer.reply) if isinstance(answer, Answer) else None)


def _belongs(row: Row, item: Item, answerer: Answerer, path: Path) -> None:
    if row["model"] != answerer.name:
        raise ConfigError(f"{path}: holds answers of {row['model']!r}, not of {answerer.name!r}; give it another file")
    if row["prompt_digest"] != digest(item.prompt):
        raise ConfigError(
            f"{path}: {item.benchmark} {item.index} was asked with another prompt; delete the file to ask it anew"
        )
