"""Read the texts of a table for a model to label, and write tables of its answers in the same formats."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from common.errors import ConfigError
from common.files import atomic_path
from configs.labelling import TextsConfig
from data.labelled.table import Table, read_table, require_columns

WRITABLE = (".csv", ".jsonl", ".parquet")


def read_texts(config: TextsConfig, sha256: str = "") -> tuple[Table, list[str | None]]:
    """Read a table and the text of each row; None for a row whose text is missing or blank.

    `sha256`: expected digest of the file. Raises `ConfigError` for a table that cannot be read or lacks the column, and
    for a value that is no text.
    """
    table = read_table(config.path, sha256=sha256)
    require_columns(config.path, table.columns, [config.text_column])
    texts: list[str | None] = []
    for number, row in enumerate(table.rows, 1):
        value = row[config.text_column]
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise ConfigError(
                f"{config.path}: row {number}: has a {kind}, not a text, in column {config.text_column!r}"
            )
        texts.append(value if value and value.strip() else None)
    if not any(texts):
        raise ConfigError(f"{config.path}: no row has a text in column {config.text_column!r}")
    return table, texts


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

    In a CSV, values other than text, numbers and booleans are written as JSON; so are the values of a Parquet column
    that have no common type. NaN and infinities are null in JSON, which has no such numbers.
    """
    check_writable(path)
    with atomic_path(path) as temporary:
        if path.suffix.lower() == ".parquet":
            # Column by column: each gets the type that its own values have in common.
            columns = {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else {})}
            pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
        elif path.suffix.lower() == ".jsonl":
            lines = "".join(f"{_json(row)}\n" for row in rows)
            temporary.write_text(lines, encoding="utf-8", errors="replace")
        else:
            out = io.StringIO(newline="")
            writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
            temporary.write_text(out.getvalue(), encoding="utf-8", errors="replace")


def _column(values: list[Any]) -> pyarrow.Array:
    """A column of the values' common type, or of text if they have none."""
    try:
        column = pyarrow.array(values)
    except (pyarrow.ArrowException, TypeError, OverflowError):
        column = None
    # Not every reader supports a column, or a list column, of type null.
    if column is None or "null" in str(column.type):
        texts = [None if value is None else str(_cell(value)) for value in values]
        column = pyarrow.array(texts, pyarrow.string())
    return column


def _cell(value: Any) -> Any:
    simple = value is None or isinstance(value, str | int | float)
    return value if simple else _json(value)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # a number that is not finite
        return json.dumps(_finite(value), ensure_ascii=False, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    """A copy of JSON data in which None takes the place of every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
