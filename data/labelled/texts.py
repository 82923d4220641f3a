"""The texts of a table that a model is asked about, and tables of its answers written back in the same formats."""

import csv
import io
import json
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
    """The table, and the text of each row; None for a row without a text, or with white space alone.

    `sha256`: what the file must contain still. Raises `ConfigError` for a table that cannot be read, one without the
    column, and a value that is no text.
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
    """The rows of the table, each with the answer to it. A column of the name of an answer's becomes `given_NAME`."""
    taken = set(answers[0]) if answers else set()
    return [
        {**{f"given_{name}" if name in taken else name: value for name, value in row.items()}, **answer}
        for row, answer in zip(table.rows, answers, strict=True)
    ]


def check_writable(path: Path) -> None:
    """Raise `ConfigError` where a table could not be written to `path`."""
    if path.suffix.lower() not in WRITABLE:
        raise ConfigError(f"{path}: tables are written as {', '.join(WRITABLE)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace `path` by the rows, which have the same columns, whole or not at all. Raises `ConfigError`, `OSError`.

    In a CSV, what is no text, number or truth value is JSON; so is a Parquet column whose values share no type.
    """
    check_writable(path)
    with atomic_path(path) as temporary:
        if path.suffix.lower() == ".parquet":
            columns = {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else {})}
            pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
        elif path.suffix.lower() == ".jsonl":
            lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
            temporary.write_text(lines, encoding="utf-8", errors="replace")
        else:
            out = io.StringIO(newline="")
            writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
            temporary.write_text(out.getvalue(), encoding="utf-8", errors="replace")


def _column(values: list[Any]) -> pyarrow.Array:
    try:
        column = pyarrow.array(values)
    except (pyarrow.ArrowException, TypeError, OverflowError):
        column = None
    # A type with nothing known about what it holds cannot be read back everywhere.
    if column is None or "null" in str(column.type):
        texts = [None if value is None else str(_cell(value)) for value in values]
        column = pyarrow.array(texts, pyarrow.string())
    return column


def _cell(value: Any) -> Any:
    simple = value is None or isinstance(value, str | int | float)
    return value if simple else json.dumps(value, ensure_ascii=False, default=str)
