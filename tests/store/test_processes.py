"""Several processes at one store, and processes killed in the middle of a write."""

import random

import pytest

from bench.operation.commits import commit_concurrently, lost_and_double
from store.artifacts import Store
from store.catalog import Catalog
from store.events import read_events
from tests.support.samples.stage_store import damage, key_of
from tests.support.stages.stage_crowd import CrowdProcess, publish, write_and_ingest


@pytest.mark.slow
@pytest.mark.parametrize("supersede", [False, True])
def test_processes_that_publish_the_same_keys_each_get_a_whole_artifact(store, supersede):
    count = 12
    processes = [CrowdProcess(publish, store.root, name, count, supersede) for name in ("ann", "bob", "cy")]
    for process in processes:
        process.go()
    outputs = [process.join() for process in processes]
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
        process = CrowdProcess(publish, store.root, f"round{round_}", 400, True)
        process.go()
        for _ in range(rng.randrange(1, 40)):
            process.next_report()
            published += 1
        process.kill()
    assert all(not damaged for damaged in damage(store).values())
    assert len(store.folders()) >= published


@pytest.mark.slow
def test_a_killed_process_loses_no_event_that_it_had_written(store):
    rng = random.Random(6)
    for round_ in range(4):
        name = f"round{round_}"
        process = CrowdProcess(write_and_ingest, store.root, name, 5000, 25)
        process.go()
        acknowledged = 0
        for _ in range(rng.randrange(1, 200)):
            acknowledged = process.next_report() + 1
        process.kill()
        events, _ = read_events(store.root / "events" / f"{name}.jsonl")
        assert len(events) >= 2 * acknowledged
        Catalog(store).ingest()
        rows = Catalog(store).query("SELECT count(*) AS n FROM metrics WHERE execution = ?", [name])
        assert rows == [{"n": len(events)}]


@pytest.mark.slow
def test_concurrent_commits_lose_and_duplicate_nothing(tmp_path):
    """A small run of bench/operation/commits.py, which also compares the catalog with a rebuilt one."""
    Store(tmp_path).prepare()
    names = ["ann", "bob", "cy", "dee"]
    assert len(commit_concurrently(tmp_path, names, 15)) == 60
    assert lost_and_double(tmp_path, names, 15) == (0, 0)
    rows = Catalog(Store(tmp_path)).query("SELECT count(*) AS n, sum(value) AS sum FROM metrics")
    assert rows == [{"n": 60, "sum": 4 * sum(range(15)) / 2}]
