"""Prefect's server for the tests of this folder that ask for it. Ray keeps to loopback."""

import os

import pytest

from nautile.tasks.engine.progress import subscribe

# Read when Ray is imported, whichever test does that first; see `tests.support.servers.ray_cluster`.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="package")
def prefect_server(prefect_url):
    """Flows in this process go to the server of the test session."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield


@pytest.fixture
def updates():
    """The updates of the stages that run in this process, as they arrive."""
    received = []
    unsubscribe = subscribe(received.append)
    yield received
    unsubscribe()


@pytest.fixture
def gate(tmp_path):
    """A folder where stages say that they wait, and are let go (`tests.support.stages.stage_sums`, `stage_pieces`)."""
    gate = tmp_path / "gate"
    gate.mkdir()
    return gate
