"""Several processes at one store, and processes killed in the middle of a write."""

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor

import pytest

from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter, read_events
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


def set_gate(gate):
    global GATE
    GATE = gate  # the barrier of a worker process, so that all begin at once


def commit_all(root, name, count):
    """What a stage's parent does while its child works: append an event, then load new events into the catalog."""
    emit = EventWriter(root / "events" / f"{name}.jsonl", name, stage="bench")
    GATE.wait()
    for step in range(count):
        emit("metric", name="loss", step=step, value=step / 2)
        Catalog(Store(root)).ingest()
    emit.close()


@pytest.mark.slow
def test_concurrent_commits_lose_and_duplicate_nothing(tmp_path):
    """Eight processes that did so without our lock damaged the catalog in one of three trials."""
    Store(tmp_path).prepare()
    names, context = ["ann", "bob", "cy", "dee"], multiprocessing.get_context("forkserver")
    gate = context.Barrier(len(names))
    with ProcessPoolExecutor(len(names), mp_context=context, initializer=set_gate, initargs=(gate,)) as pool:
        list(pool.map(commit_all, [tmp_path] * len(names), names, [15] * len(names)))
    for rebuild in (False, True):
        if rebuild:
            Catalog(Store(tmp_path)).rebuild()
        rows = Catalog(Store(tmp_path)).query("SELECT execution, step, value FROM metrics ORDER BY ALL")
        expected = [{"execution": name, "step": n, "value": n / 2} for name in names for n in range(15)]
        assert rows == expected
