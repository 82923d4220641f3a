"""The catalog: eight DuckDB tables over the manifests and event files, which can be rebuilt from them at any time.

While one process has a DuckDB file open for writing, every other attempt to open it fails, read-only ones too. So no
process keeps it open: each transaction opens the file, works, and closes it (about 50 ms), and who has several queries
keeps it open for as long as they take (`CatalogReader`). Before that it takes a lock of ours, because DuckDB's own does
not protect a process that opens the file while another one closes it: eight processes that committed at once damaged it
in one of three trials (bench/operation/commits.py). Programs that do not take our lock, such as DuckDB's shell, are
waited for by polling. The table `ingested` holds how far each file has been read; a position and the rows up to it are
written in one transaction.
"""

import atexit
import logging
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb

from common.errors import ConfigError, Retryable
from common.files import atomic_path, writing
from common.text import first_line
from store.artifacts import Store
from store.events import READ_LIMIT, read_events
from store.locks import flock_until
from store.manifest import MANIFEST
from store.schema import (
    ARTIFACTS,
    INPUTS,
    LINEAGE_WITH_CALLS,
    MACROS,
    SCHEMA,
    TABLE_OF_EVENT,
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

PATIENCE_S = 60.0  # how long to wait for other processes
SLICE = 2**20  # bytes of events between two looks at the clock: about half a second
# Off: looking for extensions on the network. Two threads are enough for transactions this small.
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {"autoinstall_known_extensions": False, "threads": 2}

# For a query that a person typed. DuckDB without external access still lets it write beside its own file (`COPY … TO
# 'catalog.duckdb.wal'`, which the next transaction would take for its own), so its file system is off as well.
_LOCKED = (
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET disabled_filesystems = 'LocalFileSystem'",
    "SET lock_configuration = true",
)
_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
# Any statement with a PIVOT whose columns are not listed has the type MULTI, and only its first word says what it is.
_PIVOTS = re.compile(r"(\s|--[^\n]*\n|/\*.*?\*/|\()*(PIVOT|SELECT|FROM|WITH|EXPLAIN)\b", re.IGNORECASE | re.DOTALL)
_ONLY_READS = (
    "it may only read the catalog's tables: SELECT, FROM, WITH, VALUES, DESCRIBE, SHOW, SUMMARIZE, PIVOT or EXPLAIN, "
    "and no file and no setting. `nautile store export TABLE OUT.parquet` writes a table to a file"
)

# DuckDB gives the connections of a process to one file one database, which the last of them closes: none may be opened
# meanwhile. Held for moments only, and by nobody who waits for another process.
_opening = threading.Lock()


@atexit.register
def _hide_leak_report() -> None:
    """Keep DuckDB's binding from printing sixty lines about leaks as the interpreter ends.

    It reports every type that is still referred to once the modules are gone. Prefect keeps a flow, and with it all
    that the flow's module refers to, to the very end, so each flow run would print that report.
    """
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class CatalogBusy(Retryable):
    """Another process kept the catalog open for longer than we wait. Nothing is lost: the next ingestion catches up."""


class Catalog:
    """The catalog of one store. Holds no connection; safe to use from several threads and processes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = store.catalog_path
        self._queue = store.root / "locks" / "catalog.lock"

    def ingest(self, *, patience: float = PATIENCE_S, most_s: float = math.inf) -> int:
        """Read manifests and events written since the last call; returns the number of rows written.

        Idempotent, and safe while other processes do the same. After `most_s` seconds a backlog is left to the next
        call. Raises `CatalogBusy` after `patience` seconds of waiting for a lock, `ConfigError` if the file is not a
        catalog or the store cannot be written.
        """
        rows = 0
        more = True
        until = time.monotonic() + most_s
        while more:  # a long backlog takes several short transactions
            with self._transaction(patience) as connection:
                written, more = self._ingest_some(connection, until)
                rows += written
            if time.monotonic() >= until:
                break
        with suppress(OSError):
            os.utime(self._queue)
        return rows

    def age_s(self) -> float:
        """Seconds since any process last ended an `ingest`; infinity if none has, or the clock went back."""
        try:
            age = time.time() - self._queue.stat().st_mtime
        except OSError:
            return math.inf
        return age if age >= 0 else math.inf

    def rebuild(self, *, patience: float = PATIENCE_S) -> dict[str, int]:
        """Empty every table and fill it from manifests and events, in one transaction. Returns rows by table.

        A file that is damaged is replaced. Raises as `ingest` does.
        """
        try:
            return self._rebuild(patience)
        except NewerCatalog:
            raise
        except ConfigError as error:
            logger.warning("the catalog is replaced by a new one: %s", error)
        with writing(self.store.root):
            for path in (self.path, self.path.with_name(self.path.name + ".wal")):
                path.unlink(missing_ok=True)
        return self._rebuild(patience)

    def query(self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S) -> list[CatalogRow]:
        """The rows of a read-only query as dicts in the order of its columns. See `select` for the errors."""
        return _as_dicts(*self.select(sql, parameters, patience=patience))

    def select(
        self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S, files: bool = False
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a read-only query over everything ingested so far.

        `files`: the query may read and write files, which one that a person typed may not. Raises `ConfigError` if the
        query is wrong (with DuckDB's message), would write, set something or reach for a file; `CatalogBusy` as
        `ingest`.
        """
        with self._readable(patience, locked=not files) as connection:
            return _answer(connection, sql, parameters, locked=not files)

    def reading(self, *, patience: float = PATIENCE_S) -> "CatalogReader":
        """For a block with several queries of one state; see `CatalogReader`."""
        return CatalogReader(self, patience)

    def export(self, table: str, out: Path, *, overwrite: bool = False, patience: float = PATIENCE_S) -> int:
        """Write `table` to the Parquet file `out`, whole or not at all; returns the number of rows.

        Raises `ConfigError` for an unknown table, a file that exists (without `overwrite`) or cannot be written.
        """
        keys = {known.name: ", ".join(known.key) for known in TABLES}
        if table not in keys:
            raise ConfigError(f"no table {table!r}: there are {', '.join(keys)}")
        if out.exists() and not overwrite:
            raise ConfigError(f"{out} exists: name another file, or add --overwrite")
        try:
            with atomic_path(out) as temporary:
                target = str(temporary).replace("'", "''")
                _, rows = self.select(
                    f"COPY (FROM {table} ORDER BY {keys[table]}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)",
                    patience=patience,
                    files=True,
                )
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error.strerror}") from error
        return rows[0][0]

    def lineage(self, artifact_id: str) -> list[CatalogRow]:
        """Every artifact that `artifact_id` was made from, itself first.

        A row of `artifacts` for each, with `depth`, the `name` under which the artifact `made` read it, and `calls`,
        the number of endpoint calls of its execution.

        Raises `ConfigError` if there is no such artifact.
        """
        artifact = self.store.get(artifact_id)
        self.ingest()
        return self.query(LINEAGE_WITH_CALLS, [artifact.id])

    @contextmanager
    def _readable(self, patience: float, *, locked: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        """The catalog, read-only and of the present schema. `locked`: without files and settings."""
        if not self.path.exists():
            self.ingest(patience=patience)
        with ExitStack() as stack:
            # With files alone: those who read beside it would have locked the settings of the process.
            connection = stack.enter_context(self._open(patience, read_only=True, shared=locked))
            if schema_of(connection) != SCHEMA:  # an older one, or none: its first transaction did not finish
                stack.close()
                self.ingest(patience=patience)
                connection = stack.enter_context(self._open(patience, read_only=True, shared=locked))
            if locked:
                _lock_settings(connection)
            yield connection

    def _rebuild(self, patience: float) -> dict[str, int]:
        with self._transaction(patience) as connection:
            _create_empty(connection)
            more = True
            while more:
                _, more = self._ingest_some(connection, math.inf)
            counts = {table.name: f"SELECT count(*) FROM {table.name}" for table in TABLES}
            return {name: connection.execute(sql).fetchall()[0][0] for name, sql in counts.items()}

    def _ingest_some(self, connection: duckdb.DuckDBPyConnection, until: float) -> tuple[int, bool]:
        """Read about `READ_LIMIT` bytes of events, fewer if the time is up; returns the rows written, and whether there
        is more to read."""
        known = dict(connection.execute("SELECT path, position FROM ingested").fetchall())
        written = self._ingest_manifests(connection, known)
        budget = READ_LIMIT
        slice_bytes = READ_LIMIT if until == math.inf else SLICE
        # Of many files at once: a statement takes milliseconds however few rows it has, and others wait for the lock.
        batch: list[tuple[str, list[dict[str, Any]]]] = []
        reached_in: dict[str, int] = {}
        held = 0

        def insert() -> None:
            nonlocal written, held
            written += _insert_events(connection, batch)
            _set_positions(connection, reached_in)
            batch.clear()
            reached_in.clear()
            held = 0

        for path in sorted((self.store.root / "events").glob("*.jsonl")):
            name, size = f"events/{path.name}", path.stat().st_size
            position = known.get(name, 0)
            while position < size:
                if budget <= 0 or (budget < READ_LIMIT and time.monotonic() >= until):
                    insert()
                    return written, True
                events, reached = read_events(path, position, min(budget, slice_bytes))
                if reached == position:
                    break  # a line that is still being written
                batch.append((name, events))
                reached_in[name] = reached
                budget, held = budget - (reached - position), held + (reached - position)
                position = reached
                if held >= slice_bytes:
                    insert()
        insert()
        return written, False

    def _ingest_manifests(self, connection: duckdb.DuckDBPyConnection, known: dict[str, int]) -> int:
        """Write the rows of manifests that are new or have changed, and delete those of manifests that are gone.

        The position of a manifest in `ingested` is its modification time in nanoseconds.
        """
        root, present, new = self.store.root, set(), []
        for kind, key, number, folder in self.store.folders():
            name = str((folder / MANIFEST).relative_to(root))
            try:
                stamp = (folder / MANIFEST).stat().st_mtime_ns
            except OSError:
                continue
            present.add(name)
            if known.get(name) == stamp:
                continue
            if artifact := self.store.read(kind, key, number, folder):
                new.append((name, stamp, artifact))
            else:
                present.discard(name)
        gone = [name for name in known if name.startswith("artifacts/") and name not in present]
        for name in (*gone, *(name for name, _, _ in new)):
            _delete_artifact(connection, name)
        if new:
            _insert(connection, ARTIFACTS, [artifact_row(artifact) for _, _, artifact in new])
            _insert(connection, INPUTS, [row for _, _, artifact in new for row in input_rows(artifact)])
            _set_positions(connection, {name: stamp for name, stamp, _ in new})
        return len(new)

    @contextmanager
    def _transaction(self, patience: float) -> Iterator[duckdb.DuckDBPyConnection]:
        with writing(self.store.root):
            (self.store.root / "locks").mkdir(parents=True, exist_ok=True)
        with self._open(patience, read_only=False) as connection:
            try:
                version = schema_of(connection)
                refuse_newer(self.path, version)
                usable = version == SCHEMA or (version > 0 and migrate(connection, self.path, version))
                connection.execute("BEGIN")
                if not usable:
                    _create_empty(connection)
                yield connection
                connection.execute("COMMIT")
            except duckdb.Error as error:
                raise ConfigError(_unusable(self.path, error)) from error

    @contextmanager
    def _open(self, patience: float, *, read_only: bool, shared: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
        deadline = time.monotonic() + patience
        with flock_until(self._queue, deadline, shared=shared) as acquired:
            if not acquired:
                raise CatalogBusy(f"{self.path} is in use by other processes of this machine")
            connection = self._connect(deadline, read_only)
            try:
                yield connection
            finally:
                with _opening:
                    connection.close()

    def _connect(self, deadline: float, read_only: bool) -> duckdb.DuckDBPyConnection:
        wait = 0.01
        while True:
            try:
                with _opening:
                    return duckdb.connect(self.path, read_only=read_only, config=_SETTINGS)
            except duckdb.Error as error:
                text = first_line(error)
                # Another process has it open, or, where there are no locks, a thread of this one has it otherwise.
                if not re.search("lock|different configuration", text, re.IGNORECASE):
                    raise ConfigError(_unusable(self.path, error)) from None
                if time.monotonic() > deadline:
                    raise CatalogBusy(f"{self.path} is kept open by another process ({text})") from None
            time.sleep(random.uniform(0.5, 1.5) * wait)
            wait = min(0.3, wait * 1.5)


class CatalogReader:
    """Several queries over one connection, which the first of them opens and the end of the block closes.

    Nothing is ingested meanwhile, by whichever process, so the block must be short. For a single thread.
    """

    def __init__(self, catalog: Catalog, patience: float = PATIENCE_S) -> None:
        self._catalog, self._patience = catalog, patience
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._stack = ExitStack()

    def __call__(self, sql: str, *parameters: Any) -> list[CatalogRow]:
        """The rows of a query. Raises as `Catalog.select`."""
        if self._connection is None:
            self._connection = self._stack.enter_context(self._catalog._readable(self._patience, locked=True))
        return _as_dicts(*_answer(self._connection, sql, parameters, locked=True))

    def close(self) -> None:
        """Let others write the catalog; the next query opens it again."""
        self._connection = None
        self._stack.close()

    def __enter__(self) -> "CatalogReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def query_files(sql: str, parameters: Sequence[Any] = ()) -> list[CatalogRow]:
    """The rows of a query of our own that reads files and no table. Raises `ConfigError` with DuckDB's message."""
    with duckdb.connect(config=_SETTINGS) as connection:
        return _as_dicts(*_answer(connection, sql, parameters, locked=False))


def _as_dicts(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[CatalogRow]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _lock_settings(connection: duckdb.DuckDBPyConnection) -> None:
    """Keep queries from files and settings. The connections of a process share these, so the first of them does it."""
    with _opening:
        row = connection.execute("SELECT current_setting('lock_configuration')").fetchone()
        if row != (True,):
            for setting in _LOCKED:
                connection.execute(setting)


def _answer(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any], *, locked: bool
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of a query, over a catalog that is `_readable` like that."""
    try:
        if locked:
            _refuse_writing(connection, sql)
        result = connection.execute(sql, list(parameters))
        return [column[0] for column in result.description or ()], result.fetchall()
    except duckdb.PermissionException:
        raise ConfigError(f"the query was refused: {_ONLY_READS}") from None
    except duckdb.Error as error:
        raise ConfigError(f"the query was refused: {str(error).strip()}") from None


def _refuse_writing(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise `ConfigError` unless all statements of a query read, or if there is none."""
    kinds: list[tuple[duckdb.StatementType | None, str]]
    try:
        kinds = [(statement.type, statement.query) for statement in connection.extract_statements(sql)]
    except ValueError:  # a type that the binding has no name for: UPDATE EXTENSIONS
        kinds = [(None, "")]
    if not kinds:
        raise ConfigError('the query is empty: `nautile sql "SELECT * FROM runs"` is an example')
    for kind, text in kinds:
        if kind not in _READING and not (kind == duckdb.StatementType.MULTI and _PIVOTS.match(text)):
            raise ConfigError(f"the query was refused: {_ONLY_READS}")


def _unusable(path: Path, error: duckdb.Error) -> str:
    reason = first_line(error)
    return f"the catalog {path} cannot be used ({reason}); if it is damaged, `nautile store rebuild` replaces it"


def _create_empty(connection: duckdb.DuckDBPyConnection) -> None:
    """Replace all tables by empty ones of the current schema."""
    connection.execute("DROP TABLE IF EXISTS ingested")
    connection.execute("CREATE TABLE ingested (path VARCHAR PRIMARY KEY, position BIGINT)")
    for table in TABLES:
        connection.execute(f"DROP TABLE IF EXISTS {table.name}")
        connection.execute(table.create())
    for macro in MACROS:
        connection.execute(macro)
    _set_positions(connection, {"schema": SCHEMA})


def _insert_events(connection: duckdb.DuckDBPyConnection, batch: list[tuple[str, list[dict[str, Any]]]]) -> int:
    """Insert the events of files; one that does not fit its table is logged and skipped, as a torn line is.

    Returns the number of rows.
    """
    by_table: dict[str, dict[str, dict[str, Any]]] = {}  # kind -> id -> row: a statement may set a row only once
    for name, event in ((name, event) for name, events in batch for event in events):
        if event["kind"] not in TABLE_OF_EVENT:
            logger.warning("%s: an event of unknown kind %r is skipped", name, event["kind"])
            continue
        try:
            row = event_row(event)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            logger.warning("%s: event %s is skipped: %s", name, event["id"], error)
            continue
        rows, precedence = by_table.setdefault(event["kind"], {}), TABLE_OF_EVENT[event["kind"]].precedence
        if row["id"] not in rows or precedence(row) >= precedence(rows[row["id"]]):
            rows[row["id"]] = row
    for kind, rows in by_table.items():
        _insert(connection, TABLE_OF_EVENT[kind], list(rows.values()))
    return sum(len(rows) for rows in by_table.values())


def _insert(connection: duckdb.DuckDBPyConnection, table: CatalogTable, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(table.upsert(), [[row[name] for row in rows] for name in table.columns])


def _set_positions(connection: duckdb.DuckDBPyConnection, positions: dict[str, int]) -> None:
    if positions:
        both = [list(positions), list(positions.values())]
        connection.execute("INSERT OR REPLACE INTO ingested SELECT unnest(?::VARCHAR[]), unnest(?::BIGINT[])", both)


def _delete_artifact(connection: duckdb.DuckDBPyConnection, name: str) -> None:
    """Delete the rows of the artifact whose manifest was at `name`."""
    _, kind, folder, _ = name.split("/")
    key, dot, number = folder.partition(".")
    artifact_id = f"{kind}/{key[:12]}{dot}{number}"  # as `short_id` writes it
    connection.execute("DELETE FROM inputs WHERE artifact = ?", [artifact_id])
    connection.execute("DELETE FROM artifacts WHERE id = ?", [artifact_id])
    connection.execute("DELETE FROM ingested WHERE path = ?", [name])
