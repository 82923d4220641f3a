"""Read the texts of a table for a model to label, and write tables of its answers in the same formats."""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from nautile.common.csv_lines import csv_line, encodable
from nautile.common.errors import ConfigError
from nautile.common.files import atomic_path
from nautile.data.table import Table, as_text, read_table, require_columns
from nautile.uses.labelled.config import TextsConfig
from nautile.uses.labelled.rows import several_labels

_PLAIN = (bytes, Decimal, date, time, timedelta)
WRITABLE = (".csv", ".jsonl", ".parquet")


def read_texts(config: TextsConfig, sha256: str = "") -> tuple[Table, list[str | None]]:
    """Read a table (of the digest `sha256`, if given) and the text of each row; None for one that is missing or blank.

    Raises `ConfigError` for a table that cannot be read or lacks the column, and for a value that is no text.
    """
    table = read_table(config.path, sha256=sha256, delimiter=config.delimiter, encoding=config.encoding)
    require_columns(config.path, table.columns, [config.text_column])
    texts: list[str | None] = []
    for number, row in enumerate(table.rows, 1):
        value = as_text(row[config.text_column])
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise ConfigError(
                f"{config.path}: row {number}: has a {kind}, not a text, in column {config.text_column!r}"
            )
        texts.append(value if value and value.strip() else None)
    if not any(texts):
        raise ConfigError(f"{config.path}: no row has a text in column {config.text_column!r}")
    return table, texts


def gold_labels(table: Table, path: str, column: str, labels: Sequence[str], multi_label: bool = False) -> list[Any]:
    """The correct label of each row of the table at `path`, or the list of them if a text may have several.

    Raises `ConfigError` for one that is not in `labels`.
    """
    require_columns(path, table.columns, [column])
    gold: list[Any] = []
    for number, row in enumerate(table.rows, 1):
        values = several_labels(row[column], f"{path}: row {number}") if multi_label else [row[column]]
        own = [str(value).strip() if multi_label else str(value) for value in values]
        gold.append(own if multi_label else own[0])
        for label in own:
            if label in labels:
                continue
            raise ConfigError(
                f"{path}: row {number}: the label {label!r} in column {column!r} is unknown; the labels are "
                f"{', '.join(labels)}"
            )
    return gold


def with_answers(table: Table, answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the answers to the rows of the table. A column with the name of an answer's field becomes `given_NAME`.

    With as many `given_` as give it a name of its own: a table that has been answered before has such columns.
    """
    answer_fields = set(answers[0]) if answers else set()
    names = {name: name for name in table.columns if name not in answer_fields}
    for name in table.columns:
        if name in answer_fields:
            given_name = f"given_{name}"
            while given_name in answer_fields or given_name in names.values():
                given_name = f"given_{given_name}"
            names[name] = given_name
    return [
        {**{names[name]: value for name, value in row.items()}, **answer}
        for row, answer in zip(table.rows, answers, strict=True)
    ]


def check_writable(path: Path) -> None:
    """Raise `ConfigError` if a table cannot be written to `path`: unknown format, or no such folder."""
    if path.suffix.lower() not in WRITABLE:
        raise ConfigError(f"{path}: tables are written as {', '.join(WRITABLE)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, which all have the same columns, to `path` atomically. Raises `ConfigError`, `OSError`.

    In a CSV, lists and objects are written as JSON, and so are the values of a Parquet column that have no common type.
    There and in JSON lines, dates and times are in ISO 8601, decimals have all their digits, and bytes are UTF-8 text
    or base64. NaN and infinities are null in JSON. Half a surrogate pair is U+FFFD in a CSV and in Parquet, and an
    escape in JSON lines. A text of a CSV that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    check_writable(path)
    with atomic_path(path) as temporary:
        if path.suffix.lower() == ".parquet":
            columns = {encodable(name): _column([row[name] for row in rows]) for name in (rows[0] if rows else {})}
            pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
        elif path.suffix.lower() == ".jsonl":
            temporary.write_text("".join(f"{_json(row)}\n" for row in rows), encoding="utf-8")
        else:
            lines = [csv_line(rows[0] if rows else []), *(csv_line(map(_cell, row.values())) for row in rows)]
            temporary.write_text("".join(lines), encoding="utf-8")


def _column(values: list[Any]) -> pyarrow.Array:
    """A column of the values' common type, or of text if they have none."""
    values = [encodable(value) if isinstance(value, str) else value for value in values]
    try:
        column = pyarrow.array(values)
        # Arrow takes microseconds for all times, also of those values that have nanoseconds.
        if any(getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0) for value in values):
            kind = column.type
            is_time = pyarrow.types.is_timestamp(kind)
            column = pyarrow.array(values, pyarrow.timestamp("ns", kind.tz) if is_time else pyarrow.duration("ns"))
    except (pyarrow.ArrowException, TypeError, OverflowError, UnicodeEncodeError):
        column = None
    # Not every reader supports a column, or a list column, of type null.
    if column is None or "null" in str(column.type):
        texts = [None if value is None else encodable(str(_cell(value))) for value in values]
        column = pyarrow.array(texts, pyarrow.string())
    return column


def _cell(value: Any) -> Any:
    """A value as a CSV has it: a text, a number, a boolean or nothing."""
    if value is None or isinstance(value, str | int | float):
        return value
    return _plain(value) if isinstance(value, _PLAIN) else _json(value)


def _plain(value: Any) -> str:
    """A value that JSON has no form for, as a text."""
    if isinstance(value, bytes):
        text = as_text(value)
        return text if isinstance(text, str) else base64.b64encode(value).decode("ascii")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _json(value: Any) -> str:
    """JSON of a value. Only half a surrogate pair is escaped, so that a row is read back as it was."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except ValueError:  # a number that is not finite
        text = json.dumps(_finite(value), ensure_ascii=False, default=_plain, allow_nan=False)
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def _finite(value: Any) -> Any:
    """A copy of JSON data in which None takes the place of every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
