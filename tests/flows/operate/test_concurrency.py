"""Steps of different runs take turns on a resource: a real server, two that want the one slot."""

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path

import pytest
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from nautile.common.processes import free_port
from nautile.flows.operate import concurrency, reconcile
from nautile.store.artifacts import Store
from nautile.store.locks import KeyLock
from nautile.tasks.engine import prefect_task
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.child_process import cancelling
from nautile.tasks.engine.errors import StageCancelled
from nautile.tasks.engine.progress import subscribe
from nautile.tasks.engine.stage import RunContext
from tests.support.servers.prefect_calls import fetch, remove_limits, request
from tests.support.servers.prefect_server import start_server
from tests.support.stages import stage_sums
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import ROOT

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
    """Starts a thread that waits for the slot, in the caller's context; what has happened, in order."""
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
    threads = []

    def start():
        threads.append(threading.Thread(target=copy_context().run, args=(work,)))
        threads[0].start()
        return threads[0]

    yield start, waits, events
    threads[0].join(90)
    unsubscribe()


def test_the_second_waits_until_the_first_is_done(name, second):
    start, waits, events = second
    with prefect_task._slot(RunContext("r1", "", label="pretrain", limit=name)):
        thread = start()
        assert waits.wait(60)
        time.sleep(0.1)
        events.append("first")
    thread.join(90)
    assert events == ["first", "second"]


def test_one_that_waits_ends_when_its_run_is_cancelled(name, second):
    start, waits, events = second

    def cancelled_run():
        with cancelling():
            threads.append(start())
            assert waits.wait(60)
            raise KeyboardInterrupt

    threads = []
    with prefect_task._slot(RunContext("r1", "", label="pretrain", limit=name)):
        with pytest.raises(KeyboardInterrupt):
            cancelled_run()
        threads[0].join(120)
        assert events == ["cancelled"]


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


def active(url: str, name: str) -> int:
    return fetch(f"{url}/v2/concurrency_limits/{name}")["active_slots"]


def test_a_declaration_that_has_not_changed_leaves_the_servers_limit(name, prefect_url):
    request(f"{prefect_url}/v2/concurrency_limits/{name}", {"limit": 3}, method="PATCH").raise_for_status()
    concurrency.declare({"accelerator": 1, "cpu": 2}, before={"accelerator": 1, "cpu": 2})
    assert fetch(f"{prefect_url}/v2/concurrency_limits/{name}")["limit"] == 3  # as the operator has set it
    concurrency.declare({"accelerator": 2, "cpu": 2}, before={"accelerator": 1, "cpu": 2})
    assert fetch(f"{prefect_url}/v2/concurrency_limits/{name}")["limit"] == 2


def test_an_operators_limit_of_zero_holds_all_steps(name, prefect_url):
    request(f"{prefect_url}/v2/concurrency_limits/{name}", {"limit": 0}, method="PATCH").raise_for_status()
    assert not prefect_task.ServerSlot(name).try_acquire()


def test_a_slot_that_no_lease_holds_is_free_again_after_reconcile(name, prefect_url, monkeypatch):
    """As a server leaves it that is killed between counting the slot and recording its lease."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    monkeypatch.setattr(reconcile, "SETTLED_S", 0.1)
    fetch(f"{prefect_url}/v2/concurrency_limits/increment", {"names": [name], "slots": 1})
    assert not prefect_task.ServerSlot(name).try_acquire()
    assert [result.line() for result in reconcile.slots()] == [f"slot {name}: 1 held by no step; free again"]
    slot = prefect_task.ServerSlot(name)
    assert slot.try_acquire()
    assert list(reconcile.slots()) == []  # a step holds it
    slot.release()
    assert active(prefect_url, name) == 0


@pytest.mark.heavy
def test_a_step_keeps_its_slot_over_a_server_that_is_killed_and_frees_it_after_its_own_end(prefect_home, tmp_path):
    """Twice: within the lease, and after the server has given the slot back because nobody renewed it."""
    home = tmp_path / "home"
    shutil.copytree(prefect_home, home)
    port, quick = free_port(), {"PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "1"}
    server = start_server(home, port, quick)
    url = f"http://127.0.0.1:{port}/api"
    try:
        with temporary_settings({PREFECT_API_URL: url}), pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefect_task, "RENEW_S", 0.5)
            concurrency.declare({"accelerator": 1})
            name = concurrency.declared_limits()["accelerator"]
            slot = prefect_task.ServerSlot(name)
            assert slot.try_acquire()
            server.kill()
            server.wait()
            assert not prefect_task.ServerSlot(name).try_acquire()  # nobody answers, which is no permission
            server = start_server(home, port, quick)
            assert active(url, name) == 1
            assert not prefect_task.ServerSlot(name).try_acquire()
            # The server has given the slot back meanwhile: the step takes it again.
            (lease,) = [path for path in (home / "concurrency_leases").glob("*.json") if path.stem != "expirations"]
            request(f"{url}/v2/concurrency_limits/decrement-with-lease", {"lease_id": lease.stem}).raise_for_status()
            wait_for(lambda: active(url, name) == 1)
            slot.release()
            assert active(url, name) == 0
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.heavy
def test_a_killed_steps_slot_is_free_within_a_minute(name, prefect_url):
    """Its lease is not renewed: the server gives the slot back, also if it was restarted in between."""
    code = (
        "import sys, time; from nautile.tasks.engine.prefect_task import ServerSlot; slot = ServerSlot(sys.argv[1]);"
        " print(slot.try_acquire(), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, name]
    settings = {**os.environ, "PREFECT_API_URL": prefect_url}
    process = subprocess.Popen(command, env=settings, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    assert active(prefect_url, name) == 1
    process.kill()
    process.wait()
    wait_for(lambda: active(prefect_url, name) == 0)


def test_a_step_that_only_reuses_waits_for_no_slot(store):
    taken = []

    @contextmanager
    def slot():
        taken.append("slot")
        raise TimeoutError("all slots are taken")
        yield

    part = stage_sums.section(1)
    with pytest.raises(TimeoutError):
        run_stage(stage_sums.sums, part, {}, RunContext("r1", str(store.root)), slot=slot)
    made = run_stage(stage_sums.sums, part, {}, RunContext("r1", str(store.root)))
    assert run_stage(stage_sums.sums, part, {}, RunContext("r2", str(store.root)), slot=slot) == made
    assert taken == ["slot"]
