"""Units as task runs of Prefect: named, tried again each by itself, set aside by name, ended with the flow."""

import pytest
from prefect import flow
from prefect.client.schemas.objects import StateType
from prefect.testing.utilities import prefect_test_harness

from configs.schema import LaunchConfig
from store.artifacts import Store
from tasks import prefect_task, units
from tasks.stage import RunContext
from tests.support.stage_pieces import pieces, section, whole
from tests.tasks.test_stage_prefect import artifacts, task_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("DO_NOT_TRACK", "1")
        with prefect_test_harness(server_startup_timeout=180):
            yield


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(pieces.task(), "retries", 0)
    monkeypatch.setattr(units, "RETRY_AFTER_S", (0.01,))
    monkeypatch.setattr(prefect_task, "SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(prefect_task, "FIRST_SHOWN_AFTER_S", 0.0)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def through_a_flow(store, asked, workers=2):
    @flow(name="one-stage")
    def one_stage():
        launch = LaunchConfig(workers=workers)
        return pieces(asked, {}, RunContext("r1", str(store.root), label="pieces:a", launch=launch))

    return one_stage(return_state=True)


def text(store, made):
    return (store.get(made["numbers"]).path / "all.txt").read_text()


def test_each_unit_is_a_task_run_and_is_tried_again_by_itself(store):
    faults = {"piece-1": {"retry": 2}, "piece-2": {"killed": 1}}
    state = through_a_flow(store, section(4, faults=faults))
    assert text(store, state.result()) == whole(4)
    wanted = [f"{step} piece-{index}" for step in ("cut", "double") for index in range(4)]
    assert sorted(task_runs(state)) == sorted((name, StateType.COMPLETED) for name in ["pieces:a", *wanted])
    (progress,) = artifacts(state, "progress-pieces-a")
    assert progress.data == 100.0
    assert "pieces" in progress.description
