"""Catalogs written by an older or a newer nautile: the first are brought up to date, the second refused.

Each step leads from one schema to the next, in the transaction that also writes the new number: a crash leaves the old
catalog, and a copy of it stays beside the file (`catalog.schema<n>.duckdb`). A schema without a step, or a step that
fails, costs no more than time: the tables are filled anew from manifests and event files, which are the truth.
"""

import logging
import uuid
from pathlib import Path

import duckdb

from configs.section import ConfigError
from store.lineage import MACROS
from store.tables import SCHEMA

logger = logging.getLogger(__name__)

# A manifest whose row gains a column is forgotten, so that it is read again.
STEPS: dict[int, tuple[str, ...]] = {
    1: ("ALTER TABLE artifacts ADD COLUMN label VARCHAR", "DELETE FROM ingested WHERE path LIKE 'artifacts/%'"),
}


class NewerCatalog(ConfigError):
    """The catalog has tables that this program does not know."""


def schema_of(connection: duckdb.DuckDBPyConnection) -> int:
    """The version of the tables in the file, 0 if there are none."""
    try:
        found = connection.execute("SELECT position FROM ingested WHERE path = 'schema'").fetchone()
    except duckdb.CatalogException:
        return 0  # no such table
    return found[0] if found else 0


def refuse_newer(path: Path, version: int) -> None:
    """Raise `NewerCatalog` if `version` is beyond what this program knows."""
    if version > SCHEMA:
        raise NewerCatalog(
            f"the catalog {path} has schema {version}, and this nautile knows {SCHEMA} at most: use the newer nautile "
            "that wrote it, or move the file away and it is built again from manifests and events"
        )


def migrate(connection: duckdb.DuckDBPyConnection, path: Path, version: int) -> bool:
    """Take the catalog from `version` to `SCHEMA`; False if there is no way and it must be built anew."""
    _back_up(connection, path.with_name(f"{path.stem}.schema{version}{path.suffix}"))
    if not all(step in STEPS for step in range(version, SCHEMA)):
        logger.warning("%s: schema %d cannot be migrated; it is built anew", path, version)
        return False
    connection.execute("BEGIN")
    try:
        for step in range(version, SCHEMA):
            for statement in STEPS[step]:
                connection.execute(statement)
        for macro in MACROS:
            connection.execute(macro)
        connection.execute("INSERT OR REPLACE INTO ingested VALUES ('schema', ?)", [SCHEMA])
        connection.execute("COMMIT")
    except duckdb.Error as error:
        connection.execute("ROLLBACK")
        logger.warning("%s: schema %d cannot be migrated (%s); it is built anew", path, version, error)
        return False
    logger.info("%s: migrated from schema %d to %d", path, version, SCHEMA)
    return True


def _back_up(connection: duckdb.DuckDBPyConnection, target: Path) -> None:
    """Copy the tables to `target` by DuckDB itself.

    To open the file a second time, as a copy by bytes would, would drop the lock that DuckDB holds on it: a POSIX lock
    goes when its process closes any descriptor of the file.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
    try:
        connection.execute(f"ATTACH '{str(temporary).replace(chr(39), chr(39) * 2)}' AS backup")
        try:
            for (table,) in connection.execute(
                "SELECT table_name FROM duckdb_tables() WHERE database_name = current_database()"
            ).fetchall():
                connection.execute(f'CREATE TABLE backup."{table}" AS FROM "{name}"."{table}"')
        finally:
            connection.execute("DETACH backup")
        temporary.replace(target)
    finally:
        for rest in (temporary, temporary.with_name(temporary.name + ".wal")):
            rest.unlink(missing_ok=True)
