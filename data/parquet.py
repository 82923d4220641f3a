"""Parquet files to batches of columns: whole files are refused by name, single bad rows are counted by reason.

Pages are streamed, so memory depends neither on the file nor on its row groups, and only the columns that the work
needs are read at all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.section import ConfigError
from data.records import (
    BATCH,
    MAX_CHARACTERS,
    NEEDED,
    WORKED,
    Batch,
    Form,
    Record,
    Rejected,
    RejectReason,
    batch_of,
    from_dict,
)

STREAM = 1 << 20  # bytes of a column chunk held at a time


def parquet_batches(
    path: Path, form: Form, listed: Sequence[str] = (), carried: Sequence[str] = (), rows: int | None = None
) -> Iterator[Batch]:
    """Batches of the file's first `rows` rows (None: all), with the columns to work on and those of `listed`.

    `carried`: further columns for the records that are made whole. A column that the file does not have is None.

    Raises `ConfigError` for a file that is missing, no Parquet, damaged, or without the columns of the text.
    """
    parquet = _opened(path)
    there = parquet.schema_arrow.names
    for needed in NEEDED[form]:
        if needed not in there:
            raise ConfigError(f"{path}: no column {needed!r}; there are {', '.join(there)}")
    columns = [*WORKED[form], *listed]
    wanted = [name for name in dict.fromkeys([*columns, *carried]) if name in there]
    left = parquet.metadata.num_rows if rows is None else rows
    for group in range(parquet.num_row_groups):
        for table in _tables(path, parquet, group, wanted):
            if left < table.num_rows:
                table = table.slice(0, left)
            left -= table.num_rows
            if table.num_rows:
                yield _batch(table, form, columns)
            if not left:
                return


def parquet_rows(path: Path) -> int:
    """Rows of a Parquet file by its footer. Raises `ConfigError` as `parquet_batches` does."""
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
        yield from parquet.iter_batches(BATCH, row_groups=[group], columns=columns, use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:  # a broken page header is an OSError
        raise ConfigError(f"{path}: row group {group} is damaged ({str(error).splitlines()[0]})") from None


def _batch(table: Any, form: Form, columns: Sequence[str]) -> Batch:
    rows = table.num_rows
    try:
        values = {name: table.column(name).to_pylist() for name in table.schema.names if name in columns}
    except UnicodeDecodeError:
        return batch_of([_row(table, i, form) for i in range(rows)], form)
    faults: dict[int, RejectReason] = {}
    for name in (name for name in WORKED[form] if name in values):
        required = name in NEEDED[form]
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
    return Batch(form, rows, chosen, Counter(faults.values()), lambda i: _record(table, places[i], form))


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
