"""The catalog: manifests and events become rows, once; queries, rebuilding and lineage."""

import json
import math
import re
import shutil
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.store import catalog as catalogs
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog, CatalogBusy, query_files
from nautile.store.events import EventWriter
from nautile.store.schema import SCHEMA, TABLES
from tests.support.samples.stage_store import filled, key_of, manifest_of, published

NAMES = [table.name for table in TABLES]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def catalog(store):
    return Catalog(store)


def writer(store, name, execution="e1", stage="toy"):
    return EventWriter(store.root / "events" / f"{name}.jsonl", execution, stage=stage)


def everything(catalog):
    """table -> its rows as sorted JSON, by one query."""
    every = " UNION ALL ".join(f"SELECT '{name}' AS name, to_json(t)::VARCHAR AS row FROM {name} t" for name in NAMES)
    rows = catalog.query(every)
    return {name: sorted(row["row"] for row in rows if row["name"] == name) for name in NAMES}


def fill(store):
    """Artifacts (one superseded, one read by another), and events of two attempts at one execution."""
    tokens = published(store, "tokens", "in", run="r1")
    published(store, "checkpoint", "out", {"w.bin": "1"}, inputs={"web": tokens}, execution="e1")
    published(store, "checkpoint", "out", {"w.bin": "2"}, inputs={"web": tokens}, execution="e2", supersede=True)
    for attempt in (1, 2):
        emit = writer(store, f"child-{attempt}")
        for step in range(5 * attempt):
            emit("metric", name="loss", step=step, value=attempt + step / 10)
            emit("sample", set="train", index=step, prompt=f"{step}?", rewards=[0.5, None], nested={"a": [1, "é"]})
        emit("call", endpoint="judge", model="m", purpose="judge", attempt=attempt, tokens_in=5, extra="kept")
    emit = writer(store, "runs", execution="", stage="")
    row = {"id": "a1", "run": "r1", "stage": "toy", "label": "toy:x", "key": key_of("out"), "execution": "e1"}
    row |= {"attempt": 1, "started": "2026-01-02T03:04:05.000006+00:00", "forced": False, "reused": False}
    emit("run", state="running", **row)
    emit("run", state="done", ended="2026-01-02T03:04:09+00:00", outputs={"checkpoint": "checkpoint/x"}, **row)
    emit("plan", id="p1", run="r1", state="done", steps=[{"label": "toy:x", "after": []}], settings={"seed": 0})
    emit("note", id="r1", text="the first", tags=["kept"])


def test_manifests_and_events_become_rows(store, catalog):
    fill(store)
    catalog.ingest()
    artifact = catalog.query("SELECT * FROM artifacts WHERE kind = 'checkpoint' AND superseded = 0")[0]
    assert artifact["id"] == f"checkpoint/{key_of('out')[:12]}"
    assert (artifact["execution"], artifact["bytes"], artifact["file_count"], artifact["stage"]) == ("e2", 1, 1, "toy")
    assert json.loads(artifact["config"]) == {"word": "out"}
    assert json.loads(artifact["files"])["w.bin"]["bytes"] == 1
    inputs = catalog.query("SELECT * FROM inputs ORDER BY artifact")
    assert [(row["name"], row["kind"], row["key"]) for row in inputs] == [("web", "tokens", key_of("in"))] * 2
    metrics = catalog.query("SELECT step, value, execution, stage, source FROM metrics ORDER BY step")
    assert [row["step"] for row in metrics] == list(range(10))
    assert metrics[0] == {"step": 0, "value": 2.0, "execution": "e1", "stage": "toy", "source": None}
    sample = catalog.query("SELECT * FROM samples WHERE index = 3")[0]
    assert sample["set"] == "train"
    assert json.loads(sample["fields"]) == {"prompt": "3?", "rewards": [0.5, None], "nested": {"a": [1, "é"]}}
    calls = catalog.query("SELECT * FROM calls ORDER BY attempt")
    assert [(row["purpose"], row["attempt"], row["tokens_in"], row["tokens_out"]) for row in calls] == [
        ("judge", 1, 5, None),
        ("judge", 2, 5, None),
    ]
    assert json.loads(calls[0]["fields"]) == {"extra": "kept"}
    (run,) = catalog.query("SELECT * FROM attempts")
    assert (run["state"], run["label"], run["peak_bytes"]) == ("done", "toy:x", None)
    assert run["started"] == datetime(2026, 1, 2, 3, 4, 5, 6)
    assert json.loads(run["outputs"]) == {"checkpoint": "checkpoint/x"}


def test_ingesting_again_changes_nothing_and_continues_where_it_stopped(store, catalog):
    fill(store)
    assert catalog.ingest() > 0
    before = everything(catalog)
    assert catalog.ingest() == 0
    assert everything(catalog) == before
    writer(store, "child-1")("metric", name="late", step=0, value=1.0)
    assert catalog.ingest() == 1


@pytest.mark.slow
def test_a_rebuild_from_nothing_gives_the_same_rows(store, catalog):
    fill(store)
    catalog.ingest()
    emit = writer(store, "child-2")
    emit("metric", name="loss", step=0, value=9.0)
    emit("metric", name="loss", step=77, value=math.nan)
    published(store, "tokens", "in", {"a.txt": "new"}, supersede=True)
    catalog.ingest()
    before = everything(catalog)
    assert all(before.values())
    assert catalog.rebuild() == {name: len(rows) for name, rows in before.items()}
    assert everything(catalog) == before
    catalog.path.unlink()
    assert everything(Catalog(store)) == before
    assert catalog.query("SELECT value FROM metrics WHERE step = 0") == [{"value": 9.0}]


# Values of the fields of an event that DuckDB and Python might read differently, or that do not fit a column.
ODD = [
    None, "", "a", "é", "a\\b", 'say "x"', "line\nbreak", "\x1b[31m", "\0", "\ud83d\ude00", "null", 0, 5, -7, 5.5,
    1e300, -1.5e-7, 2**62, 2**63, 2**80, 0.0012345678901234567, math.nan, math.inf, True, "7", "1e5", "nan", [1],
    {"a": None},
]  # fmt: skip


def odd_lines():
    """Lines of metrics, samples and calls with each odd value in each place, and some that are no events."""
    common = {"execution": "e1", "stage": "toy", "time": 1_700_000_000_000_000}
    metric = {"kind": "metric", "fields": {"name": "loss", "step": 1, "value": 0.5, "source": "web"}} | common
    sample = {"kind": "sample", "fields": {"set": "train", "index": 3, "text": "é", "x": {"y": [0.1, None]}}} | common
    call = {"kind": "call", "fields": {"endpoint": "judge", "attempt": 1, "cached": False, "dollars": 0.5}} | common
    call["fields"] |= {"error": "e", "more": [0.1]}
    events = []
    for event in (metric, sample, call):
        fields = event["fields"]
        events += [event, event | {"time": 1}, event | {"time": -1}, event | {"fields": {}}, event | {"fields": None}]
        for name in fields:
            events.append(event | {"fields": {key: value for key, value in fields.items() if key != name}})
            events += [event | {"fields": fields | {name: value}} for value in ODD]
        events += [event | {name: value} for name in ("execution", "stage", "time", "id") for value in ODD]
    numbers = (-0.0, -1, 2**53 + 1, 2**64)
    for event in (metric, sample, call):
        fields = event["fields"]
        events += [event | {"fields": fields | {name: number}} for name in fields for number in numbers]
        events += [event | {"fields": fields | {"of a later version": [number]}} for number in numbers]
    twice = [metric | {"id": "twice", "time": time} for time in (7, 8, 6)]
    lines = [json.dumps({"id": f"i{place}"} | event) for place, event in enumerate([*events, *twice])]
    deep = json.dumps(sample | {"id": "deep"}).replace("[0.1, null]", "[" * 70 + "]" * 70)
    return [*lines, deep, lines[0].replace("0.5", "0.5,}"), "{torn", '"text"', ""]


@pytest.mark.slow
def test_bulk_ingestion_gives_the_rows_of_events_read_one_by_one(store, tmp_path, monkeypatch):
    """And leaves out the same: what DuckDB's reader takes is a part of what Python's takes, and it reads it alike."""
    other = Store(tmp_path / "other")
    for each in (store, other):
        each.prepare()
        (each.events / "odd.jsonl").write_text("\n".join([*odd_lines(), ""]), encoding="utf-8")
    taken, insert_plain = [], catalogs.insert_plain
    monkeypatch.setattr(catalogs, "insert_plain", lambda *given: taken.append(insert_plain(*given)) or taken[-1])
    Catalog(other).ingest()
    assert not taken
    monkeypatch.setattr(catalogs, "LEAST", 1)
    Catalog(store).ingest()
    assert len(taken[0]) > 150
    once = everything(Catalog(store))
    assert once == everything(Catalog(other))
    Catalog(store).rebuild()
    assert everything(Catalog(store)) == once
    assert Catalog(store).left_out() == Catalog(other).left_out() != {}


@pytest.mark.slow
def test_a_backlog_is_ingested_in_several_transactions(store, catalog, monkeypatch):
    fill(store)
    catalog.ingest()
    before = everything(catalog)
    catalog.path.unlink()
    monkeypatch.setattr(catalogs, "READ_LIMIT", 700)
    assert catalog.ingest() > 0
    assert everything(catalog) == before


@pytest.mark.slow
@pytest.mark.parametrize("size", [2**20, 1])
def test_the_files_of_many_runs_are_ingested_at_once_as_they_are_by_themselves(store, tmp_path, monkeypatch, size):
    """A statement takes milliseconds however few rows it has, and all runs of a machine wait for the catalog's lock."""
    monkeypatch.setattr(catalogs, "SLICE", size)
    fill(store)
    alone, statements = Store(tmp_path / "alone"), []
    for path in sorted((store.root / "events").glob("*.jsonl")):  # a metric of both attempts is in two of them
        alone.prepare()
        (alone.root / "events" / path.name).write_bytes(path.read_bytes())
        Catalog(alone).ingest()
    insert = catalogs._insert
    monkeypatch.setattr(
        catalogs, "_insert", lambda *given, **options: statements.append(given[1].name) or insert(*given, **options)
    )
    Catalog(store).ingest(most_s=60.0)
    once = [name for name in statements if name not in ("artifacts", "inputs")]
    assert (len(once) == len(set(once))) == (size > 1)
    both = [everything(Catalog(each)) for each in (store, alone)]
    for name in set(NAMES) - {"artifacts", "inputs"}:
        assert both[0][name] == both[1][name], name


def test_a_removed_artifact_has_no_row(store, catalog):
    fill(store)
    catalog.ingest()
    store.discard(store.get(f"checkpoint/{key_of('out')[:12]}.1").path)
    catalog.ingest()
    assert catalog.query("SELECT count(*) AS n FROM artifacts") == [{"n": 2}]
    assert catalog.query("SELECT count(*) AS n FROM inputs") == [{"n": 1}]
    before = everything(catalog)
    catalog.rebuild()
    assert everything(catalog) == before


@pytest.mark.slow
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_event_becomes_a_row_or_is_skipped(tmp_path_factory, data):
    store = Store(tmp_path_factory.mktemp("any"))
    store.prepare()
    anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
    emit = writer(store, "x")
    count = data.draw(st.integers(1, 12))
    for index in range(count):
        emit("sample", index=index, set=data.draw(st.text()), **{"any": data.draw(anything)})
        emit("call", endpoint=data.draw(anything), tokens_in=data.draw(st.none() | st.integers(0, 2**40)))
    emit("sample", index=2**70)
    emit("call", tokens_in="many")
    catalog = Catalog(store)
    catalog.ingest()
    assert catalog.query("SELECT count(*) AS n FROM samples") == [{"n": count}]
    assert catalog.query("SELECT count(*) AS n FROM calls") == [{"n": count}]


STRANGE = "\ud800"  # half of a surrogate pair, which JSON can spell and no database stores


def test_a_strange_event_of_another_machine_harms_no_other(store, catalog):
    event = {"id": "a", "kind": "metric", "execution": "e1", "stage": "toy", "time": 1, "fields": {"value": 1.0}}
    names = ("id", "execution", "stage", "kind")
    parts = [{name: value} for name in names for value in (STRANGE, ["a"])]
    parts += [{"time": 10**30}, {"time": 10**23}]  # the second is of a year beyond 2^31
    lines = [json.dumps(line) for part in parts for line in (event | part, event | {"id": f"good {part}"})]
    (store.root / "events" / "pulled.jsonl").write_text("\n".join(lines) + "\n")
    catalog.ingest()
    good = {row["id"] for row in catalog.query("SELECT id FROM metrics")}
    assert good >= {f"good {part}" for part in parts}


def test_a_manifest_that_the_catalog_cannot_hold_is_refused(store, catalog):
    parts = [
        *({name: STRANGE} for name in ("stage", "label", "commit", "host", "run")),
        {"inputs": {STRANGE: f"tokens/{key_of('y')}"}, "input_executions": {STRANGE: "e"}},
        {"inputs": {"web": f"tokens/{key_of('y')}"}, "input_executions": {"web": STRANGE}},
        {"version": 2**31},
        {"files": {name: {"bytes": 2**62, "sha256": key_of(name)} for name in "ab"}},
        {"created": "0001-01-01T00:00:00+14:00"},
    ]
    for number, part in enumerate(parts):
        manifest = manifest_of(key=key_of(f"bad {number}"), **part)
        filled(store.root / "artifacts" / "tokens" / manifest["key"], {"manifest.json": json.dumps(manifest)})
    published(store, "tokens", "good")
    catalog.ingest()
    assert catalog.query("SELECT key FROM artifacts") == [{"key": key_of("good")}]
    assert [artifact.key for artifact in store.list()] == [key_of("good")]


@pytest.mark.parametrize("suffix", ["0", "01", "\N{SUPERSCRIPT TWO}", "20261124173000"])
def test_a_copy_of_a_folder_that_somebody_has_put_beside_it_is_no_version(store, catalog, suffix):
    published(store, "tokens", "good")
    artifact = published(store, "tokens", "good", {"a.txt": "new"}, supersede=True)
    shutil.copytree(artifact.folder, artifact.folder.with_name(f"{artifact.key}.{suffix}"))
    catalog.ingest()
    assert [row["superseded"] for row in catalog.query("SELECT superseded FROM artifacts ORDER BY 1")] == [0, 1]
    assert store.get(artifact.id) == artifact
    with pytest.raises(ConfigError, match="no artifact"):
        store.get(f"{artifact.id}.{suffix}")


def test_queries_and_their_errors_are_explained(store, catalog):
    fill(store)
    assert catalog.query("SELECT count(*) AS n FROM metrics") == [{"n": 10}]  # the first query ingests
    assert catalog.select("SELECT step, name FROM metrics WHERE step > 99") == (["step", "name"], [])
    assert catalog.query("SELECT step FROM metrics WHERE step = ?", [4]) == [{"step": 4}]
    for sql, message in (("SELECT nonsense FROM metrics", "nonsense"), ("SELEC 1", "syntax"), (" -- none", "is empty")):
        with pytest.raises(ConfigError, match=rf"(?s)the query .*{message}"):
            catalog.query(sql)
    assert query_files(f"SELECT content FROM read_text('{__file__}')")  # what the code itself asks for


SECRET = "planted-161803398"
READS = (
    "FROM metrics",
    "VALUES (1)",
    "SELECT * FROM (PIVOT (FROM metrics LIMIT 2) ON name) ORDER BY id",
    "SUMMARIZE metrics",
)
READS += ("DESCRIBE metrics", "SHOW TABLES", "WITH q AS (FROM metrics) SELECT step, q.name FROM q", "EXPLAIN FROM runs")
WRITES = (
    "COPY ({read}) TO {file}", "COPY metrics TO {file} (FORMAT parquet)", "COPY metrics FROM {file}",
    "EXPORT DATABASE {file}", "IMPORT DATABASE {file}", "ATTACH {file} AS other", "ATTACH {file} AS o (READ_ONLY)",
    "ATTACH ':memory:' AS other", "DETACH catalog", "USE other", "INSTALL {file}", "INSTALL httpfs FROM {file}",
    "LOAD {file}", "LOAD httpfs", "UPDATE EXTENSIONS", "CREATE SECRET s (TYPE s3)", "DROP SECRET s", "CHECKPOINT",
    "SET temp_directory = {file}", "SET enable_external_access = true", "SET SESSION threads = 1", "RESET threads",
    "SET VARIABLE x = (SELECT content FROM read_text({file}))", "PRAGMA threads = 3", "PRAGMA database_list", "VACUUM",
    "CALL pragma_version()", "CREATE TABLE t AS {read}", "CREATE TEMP TABLE t AS {read}", "DROP TABLE metrics",
    "CREATE OR REPLACE TEMP MACRO f() AS 1", "INSERT INTO metrics BY NAME {read}", "UPDATE metrics SET step = 0",
    "DELETE FROM metrics", "TRUNCATE runs", "ALTER TABLE runs ADD COLUMN b INT", "COMMENT ON TABLE runs IS 'x'",
    "MERGE INTO runs USING runs r ON true WHEN MATCHED THEN DELETE", "BEGIN", "PREPARE p AS {read}", "EXECUTE p",
)  # fmt: skip
REACHES = (
    "SELECT content::VARCHAR FROM read_blob({file})", "FROM read_text({file})", "FROM read_csv({file})", "FROM {file}",
    "FROM read_json({file})", "FROM read_parquet({file})", "FROM glob({file})", "FROM sniff_csv({file})",
    "EXPLAIN ANALYZE COPY ({read}) TO {file}", "EXPLAIN ANALYZE INSERT INTO runs BY NAME FROM attempts",
    "COPY (PIVOT metrics ON name) TO {file}", "EXPLAIN ANALYZE FROM read_text({file})",
)  # fmt: skip


@st.composite
def statements(draw, folder):
    """A statement that must be refused: by its kind, or for a file that it names; perhaps after one that reads."""
    names = ("outside/secret.csv", "store/catalog.duckdb", "store/catalog.duckdb.wal", "store/catalog.duckdb.tmp/x")
    names += ("store/events/*.jsonl", "new", "store/../outside/secret.csv")
    file = f"'{folder / draw(st.sampled_from(names))}'"
    sql = draw(st.sampled_from((*WRITES, *REACHES))).format(file=file, read=draw(st.sampled_from(READS)))
    before = draw(st.sampled_from(("", "/* SELECT */ ", "FROM attempts; ", "-- a comment\n", ";")))
    return before + "".join(draw(st.sampled_from((part, part.lower()))) for part in re.split(r"('[^']*')", sql))


@pytest.mark.slow
def test_a_query_leaves_every_file_alone_and_reads_none(store, catalog):
    fill(store)
    (store.root.parent / "outside").mkdir()
    (store.root.parent / "outside" / "secret.csv").write_text(f"a\n{SECRET}\n")
    reads = {sql: catalog.select(sql) for sql in READS}

    def files():
        return {path: path.read_bytes() for path in store.root.parent.rglob("*") if path.is_file()}

    before = files()
    seen = set()

    @settings(max_examples=80)
    @given(statements(store.root.parent))
    def refused(sql):
        with pytest.raises(ConfigError, match="the query was refused: ") as error:
            catalog.select(sql)
        assert SECRET not in str(error.value)
        assert files() == before
        seen.add(sql.partition(" ")[0])

    refused()
    assert len(seen) > 20
    assert {sql: catalog.select(sql) for sql in READS} == reads


@pytest.mark.slow
def test_a_catalog_that_another_process_keeps_open_is_waited_for_up_to_a_limit(store, catalog, monkeypatch):
    fill(store)
    catalog.ingest()
    before = everything(catalog)
    code = f"import duckdb, sys; c = duckdb.connect({str(catalog.path)!r}); print('open', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(CatalogBusy, match="kept open by another process"):
        catalog.ingest(patience=0.2)
    with pytest.raises(CatalogBusy):
        catalog.query("SELECT 1", patience=0.2)
    monkeypatch.setattr(catalogs, "FOREIGN_S", 0.2)
    with pytest.raises(CatalogBusy, match=r"close it .*PID"):
        catalog.query("SELECT 1", patience=3600)
    monkeypatch.setattr(catalogs, "FOREIGN_S", 60)
    results = []
    waiter = threading.Thread(target=lambda: results.append(everything(catalog)))
    waiter.start()
    holder.communicate("")
    waiter.join()
    assert results == [before]


def test_several_queries_read_one_state_and_may_not_write(store, catalog):
    assert catalog.age_s() == math.inf
    fill(store)
    with catalog.reading() as ask:  # which ingests where there is no catalog yet
        (row,) = ask("SELECT count(*) AS n FROM attempts WHERE state <> ?", "none")
        assert row["n"] > 0
        assert ask("SELECT ? AS a, ? AS b", 1, "x") == [{"a": 1, "b": "x"}]
        with pytest.raises(ConfigError, match="may only read"):
            ask("DELETE FROM attempts")
        with pytest.raises(ConfigError, match="may only read"):
            ask("SELECT * FROM read_text('/etc/hostname')")
    assert 0 <= catalog.age_s() < math.inf


def test_a_reader_keeps_one_connection_beside_others_and_lets_a_writer_in_once_it_is_closed(
    store, catalog, monkeypatch
):
    count = "SELECT count(*) AS n FROM artifacts"
    catalog.ingest()
    opened = []
    connect = duckdb.connect
    monkeypatch.setattr(duckdb, "connect", lambda *given, **more: opened.append(given) or connect(*given, **more))
    with catalog.reading() as reader, catalog.reading() as other:
        assert not opened  # a page whose queries are all remembered opens nothing
        before = reader(count)
        with pytest.raises(ConfigError, match="may only read"):
            reader(f"SELECT content FROM read_text('{__file__}')")
        assert reader(count) == before
        assert len(opened) == 1
        assert other(count) == catalog.query(count) == before  # in one process, with settings locked by the first
        for closed in (reader, other):
            with pytest.raises(CatalogBusy):
                catalog.ingest(patience=0.1)
            closed.close()
        published(store, "tokens", "in")
        assert catalog.ingest() == 1
        assert reader(count)[0]["n"] == before[0]["n"] + 1


@pytest.mark.parametrize("content", [b"this is no database", b""])
def test_a_damaged_catalog_is_named_and_replaced_by_a_rebuild(store, catalog, content):
    fill(store)
    catalog.ingest()
    before = everything(catalog)
    catalog.path.write_bytes(content)
    if content:
        with pytest.raises(ConfigError, match=r"catalog.duckdb cannot be used .*`nautile store rebuild`"):
            catalog.ingest()
    catalog.rebuild()
    assert everything(catalog) == before


@pytest.mark.slow
def test_a_rebuild_is_done_beside_those_who_read_and_write(store, catalog, monkeypatch):
    fill(store)
    catalog.ingest()
    before = everything(catalog)
    ingest, rebuilding = Catalog.ingest, []

    def ingest_beside_others(self, **options):
        rows = ingest(self, **options)
        if self.path != catalog.path and not rebuilding:
            rebuilding.append(self.path)
            assert everything(catalog) == before
            writer(store, "meanwhile")("metric", name="loss", step=1234, value=1.0)
            assert ingest(catalog) == 1
        return rows

    monkeypatch.setattr(Catalog, "ingest", ingest_beside_others)
    assert catalog.rebuild()["metrics"] == len(before["metrics"]) + 1
    assert catalog.query("SELECT value FROM metrics WHERE step = 1234") == [{"value": 1.0}]
    assert [path.name for path in store.root.glob("catalog*")] == ["catalog.duckdb"]
    # What a killed rebuild leaves is not read again.
    rebuilding[0].write_bytes(b"half")
    monkeypatch.undo()
    catalog.rebuild()
    assert not rebuilding[0].exists()


@pytest.mark.slow
def test_a_catalog_that_was_cut_off_names_its_remedy(store, catalog):
    emit = writer(store, "many")
    for step in range(20_000):
        emit("metric", name=f"loss {step}", step=step, value=step / 7)
    catalog.ingest()
    # How much of the file is free space at its end differs, and so does what is missing: rows, or the tables' names.
    for _ in range(3):
        catalog.path.write_bytes(catalog.path.read_bytes()[: catalog.path.stat().st_size // 4])
        for query in (catalog.query, catalog.reading()):
            with pytest.raises(ConfigError, match=r"catalog.duckdb cannot be used .*`nautile store rebuild`"):
                query("SELECT sum(value), max(name) FROM metrics")
        query.close()
    catalog.rebuild()
    assert catalog.query("SELECT count(*) AS n FROM metrics WHERE name LIKE 'loss %'") == [{"n": 20_000}]


@pytest.mark.parametrize("reason", ["Read-only file system", "Permission denied", "No space left on device"])
def test_a_store_that_cannot_be_written_is_read_as_it_is(store, catalog, monkeypatch, caplog, reason):
    fill(store)
    catalog.ingest()
    before = everything(catalog)
    connect = duckdb.connect

    def refuse_to_write(path, *, read_only, **options):
        if not read_only:
            raise duckdb.IOException(f'IO Error: Cannot open file "{path}": {reason}')
        return connect(path, read_only=read_only, **options)

    monkeypatch.setattr(duckdb, "connect", refuse_to_write)
    with pytest.raises(ConfigError, match=r"cannot be written .*free some space or fix its permissions") as error:
        catalog.ingest()
    assert "rebuild" not in str(error.value)
    catalog.catch_up()
    assert everything(catalog) == before
    assert "is not shown" in caplog.text
    catalog.path.unlink()
    with pytest.raises(ConfigError, match="cannot be written"):
        catalog.catch_up()


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 1000])  # events in bulk, and one by one
def test_of_two_records_of_an_event_the_newer_stays_whichever_is_read_first(store, catalog, monkeypatch, least):
    monkeypatch.setattr(catalogs, "LEAST", least)
    store.prepare()

    def record(file, value, time, execution="e1"):
        event = {"id": "m", "kind": "metric", "execution": execution, "stage": "toy", "time": time}
        line = json.dumps(event | {"fields": {"name": "loss", "step": 1, "value": value}})
        with (store.events / f"{file}.jsonl").open("a") as lines:
            lines.write(f"{line}\n")
        catalog.ingest()
        return [row["value"] for row in catalog.query("SELECT value FROM metrics ORDER BY execution")]

    assert record("b", 1.0, time=5) == [1.0]
    assert record("a", 2.0, time=4) == [1.0]
    assert record("c", 3.0, time=6) == [3.0]
    assert record("c", 4.0, time=6) == [4.0]
    assert record("d", 5.0, time=9, execution="e2") == [4.0, 5.0]  # no event of another execution is replaced
    before = everything(catalog)
    assert catalog.rebuild()["metrics"] == 2
    assert everything(catalog) == before


def test_a_reader_knows_what_is_not_in_the_catalog_yet(store, catalog):
    def is_current():
        with catalog.reading() as reader:
            return reader.is_current()

    assert not is_current()  # there is no file
    fill(store)
    catalog.ingest()
    assert is_current()
    writer(store, "child-3")("metric", name="loss", step=9, value=1.0)
    assert not is_current()
    with catalog.caught_up() as reader:
        assert reader("SELECT value FROM metrics WHERE step = 9 AND execution = 'e1'")[-1] == {"value": 1.0}
    assert is_current()
    added = published(store, "tokens", "more")
    assert not is_current()
    catalog.ingest()
    manifest = added.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    assert not is_current()
    catalog.ingest()
    shutil.rmtree(added.folder)
    assert not is_current()
    with catalog.caught_up() as reader:
        assert not reader("SELECT id FROM artifacts WHERE id = ?", added.id)
    assert is_current()


def test_a_reader_of_what_is_current_does_not_open_the_file_for_writing(store, catalog, monkeypatch):
    fill(store)
    catalog.ingest()
    opened, connect = [], duckdb.connect
    monkeypatch.setattr(duckdb, "connect", lambda path, **how: opened.append(how["read_only"]) or connect(path, **how))
    with catalog.caught_up() as reader:
        assert len(reader("FROM artifacts")) == 3
    assert opened == [True]


@pytest.mark.parametrize(("schema", "first"), [(0, "ingest"), (SCHEMA + 1, "query")])
def test_a_catalog_of_another_schema_is_built_anew(store, catalog, schema, first):
    fill(store)
    catalog.ingest()
    before = everything(catalog)
    with duckdb.connect(catalog.path) as connection:
        connection.execute("UPDATE ingested SET position = ? WHERE path = 'schema'", [schema])
        connection.execute("ALTER TABLE attempts DROP COLUMN host")
        connection.execute("DROP TABLE notes")
        connection.execute("CREATE VIEW notes AS SELECT 42 AS answer")
        connection.execute("CREATE TABLE tomorrow AS SELECT 42 AS answer")
    if first == "ingest":
        assert Catalog(store).ingest() > 0
    assert everything(Catalog(store)) == before
    with pytest.raises(ConfigError, match="tomorrow"):
        catalog.query("SELECT * FROM tomorrow")


LAST_WORDS = """
import atexit, ctypes, logging, sys
import duckdb
atexit.register(lambda: print("of an exit function", file=sys.stderr))
from nautile.store import catalog
catalog.hide_leak_report()
class Handler(logging.StreamHandler):
    def close(self):
        print("of logging", file=sys.stderr)
logging.getLogger().addHandler(Handler())
for leaked in (duckdb.DuckDBPyConnection, duckdb.connect, catalog.Catalog):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
"""


@pytest.mark.slow
def test_only_a_process_that_asks_for_it_has_no_report_of_leaks_and_it_keeps_standard_error_to_the_end():
    def last_words(program):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        return done.stderr

    assert last_words(LAST_WORDS).splitlines() == ["of an exit function", "of logging"]
    # Who imports the catalog, a notebook for one, keeps its process as it was.
    imported = last_words(LAST_WORDS.replace("catalog.hide_leak_report()", ""))
    assert "nanobind: leaked" in imported, "the binding reports no leaks any more: remove what hides them"


def test_lineage_reaches_shards_and_calls(store, catalog):
    def emit_calls(execution, purpose, times):
        emit = writer(store, f"calls-{execution}", execution)
        for _ in range(times):
            emit("call", endpoint="e", purpose=purpose, dollars=0.5)

    web = published(store, "tokens", "web", {"index.json": "{}", "shards/0.bin": "00", "shards/1.bin": "11"})
    exemplars = published(store, "exemplars", "synth")
    distilled = published(store, "tokens", "distill", inputs={"exemplars": exemplars}, execution="teach")
    emit_calls("teach", "teacher", 3)
    old_base = published(store, "checkpoint", "base", {"w": "1"}, inputs={"web": web}, execution="base-1")
    inputs = {"web": web, "distilled": distilled}
    base = published(store, "checkpoint", "base", {"w": "2"}, inputs=inputs, execution="base-2", supersede=True)
    aligned = published(store, "checkpoint", "align", inputs={"checkpoint": base}, execution="align")
    emit_calls("align", "judge", 2)
    score = published(store, "evaluation", "eval", inputs={"checkpoint": aligned, "base": base})
    published(store, "report", "unrelated")
    rows = catalog.lineage(score.id)
    assert {row["id"]: row["calls"] for row in rows} == {
        score.id: 0,
        aligned.id: 2,
        base.id: 0,
        web.id: 0,
        distilled.id: 3,
        exemplars.id: 0,
    }
    assert rows[0]["depth"] == 0
    edges = {(row["made"], row["name"], row["id"]) for row in rows}
    assert (base.id, "distilled", distilled.id) in edges
    assert (score.id, "base", base.id) in edges
    old = {row["id"] for row in catalog.lineage(f"{old_base.id}.1")}
    assert old == {f"{old_base.id}.1", web.id}
    shards = catalog.query(
        "SELECT path, sha256 FROM lineage_files(?) WHERE kind = 'tokens' AND path LIKE '%.bin'", [score.id]
    )
    assert shards == [
        {"path": f"shards/{n}.bin", "sha256": web.manifest["files"][f"shards/{n}.bin"]["sha256"]} for n in range(2)
    ]
    spent = catalog.query("SELECT purpose, sum(dollars) AS d FROM lineage_calls(?) GROUP BY 1 ORDER BY 1", [score.id])
    assert spent == [{"purpose": "judge", "d": 1.0}, {"purpose": "teacher", "d": 1.5}]


def test_a_lineage_in_a_circle_ends_and_visits_each_artifact_once(store, catalog):
    """Of manifests whose seals are right, although keys cannot be digests of each other."""
    names = "abcd"
    for place, name in enumerate(names):
        inputs = {"next": f"tokens/{key_of(names[(place + 1) % 4])}", "after": f"tokens/{key_of(names[place - 2])}"}
        fields = {"key": key_of(name), "inputs": inputs, "input_executions": dict.fromkeys(inputs, "e1")}
        folder = store.root / "artifacts" / "tokens" / key_of(name)
        filled(folder, {"manifest.json": json.dumps(manifest_of(**fields))})
    rows = catalog.lineage(f"tokens/{key_of('a')[:12]}")
    assert len({(row["id"], row["made"], row["name"]) for row in rows}) == len(rows) == 1 + 2 * len(names)
    assert (rows[0]["depth"], rows[0]["key"], rows[0]["made"]) == (0, key_of("a"), None)
    assert {row["key"]: row["depth"] for row in reversed(rows)} == {
        key_of(name): depth for name, depth in zip(names, (0, 1, 1, 2), strict=True)
    }


def test_a_lineage_of_many_paths_is_as_long_as_its_inputs(store, catalog):
    last = published(store, "tokens", "0")
    for number in range(1, 41):  # 2^40 paths
        last = published(store, "tokens", str(number), inputs={"x": last, "y": last})
    assert len(catalog.lineage(last.id)) == 81


def test_lineage_shows_the_live_artifact_where_the_version_that_was_read_is_removed(store, catalog):
    tokens = published(store, "tokens", "in")
    checkpoint = published(store, "checkpoint", "out", inputs={"web": tokens})
    published(store, "tokens", "in", {"a.txt": "again"}, supersede=True)
    assert [row["id"] for row in catalog.lineage(checkpoint.id)] == [checkpoint.id, f"{tokens.id}.1"]
    store.discard(store.get(f"{tokens.id}.1").path)
    assert [row["id"] for row in catalog.lineage(checkpoint.id)] == [checkpoint.id, tokens.id]


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_run_stays_ended_though_the_clock_was_set_back(store, catalog, monkeypatch, first, between):
    """A run was killed; the process that reports its end has a clock that is an hour behind."""
    begun, ended = (first, "b" if first == "a" else "a")  # the files are read by their names
    noon = 1_767_268_800 * 10**9
    monkeypatch.setattr("time.time_ns", lambda: noon)
    writer(store, begun, execution="")("run", id="r", state="running", label="reason")
    if between:
        catalog.ingest()
    monkeypatch.setattr("time.time_ns", lambda: noon - 3600 * 10**9)
    writer(store, ended, execution="")("run", id="r", state="interrupted", label="reason")
    catalog.ingest()
    assert catalog.query("SELECT state FROM attempts") == [{"state": "interrupted"}]
    before = everything(catalog)
    catalog.rebuild()
    assert everything(catalog) == before
