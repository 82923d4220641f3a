"""Work items on a real Ray cluster of several worker processes; one of them is killed at work."""

import os
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from prefect import flow

from common.errors import ConfigError
from configs.operation import LaunchConfig
from store.artifacts import Store
from store.catalog import Catalog
from tasks.engine import child_process as child
from tasks.engine.child_process import cancelling
from tasks.engine.prefect_task import as_prefect_task
from tasks.engine.stage import RunContext
from tests.support.ray_cluster import cluster, surroundings
from tests.support.stage_parent import is_alive, wait_for
from tests.support.stage_pieces import joined, pieces, runs, section

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address(prefect_server):
    """One cluster for all tests here. Ray's sockets need a short path."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in surroundings(Path(folder)).items():
            patch.setenv(name, value)
        with cluster(3, Path(folder)) as address:
            yield address


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(as_prefect_task(pieces), "retries", 0)
    yield
    child._cancelled.clear()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def gate(tmp_path):
    gate = tmp_path / "gate"
    gate.mkdir()
    return gate


def through_a_flow(store, config, address):
    @flow(name="one-stage")
    def one_stage():
        where = LaunchConfig(engine="ray", ray_address=address)
        with cancelling():
            return as_prefect_task(pieces)(config, {}, RunContext("r1", str(store.root), label="pieces", launch=where))

    return one_stage(return_state=True)


def test_a_killed_worker_a_bad_item_and_one_that_crashed_lose_and_double_nothing(store, gate, address):
    faults = {"piece-0": {"bad": 9}, "piece-1": {"crash": 1}}
    config = section(5, faults=faults, skippable=0.2, gate=str(gate), gated=["piece-2"])
    killed = {}

    def kill_one():
        wait_for((gate / "piece-2").exists)
        child, worker = map(int, (gate / "piece-2").read_text().split())
        # Meanwhile the other workers finish the rest of the fan-out.
        wait_for(lambda: sum(map(len, runs(store.root).values())) == 7)  # the list, five items, one of them again
        killed.update(child=child, worker=worker, cmdline=psutil.Process(worker).cmdline())
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: not is_alive(child))
        (gate / "open").touch()

    killer = threading.Thread(target=kill_one)
    killer.start()
    state = through_a_flow(store, config, address)
    killer.join()
    outputs = state.result()
    assert "ray::" in killed["cmdline"][0]
    assert (store.get(outputs["numbers"]).path / "all.txt").read_text() == joined(5, without=(0,))
    facts = store.get(outputs["numbers"]).manifest["facts"]
    assert facts["skipped"] == {"piece-0": "piece-0: not a text"}
    again = {item: count for item, count in facts["runs"].items() if count > 1}
    assert again == {"piece-1": 2, "piece-2": 2}
    Catalog(store).ingest()
    (rows,) = Catalog(store).query("SELECT count(*) AS n, sum(value) AS rows FROM metrics WHERE name = 'rows'")
    assert rows == {"n": 4, "rows": 20.0}


def test_an_interrupted_run_leaves_no_process_on_the_cluster(store, gate, address, monkeypatch):
    stopped = []

    def interrupt(update):
        if (gate / "piece-1").exists() and not stopped:
            stopped.append(update)
            raise KeyboardInterrupt

    monkeypatch.setattr("tasks.engine.attempt_log.notify", interrupt)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        through_a_flow(store, section(2, gate=str(gate), gated=["piece-1"]), address)
    assert stopped
    running = map(int, (gate / "piece-1").read_text().split())
    wait_for(lambda: not any(map(is_alive, running)), 10)
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_cluster_that_is_not_there_is_one_message(store, address):
    with pytest.raises(ConfigError, match=r"no cluster answers at 127.0.0.1:9 \(Connection refused\): start one"):
        through_a_flow(store, section(1), "127.0.0.1:9").result()
