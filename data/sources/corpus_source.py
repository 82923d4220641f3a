"""Every kind of corpus behind one interface: list its files, then read each as batches of rows in a fixed order.

`configs.readers` names a subclass of `Corpus` for each reader. A file is read by one work item, from its first row on
each time; numbers of rows include the rejected ones, whatever reads them.
"""

import itertools
import logging
import pkgutil
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from nautile.common.errors import ConfigError, Retryable
from nautile.common.text import first_line
from nautile.configs.ingest import SourceConfig
from nautile.configs.readers import READERS, Reader
from nautile.data.records import (
    TEXT_COLUMNS,
    Record,
    RecordBatch,
    Rejected,
    SynthRecord,
    batched,
    from_dict,
    schema_columns,
)
from nautile.data.screening.language import detect_language
from nautile.data.sources.hub import SourceFile, count_hub_rows, fetch_hub_file, list_hub_files, named_in_errors
from nautile.data.sources.local_files import (
    count_jsonl_rows,
    count_parquet_rows,
    is_parquet,
    matching_files,
    read_jsonl,
    read_parquet_batches,
    refuse_other_kind,
    with_field_names,
)
from nautile.data.sources.reasoning_gym import Problem, derived_seed, problems
from nautile.data.sources.slips import Slips
from nautile.data.sources.wikipedia import STAND_IN as WIKIPEDIA_STAND_IN
from nautile.data.sources.wikipedia import articles, web_record

log = logging.getLogger(__name__)

REASONING_STAND_IN = "reasoning-gym problems with worked rationales, in place of SYNTH"
ARTICLES_PER_FILE = 4096
# Each item imports the generators (3 s) and generates the problems before its own (26 us each).
PROBLEMS_PER_FILE = 32_768
_SAMPLE_COLUMNS = ("id", "url", "synth_id")  # not trained on; read only to identify the samples that are displayed


def list_files(source: SourceConfig, folder: Path) -> list[SourceFile]:
    """List the files of `source` in order; if its `records` is set, only those with its first `records` rows.

    Files that must be downloaded to count their rows go to `folder` and are removed afterwards. Raises `ConfigError`
    for a source that cannot be read, `Retryable` for a temporary failure.
    """
    check_source(source)
    return _corpus(source).files(folder)


def check_source(source: SourceConfig) -> None:
    """Raise `ConfigError` for a source of another form than its reader gives, or for names of no field."""
    form = READERS[source.reader].form or source.form
    if source.form != form:
        raise ConfigError(f"source {source.name!r}: reader {source.reader!r} gives form {form!r}, not {source.form!r}")
    if unknown := sorted(set(source.columns or ()) - set(schema_columns(form))):
        fields = ", ".join(schema_columns(form))
        raise ConfigError(f"source {source.name!r}: columns: form {form!r} has no field {unknown[0]!r}, but {fields}")
    read_from = [(source.columns or {}).get(field, field) for field in TEXT_COLUMNS[form]]
    if repeated := next((column for column in read_from if read_from.count(column) > 1), None):
        raise ConfigError(f"source {source.name!r}: columns: two of the texts are read from the column {repeated!r}")


def read_file(source: SourceConfig, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
    """Read one file and apply the language and score filters of `source`; dropped rows are counted in the batches.

    A row without a score is dropped too. Where a row does not say its language, it is detected, and a text that leaves
    it open stays. A file of the Hub is downloaded into `folder`, then removed. Raises `ConfigError` for a file that
    cannot be read, `Retryable` for a temporary failure.
    """
    known = (*source.languages, None)
    for batch in _corpus(source).batches(file, folder):
        if source.languages:
            batch = batch.select([i for i, code in enumerate(_languages(batch)) if code in known], "language")
        if (minimum := source.minimum_score) is not None:
            # A text is no score, even one of digits; JSON lines and Parquet may have any value here.
            numbers = [(i, n) for i, n in enumerate(batch.columns["score"]) if isinstance(n, int | float | Decimal)]
            passing = [i for i, number in numbers if number >= minimum]
            batch = batch.select(passing, "score")
        yield batch


def _languages(batch: RecordBatch) -> Iterator[str | None]:
    """The language of each usable row: what it says itself, else that of its text; None: not certain.

    Of an exercise the message and the answer count: many a reasoning in English belongs to another language.
    """
    texts = iter(batch.texts()) if batch.form == "web" else (f"{ask}\n{answer}" for ask, _, answer in batch.turns())
    for code, text in zip(batch.columns["language"], texts, strict=True):
        yield detect_language(text) if code is None else code


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
    return _corpus(source).stand_in


class Corpus(ABC):
    """How one source is listed and read, before its filters."""

    stand_in: str | None = None  # what the text stands in for

    def __init__(self, source: SourceConfig, reader: Reader) -> None:
        self.source = source
        self.reader = reader

    @abstractmethod
    def files(self, folder: Path) -> list[SourceFile]:
        """The files in their order, as `list_files`."""

    @abstractmethod
    def batches(self, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
        """The rows of one file, or of its range of rows."""


class Wikipedia(Corpus):
    """Summaries of articles, from a package."""

    stand_in = WIKIPEDIA_STAND_IN

    def files(self, folder: Path) -> list[SourceFile]:
        count = len(articles())
        return _ranges(self.source.reader, min(count, self.source.records or count), ARTICLES_PER_FILE)

    def batches(self, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
        yield from batched(map(web_record, articles()[file.first : _end(file)]), "web")


class Reasoning(Corpus):
    """Problems that a package generates, with worked solutions."""

    def __init__(self, source: SourceConfig, reader: Reader) -> None:
        super().__init__(source, reader)
        self.stand_in = REASONING_STAND_IN
        if any(task.slips for task in source.tasks):
            self.stand_in += "; mistakes are planted in them, in place of a corpus with gaps in knowledge"

    def files(self, folder: Path) -> list[SourceFile]:
        if self.source.records is None:
            raise ConfigError(
                f"source {self.source.name!r}: reader {self.source.reader!r} generates problems without end; set "
                "`records`"
            )
        return _ranges(self.source.reader, self.source.records, PROBLEMS_PER_FILE)

    def batches(self, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
        source = self.source
        slips = Slips(source.tasks)
        generated = problems(source.tasks, derived_seed(source.seed or 0, source.name), "train")
        records = (synth_record(slips.apply(problem)) for problem in generated)
        yield from batched(itertools.islice(records, file.first, _end(file)), "synth")


class LocalFiles(Corpus):
    """Files of this machine, Parquet or JSON lines. They are counted only if `records` limits them."""

    def files(self, folder: Path) -> list[SourceFile]:
        listed = self.listed()
        if self.source.records is None:
            return listed
        return _first_records(listed, self.source.records, lambda file: self.count(file, folder))

    def listed(self) -> list[SourceFile]:
        """All files, without their numbers of rows."""
        paths = matching_files(self.source.path)
        return [SourceFile(number, str(path), path.stat().st_size) for number, path in enumerate(paths)]

    def count(self, file: SourceFile, folder: Path) -> int:
        """The number of rows of a file."""
        return count_parquet_rows(Path(file.path)) if is_parquet(file.path) else count_jsonl_rows(Path(file.path))

    def batches(self, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
        path = Path(file.path)
        before = _stamp(path)
        if before and before[0] != file.bytes:
            raise ConfigError(f"{path}: has changed since it was listed ({file.bytes} bytes then)")
        yield from self.rows_of(file)
        if _stamp(path) != before:
            raise ConfigError(f"{path}: changed while it was read; try again when nothing writes to it")

    def rows_of(self, file: SourceFile) -> Iterator[RecordBatch]:
        """The rows of a file that is not looked at for changes."""
        yield from _read_path(self.source, Path(file.path), file.rows)


class HubFiles(LocalFiles):
    """Files of a dataset of the Hub, each downloaded while it is read."""

    def listed(self) -> list[SourceFile]:
        return list_hub_files(self.source)

    def count(self, file: SourceFile, folder: Path) -> int:
        return count_hub_rows(self.source, file, folder)

    def batches(self, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
        try:
            with named_in_errors(folder, self.source.path):
                yield from _read_path(self.source, fetch_hub_file(self.source, file, folder), file.rows)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Rows(LocalFiles):
    """What the function `rows` of a plug-in's reader gives: of files of this machine, or of the names that it lists."""

    def listed(self) -> list[SourceFile]:
        if self.reader.files is None:
            return super().listed()
        with self._named(self.source.path):
            return [SourceFile(number, str(name)) for number, name in enumerate(self.reader.files(self.source.path))]

    def count(self, file: SourceFile, folder: Path) -> int:
        return sum(1 for _ in self._records(file))

    def batches(self, file: SourceFile, folder: Path) -> Iterator[RecordBatch]:
        return super().batches(file, folder) if self.reader.is_local else self.rows_of(file)

    def rows_of(self, file: SourceFile) -> Iterator[RecordBatch]:
        yield from batched(itertools.islice(self._records(file), file.first, _end(file)), self.source.form)

    def _records(self, file: SourceFile) -> Iterator[Record | Rejected]:
        assert self.reader.rows is not None, "checked when the section was read"
        with self._named(file.path):
            for row in self.reader.rows(file.path):
                if isinstance(row, Mapping) and self.source.columns:
                    row = with_field_names(row, self.source.columns)
                yield row if isinstance(row, Rejected) else from_dict(row, self.source.form)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Turn what the reader's code raises into a `ConfigError`: another attempt would meet it again."""
        try:
            yield
        except (ConfigError, Retryable, MemoryError):
            raise
        except (ConnectionError, TimeoutError) as error:
            raise Retryable(f"{name}: reader {self.source.reader!r} has no answer ({first_line(error)})") from error
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"{name}: cannot be read by reader {self.source.reader!r} ({what})") from error


def _corpus(source: SourceConfig) -> Corpus:
    reader = READERS[source.reader]
    corpus: Corpus = pkgutil.resolve_name(reader.corpus)(source, reader)
    return corpus


def _end(file: SourceFile) -> int | None:
    """The number of the row after a file's last one; None: all rows that follow."""
    return None if file.rows is None else file.first + file.rows


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
        return read_parquet_batches(path, source.form, filter_columns, record_columns, rows, source.columns)
    return batched(itertools.islice(read_jsonl([path], source.form, columns=source.columns), rows), source.form)


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
