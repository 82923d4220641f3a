"""Bulk ingestion of event lines: metrics, samples and calls in their usual form are checked and inserted by columns.

`store.schema.event_row` checks and converts one value after the other; here a few calls do it for all values of a
column, in a fifth of the time. Only events whose every value has the type of its column are taken. All others, and all
other kinds, are left to `event_row`, which checks, converts or refuses them. For those that are taken both give the
same row, which a test holds.
"""

import math
import re
from collections.abc import Sequence
from datetime import timedelta
from types import NoneType
from typing import Any

import duckdb
import orjson

from nautile.store.manifest import DEEPEST, EARLIEST, LARGEST_EVENT, LATEST
from nautile.store.schema import CASTS_OF, LARGEST_INTEGER, TABLE_OF_EVENT, CatalogTable, as_amount

LEAST = 1_000  # lines for which the statements, some milliseconds each, are worth it
_TABLES = {kind: table for kind, table in TABLE_OF_EVENT.items() if table.place == "recorded"}
_OF_EVENT = ("id", "execution", "stage", "time")  # the columns that are no fields
_REQUIRED = ("id", "execution", "time")
# SQL type -> the types of Python's values, and the range of numbers.
_FORMS: dict[str, tuple[set[type], float, float]] = {
    "VARCHAR": ({str}, 0, 0),
    "JSON": ({dict}, 0, 0),
    "BOOLEAN": ({bool}, 0, 1),
    "INTEGER": ({int}, -(2**31), 2**31 - 1),
    "BIGINT": ({int}, -(2**63), LARGEST_INTEGER),
    "DOUBLE": ({int, float}, -math.inf, math.inf),
    "TIMESTAMP": ({int}, 0, (LATEST - EARLIEST) // timedelta(microseconds=1) - 1),
}
# Integers of more than 64 bits, which orjson would round. Most lines have no 19 digits, which is found out much faster.
_ZEROS, _TO_ZEROS = b"0" * 19, bytes.maketrans(b"123456789", b"0" * 9)
_LONG_INTEGER = re.compile(rb"[^.0-9][0-9]{19}")


def _fits(table: CatalogTable, name: str, values: Sequence[Any]) -> bool:
    """Whether a column takes all these values as they are: `event_row` would neither change nor refuse one."""
    types, least, most = _FORMS[table.columns[name]]
    found = set(map(type, values))
    if NoneType in found and name not in _REQUIRED:
        found.remove(NoneType)
        values = [value for value in values if value is not None]
    if not found <= types or not found:
        return not found
    if found == {str}:
        return "".join(values).isprintable()
    if CASTS_OF[table.name][name] is as_amount:
        least = 0
    return found == {dict} or (least <= min(values) and max(values) <= most)


def _columns(table: CatalogTable, events: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The values of events by column. Takes out of their fields what has a column of its own."""
    every = [event["fields"] for event in events]
    columns: dict[str, list[Any]] = {}
    for name in table.columns:
        if name in _OF_EVENT:
            columns[name] = [event.get(name) for event in events]
        elif name != "fields":
            columns[name] = [fields.pop(name, None) for fields in every]
    columns["stage"] = [stage or None for stage in columns["stage"]]
    if "fields" in table.columns:  # all others
        columns["fields"] = every
    return columns


def _value(name: str, kind: str) -> str:
    """SQL for the values of a column, which are given as one JSON text: much faster than as a list."""
    values = f"""unnest(from_json(?::VARCHAR, '["{"BIGINT" if kind == "TIMESTAMP" else kind}"]'))"""
    return f'{f"make_timestamp({values})" if kind == "TIMESTAMP" else values} AS "{name}"'


def insert_plain(connection: duckdb.DuckDBPyConnection, lines: Sequence[bytes], is_new: bool) -> set[int]:
    """Insert the rows of all lines in the usual form (`is_new`: see `insert_rows`); returns the places of these."""
    found: dict[str, tuple[list[int], list[dict[str, Any]]]] = {kind: ([], []) for kind in _TABLES}
    for place, line in enumerate(lines):
        if line.count(b"[") + line.count(b"{") > DEEPEST or len(line) > LARGEST_EVENT:
            continue  # it may be nested too deep
        try:
            event = orjson.loads(line)
            kind, fields = event["kind"], event["fields"]
            places, events = found[kind]
        except (ValueError, LookupError, TypeError):
            continue
        if not isinstance(fields, dict):
            continue
        # Of a metric no field is kept as JSON.
        if kind != "metric" and _ZEROS in line.translate(_TO_ZEROS) and _LONG_INTEGER.search(line):
            continue
        places.append(place)
        events.append(event)
    taken: set[int] = set()
    for kind, (places, events) in found.items():
        table = _TABLES[kind]
        columns = _columns(table, events)
        odd = {
            place
            for name, values in columns.items()
            if not _fits(table, name, values)
            for place, value in zip(places, values, strict=True)
            if not _fits(table, name, [value])
        }
        if odd:
            for name, values in columns.items():
                columns[name] = [value for place, value in zip(places, values, strict=True) if place not in odd]
        if len(odd) < len(places):
            rows = f"SELECT {', '.join(_value(name, table.columns[name]) for name in columns)}"
            texts = [orjson.dumps(values).decode() for values in columns.values()]
            insert_rows(connection, table, rows, texts, is_new=is_new)
        taken.update(set(places) - odd)
    return taken


def insert_rows(
    connection: duckdb.DuckDBPyConnection, table: CatalogTable, rows: str, parameters: Sequence[Any], *, is_new: bool
) -> None:
    """Insert the rows of a query into a table of events, each event once: of two with one key the newer stays.

    `is_new`: without a look for those that are in the table; `keep_newest` has to follow, once for all rows.
    """
    target, key = f"{table.place}.{table.name}", ", ".join(table.key)
    insert = f"INSERT INTO {target} BY NAME {rows}"
    if is_new:
        connection.execute(insert, parameters)
        return
    (last,) = connection.execute(f"SELECT coalesce(max(rowid), -1) FROM {target}").fetchone() or (-1,)
    connection.execute(insert, parameters)
    # By the executions of the new rows DuckDB reads only that part of the table which has rows of them: the events of
    # an execution are written together.
    _keep_newest(connection, table, f"({key}) IN (SELECT {key} FROM {target} WHERE rowid > {last})")


def keep_newest(connection: duckdb.DuckDBPyConnection) -> None:
    """Of the rows of one event keep the newest, and of those of one time that which was inserted last."""
    for table in _TABLES.values():
        digest = f"hash({', '.join(table.key)})"  # of 64 bits, since the keys of all rows would not fit into memory
        repeated = f"SELECT {digest} FROM {table.place}.{table.name} GROUP BY 1 HAVING count(*) > 1"
        _keep_newest(connection, table, f"{digest} IN ({repeated})")


def _keep_newest(connection: duckdb.DuckDBPyConnection, table: CatalogTable, which: str) -> None:
    """`keep_newest` among the rows that meet a condition."""
    target, key = f"{table.place}.{table.name}", ", ".join(table.key)
    connection.execute(
        f"DELETE FROM {target} WHERE rowid IN (SELECT rowid FROM {target} WHERE {which} "
        f"QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY time DESC, rowid DESC) > 1)"
    )
