"""Work items as Prefect task runs: named, retried one by one, skipped by name, ended with the flow."""

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import TaskRunSort

from nautile.common.errors import Retryable
from nautile.common.retry import Backoff
from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine import errors, prefect_task
from nautile.tasks.engine.child_process import cancelling
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.fanout import work_item
from nautile.tasks.engine.prefect_task import as_prefect_task
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_parent import is_alive, wait_for
from tests.support.stages.stage_pieces import joined, pieces, runs, section
from tests.tasks.engine.test_stage_prefect import artifacts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No retries of the whole stage, no pauses between those of an item, and progress shown from the first moment."""
    monkeypatch.setattr(as_prefect_task(pieces), "retries", 0)
    monkeypatch.setattr(work_item, "ITEM_BACKOFF", Backoff(first_s=0.01, longest_s=0.01))
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


def states(state, count):
    """Task run name -> the name of its state, once the server knows that `count` ended (it learns so from events)."""
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:

        def ended():
            task_runs = client.read_task_runs(flow_run_filter=wanted, limit=50, sort=TaskRunSort.END_TIME_DESC)
            final = {run.name: run.state.name for run in task_runs if run.state and run.state.is_final()}
            return final if len(final) >= count else None

        return wait_for(ended)


def text(store, outputs):
    return (store.get(outputs["numbers"]).path / "all.txt").read_text()


def test_each_item_is_a_task_run_that_is_retried_or_skipped_by_itself(store):
    faults = {"piece-0": {"bad": 9}, "piece-1": {"retry": 2}, "piece-2": {"killed": 1}}
    state = through_a_flow(store, section(4, faults=faults, skippable=0.25))
    outputs = state.result()
    assert text(store, outputs) == joined(4, without=(0,))
    facts = store.get(outputs["numbers"]).manifest["facts"]
    assert facts["skipped"] == {"piece-0": "piece-0: not a text"}
    assert {item: facts["runs"][item] for item in ("list", "piece-0", "piece-1", "piece-2", "piece-3")} == {
        "list": 1,
        "piece-0": 1,
        "piece-1": 3,
        "piece-2": 2,
        "piece-3": 1,
    }
    done = {"pieces:a", *(f"cut piece-{n}" for n in range(1, 4)), *(f"double piece-{n}" for n in range(1, 4))}
    assert states(state, 8) == {**dict.fromkeys(done, "Completed"), "cut piece-0": "SetAside"}
    (progress,) = artifacts(state, "progress-pieces-a")
    assert progress.data == 100.0
    with get_client(sync_client=True) as client:  # whose server writes the states of many in one transaction
        batches = client._client.get("/admin/settings").json()["server"]["services"]["task_run_recorder"]
    assert (batches["batch_size"], batches["flush_interval"]) == (200, 1)


def test_the_tries_of_an_item_are_bounded(store):
    state = through_a_flow(store, section(2, faults={"piece-0": {"crash": 99}, "piece-1": {"retry": 99}}))
    assert state.is_failed()
    with pytest.raises((StageCrash, Retryable), match=r"piece-\d"):
        state.result()
    tries = {item: len(pids) for item, pids in runs(store.root).items()}
    assert tries == {"list": 1, "piece-0": 1 + errors.CRASHES, "piece-1": errors.ITEM_BACKOFF.attempts}


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
