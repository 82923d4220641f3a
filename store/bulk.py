"""Bulk ingestion of event lines: metrics and samples in their usual form are read and inserted by SQL alone.

Python takes some 50 microseconds to make a row of an event, DuckDB's JSON reader five. Only lines whose every value has
the form that `EventWriter` gives it are taken; all others, and all other kinds, are left to `store.schema.event_row`,
which checks, converts or refuses them. For those that are taken both give the same row, which a test holds.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import duckdb

from nautile.store.manifest import DEEPEST, EARLIEST, LATEST
from nautile.store.schema import METRICS, SAMPLES, CatalogTable

LEAST = 1_000  # lines for which the statements, some milliseconds each, are worth it
_FIELDS = ("name", "step", "value", "source", "set", "index")
_PATHS = ("id", "kind", "execution", "stage", "time", *(f"fields.{name}" for name in _FIELDS))
_NUMBER_OF = {path.removeprefix("fields."): f"e[{number}]" for number, path in enumerate(_PATHS, 1)}
# Integers of more than 64 bits, which DuckDB would round; halves of surrogate pairs, which it refuses; and what it
# takes for JSON though it is none: NaN, infinities, and a comma behind the last value.
_NOT_PLAIN = r"(?i)(^|[^.0-9])[0-9]{19}|\\ud[89a-f]|[:,\[]\s*-?(nan|inf|infinity)\s*[,}\]]|,\s*[}\]]"


def _is_text(name: str) -> str:
    """Printable ASCII without an escape: neither has `as_line` anything to change, nor the quotes anything inside."""
    return rf"""regexp_full_match({_NUMBER_OF[name]}, '"[ !#-\[\]-~]*"')"""


def _is_integer(name: str) -> str:
    return f"regexp_full_match({_NUMBER_OF[name]}, '-?[0-9]{{1,18}}')"


def _is_absent(name: str) -> str:
    return f"({_NUMBER_OF[name]} IS NULL OR {_NUMBER_OF[name]} = 'null')"


def _text(name: str) -> str:
    return f"CASE WHEN {_is_absent(name)} THEN NULL ELSE trim({_NUMBER_OF[name]}, '\"') END"


def _number(name: str, kind: str) -> str:
    """`TRY_CAST`, since DuckDB may convert a value before it has looked at the condition beside it."""
    return f"TRY_CAST({_NUMBER_OF[name]} AS {kind})"


def _microseconds(time: datetime) -> int:
    return int((time - EARLIEST).total_seconds()) * 10**6


_USUAL = f"""
{_is_text("id")} AND {_is_text("execution")} AND ({_is_absent("stage")} OR {_is_text("stage")})
AND {_is_integer("time")} AND {_number("time", "BIGINT")} BETWEEN 0 AND {_microseconds(LATEST) - 1}
"""
_METRIC = rf"""
{_NUMBER_OF["kind"]} = '"metric"' AND {_is_text("name")} AND {_is_integer("step")}
AND regexp_full_match({_NUMBER_OF["value"]}, '-?[0-9]+([.][0-9]+)?([eE][-+]?[0-9]{{1,2}})?')
AND ({_is_absent("source")} OR {_is_text("source")})
"""
_SAMPLE = f"""
{_NUMBER_OF["kind"]} = '"sample"' AND {_is_integer("index")} AND ({_is_absent("set")} OR {_is_text("set")})
"""
_READ = f"""
CREATE OR REPLACE TEMP TABLE plain AS
WITH given AS (SELECT unnest(range(?)) AS place, unnest(?::VARCHAR[]) AS line),
parsed AS (
    SELECT place, line, TRY(json_extract(line, {[f"$.{path}" for path in _PATHS]})) AS e FROM given
    WHERE NOT regexp_matches(line, '{_NOT_PLAIN}'))
SELECT place, e, CASE WHEN {_METRIC} THEN 'metrics' ELSE 'samples' END AS name, line FROM parsed
WHERE coalesce({_USUAL} AND ({_METRIC} OR {_SAMPLE}), false)
"""
_COLUMNS = {
    "id": _text("id"),
    "execution": _text("execution"),
    "stage": f"nullif({_text('stage')}, '')",
    "time": f"make_timestamp({_number('time', 'BIGINT')})",
    "name": _text("name"),
    "step": _number("step", "BIGINT"),
    "value": _number("value", "DOUBLE"),
    "source": _text("source"),
    "set": _text("set"),
    "index": _number("index", "BIGINT"),
    "fields": """json_merge_patch(json_extract(line, '$.fields'), '{"set": null, "index": null}')""",
}


def insert_rows(
    connection: duckdb.DuckDBPyConnection, table: CatalogTable, rows: str, parameters: Sequence[Any] = ()
) -> None:
    """Insert the rows of a query into a table of events, each event once: of two with one key the newer stays.

    By the executions of the new rows, DuckDB reads only that part of the table which has rows of them: the events of an
    execution are written together.
    """
    target, key = f"{table.place}.{table.name}", ", ".join(table.key)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE added AS {rows}", parameters)
    # Asked first, which is a tenth of the time of ordering all rows: hardly ever are there any.
    if connection.execute(f"SELECT 1 FROM added GROUP BY {key} HAVING count(*) > 1 LIMIT 1").fetchone():
        connection.execute(
            f"DELETE FROM added WHERE rowid NOT IN (SELECT arg_max(rowid, (time, rowid)) FROM added GROUP BY {key})"
        )
    same = " AND ".join(f"a.{name} = t.{name}" for name in table.key)
    known = connection.execute(
        f"SELECT t.rowid, a.rowid, a.time >= t.time FROM {target} t JOIN added a ON {same}"
    ).fetchall()
    if known:
        older = [old for old, _, is_newer in known if is_newer]
        late = [new for _, new, is_newer in known if not is_newer]
        connection.execute(f"DELETE FROM {target} WHERE rowid IN (SELECT unnest(?::BIGINT[]))", [older])
        connection.execute("DELETE FROM added WHERE rowid IN (SELECT unnest(?::BIGINT[]))", [late])
    connection.execute(f"INSERT INTO {target} BY NAME SELECT * FROM added")
    connection.execute("DROP TABLE added")


def insert_plain(connection: duckdb.DuckDBPyConnection, lines: Sequence[bytes]) -> set[int]:
    """Insert the rows of all lines in the usual form; returns the places of these lines."""
    texts: list[str] = []
    places: list[int] = []
    for place, line in enumerate(lines):
        if line.count(b"[") + line.count(b"{") > DEEPEST:
            continue  # it may be nested too deep
        try:
            texts.append(line.decode())
        except UnicodeDecodeError:
            continue
        places.append(place)
    connection.execute(_READ, [len(texts), texts])
    for table in (METRICS, SAMPLES):
        columns = ", ".join(f'{_COLUMNS[name]} AS "{name}"' for name in table.columns)
        insert_rows(connection, table, f"SELECT {columns} FROM plain WHERE name = '{table.name}' ORDER BY place")
    taken = connection.execute("SELECT place FROM plain").fetchall()
    connection.execute("DROP TABLE plain")
    return {places[place] for (place,) in taken}
