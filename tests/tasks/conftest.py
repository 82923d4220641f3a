"""One Prefect server for all tests of this folder that ask for it: it takes 20 s to come up. Ray keeps to loopback."""

import os

import pytest
from prefect.testing.utilities import prefect_test_harness

# Read when Ray is imported, whichever test does that first; see `tests.support.ray_cluster`.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="package")
def prefect_server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("DO_NOT_TRACK", "1")
        with prefect_test_harness(server_startup_timeout=180):
            yield
