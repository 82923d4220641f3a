"""Strict reader of a user's table: CSV, JSON lines or Parquet with named columns.

The delimiter and the encoding of a text file are named by the caller, or found: UTF-8, or UTF-16 and UTF-32 by the mark
at the beginning; the delimiter that gives all of the first rows the columns of the header. Other encodings are not
guessed, because every byte is a letter in each of them: a wrong guess would change words without an error. The file is
read once into memory, so that the digest is that of the parsed content; a file that changes meanwhile is rejected, and
so is one that unpacks to far more than its size (`unpacked_limit`). Row numbers in messages count rows of data from 1;
for CSV the line is given too.
"""

import codecs
import csv
import hashlib
import io
import json
import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from pyarrow.parquet import ParquetFile

from nautile.common.errors import ConfigError
from nautile.common.files import distinct_members, refuse_constant
from nautile.common.input_files import open_regular, unpacked_limit
from nautile.common.text import first_line
from nautile.data.sources.local_files import NO_FORM, text_bytes, text_leaves

LONGEST_LINE = 1_000_000  # bytes of a line, and characters of a value
LARGEST_FILE = 2 * 2**30  # bytes
VALUE_BYTES, ROW_BYTES = 8, 200  # that a value and a row of a table take at least
ROWS_AT_ONCE = 256
READABLE = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
DELIMITERS = {";": ";", "\t": "tab", "|": "|", ",": ","}  # character -> its name
ROWS_OF_A_GUESS = 50  # whose columns are counted to find the delimiter
# Mark at the beginning of a file -> its encoding. That of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip

logger = logging.getLogger(__name__)


class Table(NamedTuple):
    """The rows of a file, in order. `classes`: the class names of columns whose values are class numbers.

    `found`: a line that says which delimiter and encoding were found; empty for those that are expected, or were named.
    """

    columns: list[str]
    rows: list[dict[str, Any]]
    sha256: str
    classes: dict[str, list[str]]
    found: str = ""


def read_table(
    path: Path | str,
    *,
    sha256: str = "",
    delimiter: str | None = None,
    encoding: str | None = None,
    header: Sequence[str] = (),
) -> Table:
    """Read a .csv, .tsv, .jsonl, .ndjson or .parquet file, or a .txt with a `delimiter` and without quoting.

    Values of a CSV are strings; a missing field in JSON lines is None. `sha256`: expected digest of the file. No
    `delimiter`, no `encoding`: they are found, and logged where they are not a comma (a tab for .tsv) and UTF-8.
    `header`: the columns of a CSV whose first row is data. Raises `ConfigError`, with the row's number where there is
    one, for a file that is no such table or has another digest.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in READABLE and not (suffix == ".txt" and delimiter):
        raise ConfigError(f"{path}: is none of {', '.join(READABLE)}, nor a .txt with a `delimiter`")
    content, digest = read_unchanged(path, sha256)
    if not content.strip():
        raise ConfigError(f"{path}: is empty")
    classes: dict[str, list[str]] = {}
    found: list[str] = []
    if suffix == ".parquet":
        columns, rows, classes = _parquet(path, content)
    else:
        mark = next((mark for mark in MARKS if content.startswith(mark)), b"")
        if mark and not encoding:
            found.append(f"{MARKS[mark].upper()} by its byte-order mark")
        text = _text(path, content, encoding or MARKS.get(mark, ""))
        if suffix in (".csv", ".tsv", ".txt"):
            csv.field_size_limit(LONGEST_LINE)
            if not delimiter and (delimiter := _found_delimiter(path, text, "\t" if suffix == ".tsv" else ",")):
                found.append(f"{DELIMITERS[delimiter]} between its columns")
            columns, rows = _csv(path, text, delimiter, list(header))
        else:
            columns, rows = _json_lines(path, text)
    if not rows:
        raise ConfigError(f"{path}: has the columns {', '.join(columns)} and no row")
    line = f"{path}: read with {' and '.join(reversed(found))}" if found else ""
    if line:
        logger.info("%s", line)
    return Table(columns, rows, digest, classes, line)


def read_unchanged(path: Path | str, sha256: str = "") -> tuple[bytes, str]:
    """Read a file and check that it does not change meanwhile; returns (content, its sha256).

    Raises `ConfigError` for a file that changes, cannot be read, or has another digest than `sha256`, if that is given.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            before = os.fstat(file.fileno())
            if before.st_size > LARGEST_FILE:
                raise ConfigError(f"{path}: has {before.st_size} bytes; more than {LARGEST_FILE} are not read at once")
            content = file.read(before.st_size + 1)  # one more shows that the file has grown
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
    value = as_text(row.get(column))
    if not isinstance(value, str):
        kind = "no value" if value is None else f"a {type(value).__name__}, not a text,"
        raise ConfigError(f"{where}: has {kind} in column {column!r}")
    if not value.strip():
        raise ConfigError(f"{where}: the text in column {column!r} is empty")
    return value


def as_text(value: Any) -> Any:
    """Bytes that are UTF-8 as a text: some programs write texts to Parquet without saying so. Else the value itself."""
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def is_missing(value: Any) -> bool:
    """Whether a value of a table is unknown: None, blank text, or NaN."""
    return (
        value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and value != value)
    )


def require_columns(path: Path | str, columns: Sequence[str], needed: Sequence[str]) -> None:
    """Raise `ConfigError` unless all of `needed` are among the columns."""
    if missing_names := [name for name in needed if name not in columns]:
        raise ConfigError(f"{path}: no column {missing_names[0]!r}; there are {', '.join(columns)}")


def _text(path: Path, content: bytes, encoding: str) -> bytes:
    """The content as UTF-8, from `encoding` if it is given. Raises `ConfigError` that names the bytes it does not have.

    `utf-8` is left as it is: `_lines` names the line of a byte that is none.
    """
    try:
        name = codecs.lookup(encoding).name if encoding else "utf-8"
    except LookupError:
        raise ConfigError(
            f"{path}: no encoding is called {encoding!r}; `encoding` may be utf-8, utf-16, cp1252, …"
        ) from None
    if name in ("utf-8", "utf-8-sig"):
        return content
    try:
        return content.decode(encoding).removeprefix("\ufeff").encode()
    except UnicodeDecodeError as error:
        before = content[: error.start].decode(encoding, "ignore").count("\n")
        place = f"line {before + 1}, byte {error.start + 1} of the file"
        shown = content[error.start : error.end].hex()
        raise ConfigError(f"{path}: {place} (0x{shown}) is nothing in {encoding}; set another `encoding`") from None
    except (UnicodeError, LookupError, ValueError):  # half a character at the end; a codec of no texts, such as base64
        raise ConfigError(f"{path}: cannot be read as {encoding}; set another `encoding`") from None


def _lines(path: Path, content: bytes) -> Iterator[str]:
    """Decoded lines of UTF-8, including their line ends."""
    if b"\x00" in content[:8192]:
        raise ConfigError(
            f"{path}: is binary, and its name says that it is text; if it is UTF-16 without a byte-order mark, set "
            "`encoding` to utf-16-le or utf-16-be"
        )
    if b"\n" not in content:  # the line ends of old Macs
        content = content.replace(b"\r", b"\n")
    for number, line in enumerate(io.BytesIO(content), 1):
        if len(line) > LONGEST_LINE:
            raise ConfigError(f"{path}: line {number} has {len(line)} bytes; {LONGEST_LINE} are the most")
        try:
            yield line.decode("utf-8-sig")  # its mark is in the middle of files put together
        except UnicodeDecodeError as error:
            # What Windows writes in Western Europe and America: the user sees whether the words are right.
            as_windows = line.decode("cp1252", "replace").strip()
            begin = max(0, error.start - 30)
            raise ConfigError(
                f"{path}: line {number} is not UTF-8 (byte {error.start + 1} of it); set `encoding` (in commands "
                f"`--encoding`): with cp1252, of Windows, it is {as_windows[begin : begin + 60]!r}"
            ) from None


def _found_delimiter(path: Path, content: bytes, usual: str) -> str:
    """The delimiter that gives each of the first rows the columns of the header, which are at least two.

    Empty if that is the `usual` one, or if no delimiter does. Raises `ConfigError` if several do, without the usual.
    """
    if _fits(path, content, usual):
        return ""
    fitting = [other for other in DELIMITERS if other != usual and _fits(path, content, other)]
    if len(fitting) > 1:
        names = " and ".join(DELIMITERS[name] for name in fitting)
        raise ConfigError(
            f"{path}: its columns may be separated by {names}: set `delimiter` (in commands `--delimiter`) to one"
        )
    return fitting[0] if fitting else ""


def _fits(path: Path, content: bytes, delimiter: str) -> bool:
    """Whether the first rows of a CSV have equally many columns, at least two, with a delimiter."""
    reader = csv.reader(_lines(path, content), delimiter=delimiter, strict=True)
    try:
        counts = {len(values) for values in islice(reader, ROWS_OF_A_GUESS) if values}
    except csv.Error:
        return False
    return len(counts) == 1 and counts.pop() > 1


def _csv(
    path: Path, content: bytes, delimiter: str | None, header: list[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """(columns, rows) of a CSV; without `header` its first row is it. No `delimiter`: a comma, a tab for .tsv."""
    separator = delimiter or ("\t" if path.suffix.lower() == ".tsv" else ",")
    # Strict: an opening quotation mark without its end would otherwise make one value of the rest of the file.
    reader = csv.reader(
        _lines(path, content),
        delimiter=separator,
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
                if not delimiter:
                    _check_delimiter(path, columns, separator)
                check_names(path, columns)
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


def _check_delimiter(path: Path, columns: list[str], delimiter: str) -> None:
    """Raise `ConfigError` if the first row of a file looks as if another character separates its columns."""
    for other, name in DELIMITERS.items():
        if len(columns) == 1 and other in columns[0]:
            raise ConfigError(
                f"{path}: its first row is one column, {columns[0][:60]!r}: if {name} separates its columns, set "
                f"`delimiter` to that (in commands `--delimiter {shlex.quote(name)}`), else to {DELIMITERS[delimiter]}"
            )


def check_names(path: Path | str, columns: Sequence[str]) -> None:
    """Raise `ConfigError` for a column without a name, and for two of one name."""
    if not all(columns):
        where = list(columns).index("") + 1
        raise ConfigError(f"{path}: column {where} has no name; the first row must name each column")
    if duplicates := sorted(name for name, count in Counter(columns).items() if count > 1):
        raise ConfigError(f"{path}: two columns are called {duplicates[0]!r}")


def _json_lines(path: Path, content: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    """(columns, rows) of JSON lines; the columns are the fields of all rows, in order of their first occurrence."""
    rows: list[dict[str, Any]] = []
    for line in _lines(path, content):
        if not line.strip():
            continue
        where = f"{path}: row {len(rows) + 1}"
        try:
            value = json.loads(line, parse_constant=refuse_constant, object_pairs_hook=distinct_members)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON ({first_line(error)})") from None
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"{where} is not a JSON object with named values")
        rows.append(value)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [{name: row.get(name) for name in columns} for row in rows]


def _parquet(path: Path, content: bytes) -> tuple[list[str], list[dict[str, Any]], dict[str, list[str]]]:
    """(columns, rows, class names by column) of a Parquet file."""
    try:
        parquet = ParquetFile(pyarrow.BufferReader(content))
        columns = parquet.schema_arrow.names
        check_names(path, columns)
        _check_size(path, parquet, len(content))
        # Texts as dictionaries: one that is repeated by the million is stored once, and its rows are built in turn.
        parquet = ParquetFile(pyarrow.BufferReader(content), read_dictionary=text_leaves(parquet.metadata))
        rows = list(_parquet_rows(path, parquet, columns, unpacked_limit(len(content))))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None
    return columns, rows, _class_names(parquet.schema_arrow.metadata or {})


def _check_size(path: Path, parquet: ParquetFile, size: int) -> None:
    """Raise `ConfigError` if the footer says that the rows take more than `unpacked_limit`, before any is read."""
    metadata = parquet.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(metadata.num_columns))
    rows = VALUE_BYTES * values + ROW_BYTES * metadata.num_rows
    unpacked = max(sum(group.total_byte_size for group in groups), rows)
    if unpacked > unpacked_limit(size):
        raise ConfigError(
            f"{path}: its {metadata.num_rows:,} rows take over {unpacked_limit(size):,} bytes, far more than its "
            f"{size:,}; it is not read"
        )


def _parquet_rows(path: Path, parquet: ParquetFile, columns: list[str], limit: int) -> Iterator[dict[str, Any]]:
    """The rows one by one. Raises `ConfigError` when their texts take over `limit` bytes together."""
    number = taken = 0
    for batch in parquet.iter_batches(ROWS_AT_ONCE, use_threads=False):
        taken += sum(map(text_bytes, batch.columns))  # known before a text is built
        if taken > limit:
            raise ConfigError(f"{path}: its texts take over {limit:,} bytes, far more than its size; it is not read")
        for index in range(batch.num_rows):
            number += 1
            try:
                # Value by value, so that an error names the row; `to_pylist` would only say that there is one.
                row = {name: batch.column(name)[index].as_py() for name in columns}
            except UnicodeDecodeError:
                raise ConfigError(f"{path}: row {number} has a text that is not UTF-8") from None
            except NO_FORM as error:
                raise ConfigError(
                    f"{path}: row {number} has a value that cannot be read ({first_line(error)})"
                ) from None
            if any(isinstance(value, str) and len(value) > LONGEST_LINE for value in row.values()):
                raise ConfigError(f"{path}: row {number} has a text of more than {LONGEST_LINE} characters")
            yield row


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The class names that `datasets` writes into a Parquet file's metadata, also for columns of lists of classes."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        inner = {name: f[0] if isinstance(f, list) else f.get("feature", f) for name, f in features.items()}
        classes = {name: f for name, f in inner.items() if isinstance(f, dict) and f.get("_type") == "ClassLabel"}
        return {name: [str(label) for label in f["names"]] for name, f in classes.items()}
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):  # of another program
        return {}
