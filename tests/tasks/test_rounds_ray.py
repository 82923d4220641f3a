"""Units on a real Ray cluster of several worker processes, through Prefect; one of them is killed while it works."""

import os
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from prefect import flow
from prefect.testing.utilities import prefect_test_harness

from configs.schema import LaunchConfig
from store.artifacts import Store
from store.catalog import Catalog
from tasks.child import cancelling
from tasks.stage import RunContext
from tests.support.ray_cluster import cluster, surroundings
from tests.support.stage_parent import is_alive, wait_for
from tests.support.stage_pieces import pieces, runs, section, whole

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address():
    """One cluster and one Prefect server for all tests here. Ray's sockets want a short path."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("DO_NOT_TRACK", "1")
        for name, value in surroundings(Path(folder)).items():
            patch.setenv(name, value)
        with cluster(3, Path(folder)) as found, prefect_test_harness(server_startup_timeout=180):
            yield found


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def gate(tmp_path):
    gate = tmp_path / "gate"
    gate.mkdir()
    return gate


def through_a_flow(store, asked, address, **launch):
    @flow(name="one-stage")
    def one_stage():
        where = LaunchConfig(engine="ray", ray_address=address, **launch)
        with cancelling():
            return pieces(asked, {}, RunContext("r1", str(store.root), label="pieces", launch=where))

    return one_stage(return_state=True)


def test_a_worker_killed_mid_way_loses_and_doubles_nothing(store, gate, address):
    asked = section(8, gate=str(gate), gated=["piece-2"])
    found = {}

    def kill_one():
        wait_for((gate / "piece-2").exists)
        child, worker = map(int, (gate / "piece-2").read_text().split())
        # The others go on meanwhile: all the rest of the round is done when the worker dies.
        wait_for(lambda: len(runs(store.root)) == 9)
        found.update(child=child, worker=worker, cmdline=psutil.Process(worker).cmdline())
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: not is_alive(child))
        (gate / "open").touch()
        found["runs"] = runs(store.root)

    killer = threading.Thread(target=kill_one)
    killer.start()
    state = through_a_flow(store, asked, address)
    killer.join()
    made = state.result()
    assert "ray::" in found["cmdline"][0]
    assert (store.get(made["numbers"]).path / "all.txt").read_text() == whole(8)
    assert store.get(made["numbers"]).manifest["facts"]["set_aside"] == {}
    Catalog(store).ingest()
    (rows,) = Catalog(store).query("SELECT count(*) AS n, sum(value) AS rows FROM metrics WHERE name = 'rows'")
    assert rows == {"n": 8, "rows": 40.0}
