"""The catalog: six DuckDB tables over the manifests and event files, built from them and rebuilt at any time.

While one process has a DuckDB file open to write, every other open of it fails, read-only ones too. So nobody keeps
it open: each transaction is open, work, close (about 50 ms). Who opens it queues at a lock of ours first: DuckDB's own
can only be polled, and it does not keep apart one process that closes the file and one that opens it (eight that
committed at once broke it, in one of three trials; bench/commits.py). Others that open the file are waited for still.
A bookkeeping table says how far each file has been taken in; a cursor and its rows are written in one transaction.
"""

import atexit
import logging
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from common.errors import ConfigError, Retryable
from common.files import writing
from store.artifacts import Store
from store.events import READ_LIMIT, read_events
from store.locks import flock_until
from store.manifest import MANIFEST
from store.schema import (
    ARTIFACTS,
    BY_EVENT,
    INPUTS,
    LINEAGE_WITH_CALLS,
    MACROS,
    SCHEMA,
    TABLES,
    CatalogTable,
    NewerCatalog,
    artifact_row,
    event_row,
    input_rows,
    migrate,
    refuse_newer,
    schema_of,
)

CatalogRow = dict[str, Any]  # of a query: column -> value
logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
# DuckDB would look for extensions on the network; the two threads are enough for transactions this small.
_SETTINGS = {"autoinstall_known_extensions": False, "threads": 2}

_within = threading.RLock()  # one process cannot open the file twice with different settings


@atexit.register
def _hide_leak_report() -> None:
    """Keep DuckDB's binding from printing sixty lines about leaks as the interpreter ends.

    It reports every type that is still referred to once the modules are gone. Prefect keeps a flow, and with it all
    that the flow's module refers to, to the very end, so each flow run would print that report.
    """
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class CatalogBusy(Retryable):
    """Another process kept the catalog open longer than we were ready to wait. Nothing is lost by it."""


class _Outdated(Exception):
    """The file holds tables of another schema, or (its first transaction never ended) none."""


class Catalog:
    """The catalog of one store. Holds no connection; safe to use from several threads and processes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = store.catalog_path

    def ingest(self, *, patience: float = PATIENCE_S) -> int:
        """Take in what has been written since the last time; returns the number of rows written.

        Idempotent, and safe beside other processes doing the same. Raises `CatalogBusy` after `patience` seconds
        behind a lock, `ConfigError` if the file is not a catalog or the store cannot be written.
        """
        rows = 0
        more = True
        while more:  # a long backlog goes in several short transactions
            with self._transaction(patience) as connection:
                written, more = self._take_in(connection)
                rows += written
        return rows

    def rebuild(self, *, patience: float = PATIENCE_S) -> dict[str, int]:
        """Empty every table and fill it from manifests and events, in one transaction. Returns rows by table.

        A file that is no catalog any more is replaced. Raises as `ingest` does.
        """
        try:
            return self._rebuild(patience)
        except NewerCatalog:
            raise
        except ConfigError as error:
            logger.warning("the catalog is begun anew: %s", error)
        with writing(self.store.root):
            for path in (self.path, self.path.with_name(self.path.name + ".wal")):
                path.unlink(missing_ok=True)
        return self._rebuild(patience)

    def query(self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S) -> list[dict[str, Any]]:
        """The rows of a read-only query as dicts in the order of its columns. See `select` for the errors."""
        columns, rows = self.select(sql, parameters, patience=patience)
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def select(
        self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a read-only query, of what has been ingested so far.

        Raises `ConfigError` with DuckDB's own words if the query is wrong or would write, `CatalogBusy` as `ingest`.
        """
        if not self.path.exists():
            self.ingest(patience=patience)
        try:
            return self._select(sql, parameters, patience)
        except _Outdated:
            self.ingest(patience=patience)
            return self._select(sql, parameters, patience)

    def export(self, table: str, out: Path, *, overwrite: bool = False, patience: float = PATIENCE_S) -> int:
        """Write `table` to the Parquet file `out`, whole or not at all; returns its rows.

        Raises `ConfigError` for an unknown table, a file that is there (without `overwrite`) or cannot be written.
        """
        known = [known.name for known in TABLES]
        if table not in known:
            raise ConfigError(f"no table {table!r}: there are {', '.join(known)}")
        if out.exists() and not overwrite:
            raise ConfigError(f"{out} is there already: name another file, or say --overwrite")
        temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.tmp")
        where = str(temporary).replace("'", "''")
        keys = ", ".join(next(known.key for known in TABLES if known.name == table))
        try:
            _, rows = self.select(
                f"COPY (FROM {table} ORDER BY {keys}) TO '{where}' (FORMAT parquet, COMPRESSION zstd)",
                patience=patience,
            )
            temporary.replace(out)
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return rows[0][0]

    def lineage(self, artifact_id: str) -> list[dict[str, Any]]:
        """Every artifact that `artifact_id` was made from, itself first: a row of `artifacts` each, with `depth`, the
        `name` under which `made` read it, and `calls`, the number of endpoint calls of its making.

        Raises `ConfigError` if there is no such artifact.
        """
        artifact = self.store.get(artifact_id)
        self.ingest()
        return self.query(LINEAGE_WITH_CALLS, [artifact.id])

    def _select(self, sql: str, parameters: Sequence[Any], patience: float) -> tuple[list[str], list[tuple[Any, ...]]]:
        with self._open(patience, read_only=True) as connection:
            if schema_of(connection) != SCHEMA:
                raise _Outdated
            try:
                result = connection.execute(sql, list(parameters))
                return [column[0] for column in result.description or ()], result.fetchall()
            except duckdb.Error as error:
                raise ConfigError(f"the query was refused: {str(error).strip()}") from None

    def _rebuild(self, patience: float) -> dict[str, int]:
        with self._transaction(patience) as connection:
            _drop(connection)
            more = True
            while more:
                _, more = self._take_in(connection)
            counts = {table.name: f"SELECT count(*) FROM {table.name}" for table in TABLES}
            return {name: connection.execute(sql).fetchall()[0][0] for name, sql in counts.items()}

    def _take_in(self, connection: duckdb.DuckDBPyConnection) -> tuple[int, bool]:
        """One transaction's worth: the rows written, and whether there is more."""
        known = dict(connection.execute("SELECT path, position FROM ingested").fetchall())
        written = self._take_in_artifacts(connection, known)
        budget = READ_LIMIT
        for name, size in self._event_files():
            position = known.get(name, 0)
            while position < size:
                if budget <= 0:
                    return written, True
                events, reached = read_events(self.store.root / name, position, budget)
                if reached == position:
                    break  # a line that is still being written
                written += _insert_events(connection, events, name)
                _advance(connection, name, reached)
                budget -= reached - position
                position = reached
        return written, False

    def _event_files(self) -> list[tuple[str, int]]:
        """(path in the store, bytes) of every event file."""
        folder = self.store.root / "events"
        if not folder.is_dir():
            return []
        with os.scandir(folder) as entries:
            return sorted((f"events/{e.name}", e.stat().st_size) for e in entries if e.name.endswith(".jsonl"))

    def _take_in_artifacts(self, connection: duckdb.DuckDBPyConnection, known: dict[str, int]) -> int:
        """Rows for manifests that are new or have moved; none for those that are gone."""
        root, found, new = self.store.root, set(), []
        for kind, key, number, folder in self.store.folders():
            name = str((folder / MANIFEST).relative_to(root))
            try:
                stamp = (folder / MANIFEST).stat().st_mtime_ns
            except OSError:
                continue
            found.add(name)
            if known.get(name) == stamp:
                continue
            artifact = self.store.read(kind, key, number, folder)
            if artifact is None:
                found.discard(name)
                continue
            new.append((name, stamp, artifact))
        gone = [name for name in known if name.startswith("artifacts/") and name not in found]
        for name in (*gone, *(name for name, _, _ in new)):
            _forget(connection, name)
        if new:
            _insert(connection, ARTIFACTS, [artifact_row(artifact) for _, _, artifact in new])
            _insert(connection, INPUTS, [row for _, _, artifact in new for row in input_rows(artifact)])
            for name, stamp, _ in new:
                _advance(connection, name, stamp)
        return len(new)

    @contextmanager
    def _transaction(self, patience: float) -> Iterator[duckdb.DuckDBPyConnection]:
        with writing(self.store.root):
            (self.store.root / "locks").mkdir(parents=True, exist_ok=True)
        with self._open(patience, read_only=False) as connection:
            try:
                version = schema_of(connection)
                refuse_newer(self.path, version)
                whole = version == SCHEMA or (version > 0 and migrate(connection, self.path, version))
                connection.execute("BEGIN")
                if not whole:
                    _drop(connection)
                yield connection
                connection.execute("COMMIT")
            except duckdb.Error as error:
                raise ConfigError(_broken(self.path, error)) from error

    @contextmanager
    def _open(self, patience: float, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        deadline = time.monotonic() + patience
        queue = self.store.root / "locks" / "catalog.lock"
        with _within, flock_until(queue, deadline, shared=read_only) as mine:
            if not mine:
                raise CatalogBusy(f"{self.path} is kept busy by other processes of this machine")
            connection = self._connect(deadline, read_only)
            try:
                yield connection
            finally:
                connection.close()

    def _connect(self, deadline: float, read_only: bool) -> duckdb.DuckDBPyConnection:
        wait = 0.01
        while True:
            try:
                return duckdb.connect(self.path, read_only=read_only, config=_SETTINGS)
            except duckdb.Error as error:
                text = str(error).strip().splitlines()[0]
                if "lock" not in text.lower():
                    raise ConfigError(_broken(self.path, error)) from None
                if time.monotonic() > deadline:
                    raise CatalogBusy(f"{self.path} is kept open by another process ({text})") from None
            time.sleep(random.uniform(0.5, 1.5) * wait)
            wait = min(0.3, wait * 1.5)


def _broken(path: Path, error: duckdb.Error) -> str:
    text = str(error).strip().splitlines()[0]
    return f"the catalog {path} cannot be used ({text}); if it is damaged, `nautile store rebuild` mends it"


def _drop(connection: duckdb.DuckDBPyConnection) -> None:
    """Begin with empty tables of this schema."""
    connection.execute("DROP TABLE IF EXISTS ingested")
    connection.execute("CREATE TABLE ingested (path VARCHAR PRIMARY KEY, position BIGINT)")
    for table in TABLES:
        connection.execute(f"DROP TABLE IF EXISTS {table.name}")
        connection.execute(table.create())
    for macro in MACROS:
        connection.execute(macro)
    _advance(connection, "schema", SCHEMA)


def _insert_events(connection: duckdb.DuckDBPyConnection, events: list[dict[str, Any]], name: str) -> int:
    """Insert the events; one that has no place in its table is logged and passed over, as a torn line is."""
    by_table: dict[str, dict[str, dict[str, Any]]] = {}
    for event in events:
        if event["kind"] not in BY_EVENT:
            logger.warning("%s: an event of unknown kind %r is passed over", name, event["kind"])
            continue
        try:
            row = event_row(event)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            logger.warning("%s: event %s is passed over: %s", name, event["id"], error)
            continue
        rows, order = by_table.setdefault(event["kind"], {}), BY_EVENT[event["kind"]].order
        if row["id"] not in rows or order(row) >= order(rows[row["id"]]):
            rows[row["id"]] = row
    for kind, rows in by_table.items():
        _insert(connection, BY_EVENT[kind], list(rows.values()))
    return sum(len(rows) for rows in by_table.values())


def _insert(connection: duckdb.DuckDBPyConnection, table: CatalogTable, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(table.upsert(), [[row[name] for row in rows] for name in table.columns])


def _advance(connection: duckdb.DuckDBPyConnection, name: str, position: int) -> None:
    connection.execute("INSERT OR REPLACE INTO ingested VALUES (?, ?)", [name, position])


def _forget(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """Drop the rows of the artifact whose manifest was at `name`."""
    _, kind, folder, _ = name.split("/")
    key, dot, number = folder.partition(".")
    artifact_id = f"{kind}/{key[:12]}{dot}{number}"
    connection.execute("DELETE FROM inputs WHERE artifact = ?", [artifact_id])
    connection.execute("DELETE FROM artifacts WHERE id = ?", [artifact_id])
    connection.execute("DELETE FROM ingested WHERE path = ?", [name])
