"""Several processes at one store, and processes killed in the middle of a write."""

import random
import signal

import pytest

from bench.commits import crowd, lost_and_double
from store.artifacts import Store
from store.catalog import Catalog
from store.events import read_events
from tests.support.stage_crowd import go, start
from tests.support.stage_store import damage, key_of


@pytest.mark.slow
@pytest.mark.parametrize("supersede", [False, True])
def test_processes_that_publish_the_same_keys_each_get_a_whole_artifact(store, supersede):
    count = 12
    crowd = [start("publish", store.root, name, count, supersede) for name in ("ann", "bob", "cy")]
    go(*crowd)
    outputs = [process.communicate()[0].split() for process in crowd]
    assert [process.returncode for process in crowd] == [0, 0, 0]
    assert all(not damaged for damaged in damage(store).values())
    for index in range(count):
        live = store.find("tokens", key_of(f"crowd {index}"))
        versions = [a for a in store.list(superseded=True) if a.key == live.key]
        executions = {output[index] for output in outputs}
        assert live.execution in executions
        assert len(versions) == (3 if supersede else 1)
        assert {a.superseded for a in versions} == ({0, 1, 2} if supersede else {0})
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.slow
def test_a_process_killed_while_publishing_leaves_only_whole_artifacts(store):
    rng = random.Random(5)
    published = 0
    for round_ in range(6):
        process = start("publish", store.root, f"round{round_}", 400, True)
        go(process)
        for _ in range(rng.randrange(1, 40)):
            process.stdout.readline()
            published += 1
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert all(not damaged for damaged in damage(store).values())
    assert len(store.folders()) >= published


@pytest.mark.slow
def test_concurrent_writers_lose_and_duplicate_nothing(store):
    count, names = 60, ("ann", "bob", "cy")
    crowd = [start("ingest", store.root, name, count, 4) for name in names]
    go(*crowd)
    for process in crowd:
        process.communicate()
        assert process.returncode == 0
    catalog = Catalog(store)
    rows = catalog.query("SELECT execution, count(*) AS rows, count(DISTINCT step) AS steps FROM metrics GROUP BY 1")
    assert sorted((r["execution"], r["rows"], r["steps"]) for r in rows) == [(name, 2 * count, count) for name in names]
    before = catalog.query("SELECT * FROM metrics ORDER BY id")
    assert catalog.rebuild()["metrics"] == 2 * count * len(names)
    assert catalog.query("SELECT * FROM metrics ORDER BY id") == before


@pytest.mark.slow
def test_a_killed_process_loses_no_event_that_it_had_written(store):
    rng = random.Random(6)
    for round_ in range(4):
        name = f"round{round_}"
        process = start("ingest", store.root, name, 5000, 25)
        go(process)
        acknowledged = 0
        for _ in range(rng.randrange(1, 200)):
            acknowledged = int(process.stdout.readline()) + 1
        process.send_signal(signal.SIGKILL)
        process.communicate()
        events, _ = read_events(store.root / "events" / f"{name}.jsonl")
        assert len(events) >= 2 * acknowledged
        Catalog(store).ingest()
        rows = Catalog(store).query("SELECT count(*) AS n FROM metrics WHERE execution = ?", [name])
        assert rows == [{"n": len(events)}]


@pytest.mark.slow
def test_concurrent_commits_lose_and_duplicate_nothing(tmp_path):
    """A small run of bench/commits.py."""
    Store(tmp_path).prepare()
    names = ["ann", "bob", "cy", "dee"]
    assert len(crowd(tmp_path, names, 10)) == 40
    assert lost_and_double(tmp_path, names, 10) == (0, 0)
    rows = Catalog(Store(tmp_path)).query("SELECT count(*) AS n, sum(value) AS sum FROM metrics")
    assert rows == [{"n": 40, "sum": 4 * sum(range(10)) / 2}]
