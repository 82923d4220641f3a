"""Work items of a stage in a flow: progress of its task run, retried one by one, ended with the flow."""

import pytest
from prefect import flow
from prefect.client.schemas.objects import StateType

from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine import prefect_task
from nautile.tasks.engine.child_process import cancelling
from nautile.tasks.engine.prefect_task import as_prefect_task
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_parent import is_alive
from tests.support.stages.stage_pieces import joined, pieces, runs, section
from tests.tasks.engine.test_stage_prefect import artifacts, task_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No retries of the whole stage, and progress shown from the first moment."""
    monkeypatch.setattr(as_prefect_task(pieces), "retries", 0)
    monkeypatch.setattr(prefect_task, "SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(prefect_task, "FIRST_SHOWN_AFTER_S", 0.0)


def through_a_flow(store, config, workers=2):
    @flow(name="one-stage")
    def one_stage():
        launch = LaunchConfig(workers=workers)
        with cancelling():
            return as_prefect_task(pieces)(
                config, {}, RunContext("r1", str(store.root), label="pieces:a", launch=launch)
            )

    return one_stage(return_state=True)


def test_items_are_progress_of_the_task_run_of_their_stage_and_no_task_runs(store):
    state = through_a_flow(store, section(3))
    assert (store.get(state.result()["numbers"]).path / "all.txt").read_text() == joined(3)
    assert task_runs(state) == [("pieces:a", StateType.COMPLETED)]
    (progress,) = artifacts(state, "progress-pieces-a")
    assert progress.data == 100.0


def test_ctrl_c_ends_the_items_and_starts_no_others(store, tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    gate.mkdir()
    both = [gate / "piece-0", gate / "piece-1"]
    stopped = []

    def interrupt(update):
        if all(path.exists() for path in both) and not stopped:
            stopped.append(update)
            raise KeyboardInterrupt

    # As the main thread would be interrupted: in the middle of showing progress.
    monkeypatch.setattr("nautile.tasks.engine.attempt_log.notify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        through_a_flow(store, section(6, gate=str(gate), gated=["piece-0", "piece-1"]))
    assert stopped
    assert not any(is_alive(int(path.read_text().split()[0])) for path in both)
    assert set(runs(store.root)) == {"list", "piece-0", "piece-1"}
