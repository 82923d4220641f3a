"""Read local files: match a glob, read JSON lines as records and Parquet as batches of columns.

A file that cannot be read is an error that names it; a bad row is only counted, by reason. Row numbers include rejected
rows, so that a number always means the same row. A file that unpacks to far more than its size is refused
(`unpacked_limit`), and a batch of Parquet holds at most `LONGEST_BATCH` bytes of text, or one row.
"""

import bz2
import codecs
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from pyarrow.parquet import FileMetaData, ParquetFile, read_metadata

from nautile.common.errors import ConfigError
from nautile.common.files import distinct_members, parse_json
from nautile.common.input_files import check_regular, matching_paths, open_regular, unpacked_limit
from nautile.common.text import first_line
from nautile.data.records import (
    BATCH_ROWS,
    MAX_CHARACTERS,
    REQUIRED_COLUMNS,
    TEXT_COLUMNS,
    Record,
    RecordBatch,
    RecordForm,
    Rejected,
    from_dict,
    to_batch,
)
from nautile.data.tokens.losses import RowRejectReason

MAX_LINE = 32_000_000  # bytes; a longer line is rejected without being held in memory
UNPACKED_BUFFER = 1 << 16  # bytes
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
LINES = tuple(name + packed for name in (".jsonl", ".ndjson", ".json") for packed in ("", *PACKED))
# What helps where all rows of a file are rejected, by their reason.
_OTHER_KIND = {
    "not_json": "each line has to be one JSON object; `jq -c . FILE` writes one that is spread over lines so",
    "not_an_object": "each line has to be one JSON object with named fields",
    "wrong_type": "the columns of texts have to be texts",
    "invalid_utf8": "the file has to be UTF-8; `iconv -f WINDOWS-1252 -t UTF-8 FILE` converts one of Windows",
}
ROW_BYTES = 8  # that a row takes at least
LONGEST_BATCH = 1 << 26  # bytes of text in a batch
# What pyarrow raises for a value that Python has no form for: times beyond the year 9999 or of an unknown zone.
NO_FORM = (ValueError, OverflowError, LookupError, pyarrow.ArrowException)
PARQUET_BUFFER = 1 << 20  # bytes of a column chunk that are read at a time


def matching_files(pattern: str) -> list[Path]:
    """The files a glob matches, sorted; of a name that is a file, only that. Raises `ConfigError` if there are none."""
    if Path(pattern).is_dir():
        raise ConfigError(f"{pattern} is a folder; give a glob of its files, such as {pattern.rstrip('/')}/*.parquet")
    files = [Path(name) for name in matching_paths(pattern)]
    if not files:
        raise ConfigError(f"no file matches {pattern!r}; check the source's `path`")
    return files


def with_field_names(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row with the names of a record's fields, of which `columns` names the columns: `{"text": "body"}`."""
    read = {field: row[column] for field, column in columns.items() if column in row}
    return {name: value for name, value in row.items() if name not in columns} | read


def read_jsonl(
    paths: Sequence[Path], form: RecordForm, skip: int = 0, columns: Mapping[str, str] | None = None
) -> Iterator[Record | Rejected]:
    """Read records from JSON-lines files (compressed ones too) from row `skip` on; blank lines are not rows.

    `columns`: as for `with_field_names`.

    Raises `ConfigError` for a file that is missing, empty, not text, or one JSON array.
    """
    for path in paths:
        with _open_lines(path) as lines:
            for line in lines:
                if skip:
                    skip -= 1
                    continue
                value = _parse_line(line)
                if columns and isinstance(value, dict):
                    value = with_field_names(value, columns)
                yield value if isinstance(value, Rejected) else from_dict(value, form)


def read_json_values(path: Path, skip: int = 0) -> Iterator[Any]:
    """Parse each line of a JSON-lines file from row `skip` on, an invalid one as `Rejected`. Raises as `read_jsonl`."""
    with _open_lines(path) as lines:
        yield from map(_parse_line, islice(lines, skip, None))


def count_jsonl_rows(path: Path) -> int:
    """Count the rows of a JSON-lines file by reading it. Raises `ConfigError` as `read_jsonl` does."""
    with _open_lines(path) as lines:
        return sum(1 for _ in lines)


def is_parquet(name: str) -> bool:
    """Whether a file is Parquet, by its name; `LINES` are the names of JSON lines."""
    return not name.lower().endswith(LINES)


@contextmanager
def _open_lines(path: Path) -> Iterator[Iterator[bytes | None]]:
    """Open a file as an iterator of `_lines`; read errors become `ConfigError`s that name the file."""
    packed = path.suffix.lower() in PACKED
    try:
        with open_regular(path) as stored, _unpacked(stored, path.suffix.lower()) as file:
            _check_text(path, file)
            yield _lines(path, file, unpacked_limit(os.fstat(stored.fileno()).st_size) if packed else None)
    except zlib.error as error:
        raise ConfigError(f"{path}: the compressed file is damaged ({error}); fetch it again") from None
    except EOFError:
        raise ConfigError(f"{path}: the compressed file ends too early; fetch it again") from None
    except OSError as error:  # the errors of all decompressors are OSErrors too
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None


def _unpacked(stored: BufferedReader, suffix: str) -> BufferedReader:
    match PACKED.get(suffix):
        case "gzip":
            stream: Any = gzip.GzipFile(fileobj=stored)
        case "bz2":
            stream = bz2.BZ2File(stored)
        case "zstd":
            stream = pyarrow.CompressedInputStream(stored, "zstd")
        case _:
            return stored
    return BufferedReader(stream, UNPACKED_BUFFER)


def _check_text(path: Path, file: BufferedReader) -> None:
    """Raise `ConfigError` if the first bytes of a file show that it is not JSON lines."""
    head = file.peek()
    refuse_utf16(path, head)
    if b"\x00" in head:
        raise ConfigError(f"{path}: is binary, not JSON lines; check the source's `reader`")
    first = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0]
    # A row of JSON lines may be an array, though of no use; the array of all rows does not end in its first line.
    of_lines = not {".jsonl", ".ndjson"}.isdisjoint(suffix.lower() for suffix in path.suffixes)
    if first.startswith(b"[") and not (of_lines and parse_json(first) is not None):
        raise ConfigError(
            f"{path}: is one JSON array, which cannot be read line by line; write it as JSON lines: "
            "`jq -c '.[]' FILE` does"
        )


def refuse_utf16(path: Path, head: bytes) -> None:
    """Raise `ConfigError` if the first bytes of a file are the mark of UTF-16 or UTF-32, and say what converts it."""
    # The mark of UTF-32 begins with that of UTF-16.
    for bits, marks in (
        (32, (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
        (16, (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
    ):
        if head.startswith(marks):
            raise ConfigError(f"{path}: is UTF-{bits}, not UTF-8: `iconv -f UTF-{bits} -t UTF-8 FILE` converts it")


def _lines(path: Path, file: BufferedReader, limit: int | None) -> Iterator[bytes | None]:
    """Non-blank lines; None for a line longer than `MAX_LINE`.

    Raises `ConfigError` if there are none, and for over `limit` bytes.
    """
    size, rows, in_long_line = 0, 0, False
    # `readline` with a limit returns a part of a longer line, so a line never takes more memory than that.
    while line := file.readline(MAX_LINE):
        size += len(line)
        if limit is not None and size > limit:
            raise ConfigError(f"{path}: unpacks to over {limit:,} bytes, far more than its size; it is not read")
        was_in_long_line, in_long_line = in_long_line, len(line) == MAX_LINE and not line.endswith(b"\n")
        if was_in_long_line:
            in_long_line = not line.endswith(b"\n")
        elif in_long_line:
            rows += 1
            yield None
        # Editors of Windows begin a file with a byte-order mark, which is in the middle of files put together.
        elif (line := line.removeprefix(codecs.BOM_UTF8)).strip():
            rows += 1
            yield line
    if not rows:
        raise ConfigError(f"{path}: is empty")


def _parse_line(line: bytes | None) -> Any:
    if line is None:
        return Rejected("too_long")
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=distinct_members)
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
    names_in_file: Mapping[str, str] | None = None,
) -> Iterator[RecordBatch]:
    """Read the file's first `rows` rows (None: all) as batches.

    The `columns` of a batch are the text columns and `filter_columns`; `record_columns` are read as well, for
    `RecordBatch.record`. A column that the file does not have is None. `names_in_file`: of columns that the file has
    under another name.

    Raises `ConfigError` for a file that is missing, not Parquet, damaged, or without the required text columns.
    """
    columns = [*TEXT_COLUMNS[form], *filter_columns]
    in_file = {name: (names_in_file or {}).get(name, name) for name in (*columns, *record_columns)}
    parquet = _open_parquet(path, in_file.values())
    names = parquet.schema_arrow.names
    for required in (in_file[name] for name in REQUIRED_COLUMNS[form]):
        if required not in names:
            raise ConfigError(f"{path}: no column {required!r}; there are {', '.join(names)}")
    in_file = {name: own for name, own in in_file.items() if own in names}
    read_columns = list(dict.fromkeys(in_file.values()))
    remaining = total = parquet.metadata.num_rows if rows is None else min(rows, parquet.metadata.num_rows)
    for table in _tables(path, parquet, range(parquet.num_row_groups), read_columns):
        if remaining < table.num_rows:
            table = table.slice(0, remaining)
        remaining -= table.num_rows
        if table.num_rows:
            table = pyarrow.record_batch({name: table.column(own) for name, own in in_file.items()})
            yield replace(_table_batch(table, form, columns), total=total)
        if not remaining:
            return


def read_parquet_values(path: Path, columns: Collection[str], skip: int = 0) -> Iterator[dict[str, Any] | Rejected]:
    """Read the rows of a Parquet file from row `skip` on as dictionaries of those columns that are in `columns`.

    Raises `ConfigError` for a file that is missing, not Parquet, or damaged.
    """
    parquet = _open_parquet(path, columns)
    read_columns = [name for name in parquet.schema_arrow.names if name in columns]
    group = 0
    while group < parquet.num_row_groups and skip >= (rows := parquet.metadata.row_group(group).num_rows):
        skip -= rows
        group += 1
    for table in _tables(path, parquet, range(group, parquet.num_row_groups), read_columns):
        for i in range(min(skip, table.num_rows), table.num_rows):
            try:
                yield {name: table.column(name)[i].as_py() for name in read_columns}
            except UnicodeDecodeError:
                yield Rejected("invalid_utf8")
            except NO_FORM:
                yield Rejected("wrong_type")
        skip = max(0, skip - table.num_rows)


def refuse_other_kind(path: Path, rejected: Counter[str]) -> None:
    """Raise `ConfigError` if rows of a file without a usable row show that it is of another kind, and say what helps.

    Rows that merely have no text show nothing of the kind.
    """
    if reasons := [reason for reason, _ in rejected.most_common() if reason in _OTHER_KIND]:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in rejected.most_common())
        raise ConfigError(
            f"{path}: none of its {rejected.total():,} rows can be read ({counts}): {_OTHER_KIND[reasons[0]]}"
        )


def parquet_columns(path: Path) -> list[str]:
    """The names of the file's columns. Raises `ConfigError` as `read_parquet_values` does."""
    return _open_parquet(path).schema_arrow.names


def count_parquet_rows(path: Path) -> int:
    """Count the rows of a Parquet file from its footer. Raises `ConfigError` as `read_parquet_batches` does."""
    return _open_parquet(path).metadata.num_rows


def _open_parquet(path: Path, text_columns: Collection[str] = ()) -> ParquetFile:
    """Open a Parquet file; `text_columns` are read as dictionaries, in which a text repeated by the million is one."""
    expected = "is not a Parquet file"
    if path.suffix.lower() != ".parquet":
        expected += f", and its name ends in none of {', '.join(LINES)}, which are JSON lines"
    try:
        check_regular(path)
        size, metadata = path.stat().st_size, read_metadata(path)
        leaves = text_leaves(metadata)
        texts = [leaf for leaf in leaves if leaf in text_columns or leaf.partition(".")[0] in text_columns]
        # With a buffer and without pre_buffer, column chunks are read page by page, which bounds memory.
        parquet = ParquetFile(
            path, metadata=metadata, pre_buffer=False, buffer_size=PARQUET_BUFFER, read_dictionary=texts
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: {expected} ({first_line(error)})") from None
    names = parquet.schema_arrow.names
    if repeated := next((name for name, count in Counter(names).items() if count > 1), None):
        raise ConfigError(f"{path}: two columns are called {repeated!r}")
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    largest = max((group.total_byte_size for group in groups), default=0)
    # Rows may have no content at all, and still take their time.
    if max(largest, ROW_BYTES * metadata.num_rows) > unpacked_limit(size):
        raise ConfigError(f"{path}: unpacks to over {unpacked_limit(size):,} bytes, far more than its size")
    return parquet


def text_leaves(metadata: FileMetaData) -> list[str]:
    """The paths of the columns of texts or bytes of a Parquet file, also of those inside lists and structures."""
    columns = [metadata.schema.column(number) for number in range(metadata.num_columns)]
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def _tables(
    path: Path, parquet: ParquetFile, groups: Iterable[int], columns: list[str]
) -> Iterator[pyarrow.RecordBatch]:
    """The rows of row groups in batches of at most `BATCH_ROWS` rows, or fewer when they are long.

    Raises `ConfigError` for a damaged group, and when the texts are longer than `unpacked_limit` of the file's size.
    """
    unpacked = group = 0
    try:
        limit = unpacked_limit(path.stat().st_size)
        for group in groups:
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                # Lengths from the dictionaries, before any row's text is built.
                ends = np.cumsum(_bytes_by_row(batch))
                start = before = 0
                while start < batch.num_rows:
                    end = max(start + 1, int(np.searchsorted(ends, before + LONGEST_BATCH, "right")))
                    if unpacked + int(ends[end - 1]) > limit:
                        raise ConfigError(f"{path}: unpacks to over {limit:,} bytes, far more than its size")
                    yield _without_dictionaries(batch.slice(start, end - start))
                    start, before = end, int(ends[end - 1])
                unpacked += before
    except (pyarrow.ArrowException, OSError) as error:  # a broken page header is an OSError
        raise ConfigError(f"{path}: row group {group} is damaged ({first_line(error)})") from None


def _without_dictionaries(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """The same rows as plain columns, which are faster to convert."""
    if not any(isinstance(column, pyarrow.DictionaryArray) for column in batch.columns):
        return batch
    plain = [c.dictionary_decode() if isinstance(c, pyarrow.DictionaryArray) else c for c in batch.columns]
    return pyarrow.record_batch(plain, batch.schema.names)


def _bytes_by_row(batch: pyarrow.RecordBatch) -> np.ndarray:
    """The bytes of each row's texts, int64 [rows]; those inside lists and structures are shared out evenly."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        values = column.dictionary if isinstance(column, pyarrow.DictionaryArray) else column
        if not _is_text(values.type):
            total += -(-text_bytes(column) // max(1, batch.num_rows))
            continue
        lengths = pyarrow.compute.binary_length(values)
        if isinstance(column, pyarrow.DictionaryArray):
            lengths = lengths.take(column.indices)
        total += lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return total


def text_bytes(array: pyarrow.Array) -> int:
    """The bytes of all texts in an array, also of those inside lists and structures."""
    types, kind = pyarrow.types, array.type
    if types.is_dictionary(kind):
        lengths = pyarrow.compute.binary_length(array.dictionary) if _is_text(kind.value_type) else None
        return 0 if lengths is None else pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0
    if _is_text(kind):
        return pyarrow.compute.sum(pyarrow.compute.binary_length(array)).as_py() or 0
    if types.is_struct(kind):
        return sum(map(text_bytes, array.flatten()))
    if types.is_map(kind):
        return text_bytes(array.keys) + text_bytes(array.items)
    nested = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return text_bytes(array.flatten()) if nested else 0


def _is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _as_text(column: pyarrow.Array) -> pyarrow.Array:
    """A column of bytes as one of text: some programs write texts without saying that they are UTF-8."""
    if pyarrow.types.is_binary(column.type):
        return column.view(pyarrow.string())
    return column.view(pyarrow.large_string()) if pyarrow.types.is_large_binary(column.type) else column


def _table_batch(table: pyarrow.RecordBatch, form: RecordForm, columns: Sequence[str]) -> RecordBatch:
    """Validate rows column by column, by the same rules as `data.records.from_dict`, and drop the rejected ones."""
    rows = table.num_rows
    table = pyarrow.record_batch({name: _as_text(table.column(name)) for name in table.schema.names})
    try:
        values = {name: table.column(name).to_pylist() for name in table.schema.names if name in columns}
    except NO_FORM:  # some row is not UTF-8: read them one by one to see which
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
    row = {}
    for name in table.schema.names:
        try:
            row[name] = table.column(name)[index].as_py()
        except NO_FORM as error:
            if isinstance(error, UnicodeDecodeError) and name in TEXT_COLUMNS[form]:
                return Rejected("invalid_utf8")
    return from_dict(row, form)
