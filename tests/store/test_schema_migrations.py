"""Catalogs of other schema versions, created by the SQL of the version that wrote them."""

import json

import duckdb
import pytest

from common.errors import ConfigError
from store import schema as migrations
from store.artifacts import Store
from store.catalog import Catalog
from store.events import EventWriter
from store.schema import SCHEMA
from tests.support.samples.stage_store import published

# The tables of schema 1, as that version created them.
SCHEMA_1 = """
CREATE TABLE ingested (path VARCHAR PRIMARY KEY, position BIGINT);
CREATE TABLE artifacts (id VARCHAR, kind VARCHAR, key VARCHAR, superseded INTEGER, execution VARCHAR, stage VARCHAR,
  version INTEGER, run VARCHAR, created TIMESTAMP, bytes BIGINT, file_count INTEGER, digest VARCHAR, commit VARCHAR,
  host VARCHAR, config JSON, facts JSON, files JSON, PRIMARY KEY (id));
CREATE TABLE inputs (artifact VARCHAR, name VARCHAR, kind VARCHAR, key VARCHAR, execution VARCHAR,
  PRIMARY KEY (artifact, name));
CREATE TABLE runs (id VARCHAR, run VARCHAR, config VARCHAR, stage VARCHAR, label VARCHAR, key VARCHAR,
  execution VARCHAR,
  attempt INTEGER, state VARCHAR, reused BOOLEAN, forced BOOLEAN, started TIMESTAMP, ended TIMESTAMP, seconds DOUBLE,
  peak_bytes BIGINT, exit_code INTEGER, outputs JSON, error VARCHAR, commit VARCHAR, host VARCHAR, time TIMESTAMP,
  PRIMARY KEY (id));
CREATE TABLE metrics (id VARCHAR, execution VARCHAR, stage VARCHAR, name VARCHAR, step BIGINT, value DOUBLE,
  source VARCHAR, time TIMESTAMP, PRIMARY KEY (id));
CREATE TABLE calls (id VARCHAR, execution VARCHAR, stage VARCHAR, endpoint VARCHAR, model VARCHAR, purpose VARCHAR,
  tag VARCHAR, digest VARCHAR, attempt INTEGER, status VARCHAR, cached BOOLEAN, tokens_in BIGINT, tokens_out BIGINT,
  latency_s DOUBLE, dollars DOUBLE, error VARCHAR, fields JSON, time TIMESTAMP, PRIMARY KEY (id));
CREATE TABLE samples (id VARCHAR, execution VARCHAR, stage VARCHAR, "set" VARCHAR, index BIGINT, fields JSON,
  time TIMESTAMP, PRIMARY KEY (id));
CREATE MACRO lineage(artifact_id) AS TABLE SELECT 0 AS depth, a.* FROM artifacts a WHERE a.id = artifact_id;
INSERT INTO ingested VALUES ('schema', 1);
INSERT INTO metrics VALUES ('only here', 'e0', 'toy', 'kept', 1, 0.5, NULL, TIMESTAMP '2026-01-02 03:04:05');
"""


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "it's a store")
    store.prepare()
    tokens = published(store, "tokens", "in", label="ingest")
    published(store, "evaluation", "out", inputs={"web": tokens}, label="evaluate:align")
    EventWriter(store.root / "events" / "child.jsonl", "e1", stage="toy")("metric", name="loss", step=1, value=2.0)
    return store


@pytest.fixture
def old(store):
    with duckdb.connect(store.catalog_path) as connection:
        connection.execute(SCHEMA_1)
        artifacts = [
            (a.id, a.kind, a.key, 0, a.execution, "toy", 1, "", "2026-01-02", a.bytes, 2, "", None, "h", *["{}"] * 3)
            for a in store.list()
        ]
        connection.executemany(f"INSERT INTO artifacts VALUES ({', '.join('?' * 17)})", artifacts)
        for artifact in store.list():
            path = (artifact.folder / "manifest.json").relative_to(store.root).as_posix()
            stamp = (artifact.folder / "manifest.json").stat().st_mtime_ns
            connection.execute("INSERT INTO ingested VALUES (?, ?)", [path, stamp])
    return store.catalog_path


def labels(catalog):
    return [tuple(row.values()) for row in catalog.query("SELECT label FROM artifacts ORDER BY label")]


def backup(store):
    with duckdb.connect(store.root / "catalog.schema1.duckdb", read_only=True) as connection:
        return (
            connection.execute("SELECT position FROM ingested WHERE path = 'schema'").fetchall(),
            connection.execute("SELECT id FROM metrics").fetchall(),
            connection.execute("SELECT count(*) FROM artifacts").fetchall(),
        )


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ingest", "query"])
def test_an_older_catalog_is_migrated_and_a_copy_of_it_stays(store, old, first):
    catalog = Catalog(store)
    catalog.ingest() if first == "ingest" else catalog.query("SELECT 1")
    assert labels(catalog) == [("evaluate:align",), ("ingest",)]
    assert catalog.query("SELECT id FROM metrics WHERE name = 'kept'") == [{"id": "only here"}]
    assert len(catalog.query("SELECT * FROM metrics")) == 2
    assert catalog.query("SELECT run FROM plans UNION ALL SELECT text FROM notes") == []
    assert len(catalog.lineage(store.list("evaluation")[0].id)) == 2
    assert backup(store) == ([(1,)], [("only here",)], [(2,)])
    before = catalog.query("SELECT * FROM artifacts ORDER BY id")
    catalog.rebuild()
    assert catalog.query("SELECT * FROM artifacts ORDER BY id") == before
    assert [path.name for path in store.root.glob(".*")] == []


@pytest.mark.parametrize("steps", [{}, {1: ("ALTER TABLE artifacts ADD COLUMN label VARCHAR", "SELECT no_such_thing")}])
def test_without_a_migration_it_is_rebuilt_from_manifests_and_events(store, old, steps, monkeypatch, caplog):
    monkeypatch.setattr(migrations, "MIGRATIONS", steps)
    catalog = Catalog(store)
    catalog.ingest()
    assert labels(catalog) == [("evaluate:align",), ("ingest",)]
    assert catalog.query("SELECT name FROM metrics") == [{"name": "loss"}]
    assert "cannot be migrated" in caplog.text
    assert backup(store) == ([(1,)], [("only here",)], [(2,)])


def test_rows_of_events_that_were_not_checked_when_they_were_read_are_read_again(store):
    """A catalog of schema 3 may hold plans of any form."""
    event = {
        "id": "p",
        "kind": "plan",
        "execution": "",
        "time": 1,
        "fields": {"id": "p", "run": "r", "state": "paused"},
    }
    (store.root / "events" / "other.jsonl").write_text(json.dumps(event) + "\n")
    catalog = Catalog(store)
    catalog.ingest()
    with duckdb.connect(store.catalog_path) as connection:
        connection.execute("INSERT INTO plans (id, run, changes) VALUES ('p', 'r', '3')")
        connection.execute("UPDATE ingested SET position = 3 WHERE path = 'schema'")
        for table in ("artifacts", "inputs"):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN IF EXISTS published_as")
        connection.execute("DELETE FROM ingested WHERE starts_with(path, 'left out')")
        connection.execute("CREATE OR REPLACE MACRO lineage(artifact_id) AS TABLE SELECT 1 AS depth")
    catalog.ingest()
    assert catalog.query("SELECT * FROM plans") == []
    assert catalog.query("SELECT name FROM metrics") == [{"name": "loss"}]
    assert catalog.left_out() == {"events/other.jsonl": 1}
    assert len(catalog.lineage(store.list("evaluation")[0].id)) == 2


def test_a_newer_catalog_is_refused_and_unchanged(store):
    catalog = Catalog(store)
    catalog.ingest()
    with duckdb.connect(store.catalog_path) as connection:
        connection.execute("UPDATE ingested SET position = ? WHERE path = 'schema'", [SCHEMA + 1])
        connection.execute("CREATE TABLE tomorrow AS SELECT 42 AS answer")
    for use in (catalog.ingest, catalog.rebuild, lambda: catalog.query("SELECT 1")):
        with pytest.raises(ConfigError, match=rf"has schema {SCHEMA + 1}, and this nautile knows {SCHEMA} at most"):
            use()
    with duckdb.connect(store.catalog_path, read_only=True) as connection:
        assert connection.execute("SELECT answer FROM tomorrow").fetchall() == [(42,)]
    store.catalog_path.unlink()
    assert catalog.ingest() == 3
