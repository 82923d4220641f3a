"""Read local files: match a glob, read JSON lines as records and Parquet as batches of columns.

A file that cannot be read is an error that names it; a bad row is only counted, by reason. Row numbers include rejected
rows, so that a number always means the same row.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow.parquet import ParquetFile

from common.errors import ConfigError
from common.input_files import matching_paths, open_regular
from common.text import first_line
from data.records import (
    BATCH_ROWS,
    MAX_CHARACTERS,
    REQUIRED_COLUMNS,
    TEXT_COLUMNS,
    Record,
    RecordBatch,
    RecordForm,
    Rejected,
    RowRejectReason,
    from_dict,
    to_batch,
)

MAX_LINE = 32_000_000  # bytes; a longer line is rejected without being held in memory
PARQUET_BUFFER = 1 << 20  # bytes of a column chunk that are read at a time


def matching_files(pattern: str) -> list[Path]:
    """The files a glob matches, sorted; of a name that is a file, only that. Raises `ConfigError` if there are none."""
    if Path(pattern).is_dir():
        raise ConfigError(f"{pattern} is a folder; give a glob of its files, such as {pattern.rstrip('/')}/*.parquet")
    files = [Path(name) for name in matching_paths(pattern)]
    if not files:
        raise ConfigError(f"no file matches {pattern!r}; check the source's `path`")
    return files


def read_jsonl(paths: Sequence[Path], form: RecordForm, skip: int = 0) -> Iterator[Record | Rejected]:
    """Read records from JSON-lines files (`.gz` too) from row `skip` on; blank lines are not rows.

    Raises `ConfigError` for a file that is missing, empty, not text, or one JSON array.
    """
    for path in paths:
        with _open_lines(path) as lines:
            for line in lines:
                if skip:
                    skip -= 1
                    continue
                value = _parse_line(line)
                yield value if isinstance(value, Rejected) else from_dict(value, form)


def read_json_values(path: Path, skip: int = 0) -> Iterator[Any]:
    """Parse each line of a JSON-lines file (`.gz` too) from row `skip` on; an invalid line gives a `Rejected`.

    Raises `ConfigError` as `read_jsonl` does.
    """
    with _open_lines(path) as lines:
        yield from map(_parse_line, islice(lines, skip, None))


def count_jsonl_rows(path: Path) -> int:
    """Count the rows of a JSON-lines file by reading it. Raises `ConfigError` as `read_jsonl` does."""
    with _open_lines(path) as lines:
        return sum(1 for _ in lines)


@contextmanager
def _open_lines(path: Path) -> Iterator[Iterator[bytes | None]]:
    """Open a file as an iterator of `_lines`; read errors become `ConfigError`s that name the file."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            _check_text(path, file)
            yield _lines(file)
    except zlib.error as error:
        raise ConfigError(f"{path}: the compressed file is damaged ({error}); fetch it again") from None
    except EOFError:
        raise ConfigError(f"{path}: the compressed file ends too early; fetch it again") from None
    except OSError as error:  # gzip's own errors are OSErrors too
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


def _check_text(path: Path, file: BufferedIOBase) -> None:
    """Raise `ConfigError` if the first bytes of a file show that it is not JSON lines."""
    head = file.read(8192)
    if not head.strip():
        raise ConfigError(f"{path}: is empty")
    if b"\x00" in head:
        raise ConfigError(f"{path}: is binary, not JSON lines; check the source's `reader`")
    if path.suffix == ".json" and head.lstrip().startswith(b"["):
        raise ConfigError(f"{path}: is one JSON array, which cannot be read line by line; write it as JSON lines")
    file.seek(0)


def _lines(file: BufferedIOBase) -> Iterator[bytes | None]:
    """Non-blank lines; None for a line longer than `MAX_LINE`."""
    # `readline` with a limit returns a part of a longer line, so a line never takes more memory than that.
    while line := file.readline(MAX_LINE):
        if len(line) < MAX_LINE or line.endswith(b"\n"):
            if line.strip():
                yield line
            continue
        # Skip the remainder of an oversized line.
        while (chunk := file.readline(MAX_LINE)) and not chunk.endswith(b"\n"):
            pass
        yield None


def _parse_line(line: bytes | None) -> Any:
    if line is None:
        return Rejected("too_long")
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Rejected("invalid_utf8")
    except (ValueError, RecursionError):
        return Rejected("not_json")


def read_parquet_batches(
    path: Path,
    form: RecordForm,
    filter_columns: Sequence[str] = (),
    record_columns: Sequence[str] = (),
    rows: int | None = None,
) -> Iterator[RecordBatch]:
    """Read the file's first `rows` rows (None: all) as batches.

    The `columns` of a batch are the text columns and `filter_columns`; `record_columns` are read as well, for
    `RecordBatch.record`. A column that the file does not have is None.

    Raises `ConfigError` for a file that is missing, not Parquet, damaged, or without the required text columns.
    """
    parquet = _open_parquet(path)
    names = parquet.schema_arrow.names
    for required in REQUIRED_COLUMNS[form]:
        if required not in names:
            raise ConfigError(f"{path}: no column {required!r}; there are {', '.join(names)}")
    columns = [*TEXT_COLUMNS[form], *filter_columns]
    read_columns = [name for name in dict.fromkeys([*columns, *record_columns]) if name in names]
    remaining = total = parquet.metadata.num_rows if rows is None else min(rows, parquet.metadata.num_rows)
    for group in range(parquet.num_row_groups):
        for table in _row_group_tables(path, parquet, group, read_columns):
            if remaining < table.num_rows:
                table = table.slice(0, remaining)
            remaining -= table.num_rows
            if table.num_rows:
                yield replace(_table_batch(table, form, columns), total=total)
            if not remaining:
                return


def read_parquet_values(path: Path, columns: Container[str], skip: int = 0) -> Iterator[dict[str, Any] | Rejected]:
    """Read the rows of a Parquet file from row `skip` on as dictionaries of those columns that are in `columns`.

    Raises `ConfigError` for a file that is missing, not Parquet, or damaged.
    """
    parquet = _open_parquet(path)
    read_columns = [name for name in parquet.schema_arrow.names if name in columns]
    for group in range(parquet.num_row_groups):
        rows = parquet.metadata.row_group(group).num_rows
        if skip >= rows:
            skip -= rows
            continue
        for table in _row_group_tables(path, parquet, group, read_columns):
            for i in range(min(skip, table.num_rows), table.num_rows):
                try:
                    yield {name: table.column(name)[i].as_py() for name in read_columns}
                except UnicodeDecodeError:
                    yield Rejected("invalid_utf8")
            skip = max(0, skip - table.num_rows)


def parquet_columns(path: Path) -> list[str]:
    """The names of the file's columns. Raises `ConfigError` as `read_parquet_values` does."""
    return _open_parquet(path).schema_arrow.names


def count_parquet_rows(path: Path) -> int:
    """Count the rows of a Parquet file from its footer. Raises `ConfigError` as `read_parquet_batches` does."""
    return _open_parquet(path).metadata.num_rows


def _open_parquet(path: Path) -> ParquetFile:
    try:
        # With a buffer and without pre_buffer, column chunks are read page by page, which bounds memory.
        return ParquetFile(path, pre_buffer=False, buffer_size=PARQUET_BUFFER)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: is not a Parquet file ({first_line(error)})") from None


def _row_group_tables(
    path: Path, parquet: ParquetFile, group: int, columns: list[str]
) -> Iterator[pyarrow.RecordBatch]:
    try:
        yield from parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:  # a broken page header is an OSError
        raise ConfigError(f"{path}: row group {group} is damaged ({first_line(error)})") from None


def _table_batch(table: pyarrow.RecordBatch, form: RecordForm, columns: Sequence[str]) -> RecordBatch:
    """Validate rows column by column, by the same rules as `data.records.from_dict`, and drop the rejected ones."""
    rows = table.num_rows
    try:
        values = {name: table.column(name).to_pylist() for name in table.schema.names if name in columns}
    except UnicodeDecodeError:  # some row is not UTF-8: read them one by one to see which
        return to_batch([_read_row(table, i, form) for i in range(rows)], form)
    reasons: dict[int, RowRejectReason] = {}
    for name in (name for name in TEXT_COLUMNS[form] if name in values):
        required = name in REQUIRED_COLUMNS[form]
        for i, value in enumerate(values[name]):
            if (reason := _reject_reason(value, required)) is not None:
                reasons.setdefault(i, reason)
    if form == "synth":
        values["synthetic_reasoning"] = [text or "" for text in values.get("synthetic_reasoning", [""] * rows)]
    usable = [i for i in range(rows) if i not in reasons]
    empty_column = [None] * rows
    batch_columns = {name: values.get(name, empty_column) for name in columns}
    if reasons:
        batch_columns = {name: [column[i] for i in usable] for name, column in batch_columns.items()}

    def record(number: int) -> Record:
        row = _read_row(table, usable[number], form)
        assert not isinstance(row, Rejected)
        return row

    return RecordBatch(form, rows, batch_columns, Counter(reasons.values()), record)


def _reject_reason(value: object, required: bool) -> RowRejectReason | None:
    """Why the value of a text column makes its row unusable; None if it is valid."""
    if not value:
        return "no_text" if required else None
    if not isinstance(value, str):
        return "wrong_type"
    if len(value) > MAX_CHARACTERS:
        return "too_long"
    return "no_text" if required and value.isspace() else None


def _read_row(table: pyarrow.RecordBatch, index: int, form: RecordForm) -> Record | Rejected:
    try:
        row = {name: table.column(name)[index].as_py() for name in table.schema.names}
    except UnicodeDecodeError:
        return Rejected("invalid_utf8")
    return from_dict(row, form)
