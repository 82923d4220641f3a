"""Local files by a glob, and JSON lines to records.

Whole files are refused by name, single bad rows are counted by reason. Positions count every row, the rejected ones
too, so that a position means the same row on every reading.
"""

import glob
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from common.errors import ConfigError
from data.records import (
    BATCH_ROWS,
    MAX_CHARACTERS,
    REQUIRED_COLUMNS,
    TEXT_COLUMNS,
    Form,
    Record,
    RecordBatch,
    Rejected,
    RejectReason,
    from_dict,
    to_batch,
)

MAX_LINE = 32_000_000  # bytes; a longer line is passed over without being held


def matching_files(pattern: str) -> list[Path]:
    """The files a glob names, sorted. Raises `ConfigError` if there are none."""
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if len(paths) == 1 and paths[0].is_dir():
        raise ConfigError(f"{pattern} is a folder; give a glob of its files, such as {pattern.rstrip('/')}/*.parquet")
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ConfigError(f"no file matches {pattern!r}; check the source's `path`")
    return files


def read_jsonl(paths: Sequence[Path], form: Form, skip: int = 0) -> Iterator[Record | Rejected]:
    """Rows of JSON-lines files (`.gz` too) from the `skip`-th on; blank lines do not count.

    Raises `ConfigError` for a file that is missing, empty, not text, or one JSON array.
    """
    for path in paths:
        with _text_lines(path) as lines:
            for line in lines:
                if skip:
                    skip -= 1
                    continue
                yield _from_line(line, form)


def read_json_values(path: Path) -> Iterator[Any]:
    """What each line of a JSON-lines file (`.gz` too) holds, or a `Rejected` for one that is not JSON.

    Raises `ConfigError` as `read_jsonl` does.
    """
    with _text_lines(path) as lines:
        yield from map(_parsed, lines)


def count_jsonl_rows(path: Path) -> int:
    """Rows of a JSON-lines file, by reading it. Raises `ConfigError` as `read_jsonl` does."""
    with _text_lines(path) as lines:
        return sum(1 for _ in lines)


@contextmanager
def _text_lines(path: Path) -> Iterator[Iterator[bytes | None]]:
    try:
        with _open_jsonl(path) as file:
            _check_text(path, file)
            yield _lines(file)
    except zlib.error as error:
        raise ConfigError(f"{path}: the compressed file is damaged ({error}); fetch it again") from None
    except EOFError:
        raise ConfigError(f"{path}: the compressed file ends too early; fetch it again") from None
    except OSError as error:  # gzip's own errors are OSErrors too
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


def _open_jsonl(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _check_text(path: Path, file: IO[bytes]) -> None:
    head = file.read(8192)
    if not head.strip():
        raise ConfigError(f"{path}: is empty")
    if b"\x00" in head:
        raise ConfigError(f"{path}: is binary, not JSON lines; check the source's `reader`")
    if path.suffix == ".json" and head.lstrip().startswith(b"["):
        raise ConfigError(f"{path}: is one JSON array, which cannot be read bit by bit; write it as JSON lines")
    file.seek(0)


def _lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Lines without the blank ones; None for a line over `MAX_LINE`."""
    while line := file.readline(MAX_LINE):
        if len(line) < MAX_LINE or line.endswith(b"\n"):
            if line.strip():
                yield line
            continue
        while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
            pass
        yield None


def _from_line(line: bytes | None, form: Form) -> Record | Rejected:
    row = _parsed(line)
    return row if isinstance(row, Rejected) else from_dict(row, form)


def _parsed(line: bytes | None) -> Any:
    if line is None:
        return Rejected("too_long")
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Rejected("invalid_utf8")
    except (ValueError, RecursionError):
        return Rejected("not_json")


STREAM = 1 << 20  # bytes of a column chunk held at a time


def read_parquet_batches(
    path: Path, form: Form, listed: Sequence[str] = (), carried: Sequence[str] = (), rows: int | None = None
) -> Iterator[RecordBatch]:
    """Batches of the file's first `rows` rows (None: all), with the columns to work on and those of `listed`.

    `carried`: further columns for the records that are made whole. A column that the file does not have is None.

    Raises `ConfigError` for a file that is missing, no Parquet, damaged, or without the columns of the text.
    """
    parquet = _opened(path)
    there = parquet.schema_arrow.names
    for needed in REQUIRED_COLUMNS[form]:
        if needed not in there:
            raise ConfigError(f"{path}: no column {needed!r}; there are {', '.join(there)}")
    columns = [*TEXT_COLUMNS[form], *listed]
    wanted = [name for name in dict.fromkeys([*columns, *carried]) if name in there]
    left = total = parquet.metadata.num_rows if rows is None else min(rows, parquet.metadata.num_rows)
    for group in range(parquet.num_row_groups):
        for table in _tables(path, parquet, group, wanted):
            if left < table.num_rows:
                table = table.slice(0, left)
            left -= table.num_rows
            if table.num_rows:
                yield replace(_batch(table, form, columns), total=total)
            if not left:
                return


def count_parquet_rows(path: Path) -> int:
    """Rows of a Parquet file by its footer. Raises `ConfigError` as `read_parquet_batches` does."""
    return _opened(path).metadata.num_rows


def _opened(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without pre_buffer and with a buffer, a column chunk is read page by page instead of whole.
        return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=STREAM)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: is not a Parquet file ({str(error).splitlines()[0]})") from None


def _tables(path: Path, parquet: Any, group: int, columns: list[str]) -> Iterator[Any]:
    import pyarrow

    try:
        yield from parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:  # a broken page header is an OSError
        raise ConfigError(f"{path}: row group {group} is damaged ({str(error).splitlines()[0]})") from None


def _batch(table: Any, form: Form, columns: Sequence[str]) -> RecordBatch:
    rows = table.num_rows
    try:
        values = {name: table.column(name).to_pylist() for name in table.schema.names if name in columns}
    except UnicodeDecodeError:
        return to_batch([_row(table, i, form) for i in range(rows)], form)
    faults: dict[int, RejectReason] = {}
    for name in (name for name in TEXT_COLUMNS[form] if name in values):
        required = name in REQUIRED_COLUMNS[form]
        for i, value in enumerate(values[name]):
            if (fault := _fault(value, required)) is not None:
                faults.setdefault(i, fault)
    if form == "synth":
        values["synthetic_reasoning"] = [one or "" for one in values.get("synthetic_reasoning", [""] * rows)]
    places = [i for i in range(rows) if i not in faults]
    empty = [None] * rows
    chosen = {name: values.get(name, empty) for name in columns}
    if faults:
        chosen = {name: [column[i] for i in places] for name, column in chosen.items()}
    return RecordBatch(form, rows, chosen, Counter(faults.values()), lambda i: _record(table, places[i], form))


def _fault(value: object, required: bool) -> RejectReason | None:
    """What is wrong with a text, by the rules of `data.records.from_dict`."""
    if not value:
        return "no_text" if required else None
    if not isinstance(value, str):
        return "wrong_type"
    if len(value) > MAX_CHARACTERS:
        return "too_long"
    return "no_text" if required and value.isspace() else None


def _row(table: Any, index: int, form: Form) -> Record | Rejected:
    try:
        row = {name: table.column(name)[index].as_py() for name in table.schema.names}
    except UnicodeDecodeError:
        return Rejected("invalid_utf8")
    return from_dict(row, form)


def _record(table: Any, index: int, form: Form) -> Record:
    record = _row(table, index, form)
    assert not isinstance(record, Rejected)
    return record
