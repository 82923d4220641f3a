"""The catalog: DuckDB tables and views of the manifests and event files, which can be rebuilt from them at any time.

While a process has a DuckDB file open for writing, no other process can open it, not even read-only. So no process
keeps it open: each transaction opens the file, works and closes it (about 50 ms); a `CatalogReader` keeps it open for a
few queries. Before opening the file a process takes a lock of our own, because DuckDB's lock does not protect a process
that opens the file while another one closes it: eight processes that committed at the same time damaged the file in one
of three trials. Programs that do not take our lock, such as DuckDB's shell, are waited for by polling.

The table `ingested` records how far each file has been read, and how many of its events were left out because they do
not have the form of this version. A position and the rows up to it are written in the same transaction, so every event
is ingested exactly once.
"""

import gc
import logging
import math
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb

from nautile.common.errors import ConfigError, Retryable
from nautile.common.file_locks import has_locks
from nautile.common.files import NOT_WRITABLE, atomic_path, writing
from nautile.common.text import first_line
from nautile.store.artifacts import Store
from nautile.store.bulk import LEAST, insert_plain, insert_rows, keep_newest
from nautile.store.events import READ_LIMIT, parse_event, read_lines
from nautile.store.layout import ARTIFACT_FOLDER, EVENTS
from nautile.store.locks import KeyLock, flock_until
from nautile.store.manifest import MANIFEST
from nautile.store.schema import (
    ARTIFACTS,
    INPUTS,
    SCHEMA,
    TABLE_OF_EVENT,
    TABLES,
    CatalogTable,
    artifact_row,
    event_row,
    input_rows,
    schema_of,
)
from nautile.store.views import LINEAGE_WITH_CALLS, MACROS, RELATIONS, VIEWS

CatalogRow = dict[str, Any]  # a row of a query's result: column -> value
logger = logging.getLogger(__name__)

PATIENCE_S = 60.0  # how long to wait for other processes
FOREIGN_S = 5.0  # how long to wait for a program that does not take our lock, such as DuckDB's shell
_LEFT_OUT = "left out: "  # in `ingested`, in front of a file's name: the number of its events that were left out
_EVENTS_LEFT_OUT = f"SELECT path, position FROM ingested WHERE starts_with(path, '{_LEFT_OUT}') ORDER BY path"
_ADD_POSITION = """
INSERT INTO ingested VALUES (?, ?) ON CONFLICT (path) DO UPDATE SET position = position + excluded.position
"""
_VIEWS_AND_TABLES = """
SELECT 'VIEW', schema_name, view_name FROM duckdb_views() WHERE NOT internal
UNION ALL SELECT 'TABLE', schema_name, table_name FROM duckdb_tables() WHERE NOT internal
"""
BULK_MEMORY = "120MB"  # of DuckDB's buffers in a rebuild; the rest is on disk
RECORDED = tuple(table for table in TABLES if table.place == "recorded")
SLICE = 2**20  # bytes of events between two checks of the time limit: a tenth of a second or two
# Extensions are not downloaded from the network. Two threads are enough for such small transactions.
_SETTINGS: dict[str, str | bool | int | float | list[str]] = {"autoinstall_known_extensions": False, "threads": 2}

# Settings for queries that users type. Without external access DuckDB still allows writing next to its own file (`COPY
# … TO 'catalog.duckdb.wal'`, which the next transaction would read as its own), so the file system is disabled as well.
_LOCKED = (
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET disabled_filesystems = 'LocalFileSystem'",
    "SET lock_configuration = true",
)
# What DuckDB raises when a query reads a file that was cut off or overwritten.
DAMAGE = (duckdb.IOException, duckdb.FatalException, duckdb.InternalException, duckdb.SerializationException)
_READING = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
# A statement with a PIVOT whose columns are not listed has the type MULTI, so it is recognised by its first word.
_PIVOTS = re.compile(r"(\s|--[^\n]*\n|/\*.*?\*/|\()*(PIVOT|SELECT|FROM|WITH|EXPLAIN)\b", re.IGNORECASE | re.DOTALL)
_ONLY_READS = (
    "it may only read the catalog's tables: SELECT, FROM, WITH, VALUES, DESCRIBE, SHOW, SUMMARIZE, PIVOT or EXPLAIN, "
    "and no file and no setting. `nautile store export TABLE OUT.parquet` writes a table to a file"
)

# All connections of a process to one file share one database, which the last of them closes: no other may be opened
# while it does. Held only for opening and closing, never while waiting for another process.
_opening = threading.Lock()


class _LeakReport:
    """Redirects standard error as it is destroyed, which is after all that Python code may write; see its user."""

    def __init__(self) -> None:
        # Kept here: as this is destroyed, the modules `os` and `sys` may be unloaded already.
        self._null = os.open(os.devnull, os.O_WRONLY)
        self._redirect, self._at_end = os.dup2, sys.is_finalizing

    def __del__(self) -> None:
        if self._at_end():
            self._redirect(self._null, 2)


def hide_leak_report() -> None:
    """Suppress the sixty lines about leaks that DuckDB's binding prints as this process ends. For our own processes.

    It reports every type that is still referenced after the modules are unloaded. Prefect keeps a reference to a flow,
    and so to all that its module refers to, until the end, so every flow run would print that report.

    An attribute of `sys` is destroyed after all modules are unloaded and all exit functions have run. A module's own
    attributes may never be: whoever refers to a function of it refers to them.
    """
    sys._duckdb_leak_report = _LeakReport()  # type: ignore[attr-defined]


class CatalogBusy(Retryable):
    """Another process kept the catalog open too long. Nothing is lost: the next `ingest` continues where this ended."""


class CatalogNotWritable(ConfigError):
    """The disk is full or read-only, or this user may not write: the catalog can only be read as it is."""


class Catalog:
    """The catalog of a store. Holds no connection; safe to use from several threads and processes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.path = store.catalog_path
        self._lock_path = store.locks / "catalog.lock"  # its mtime is the end of the last `ingest`
        self._is_new = False  # whether the file is empty and no other process opens it: all is one transaction

    def ingest(self, *, patience: float = PATIENCE_S, most_s: float = math.inf) -> int:
        """Read manifests and events written since the last call; returns the number of rows written.

        Idempotent, and safe while other processes do the same. After `most_s` seconds the remaining backlog is left to
        the next call. Raises `CatalogBusy` after `patience` seconds of waiting for a lock, `ConfigError` if the file is
        not a catalog or the store cannot be written.
        """
        rows = 0
        has_more = True
        deadline = time.monotonic() + most_s
        while has_more:  # a long backlog takes several short transactions, unless nobody waits for the file
            with self._writable(patience) as connection, self._transaction(connection):
                written, has_more = self._ingest_batch(connection, deadline)
            rows += written
            if time.monotonic() >= deadline:
                break
        with suppress(OSError):
            os.utime(self._lock_path)
        return rows

    @contextmanager
    def caught_up(self, *, patience: float = PATIENCE_S) -> Iterator["CatalogReader"]:
        """`reading` after `catch_up`. Where nothing is new, both are one opening of the file, which takes 20 ms."""
        with self.reading() as reader:
            if not reader.is_current():
                reader.close()
                self.catch_up(patience=patience)
            yield reader

    def catch_up(self, *, patience: float = PATIENCE_S) -> None:
        """`ingest` before a command that only reads: a store that cannot be written is read as it is, with a warning.

        The same if other processes keep the catalog busy, since they update it. Raises the other errors of `ingest`.
        """
        try:
            self.ingest(patience=patience)
        except CatalogBusy as error:
            logger.info("the catalog is read as it is: %s", error)
        except CatalogNotWritable as error:
            if not self.path.exists():
                raise
            logger.warning("what was recorded since the catalog was last written is not shown: %s", error)

    def age_s(self) -> float:
        """Seconds since the last `ingest` of any process ended; infinity if none, or if the clock was set back."""
        try:
            age = time.time() - self._lock_path.stat().st_mtime
        except OSError:
            return math.inf
        return age if age >= 0 else math.inf

    def rebuild(self, *, patience: float = PATIENCE_S) -> dict[str, int]:
        """Recreate all tables from manifests and events; returns the number of rows by table.

        In a file beside the catalog, which others read and write until the new one takes its place. A damaged catalog
        is replaced. Raises the errors of `ingest`.
        """
        new = Catalog(self.store)
        new.path = self.path.with_name(f"{self.path.stem}.rebuild{self.path.suffix}")
        new._lock_path = self._lock_path.with_name("catalog-rebuild.lock")
        # One rebuild at a time; the lock of the other catalog is taken and given back by each of its transactions.
        with KeyLock(self._lock_path.with_name("rebuild.lock")):
            new._remove()  # what a killed rebuild has left
            new._is_new = True
            was_enabled = gc.isenabled()
            gc.disable()  # it would traverse millions of objects, of which none is in a cycle: a tenth of the time
            try:
                new.ingest(patience=patience)
            finally:
                if was_enabled:
                    gc.enable()
            new._is_new = False
            with flock_until(self._lock_path, time.monotonic() + patience, shared=False) as acquired:
                if not acquired:
                    raise CatalogBusy(f"{self.path} is in use by other processes of this machine")
                # What was written meanwhile.
                new.ingest(patience=patience)
                with new.reading() as reader:
                    counts = {table.name: f"SELECT count(*) FROM {table.place}.{table.name}" for table in TABLES}
                    rows = {name: reader.select(sql)[1][0][0] for name, sql in counts.items()}
                with writing(self.store.root):
                    self._remove()
                    new.path.replace(self.path)
            with suppress(OSError):
                os.utime(self._lock_path)
        return rows

    def _remove(self) -> None:
        with writing(self.store.root):
            for path in (self.path, self.path.with_name(self.path.name + ".wal")):
                path.unlink(missing_ok=True)

    def query(self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S) -> list[CatalogRow]:
        """The rows of a read-only query as dicts. Raises the errors of `select`."""
        return _as_dicts(*self.select(sql, parameters, patience=patience))

    def select(
        self, sql: str, parameters: Sequence[Any] = (), *, patience: float = PATIENCE_S, files: bool = False
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a read-only query over everything ingested so far.

        `files`: allow access to files; only for queries of our own, never for one that a user typed. Raises
        `ConfigError` if the query is invalid (with DuckDB's message), writes, changes a setting or accesses a file;
        `CatalogBusy` as `ingest`.
        """
        with self._damage_named(), self._readable(patience, locked=not files) as connection:
            return _execute(connection, sql, parameters, locked=not files)

    def left_out(self, *, patience: float = PATIENCE_S) -> dict[str, int]:
        """Event file -> the number of its events that are not in the catalog, because their form is unknown."""
        with self.reading(patience=patience) as reader:
            return reader.left_out()

    def reading(self, *, patience: float = PATIENCE_S) -> "CatalogReader":
        """A context manager for several queries over the same state; see `CatalogReader`."""
        return CatalogReader(self, patience)

    def export(self, table: str, out: Path, *, overwrite: bool = False, patience: float = PATIENCE_S) -> int:
        """Write `table` atomically to the Parquet file `out`, ordered by its key; returns the number of rows.

        Raises `ConfigError` for an unknown table, or if `out` exists (without `overwrite`) or cannot be written.
        """
        keys = {name: ", ".join(key) for name, key in RELATIONS.items()}
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
        count: int = rows[0][0]
        return count

    def lineage(self, artifact_id: str) -> list[CatalogRow]:
        """The artifact `artifact_id` and all artifacts that it was made from, directly or indirectly.

        Each row has the columns of `artifacts` and: `depth`, 0 for the artifact itself; `made`, the artifact that it is
        an input of, and `name`, the input's name there; `calls`, the number of endpoint calls of its execution;
        `configuration`, the name of that of its run. Raises `ConfigError` if there is no such artifact.
        """
        artifact = self.store.get(artifact_id)
        with self.caught_up() as reader:
            return reader(LINEAGE_WITH_CALLS, artifact.id)

    @contextmanager
    def _readable(self, patience: float, *, locked: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open the catalog read-only, with the current schema. `locked`: without access to files and settings."""
        if not self.path.exists():
            self.ingest(patience=patience)
        with ExitStack() as stack:
            # A query with access to files takes the lock exclusively: connections of this process share their settings,
            # and one beside it would have locked them.
            connection = stack.enter_context(self._open(patience, read_only=True, shared=locked))
            if schema_of(connection) != SCHEMA:  # another one, or none: its first transaction did not finish
                stack.close()
                self.ingest(patience=patience)
                connection = stack.enter_context(self._open(patience, read_only=True, shared=locked))
            if locked:
                _lock_settings(connection)
            yield connection

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        """Say which command replaces the file, if it turns out to be damaged only after it was opened."""
        try:
            yield
        except DAMAGE as error:
            raise _unusable(self.path, error) from None

    def _ingest_batch(self, connection: duckdb.DuckDBPyConnection, deadline: float) -> tuple[int, bool]:
        """Ingest all new manifests and up to about `READ_LIMIT` bytes of events, fewer if `deadline` passes.

        All events, if the file is new. Returns the number of rows written, and whether there is more to read.
        """
        # Inside the transaction: another process may have read further since our last one.
        positions = dict(connection.execute("SELECT path, position FROM ingested").fetchall())
        written = self._ingest_manifests(connection, positions)
        budget = math.inf if self._is_new else READ_LIMIT
        slice_bytes = 4 * SLICE if deadline == math.inf else SLICE
        # Events of many files are inserted together: a statement takes milliseconds however few rows it has, and other
        # processes wait for the lock.
        batch: list[tuple[str, bytes]] = []
        new_positions: dict[str, int] = {}
        batch_bytes = 0

        def insert() -> None:
            nonlocal written, batch_bytes
            written += _insert_lines(connection, batch, self._is_new)
            batch.clear()
            batch_bytes = 0

        has_more = False
        for name, size in sorted(_event_files(self.store.events).items()):
            position = positions.get(name, 0)
            if position >= size:  # so it is for nearly all files of a large store
                continue
            path = self.store.root / name
            while position < size:
                has_more = budget <= 0 or (budget < READ_LIMIT and time.monotonic() >= deadline)
                if has_more:
                    break
                lines, end = read_lines(path, position, int(min(budget, slice_bytes)))
                if end == position:
                    break  # the last line is still being written
                batch += [(name, line) for line in lines]
                new_positions[name] = end
                budget, batch_bytes = budget - (end - position), batch_bytes + (end - position)
                position = end
                if batch_bytes >= slice_bytes:
                    insert()
            if has_more:
                break
        insert()
        _set_positions(connection, new_positions)
        if self._is_new:
            keep_newest(connection)
        return written, has_more

    def _ingest_manifests(self, connection: duckdb.DuckDBPyConnection, positions: dict[str, int]) -> int:
        """Write the rows of new and changed manifests, and delete those of manifests that no longer exist.

        The position of a manifest in `ingested` is its modification time in nanoseconds.
        """
        stamps = _manifest_stamps(self.store)
        present, new = set(stamps), []
        for name, stamp in stamps.items():
            if positions.get(name) == stamp:
                continue
            _, kind, folder, _ = name.split("/")
            key, _, number = folder.partition(".")
            if artifact := self.store.read(kind, key, int(number or 0), self.store.artifacts / kind / folder):
                new.append((name, stamp, artifact))
            else:
                present.discard(name)
        # A manifest that cannot be read any more counts as removed: its rows would describe what nobody can use.
        removed = [name for name in positions if name.startswith(f"{ARTIFACT_FOLDER}/") and name not in present]
        _delete_artifacts(connection, [*removed, *(name for name, _, _ in new if name in positions)])
        if new:
            _insert(connection, ARTIFACTS, [artifact_row(artifact) for _, _, artifact in new])
            _insert(connection, INPUTS, [row for _, _, artifact in new for row in input_rows(artifact)])
            _set_positions(connection, {name: stamp for name, stamp, _ in new})
        return len(new)

    @contextmanager
    def _writable(self, patience: float) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open the catalog for writing; the store's folders are created if they are missing."""
        with writing(self.store.root):
            self.store.locks.mkdir(parents=True, exist_ok=True)
        with self._open(patience, read_only=False) as connection:
            yield connection

    @contextmanager
    def _transaction(self, connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
        """Run the block in a transaction on tables of the current schema, which are created first."""
        try:
            # An error that leaves the block closes the connection without COMMIT, which undoes all of it.
            schema = schema_of(connection)
            connection.execute("BEGIN")
            if schema != SCHEMA:
                if schema:
                    logger.info("%s: schema %d is not that of this version; it is built anew", self.path, schema)
                _create_empty(connection)
            yield
            connection.execute("COMMIT")
        except duckdb.Error as error:
            raise _unusable(self.path, error) from error

    @contextmanager
    def _open(self, patience: float, *, read_only: bool, shared: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
        """Take our lock, then open the file. `shared`: other processes may read at the same time."""
        deadline = time.monotonic() + patience
        with flock_until(self._lock_path, deadline, shared=shared) as acquired:
            if not acquired:
                raise CatalogBusy(f"{self.path} is in use by other processes of this machine")
            connection = self._connect(deadline, read_only)
            try:
                yield connection
            finally:
                with _opening:
                    connection.close()

    def _connect(self, deadline: float, read_only: bool) -> duckdb.DuckDBPyConnection:
        """Connect, waiting until `deadline` for programs that do not take our lock."""
        wait = 0.01
        settings = _SETTINGS | ({"memory_limit": BULK_MEMORY} if self._is_new else {})
        # Our lock is held, so no process of ours has the file open, where there are locks.
        if has_locks(self._lock_path.parent):
            deadline = min(deadline, time.monotonic() + FOREIGN_S)
        while True:
            try:
                with _opening:
                    return duckdb.connect(self.path, read_only=read_only, config=settings)
            except duckdb.Error as error:
                text = first_line(error)
                # Another process has the file open, or, on a file system without locks, a thread of this process has it
                # open with other settings.
                if not re.search("lock|different configuration", text, re.IGNORECASE):
                    raise _unusable(self.path, error) from None
                if time.monotonic() > deadline:
                    raise CatalogBusy(f"{self.path} is kept open by another process, close it ({text})") from None
            # Without `_opening`: other threads of this process may connect meanwhile.
            time.sleep(random.uniform(0.5, 1.5) * wait)
            wait = min(0.3, wait * 1.5)


class CatalogReader:
    """Several queries over one connection, which is opened by the first query and closed at the end of the block.

    No process can ingest in the meantime, so the block must be short. For a single thread.
    """

    def __init__(self, catalog: Catalog, patience: float = PATIENCE_S) -> None:
        self._catalog, self._patience = catalog, patience
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._stack = ExitStack()

    def __call__(self, sql: str, *parameters: Any) -> list[CatalogRow]:
        """The rows of a query. Raises the errors of `Catalog.select`."""
        return _as_dicts(*self.select(sql, *parameters))

    def is_current(self) -> bool:
        """Whether all that processes have recorded is in the catalog, as far as it can be read; False without one."""
        catalog = self._catalog
        if not catalog.path.exists():
            return False
        positions = dict(self.select("SELECT path, position FROM ingested")[1])
        stamps = _manifest_stamps(catalog.store)
        known = sum(path.startswith(f"{ARTIFACT_FOLDER}/") for path in positions)
        if known != len(stamps) or not stamps.items() <= positions.items():
            return False
        if any(positions.get(name, 0) < size for name, size in _event_files(catalog.store.events).items()):
            return False
        with suppress(OSError):
            os.utime(catalog._lock_path)
        return True

    def left_out(self) -> dict[str, int]:
        """`Catalog.left_out`."""
        return events_left_out(self)

    def select(self, sql: str, *parameters: Any) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and rows of a query. Raises the errors of `Catalog.select`."""
        with self._catalog._damage_named():
            if self._connection is None:
                self._connection = self._stack.enter_context(self._catalog._readable(self._patience, locked=True))
            return _execute(self._connection, sql, parameters, locked=True)

    def close(self) -> None:
        """Close the connection, so that others can write the catalog; the next query opens it again."""
        self._connection = None
        self._stack.close()

    def __enter__(self) -> "CatalogReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def query_files(sql: str, parameters: Sequence[Any] = ()) -> list[CatalogRow]:
    """The rows of an internal query over files instead of tables. Raises `ConfigError` with DuckDB's message."""
    with duckdb.connect(config=_SETTINGS) as connection:
        return _as_dicts(*_execute(connection, sql, parameters, locked=False))


def _as_dicts(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[CatalogRow]:
    return [dict(zip(columns, row, strict=True)) for row in rows]


def events_left_out(query: Callable[[str], list[CatalogRow]]) -> dict[str, int]:
    """Event file -> the number of its events that are not in the catalog, because their form is unknown."""
    return {row["path"].removeprefix(_LEFT_OUT): row["position"] for row in query(_EVENTS_LEFT_OUT)}


def _event_files(folder: Path) -> dict[str, int]:
    """The names of the event files in a folder, as `ingested` has them, with their sizes in bytes."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if entry.name.endswith(".jsonl")]
            return {f"{EVENTS}/{entry.name}": entry.stat().st_size for entry in found}
    except FileNotFoundError:
        return {}


def _manifest_stamps(store: Store) -> dict[str, int]:
    """The names of the manifests of a store, as `ingested` has them, with their times of change in nanoseconds."""
    root, stamps = str(store.root), dict[str, int]()
    for kind, folder in store.folder_names():
        name = f"{ARTIFACT_FOLDER}/{kind}/{folder}/{MANIFEST}"
        with suppress(OSError):
            stamps[name] = os.stat(f"{root}/{name}").st_mtime_ns
    return stamps


def _lock_settings(connection: duckdb.DuckDBPyConnection) -> None:
    """Disable access to files and settings. All connections of a process share them, so only the first has to do it."""
    with _opening:
        # Locking is final: to change a setting after it would be an error.
        row = connection.execute("SELECT current_setting('lock_configuration')").fetchone()
        if row != (True,):
            for setting in _LOCKED:
                connection.execute(setting)


def _execute(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any], *, locked: bool
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Execute a query; returns column names and rows. `locked`: as the connection was opened by `Catalog._readable`."""
    try:
        if locked:
            _refuse_writing(connection, sql)
        result = connection.execute(sql, list(parameters))
        return [column[0] for column in result.description or ()], result.fetchall()
    except duckdb.PermissionException:
        raise ConfigError(f"the query was refused: {_ONLY_READS}") from None
    except DAMAGE:
        raise
    except duckdb.Error as error:
        raise ConfigError(f"the query was refused: {str(error).strip()}") from None


def _refuse_writing(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise `ConfigError` if a statement of the query is not read-only, or if there is no statement."""
    kinds: list[tuple[duckdb.StatementType | None, str]]
    try:
        kinds = [(statement.type, statement.query) for statement in connection.extract_statements(sql)]
    except ValueError:  # a statement type that the binding does not know, such as UPDATE EXTENSIONS
        kinds = [(None, "")]
    if not kinds:
        raise ConfigError('the query is empty: `nautile sql "SELECT * FROM runs"` is an example')
    # Each of them: a query may have several statements, separated by semicolons.
    for kind, text in kinds:
        if kind not in _READING and not (kind == duckdb.StatementType.MULTI and _PIVOTS.match(text)):
            raise ConfigError(f"the query was refused: {_ONLY_READS}")


def _unusable(path: Path, error: duckdb.Error) -> ConfigError:
    """The error that says what helps: another disk or permissions, or a rebuild."""
    reason = first_line(error)
    if any(os.strerror(number) in str(error) for number in NOT_WRITABLE):
        return CatalogNotWritable(
            f"the catalog {path} cannot be written ({reason}): free some space or fix its permissions"
        )
    return ConfigError(
        f"the catalog {path} cannot be used ({reason}); if it is damaged, `nautile store rebuild` replaces it"
    )


def _create_empty(connection: duckdb.DuckDBPyConnection) -> None:
    """Replace everything by empty tables of the current schema: manifests and events, the truth, are read again."""
    for kind, place, name in connection.execute(_VIEWS_AND_TABLES).fetchall():
        connection.execute(f'DROP {kind} "{place}"."{name}"')
    connection.execute("CREATE SCHEMA IF NOT EXISTS recorded")
    connection.execute("CREATE TABLE ingested (path VARCHAR PRIMARY KEY, position BIGINT)")
    for table in TABLES:
        connection.execute(table.create())
    for statement in (*(view.create() for view in VIEWS), *MACROS):
        connection.execute(statement)
    _set_positions(connection, {"schema": SCHEMA})


def _insert_lines(connection: duckdb.DuckDBPyConnection, batch: list[tuple[str, bytes]], is_new: bool) -> int:
    """Insert the events of lines, each with the name of its file; returns the number of rows."""
    taken = insert_plain(connection, [line for _, line in batch], is_new) if len(batch) >= LEAST else set()
    rest = [named for place, named in enumerate(batch) if place not in taken]
    parsed = ((name, parse_event(line, name)) for name, line in rest)
    events = ((name, event) for name, event in parsed if event is not None)
    return len(taken) + _insert_events(connection, events, is_new)


def _insert_events(
    connection: duckdb.DuckDBPyConnection, events: Iterable[tuple[str, dict[str, Any]]], is_new: bool
) -> int:
    """Insert events, each with the name of its file; returns the number of rows.

    An event that does not fit its table is logged, left out and counted.
    """
    # Kind -> key -> row. Of several events with one key only one is inserted: a statement may set a row only once.
    by_table: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
    left_out: Counter[str] = Counter()
    for name, event in events:
        if event["kind"] not in TABLE_OF_EVENT:
            logger.warning("%s: an event of unknown kind %r is left out", name, event["kind"][:80])
            left_out[name] += 1
            continue
        try:
            row = event_row(event)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            logger.warning("%s: event %.80s is left out: %s", name, event["id"], error)
            left_out[name] += 1
            continue
        table = TABLE_OF_EVENT[event["kind"]]
        rows, key = by_table.setdefault(event["kind"], {}), tuple(row[column] for column in table.key)
        if key not in rows or table.precedence(row) >= table.precedence(rows[key]):
            rows[key] = row
    for kind, rows in by_table.items():
        _insert(connection, TABLE_OF_EVENT[kind], list(rows.values()), is_new=is_new)
    for name, count in left_out.items():
        connection.execute(_ADD_POSITION, [_LEFT_OUT + name, count])
    return sum(len(rows) for rows in by_table.values())


def _insert(
    connection: duckdb.DuckDBPyConnection, table: CatalogTable, rows: list[dict[str, Any]], *, is_new: bool = False
) -> None:
    if not rows:
        return
    columns = [[row[name] for row in rows] for name in table.columns]
    if table in RECORDED:
        insert_rows(connection, table, table.rows(), columns, is_new=is_new)
    else:
        connection.execute(table.insert(table.rows()), columns)


def _set_positions(connection: duckdb.DuckDBPyConnection, positions: dict[str, int]) -> None:
    if positions:
        columns = [list(positions), list(positions.values())]
        connection.execute("INSERT OR REPLACE INTO ingested SELECT unnest(?::VARCHAR[]), unnest(?::BIGINT[])", columns)


def _delete_artifacts(connection: duckdb.DuckDBPyConnection, names: list[str]) -> None:
    """Delete the rows of the artifacts whose manifests were at `names`."""
    if not names:
        return
    ids = []
    for name in names:
        _, kind, folder, _ = name.split("/")
        key, dot, number = folder.partition(".")
        ids.append(f"{kind}/{key[:12]}{dot}{number}")  # as `short_id` writes it
    connection.execute("DELETE FROM inputs WHERE list_contains(?, artifact)", [ids])
    connection.execute("DELETE FROM artifacts WHERE list_contains(?, id)", [ids])
    connection.execute("DELETE FROM ingested WHERE list_contains(?, path)", [names])
