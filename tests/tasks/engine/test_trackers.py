"""A remote run for each execution: its content, its continuation after a failure, and servers that do not answer.

Over a socket, with a server that speaks MLflow's REST protocol.
"""

import logging
import shutil

import pytest

from nautile.common.processes import free_port
from nautile.configs.operation import TelemetryConfig
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.tasks.engine import telemetry
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.progress import subscribe
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.engine.telemetry import MlflowClient, Outcome, Tracker
from tests.support.samples.tracking import execution
from tests.support.servers.mlflow_server import FakeMlflow
from tests.support.stages.stage_sums import section, sums

DONE = Outcome("done", {"numbers": "numbers/0123456789ab"})


@pytest.fixture
def mlflow():
    with FakeMlflow() as server:
        yield server
        server.hold.set()


@pytest.fixture(autouse=True)
def no_memory_of_silent_servers(monkeypatch):
    monkeypatch.setattr(telemetry, "_silent", set())


def run_sums(store, server_url, run="r1", **faults):
    wanted = TelemetryConfig(mlflow=server_url, timeout_s=0.5)
    return run_stage(
        sums, section(4, faults=faults), {}, RunContext(run, str(store.root), config="toy", telemetry=wanted)
    )


@pytest.fixture
def tracked(tmp_path, mlflow):
    """A function that measures steps in a new attempt of one execution, sends them, and returns what was not sent."""

    def attempt(number, steps, outcome=DONE, timeout_s=5.0):
        (tmp_path / "staging").mkdir(exist_ok=True)
        emit = EventWriter(tmp_path / f"{execution().files}{number}.jsonl", execution().execution)
        client = MlflowClient(mlflow.url, "nautile", timeout_s)
        state = tmp_path / "staging" / "telemetry-mlflow.json"
        tracker = Tracker(client, execution(), tmp_path / execution().files, state)
        for step in steps:
            emit("metric", name="loss", step=step, value=step / 2)
            tracker.wake()
        emit.close()
        tracker.end(outcome)
        return tracker.close(telemetry.time.monotonic())

    return attempt


def test_a_run_has_its_name_configuration_curves_scores_and_artifacts(tmp_path, mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret-of-the-environment")
    store = Store(tmp_path / "store")
    outputs = run_sums(store, mlflow.url)
    [run] = mlflow.runs.values()
    [row] = Catalog(store).query("SELECT execution, key FROM attempts ORDER BY time DESC LIMIT 1")
    assert (run["name"], run["status"]) == (f"sums-{row['execution'][:8]}", "FINISHED")
    assert mlflow.experiments == {"nautile": run["experiment_id"]}
    assert run["params"].items() >= {"seeds.data": "5", "sums.count": "4", "sums.faults": "{}"}.items()
    about = {"run": "r1", "stage": "sums", "label": "sums", "execution": row["execution"], "key": row["key"]}
    ids = {"nautile.config": "toy", "nautile.output.numbers": outputs["numbers"]}
    assert run["tags"].items() >= {**{f"nautile.{name}": value for name, value in about.items()}, **ids}.items()
    assert mlflow.curve("value") == [(step, float(step)) for step in range(4)]
    assert {headers["Authorization"] for headers in mlflow.headers} == {"Bearer secret-of-the-environment"}


@pytest.mark.slow
def test_a_step_that_is_run_again_goes_on_in_the_same_remote_run_without_doubled_steps(tmp_path, mlflow):
    store = Store(tmp_path / "store")
    with pytest.raises(StageCrash):
        run_sums(store, mlflow.url, unknown=1)
    assert [run["status"] for run in mlflow.runs.values()] == ["FAILED"]
    [surprise] = store.root.glob("staging/*/output/surprise")
    shutil.rmtree(surprise)
    outputs = run_sums(store, mlflow.url, run="r2", unknown=1)
    [run] = mlflow.runs.values()
    assert run["status"] == "FINISHED"
    assert run["tags"]["nautile.output.numbers"] == outputs["numbers"]
    assert mlflow.curve("value") == [(step, float(step)) for step in range(4)]


def test_what_a_server_missed_is_sent_by_the_next_attempt_and_what_it_has_is_not(mlflow, tracked, tmp_path):
    assert tracked(1, range(3), Outcome("failed")) == 0
    mlflow.status = 500
    assert tracked(2, range(2, 6), Outcome("failed")) == 3
    mlflow.status = 200
    assert tracked(3, range(4, 8)) == 0
    assert mlflow.curve("loss") == [(step, step / 2) for step in range(8)]
    # A machine that has lost what it noted is told by the server which steps it has.
    (tmp_path / "staging" / "telemetry-mlflow.json").unlink()
    assert tracked(4, range(6, 9)) == 0
    assert mlflow.curve("loss") == [(step, step / 2) for step in range(9)]


def test_the_backlog_of_ten_attempts_and_of_a_second_part_is_sent_in_the_order_of_its_steps(
    mlflow, tracked, monkeypatch
):
    mlflow.status = 500
    for number in range(1, 11):
        tracked(number, range(2 * number, 2 * number + 2), Outcome("failed"))
    mlflow.status = 200
    monkeypatch.setattr("nautile.store.events.LARGEST_FILE", 200)  # a file has room for one measurement
    assert tracked(11, range(22, 26)) == 0
    assert [step for step, _ in mlflow.curve("loss")] == list(range(2, 26))


@pytest.mark.slow
def test_a_server_that_is_gone_fails_no_run_is_named_once_and_counted(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret-of-the-environment")
    url = f"http://127.0.0.1:{free_port()}"
    store, ends = Store(tmp_path / "store"), []
    unsubscribe = subscribe(lambda update: ends.append((update.state, update.undelivered)))
    try:
        with caplog.at_level(logging.DEBUG, "nautile.tasks"):
            outputs = run_sums(store, url)
    finally:
        unsubscribe()
    assert store.get(outputs["numbers"])
    warnings = [record.message for record in caplog.records if "does not accept metrics" in record.message]
    assert warnings == [f"telemetry: {url} does not accept metrics (ConnectError); the run continues"]
    assert ends[-1] == ("done", 4)
    rows = Catalog(store).query("SELECT value FROM metrics WHERE name = 'telemetry_undelivered'")
    assert rows == [{"value": 4.0}]
    assert "secret-of-the-environment" not in caplog.text


def test_a_server_that_never_answers_is_waited_for_once(mlflow, tracked, monkeypatch):
    waits = []

    class Thread(telemetry.threading.Thread):
        def join(self, timeout=None):
            waits.append(round(timeout, 1))
            super().join(0.05)

    monkeypatch.setattr(telemetry.threading, "Thread", Thread)
    mlflow.hold.clear()
    assert [tracked(1, range(3), timeout_s=60.0), tracked(2, range(5), timeout_s=60.0)] == [3, 5]
    assert waits == [telemetry.LINGER_S, telemetry.SILENT_S]


def test_numbers_that_are_none_and_names_that_mlflow_does_not_take(tmp_path, mlflow):
    emit = EventWriter(tmp_path / f"{execution().files}1.jsonl", execution().execution)
    emit("metric", name="loss", step=1, value=float("nan"), source="wiki: 2.0 (v1)")
    emit("metric", name="loss", step=1, value=float("-inf"))
    emit.close()
    tracker = Tracker(MlflowClient(mlflow.url, "x", 5.0), execution(), tmp_path / execution().files, tmp_path / "state")
    tracker.end(DONE)
    assert tracker.close(telemetry.time.monotonic()) == 0
    assert mlflow.curve("loss/wiki_ 2.0 _v1_") == [(1, "NaN")]
    assert mlflow.curve("loss") == [(1, "-Infinity")]
