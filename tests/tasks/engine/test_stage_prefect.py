"""A stage as a Prefect task, against a real Prefect server: states, names, retries by condition, artifacts."""

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import ArtifactSort, TaskRunSort
from prefect.exceptions import PrefectException

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.operation import LaunchConfig, StageOperation
from nautile.tasks.engine import errors, prefect_task
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.prefect_task import as_prefect_task
from nautile.tasks.engine.progress import subscribe
from nautile.tasks.engine.stage import RunContext
from tests.support.stages import stage_pieces
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.stage_sums import section, sums

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Retries without pauses, and progress shown from the first moment."""
    monkeypatch.setattr(prefect_task, "BACKOFF", Backoff(first_s=0.01, longest_s=0.01))
    monkeypatch.setattr(prefect_task, "SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(prefect_task, "FIRST_SHOWN_AFTER_S", 0.0)


def through_a_flow(store, config, outage_hours=1.0, stage=sums, **more):
    """The final state of a flow of one stage, and the states that the stage reported."""

    @flow(name="one-stage")
    def one_stage():
        operation = StageOperation(outage_hours=outage_hours)
        resume = "nautile run toy --from sums"
        context = RunContext("r1", str(store.root), label="sums:A b", operation=operation, resume=resume, **more)
        return as_prefect_task(stage)(config, {}, context)

    updates = []
    unsubscribe = subscribe(updates.append)
    try:
        state = one_stage(return_state=True)
    finally:
        unsubscribe()
    assert {update.label for update in updates} == {"sums:A b"}
    return state, [update.state for update in updates if update.state != "running"]


def task_runs(state):
    """(name, state) of the flow run's task runs, once the server knows that they ended (it learns so from events)."""
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:

        def ended():
            runs = client.read_task_runs(flow_run_filter=wanted, limit=10, sort=TaskRunSort.END_TIME_DESC)
            return [(run.name, run.state_type) for run in runs if run.state and run.state.is_final()]

        return wait_for(ended)


def artifacts(state, key):
    """The Prefect artifacts of the flow run. Every argument is given, for the server refuses the client's defaults."""
    with get_client(sync_client=True) as client:
        return client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])),
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id])),
            task_run_filter=TaskRunFilter(),
            sort=ArtifactSort.CREATED_DESC,
            limit=10,
            offset=0,
        )


def test_a_stage_is_a_task_run_named_by_its_label_with_artifacts(store):
    state, states = through_a_flow(store, section(4))
    outputs = state.result()
    assert store.get(outputs["numbers"])
    assert states == ["publishing", "done"]
    assert task_runs(state) == [("sums:A b", StateType.COMPLETED)]
    (page,) = artifacts(state, "stage-sums-a-b")
    assert page.type == "markdown"
    assert outputs["numbers"] in page.data
    assert "| `value` | 3 |" in page.data
    (progress,) = artifacts(state, "progress-sums-a-b")
    assert progress.data == 100.0
    again, states = through_a_flow(store, section(4))
    assert again.result() == outputs
    assert states == ["reused"]


def test_items_are_progress_of_the_task_run_of_their_stage_and_no_task_runs(store):
    state, _ = through_a_flow(store, stage_pieces.section(3), stage=stage_pieces.pieces, launch=LaunchConfig(workers=2))
    assert (store.get(state.result()["numbers"]).path / "all.txt").read_text() == stage_pieces.joined(3)
    assert task_runs(state) == [("sums:A b", StateType.COMPLETED)]
    (progress,) = artifacts(state, "progress-sums-a-b")
    assert progress.data == 100.0


def test_what_is_worth_a_retry_is_tried_again(store):
    state, states = through_a_flow(store, section(faults={"retry": 5, "crash": 1}))
    assert store.get(state.result()["numbers"])
    assert states == ["failed", "retrying"] * 6 + ["publishing", "done"]
    assert len(artifacts(state, "failure-sums-a-b")) == 1


@pytest.mark.parametrize(
    ("fault", "error", "retries"),
    [
        ("config", ConfigError, 0),
        ("crash", StageCrash, errors.CRASHES),
        ("retry", Retryable, 0),
    ],
)
def test_retries_are_bounded_and_a_bad_configuration_has_none(store, fault, error, retries):
    state, states = through_a_flow(store, section(faults={fault: 99}), outage_hours=1e-12)
    assert state.is_failed()
    assert task_runs(state) == [("sums:A b", StateType.FAILED)]
    with pytest.raises(error):
        state.result()
    assert states == ["failed", "retrying"] * retries + ["failed"]
    accounts = artifacts(state, "failure-sums-a-b")  # of failures in a row the first and the last
    assert len(accounts) == min(2, retries + 1)
    assert "nautile run toy --from sums" in accounts[0].data
    written = {path.read_text() for path in (store.root / "logs" / "failures").iterdir()}
    assert len(written) == retries + 1
    assert written >= {account.data for account in accounts}


def test_a_server_that_takes_no_artifact_fails_no_stage(store, monkeypatch, caplog):
    def refuses(*_, **__):
        raise PrefectException("busy")

    for name in ("create_progress_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(prefect_task, name, refuses)
    state, _ = through_a_flow(store, section(5))
    assert store.get(state.result()["numbers"])
    assert "an artifact of sums:A b could not be sent to Prefect: busy" in caplog.text
