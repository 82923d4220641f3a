"""Steps of different runs take turns on a resource: a real server, two that want the one slot."""

import threading
import time
from contextvars import copy_context
from pathlib import Path

import pytest
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.operate import concurrency
from store.artifacts import Store
from store.locks import KeyLock
from tasks.engine import prefect_task
from tasks.engine.child_process import cancelling
from tasks.engine.errors import StageCancelled
from tasks.engine.progress import subscribe
from tasks.engine.stage import RunContext
from tests.support.servers.prefect_calls import remove_limits

pytestmark = pytest.mark.slow


@pytest.fixture
def name(prefect_url, monkeypatch):
    """The name of a limit of one slot."""
    monkeypatch.setattr(prefect_task, "SLOT_TRY_S", 1.0)
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        concurrency.declare({"accelerator": 1, "cpu": 2})
        concurrency.declare({"accelerator": 1, "cpu": 2})  # a second deploy changes nothing
        yield concurrency.declared_limits()["accelerator"]
        remove_limits(prefect_url)
        EventsWorker.drain_all(timeout=5, at_exit=False)  # else the events of later tests would go to this server


@pytest.fixture
def second(name):
    """A thread that waits for the slot that the block of `first` holds; what has happened, in order."""
    events, waits = [], threading.Event()

    def work():
        try:
            with prefect_task._slot(RunContext("r2", "", label="evaluate:align", limit=name)):
                events.append("second")
        except StageCancelled:
            events.append("cancelled")

    def on_update(update):
        if (update.label, update.state) == ("evaluate:align", "waiting") and "waits for nautile-" in update.note:
            waits.set()

    unsubscribe = subscribe(on_update)
    thread = threading.Thread(target=copy_context().run, args=(work,))
    yield thread, waits, events
    thread.join(90)
    unsubscribe()


def test_the_second_waits_until_the_first_is_done(name, second):
    thread, waits, events = second
    with prefect_task._slot(RunContext("r1", "", label="pretrain", limit=name)):
        thread.start()
        assert waits.wait(60)
        time.sleep(0.1)
        events.append("first")
    thread.join(90)
    assert events == ["first", "second"]


def test_one_that_waits_ends_when_its_run_is_cancelled(name, second):
    thread, waits, events = second
    with prefect_task._slot(RunContext("r1", "", label="pretrain", limit=name)):
        thread.start()
        assert waits.wait(60)
        with pytest.raises(KeyboardInterrupt), cancelling():
            raise KeyboardInterrupt
        thread.join(120)
        assert events == ["cancelled"]
    with cancelling():
        """Nothing is cancelled any more."""


def test_runs_of_a_sweep_take_turns_by_lock_files(tmp_path, monkeypatch):
    monkeypatch.setattr(prefect_task, "LOCK_TRY_S", 0.01)
    store, waits, events = Store(tmp_path), threading.Event(), []
    assert concurrency.shared_slots(store, "cpu", 2) == ()  # an ordinary run has none
    monkeypatch.setenv(concurrency.SHARED, "1")
    (slot,) = slots = concurrency.shared_slots(store, "accelerator", 1)
    assert len(concurrency.shared_slots(store, "cpu", 2)) == 2
    other = KeyLock(Path(slot))  # as another process holds it
    assert other.try_acquire()
    unsubscribe = subscribe(lambda update: update.run_id == "r2" and waits.set())

    def work():
        with prefect_task._slot(RunContext("r2", str(tmp_path), label="pretrain", slots=slots)):
            events.append(other.try_acquire())

    thread = threading.Thread(target=copy_context().run, args=(work,))
    thread.start()
    assert waits.wait(60)
    assert events == []
    other.release()
    thread.join(60)
    unsubscribe()
    assert events == [False]  # it held the slot
    assert other.try_acquire()
