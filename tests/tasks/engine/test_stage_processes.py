"""Processes killed or interrupted: the child, its parent; nothing is left running and the next run continues."""

import os
import signal
import threading

import pytest

from nautile.common.errors import Retryable
from nautile.store.catalog import Catalog
from nautile.tasks.engine import child_process as child
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_parent import is_alive, reached, start, wait_for
from tests.support.stages.stage_sums import section, sums


@pytest.fixture
def config(gate):
    """Six numbers; the stage waits before the fourth. It has started a process of its own."""
    return section(6, gate=str(gate), gate_at=3, faults={"grandchild": 1})


def grandchild(store):
    (path,) = (store.root / "staging").glob("*/scratch/grandchild")
    return int(path.read_text())


def finish(store, gate, config, states):
    """Let a new run continue the work, and check its result and its rows."""
    (gate / "reached").unlink(missing_ok=True)
    (gate / "open").touch()
    artifact = store.get(run_stage(sums, config, {}, RunContext("r2", str(store.root), label="sums"))["numbers"])
    assert artifact.manifest["facts"]["written"] == 3  # the other three are of the attempt before
    assert [(artifact.path / f"{n}.txt").read_text() for n in range(6)] == [str(n) for n in range(6)]
    catalog = Catalog(store)
    catalog.ingest()
    runs = catalog.query("SELECT state, attempt, execution FROM attempts ORDER BY started")
    assert [(run["state"], run["attempt"]) for run in runs] == states
    assert {run["execution"] for run in runs} == {artifact.execution}
    rows = catalog.query("SELECT count(*) AS n, count(DISTINCT step) AS steps FROM metrics WHERE name = 'value'")
    assert rows == [{"n": 6, "steps": 6}]
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.slow
def test_a_killed_child_is_a_crash_and_the_next_attempt_continues(store, gate, config):
    failed = []

    def run():
        try:
            run_stage(sums, config, {}, RunContext("r1", str(store.root), label="sums"))
        except StageCrash as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    os.kill(reached(gate), signal.SIGKILL)
    thread.join()
    assert "was ended by signal 9" in failed[0]
    wait_for(lambda: not is_alive(grandchild(store)))
    finish(store, gate, config, [("failed", 1), ("done", 2)])


@pytest.mark.slow
def test_work_whose_input_is_replaced_meanwhile_is_done_anew(store, gate):
    """A forced run gives the folder that is read from to its own version: lineage would name the one before."""
    context = RunContext("r1", str(store.root), label="sums")
    first = store.get(run_stage(sums, section(2), {}, context)["numbers"])
    config, inputs = section(3, gate=str(gate), gate_at=2), {"base": first.id}
    failed = []

    def run():
        try:
            run_stage(sums, config, inputs, context)
        except Retryable as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    reached(gate)
    source = store.staging_root / "again"
    source.mkdir()
    (source / "0.txt").write_text("70")
    second = store.publish(
        "numbers", first.key, source, stage="sums", version=1, config={}, inputs={}, facts={}, supersede=True
    )
    (gate / "open").touch()
    thread.join()
    assert failed == ["the input base was replaced by another run while it was read"]
    made = store.get(run_stage(sums, config, inputs, context)["numbers"])
    assert made.manifest["input_executions"] == {"base": second.execution}
    assert [(made.path / f"{n}.txt").read_text() for n in range(3)] == ["70", "71", "72"]


@pytest.mark.slow
def test_ctrl_c_ends_the_child_and_all_it_started_even_if_it_ignores_sigterm(store, gate, config):
    config["sums"]["faults"]["deaf"] = 1
    parent = start(store.root, config)
    worker = reached(gate)
    pids = [worker, grandchild(store)]
    assert all(map(is_alive, pids))
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate()
    assert output.startswith("KeyboardInterrupt")
    assert not is_alive(worker)
    wait_for(lambda: not any(map(is_alive, pids)))
    finish(store, gate, config, [("cancelled", 1), ("done", 2)])


@pytest.mark.slow
def test_a_waiting_run_whose_first_is_killed_takes_over(store, gate, config):
    first = start(store.root, config, "r1")
    worker = reached(gate)
    (gate / "reached").unlink()
    second = start(store.root, config, "r2")
    lock = store.lock(next((store.root / "staging").glob("*/request.json")).parent.name)
    assert lock.held_elsewhere()
    left = grandchild(store)
    first.kill()
    first.communicate()
    reached(gate)
    assert not is_alive(worker)
    os.kill(left, signal.SIGKILL)  # a server that the work starts has to see to this itself
    (gate / "open").touch()
    output, _ = second.communicate()
    assert output.startswith("made ")
    finish(store, gate, config, [("interrupted", 1), ("done", 2), ("reused", 1)])


@pytest.mark.slow
def test_a_process_that_has_finished_and_hangs_is_ended(store, monkeypatch):
    monkeypatch.setattr(child, "LINGER_S", 0.5)
    monkeypatch.setattr(child, "TERMINATE_GRACE_S", 0.5)
    artifact = run_stage(sums, section(faults={"lingers": 1}), {}, RunContext("r1", str(store.root)))
    assert store.verify(store.get(artifact["numbers"])) == []
