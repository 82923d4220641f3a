"""Every corpus behind one interface: a list of files, and the rows of each as batches, the same each time."""

import hashlib
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError
from configs.ingest import SourceConfig
from data.records import TEXT_COLUMNS, RecordBatch, SynthRecord, batched, schema_columns
from data.sources.file_list import SourceFile
from data.sources.hub import count_hub_rows, fetch_hub_file, list_hub_files
from data.sources.local_files import (
    count_jsonl_rows,
    count_parquet_rows,
    matching_files,
    read_jsonl,
    read_parquet_batches,
)
from data.sources.reasoning_gym import Problem, problems
from data.sources.wikipedia import STAND_IN as WIKIPEDIA_STAND_IN
from data.sources.wikipedia import articles, web_record

log = logging.getLogger(__name__)

REASONING_STAND_IN = "reasoning-gym problems with worked rationales, in place of SYNTH"
STAND_INS = {"wikipedia": WIKIPEDIA_STAND_IN, "reasoning": REASONING_STAND_IN}
ARTICLES_A_UNIT = 4096
PROBLEMS_A_UNIT = 32_768  # each unit imports the generators, 3 s, and makes the problems before its own, 26 us each
_FORMS = {"wikipedia": "web", "reasoning": "synth"}
_SHOWN = ("id", "url", "synth_id")  # columns that are read only to be shown in samples


def list_files(source: SourceConfig, seed: int, folder: Path) -> list[SourceFile]:
    """The files of `source` in their order, as units of work; with `records`, those that hold the first so many rows.

    What must be fetched to count rows goes to `folder`, and is removed. Raises `ConfigError` for what cannot be read,
    `Retryable` for what may be readable later.
    """
    expected = _FORMS.get(source.reader, source.form)
    if source.form != expected:
        raise ConfigError(
            f"source {source.name!r}: reader {source.reader!r} gives form {expected!r}, not {source.form!r}"
        )
    if source.reader == "wikipedia":
        there = len(articles(seed))
        return _stretches("wikipedia", min(there, source.records or there), ARTICLES_A_UNIT)
    if source.reader == "reasoning":
        if source.records is None:
            raise ConfigError(f"source {source.name!r}: reader 'reasoning' makes problems without end; set `records`")
        return _stretches("reasoning", source.records, PROBLEMS_A_UNIT)
    if source.reader == "hub":
        files = list_hub_files(source)
    else:
        found = matching_files(source.path)
        files = [SourceFile(number, str(path), path.stat().st_size) for number, path in enumerate(found)]
    if source.records is None:
        return files
    return _limited(files, source.records, lambda file: _rows(source, file, folder))


def read_file(source: SourceConfig, seed: int, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
    """The rows of one file, with the filters of `source`. A file of the Hub is fetched into `folder`, then removed.

    Raises `ConfigError` for a file that cannot be read, `Retryable` for one that may be readable later.
    """
    for batch in _batches(source, seed, file, folder):
        yield _filtered(batch, source)


def synth_record(problem: Problem, worked_share: float = 1.0) -> SynthRecord:
    """A generated problem in SYNTH's form: the exercise is its task. Of the others the reasoning is empty."""
    drawn = int.from_bytes(hashlib.sha256(b"worked:" + problem.question.encode()).digest()[:4], "big") / 2**32
    return SynthRecord(
        query=problem.question,
        synthetic_reasoning=problem.rationale if drawn < worked_share else "",
        synthetic_answer=problem.answer,
        exercise=problem.task,
        synth_id=f"{problem.task}/{problem.index}",
        language="en",
    )


def _batches(source: SourceConfig, seed: int, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
    end = None if file.rows is None else file.first + file.rows
    if source.reader == "wikipedia":
        yield from batched(map(web_record, articles(seed)[file.first : end]), "web")
    elif source.reader == "reasoning":
        made = (synth_record(one, source.worked_share) for one in problems(source.tasks, seed, "train"))
        yield from batched(itertools.islice(made, file.first, end), "synth")
    elif source.reader == "hub":
        try:
            yield from _of_file(source, fetch_hub_file(source, file, folder), file.rows)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(folder), source.path)) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        path = Path(file.path)
        if path.is_file() and path.stat().st_size != file.bytes:
            raise ConfigError(f"{path}: has changed since it was listed ({file.bytes} bytes then)")
        yield from _of_file(source, path, file.rows)


def _of_file(source: SourceConfig, path: Path, rows: int | None) -> Iterator[RecordBatch]:
    if _is_parquet(path.name):
        carried = schema_columns(source.form) if source.exemplars else [*TEXT_COLUMNS[source.form], *_SHOWN]
        return read_parquet_batches(path, source.form, _filtering(source), carried, rows)
    return batched(itertools.islice(read_jsonl([path], source.form), rows), source.form)


def _is_parquet(name: str) -> bool:
    return not name.removesuffix(".gz").endswith((".jsonl", ".json", ".ndjson"))


def _filtering(source: SourceConfig) -> list[str]:
    """The columns that the filters of `source` look at."""
    return [*(["language"] if source.languages else []), *(["score"] if source.minimum_score is not None else [])]


def _filtered(batch: RecordBatch, source: SourceConfig) -> RecordBatch:
    """Without the rows in other languages or of a lower score; those that say neither are dropped too, and counted."""
    if source.languages:
        languages = batch.columns["language"]
        batch = batch.select([i for i, one in enumerate(languages) if one in source.languages], "language")
    if (least := source.minimum_score) is not None:
        scores = batch.columns["score"]
        batch = batch.select([i for i, one in enumerate(scores) if one is not None and one >= least], "score")
    return batch


def _stretches(name: str, records: int, size: int) -> list[SourceFile]:
    starts = range(0, records, size)
    return [
        SourceFile(number, f"{name}[{first}:{min(first + size, records)}]", None, "", first, min(size, records - first))
        for number, first in enumerate(starts)
    ]


def _limited(files: list[SourceFile], records: int, rows: Callable[[SourceFile], int]) -> list[SourceFile]:
    """The files that hold the first `records` rows. One whose rows cannot be counted stays, to be set aside later."""
    chosen: list[SourceFile] = []
    for file in files:
        if records <= 0:
            break
        try:
            there = rows(file)
        except ConfigError as error:
            log.warning("its rows cannot be counted: %s", error)
            there = 0
        chosen.append(replace(file, rows=min(there, records) if there else records))
        records -= there
    return chosen


def _rows(source: SourceConfig, file: SourceFile, folder: Path) -> int:
    """How many rows a file has: by its footer, or for lines by reading it."""
    if source.reader == "hub" and _is_parquet(file.path):
        return count_hub_rows(source, file)
    if source.reader == "hub":
        try:
            return count_jsonl_rows(fetch_hub_file(source, file, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return count_parquet_rows(Path(file.path)) if _is_parquet(file.path) else count_jsonl_rows(Path(file.path))
