"""One interface over every kind of corpus: list its files, then read each as batches of rows, the same every time."""

import hashlib
import itertools
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from common.errors import ConfigError
from configs.ingest import SourceConfig
from data.records import TEXT_COLUMNS, RecordBatch, SynthRecord, batched, schema_columns
from data.sources.file_list import SourceFile
from data.sources.hub import count_hub_rows, fetch_hub_file, is_parquet, list_hub_files
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
ARTICLES_PER_FILE = 4096
# Each item imports the generators (3 s) and generates the problems before its own (26 us each).
PROBLEMS_PER_FILE = 32_768
_FORMS = {"wikipedia": "web", "reasoning": "synth"}
_SAMPLE_COLUMNS = ("id", "url", "synth_id")  # read only to be shown with samples


def list_files(source: SourceConfig, seed: int, folder: Path) -> list[SourceFile]:
    """The files of `source` in their order; with `records`, those that hold its first `records` rows.

    Files that must be fetched to count their rows go to `folder`, and are removed. Raises `ConfigError` for what cannot
    be read, `Retryable` for what may be readable later.
    """
    expected = _FORMS.get(source.reader, source.form)
    if source.form != expected:
        raise ConfigError(
            f"source {source.name!r}: reader {source.reader!r} gives form {expected!r}, not {source.form!r}"
        )
    if source.reader == "wikipedia":
        count = len(articles(seed))
        return _ranges("wikipedia", min(count, source.records or count), ARTICLES_PER_FILE)
    if source.reader == "reasoning":
        if source.records is None:
            raise ConfigError(
                f"source {source.name!r}: reader 'reasoning' generates problems without end; set `records`"
            )
        return _ranges("reasoning", source.records, PROBLEMS_PER_FILE)
    if source.reader == "hub":
        files = list_hub_files(source)
    else:
        paths = matching_files(source.path)
        files = [SourceFile(number, str(path), path.stat().st_size) for number, path in enumerate(paths)]
    if source.records is None:
        return files
    return _first_records(files, source.records, lambda file: _count_rows(source, file, folder))


def read_file(source: SourceConfig, seed: int, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
    """Read one file and apply the filters of `source`. A file of the Hub is fetched into `folder`, then removed.

    Rows in other languages or of a lower score, and those whose language or score is unknown, are dropped and counted.
    Raises `ConfigError` for a file that cannot be read, `Retryable` for one that may be readable later.
    """
    for batch in _batches(source, seed, file, folder):
        if source.languages:
            languages = batch.columns["language"]
            batch = batch.select([i for i, code in enumerate(languages) if code in source.languages], "language")
        if (least := source.minimum_score) is not None:
            scores = batch.columns["score"]
            batch = batch.select([i for i, score in enumerate(scores) if score is not None and score >= least], "score")
        yield batch


def synth_record(problem: Problem, worked_share: float = 1.0, brief_share: float = 0.0) -> SynthRecord:
    """A generated problem in SYNTH's form, its task as the exercise.

    About `worked_share` of them show all steps of the reasoning and `brief_share` the last one, as texts from many
    hands do; the others give the answer alone. A hash of the question decides.
    """
    drawn = int.from_bytes(hashlib.sha256(b"worked:" + problem.question.encode()).digest()[:4], "big") / 2**32
    steps = re.findall(r"\S.*?\.(?=\s|$)", problem.rationale) if drawn < worked_share + brief_share else []
    return SynthRecord(
        query=problem.question,
        synthetic_reasoning=problem.rationale if drawn < worked_share else "".join(steps[-1:]),
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
        drawn = problems(source.tasks, seed + (source.seed_offset or 0), "train")
        records = (synth_record(problem, source.worked_share, source.brief_share or 0.0) for problem in drawn)
        yield from batched(itertools.islice(records, file.first, end), "synth")
    elif source.reader == "hub":
        try:
            yield from _read_path(source, fetch_hub_file(source, file, folder), file.rows)
        except ConfigError as error:  # the operator knows the file by its dataset, not by where it was fetched to
            raise ConfigError(str(error).replace(str(folder), source.path)) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        path = Path(file.path)
        if path.is_file() and path.stat().st_size != file.bytes:
            raise ConfigError(f"{path}: has changed since it was listed ({file.bytes} bytes then)")
        yield from _read_path(source, path, file.rows)


def _read_path(source: SourceConfig, path: Path, rows: int | None) -> Iterator[RecordBatch]:
    if is_parquet(path.name):
        carried = schema_columns(source.form) if source.exemplars else [*TEXT_COLUMNS[source.form], *_SAMPLE_COLUMNS]
        filtered = [
            *(["language"] if source.languages else []),
            *(["score"] if source.minimum_score is not None else []),
        ]
        return read_parquet_batches(path, source.form, filtered, carried, rows)
    return batched(itertools.islice(read_jsonl([path], source.form), rows), source.form)


def _ranges(name: str, records: int, size: int) -> list[SourceFile]:
    """Records that are not in files, as file entries of `size` records each."""
    starts = range(0, records, size)
    return [
        SourceFile(number, f"{name}[{first}:{min(first + size, records)}]", None, "", first, min(size, records - first))
        for number, first in enumerate(starts)
    ]


def _first_records(files: list[SourceFile], records: int, count: Callable[[SourceFile], int]) -> list[SourceFile]:
    """The files that hold the first `records` rows. A file whose rows cannot be counted stays: reading it will fail."""
    chosen: list[SourceFile] = []
    for file in files:
        if records <= 0:
            break
        try:
            rows = count(file)
        except ConfigError as error:
            log.warning("the rows of a file cannot be counted: %s", error)
            rows = 0
        chosen.append(replace(file, rows=min(rows, records) if rows else records))
        records -= rows
    return chosen


def _count_rows(source: SourceConfig, file: SourceFile, folder: Path) -> int:
    if source.reader == "hub":
        return count_hub_rows(source, file, folder)
    return count_parquet_rows(Path(file.path)) if is_parquet(file.path) else count_jsonl_rows(Path(file.path))
