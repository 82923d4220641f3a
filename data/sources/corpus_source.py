"""One interface over every kind of corpus: list its files, then read each as batches of rows in a fixed order."""

import itertools
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.configs.ingest import SourceConfig
from nautile.data.records import TEXT_COLUMNS, RecordBatch, SynthRecord, batched, schema_columns
from nautile.data.sources.hub import SourceFile, count_hub_rows, fetch_hub_file, list_hub_files, named_in_errors
from nautile.data.sources.local_files import (
    count_jsonl_rows,
    count_parquet_rows,
    is_parquet,
    matching_files,
    read_jsonl,
    read_parquet_batches,
    refuse_other_kind,
)
from nautile.data.sources.reasoning_gym import Problem, derived_seed, problems
from nautile.data.sources.slips import Slips
from nautile.data.sources.wikipedia import STAND_IN as WIKIPEDIA_STAND_IN
from nautile.data.sources.wikipedia import articles, web_record

log = logging.getLogger(__name__)

REASONING_STAND_IN = "reasoning-gym problems with worked rationales, in place of SYNTH"
STAND_INS = {"wikipedia": WIKIPEDIA_STAND_IN, "reasoning": REASONING_STAND_IN}
ARTICLES_PER_FILE = 4096
# Each item imports the generators (3 s) and generates the problems before its own (26 us each).
PROBLEMS_PER_FILE = 32_768
_FORMS = {"wikipedia": "web", "reasoning": "synth"}
_SAMPLE_COLUMNS = ("id", "url", "synth_id")  # not trained on; read only to identify the samples that are displayed


def list_files(source: SourceConfig, folder: Path) -> list[SourceFile]:
    """List the files of `source` in order; if its `records` is set, only those with its first `records` rows.

    Files that must be downloaded to count their rows go to `folder` and are removed afterwards. Raises `ConfigError`
    for a source that cannot be read, `Retryable` for a temporary failure.
    """
    expected = _FORMS.get(source.reader, source.form)
    if source.form != expected:
        raise ConfigError(
            f"source {source.name!r}: reader {source.reader!r} gives form {expected!r}, not {source.form!r}"
        )
    # Sources from packages: their records are divided into ranges.
    if source.reader == "wikipedia":
        count = len(articles())
        return _ranges("wikipedia", min(count, source.records or count), ARTICLES_PER_FILE)
    if source.reader == "reasoning":
        if source.records is None:
            raise ConfigError(
                f"source {source.name!r}: reader 'reasoning' generates problems without end; set `records`"
            )
        return _ranges("reasoning", source.records, PROBLEMS_PER_FILE)
    # Sources with real files, which are counted only if `records` limits them.
    if source.reader == "hub":
        files = list_hub_files(source)
    else:
        paths = matching_files(source.path)
        files = [SourceFile(number, str(path), path.stat().st_size) for number, path in enumerate(paths)]
    if source.records is None:
        return files

    def count_rows(file: SourceFile) -> int:
        if source.reader == "hub":
            return count_hub_rows(source, file, folder)
        return count_parquet_rows(Path(file.path)) if is_parquet(file.path) else count_jsonl_rows(Path(file.path))

    return _first_records(files, source.records, count_rows)


def read_file(source: SourceConfig, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
    """Read one file and apply the language and score filters of `source`; dropped rows are counted in the batches.

    A row whose language or score is unknown is dropped too. A file of the Hub is downloaded into `folder`, then
    removed. Raises `ConfigError` for a file that cannot be read, `Retryable` for a temporary failure.
    """
    for batch in _batches(source, file, folder):
        if source.languages:
            languages = batch.columns["language"]
            batch = batch.select([i for i, code in enumerate(languages) if code in source.languages], "language")
        if (minimum := source.minimum_score) is not None:
            # A text is no score, even one of digits; JSON lines and Parquet may have any value here.
            numbers = [(i, n) for i, n in enumerate(batch.columns["score"]) if isinstance(n, int | float | Decimal)]
            passing = [i for i, number in numbers if number >= minimum]
            batch = batch.select(passing, "score")
        yield batch


def synth_record(problem: Problem) -> SynthRecord:
    """Turn a generated problem into a SYNTH record, with its task as the exercise."""
    return SynthRecord(
        query=problem.question,
        synthetic_reasoning=problem.rationale,
        synthetic_answer=problem.answer,
        exercise=problem.task,
        synth_id=f"{problem.task}/{problem.index}",
        language="en",
    )


def stand_in_of(source: SourceConfig) -> str | None:
    """What the source stands in for, as a label wherever its text or its effect is shown; None for a real corpus."""
    if any(task.slips for task in source.tasks):
        return f"{REASONING_STAND_IN}; mistakes are planted in them, in place of a corpus with gaps in knowledge"
    return STAND_INS.get(source.reader)


def _batches(source: SourceConfig, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
    """The rows of one file or range, before the filters."""
    end = None if file.rows is None else file.first + file.rows
    if source.reader == "wikipedia":
        yield from batched(map(web_record, articles()[file.first : end]), "web")
    elif source.reader == "reasoning":
        generated = problems(source.tasks, derived_seed(source.seed or 0, source.name), "train")
        slips = Slips(source.tasks)
        records = (synth_record(slips.apply(problem)) for problem in generated)
        yield from batched(itertools.islice(records, file.first, end), "synth")
    elif source.reader == "hub":
        try:
            with named_in_errors(folder, source.path):
                yield from _read_path(source, fetch_hub_file(source, file, folder), file.rows)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        path = Path(file.path)
        before = _stamp(path)
        if before and before[0] != file.bytes:
            raise ConfigError(f"{path}: has changed since it was listed ({file.bytes} bytes then)")
        yield from _read_path(source, path, file.rows)
        if _stamp(path) != before:
            raise ConfigError(f"{path}: changed while it was read; try again when nothing writes to it")


def _stamp(path: Path) -> tuple[int, ...]:
    """[size, mtime, inode] of a file, by which a change is noticed; empty if it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read_path(source: SourceConfig, path: Path, rows: int | None) -> Iterator[RecordBatch]:
    """The first `rows` rows of a file on disk. Raises `ConfigError` if it has rows and none of them can be read."""
    rejected, some_usable = Counter[str](), False
    for batch in _rows_of_path(source, path, rows):
        rejected += batch.rejected
        some_usable = some_usable or len(batch) > 0
        yield batch
    if not some_usable:
        refuse_other_kind(path, rejected)


def _rows_of_path(source: SourceConfig, path: Path, rows: int | None) -> Iterator[RecordBatch]:
    """The first `rows` rows of a file on disk, Parquet or JSON lines."""
    if is_parquet(path.name):
        # Exemplars for retrieval are stored with every field of the schema; other records need only their texts.
        record_columns = (
            schema_columns(source.form) if source.exemplars else [*TEXT_COLUMNS[source.form], *_SAMPLE_COLUMNS]
        )
        filter_columns = [
            *(["language"] if source.languages else []),
            *(["score"] if source.minimum_score is not None else []),
        ]
        return read_parquet_batches(path, source.form, filter_columns, record_columns, rows)
    return batched(itertools.islice(read_jsonl([path], source.form), rows), source.form)


def _ranges(name: str, records: int, size: int) -> list[SourceFile]:
    """File entries for records that are generated or come from a package, `size` records each."""
    starts = range(0, records, size)
    return [
        SourceFile(number, f"{name}[{first}:{min(first + size, records)}]", None, "", first, min(size, records - first))
        for number, first in enumerate(starts)
    ]


def _first_records(files: list[SourceFile], records: int, count: Callable[[SourceFile], int]) -> list[SourceFile]:
    """The files with the first `records` rows. A file that cannot be counted is included: reading it will fail."""
    selected: list[SourceFile] = []
    for file in files:
        if records <= 0:
            break
        try:
            rows = count(file)
        except ConfigError as error:
            log.warning("the rows of a file cannot be counted: %s", error)
            rows = 0
        selected.append(replace(file, rows=min(rows, records) if rows else records))
        records -= rows
    return selected
