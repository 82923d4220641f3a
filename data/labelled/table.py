"""Strict reader of a user's table: CSV, JSON lines or Parquet with named columns, in UTF-8.

The file is read once into memory, so that the digest is that of the parsed content; a file that changes meanwhile is
rejected. Row numbers in messages count rows of data from 1; for CSV the line is given too.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from common.errors import ConfigError
from common.text import first_line

LONGEST_LINE = 1_000_000  # bytes of a line, and characters of a value
LARGEST_FILE = 2 * 2**30  # bytes
READABLE = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")


class Table(NamedTuple):
    """The rows of a file, in order. `classes`: the class names of columns whose values are class numbers."""

    columns: list[str]
    rows: list[dict[str, Any]]
    sha256: str
    classes: dict[str, list[str]]


def read_table(path: Path | str, *, sha256: str = "", delimiter: str = "", header: Sequence[str] = ()) -> Table:
    """Read a .csv, .tsv, .jsonl, .ndjson or .parquet file, or a .txt with a `delimiter` and without quoting.

    Values of a CSV are strings; a missing field in JSON lines is None. `sha256`: expected digest of the file. `header`:
    the columns of a CSV whose first row is data. Raises `ConfigError`, with the row's number where there is one, for a
    file that is no such table or has another digest.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in READABLE and not (suffix == ".txt" and delimiter):
        raise ConfigError(f"{path}: is none of {', '.join(READABLE)}, nor a .txt with a `delimiter`")
    content, digest = read_unchanged(path, sha256)
    if not content.strip():
        raise ConfigError(f"{path}: is empty")
    classes: dict[str, list[str]] = {}
    if suffix == ".parquet":
        columns, rows, classes = _parquet(path, content)
    elif suffix in (".csv", ".tsv", ".txt"):
        columns, rows = _csv(path, content, delimiter or ("\t" if suffix == ".tsv" else ","), list(header))
    else:
        columns, rows = _json_lines(path, content)
    if not rows:
        raise ConfigError(f"{path}: has the columns {', '.join(columns)} and no row")
    return Table(columns, rows, digest, classes)


def read_unchanged(path: Path | str, sha256: str = "") -> tuple[bytes, str]:
    """Read a file and check that it does not change meanwhile; returns (content, its sha256).

    Raises `ConfigError` for a file that changes, cannot be read, or has another digest than `sha256`, if that is given.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            if before.st_size > LARGEST_FILE:
                raise ConfigError(f"{path}: has {before.st_size} bytes; more than {LARGEST_FILE} are not read at once")
            content = file.read()
        # By name, not by descriptor: a file that was replaced meanwhile has another inode.
        after = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    stamps = [(s.st_size, s.st_mtime_ns, s.st_ino) for s in (before, after)]
    if stamps[0] != stamps[1] or len(content) != before.st_size:
        raise ConfigError(f"{path}: changed while it was read; try again when nothing writes to it")
    digest = hashlib.sha256(content).hexdigest()
    if sha256 and digest != sha256:
        raise ConfigError(f"{path}: has changed since its digest was taken; run the command again")
    return content, digest


def text_value(row: dict[str, Any], column: str, where: str) -> str:
    """The text in a column. Raises `ConfigError`, beginning with `where`, if it is missing, empty or no text."""
    value = row.get(column)
    if not isinstance(value, str):
        kind = "no value" if value is None else f"a {type(value).__name__}, not a text,"
        raise ConfigError(f"{where}: has {kind} in column {column!r}")
    if not value.strip():
        raise ConfigError(f"{where}: the text in column {column!r} is empty")
    return value


def require_columns(path: Path | str, columns: Sequence[str], needed: Sequence[str]) -> None:
    """Raise `ConfigError` unless all of `needed` are among the columns."""
    if missing_names := [name for name in needed if name not in columns]:
        raise ConfigError(f"{path}: no column {missing_names[0]!r}; there are {', '.join(columns)}")


def _lines(path: Path, content: bytes) -> Iterator[str]:
    """Decoded lines, including their line ends."""
    if b"\x00" in content[:8192]:
        raise ConfigError(f"{path}: is binary, and its name says that it is text")
    for number, line in enumerate(io.BytesIO(content.removeprefix(b"\xef\xbb\xbf")), 1):
        if len(line) > LONGEST_LINE:
            raise ConfigError(f"{path}: line {number} has {len(line)} bytes; {LONGEST_LINE} are the most")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: line {number} is not UTF-8 (byte {error.start + 1} of it)") from None


def _csv(path: Path, content: bytes, delimiter: str, header: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """(columns, rows) of a CSV; the first row is the header if `header` is empty. Blank lines are ignored."""
    csv.field_size_limit(LONGEST_LINE)
    # Strict: an opening quotation mark without its end would otherwise make one value of the rest of the file.
    reader = csv.reader(
        _lines(path, content),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if path.suffix.lower() == ".txt" else csv.QUOTE_MINIMAL,
        strict=True,
    )
    rows: list[dict[str, Any]] = []
    columns = header
    try:
        for values in reader:
            if not values:  # a blank line
                continue
            if not columns:
                columns = [name.strip() for name in values]
                _check_names(path, columns)
                continue
            if len(values) != len(columns):
                raise ConfigError(
                    f"{path}: row {len(rows) + 1} (line {reader.line_num}) has {len(values)} values for "
                    f"{len(columns)} columns"
                )
            rows.append(dict(zip(columns, values, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{path}: row {len(rows) + 1} (line {reader.line_num}) is not CSV ({error})") from None
    return columns, rows


def _check_names(path: Path, columns: list[str]) -> None:
    if not all(columns):
        raise ConfigError(f"{path}: column {columns.index('') + 1} has no name; the first row must name each column")
    if duplicates := sorted({name for name in columns if columns.count(name) > 1}):
        raise ConfigError(f"{path}: two columns are called {duplicates[0]!r}")


def _json_lines(path: Path, content: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    """(columns, rows) of JSON lines; the columns are the fields of all rows, in order of their first occurrence."""
    rows: list[dict[str, Any]] = []
    for line in _lines(path, content):
        if not line.strip():
            continue
        where = f"{path}: row {len(rows) + 1}"
        try:
            value = json.loads(line, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON ({first_line(error)})") from None
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"{where} is not a JSON object with named values")
        rows.append(value)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [{name: row.get(name) for name in columns} for row in rows]


def _reject_constant(name: str) -> Any:
    """Callback of `json.loads` for NaN and the infinities, which Python accepts and JSON does not have."""
    raise ValueError(f"{name} is not a JSON number")


def _parquet(path: Path, content: bytes) -> tuple[list[str], list[dict[str, Any]], dict[str, list[str]]]:
    """(columns, rows, class names by column) of a Parquet file."""
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None
    columns = table.schema.names
    _check_names(path, columns)
    rows = []
    for number in range(table.num_rows):
        try:
            # Value by value, so that an error names the row; `to_pylist` would only say that there is one.
            row = {name: table.column(name)[number].as_py() for name in columns}
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: row {number + 1} has a text that is not UTF-8") from None
        if any(isinstance(value, str) and len(value) > LONGEST_LINE for value in row.values()):
            raise ConfigError(f"{path}: row {number + 1} has a text of more than {LONGEST_LINE} characters")
        rows.append(row)
    return columns, rows, _class_names(table.schema.metadata or {})


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The class names that `datasets` writes into a Parquet file's metadata, also for columns of lists of classes."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    names = {}
    for column, feature in features.items():
        inner = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel":
            names[column] = list(inner["names"])
    return names
