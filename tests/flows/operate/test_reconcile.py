"""What dead processes leave, settled: attempts, staging, lock files; and what must be left alone."""

import json
import os
import time

import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.flows.operate import reconcile
from nautile.flows.operate.reconcile import Reconciled, attempts, lock_files, reconcile_if_possible, staging, unfinished
from nautile.store.catalog import Catalog
from nautile.store.manifest import host
from nautile.tasks.engine.attempt_log import write_attempt_row
from tests.support.samples.stage_store import key_of, published

RUNS = "SELECT state, error, ended, outputs FROM attempts ORDER BY time"


def attempt(store, word, **fields):
    """An attempt written down as running."""
    row = {"id": f"id-{word}", "run": "r-1", "stage": "toy", "label": "toy", "key": key_of(word), "attempt": 1}
    row |= {"execution": f"made-{word}", "state": "running", "started": "2026-01-02T03:04:05+00:00"} | fields
    write_attempt_row(store, row)
    return row


def test_an_attempt_that_had_published_is_done(store):
    artifact = published(store, "numbers", "a", execution="made-a", outputs=("numbers",))
    attempt(store, "a")
    (result,) = attempts(store)
    assert "marked done" in result.line()
    (row,) = Catalog(store).query(RUNS)
    assert (row["state"], json.loads(row["outputs"])) == ("done", {"numbers": artifact.id})


def test_an_attempt_that_ended_meanwhile_keeps_its_end(store, monkeypatch):
    row = attempt(store, "a")
    acquire = type(store.lock("0" * 64)).try_acquire

    def late(lock):
        write_attempt_row(store, row | {"state": "failed", "error": "by zero"})
        return acquire(lock)

    monkeypatch.setattr("nautile.store.locks.KeyLock.try_acquire", late)
    assert list(attempts(store)) == []
    assert [row["state"] for row in Catalog(store).query(RUNS)] == ["failed"]


def test_rests_of_staging_go_and_unfinished_work_is_named_and_kept(store):
    (store.root / "staging" / ".trash-1").mkdir()
    (store.root / "staging" / ".trash-1" / "a").write_text("aaa")
    begun = store.staging(key_of("begun"))
    write_json(begun / "request.json", {"stage": "pretrain"})
    old = time.time() - 8 * 86400
    for path in (begun / "request.json", begun):
        os.utime(path, (old, old))
    assert [result.outcome for result in staging(store)] == ["left by an interrupted removal; 3 B removed"]
    (result,) = unfinished(store)
    assert "of pretrain, unfinished, untouched for 8 days; kept" in result.line()
    assert begun.is_dir()


def test_lock_files_go_unless_held_or_owned_and_a_waiter_is_not_fooled(store):
    for word in ("free", "held", "owned"):
        with store.lock(key_of(word)):
            pass
    store.staging(key_of("owned"))
    held = store.lock(key_of("held"))
    assert held.try_acquire()
    assert lock_files(store) == 1
    assert not store.lock(key_of("free")).path.exists()
    # Whoever opened the file before it went must not think that he has the lock.
    held.remove()
    with store.lock(key_of("held")):
        assert not store.lock(key_of("held")).try_acquire()


def test_a_run_holds_its_lock_for_life(store):
    with store.run_lock("r-1").for_life():
        assert store.begun_runs() == ["r-1"]
        assert store.lost_runs() == []
    assert store.begun_runs() == []
    with pytest.raises(ValueError, match="not the id"):
        store.run_lock("../r")


def test_what_hinders_the_reconciler_is_told_and_hinders_nothing_else(store, monkeypatch):
    def broken(store):
        raise ConfigError("the store is full")

    monkeypatch.setattr(reconcile, "attempts", broken)
    assert list(reconcile_if_possible(store)) == [
        Reconciled("reconcile", "stopped", "the store is full. `nautile reconcile` tries again")
    ]


@pytest.mark.slow
def test_an_attempt_on_another_machine_with_the_same_remote_is_left_alone(machine):
    """Its lock is on that machine's disk: that it is free here says nothing."""
    there, here = machine("there"), machine("here")
    attempt(there, "theirs", host="another-host")
    there.push_events()
    attempt(here, "ours", host=host())
    write_json(here.staging(key_of("ours")) / "execution.json", {"run": {"id": "id-ours"}})
    # Another folder on this machine, as in a container: it has the same host name.
    attempt(there, "beside", host=host())
    there.push_events()
    here.refresh(events=True)
    (ours,) = attempts(here)
    assert ours.outcome == "its process is gone; marked interrupted; its work is kept"
    rows = Catalog(here).query("SELECT id, state FROM attempts ORDER BY id")
    states = {row["id"]: row["state"] for row in rows}
    assert states == {"id-ours": "interrupted", "id-theirs": "running", "id-beside": "running"}
