"""Forwarded metrics: what a collector and TensorBoard receive, and that neither can fail a run; nothing by default."""

import struct
import sys
import threading

import pytest
from pydantic import ValidationError
from tensorboardX.proto.event_pb2 import Event

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.configs.operation import TelemetryConfig
from nautile.flows.dag import build_dag
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.tasks.engine import telemetry
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.engine.telemetry import (
    OtlpClient,
    Outcome,
    Point,
    TensorboardClient,
    Tracker,
    close_all,
    trackers_of,
)
from tests.support.samples.tracking import execution
from tests.support.servers.otlp_collector import FakeCollector
from tests.support.stages.stage_sums import section, sums
from tests.support.stages.toy_dag import toy_dag
from tests.support.stages.toy_stages import TOY

DONE = Outcome("done")
POINTS = [Point("loss", 1, 2.5, 1_000_000), Point("loss", 2, float("nan"), 2_000_000, "synth")]


def scalars(folder):
    """(tag, step, value, wall time) of every scalar in the event files of a folder, by their format: length, check,
    content, check."""
    events = []
    for path in sorted(folder.glob("events*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            events += [(value.tag, event.step, value.simple_value, event.wall_time) for value in event.summary.value]
    return events


def test_a_run_tells_its_metrics_to_a_collector_and_to_tensorboard(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=from-the-environment")
    with FakeCollector() as collected:
        wanted = TelemetryConfig(tensorboard=str(tmp_path / "boards"), otlp=collected.url)
        run_stage(sums, section(4), {}, RunContext("r1", str(store.root), label="sums:A", telemetry=wanted))
    assert set(collected.paths) == {"/v1/metrics"}
    assert {headers.get("api-key") for headers in collected.headers} == {"from-the-environment"}
    about = {"service.name": "nautile", "nautile.run": "r1", "nautile.stage": "sums", "nautile.label": "sums:A"}
    assert collected.resource() == about
    rows = Catalog(store).query("SELECT value, epoch_us(time) AS time FROM metrics ORDER BY step")
    values = [(value, time // 1000) for name, _, value, time in collected.points() if name == "nautile.value"]
    assert values == [(row["value"], row["time"]) for row in rows]  # and no row about anything undelivered
    assert [value for value, _ in values] == [0.0, 1.0, 2.0, 3.0]
    steps = [(marks, value) for name, marks, value, _ in collected.points() if name == "nautile.step"]
    assert steps == [({"metric": "value"}, step) for step in range(4)]
    boards = scalars(tmp_path / "boards" / "r1" / "sums-a")
    assert [(tag, step, value) for tag, step, value, _ in boards] == [("value", step, step) for step in range(4)]


def test_a_collector_that_takes_nothing_fails_no_run_is_told_once_and_counted(tmp_path, caplog):
    store = Store(tmp_path / "store")
    with FakeCollector() as collected:
        collected.status = 503
        wanted = TelemetryConfig(otlp=collected.url, timeout_s=0.2)
        outputs = run_stage(sums, section(3), {}, RunContext("r1", str(store.root), label="sums", telemetry=wanted))
    assert store.get(outputs["numbers"])
    warnings = [record.message for record in caplog.records if "does not accept metrics" in record.message]
    assert warnings == [
        f"telemetry: {collected.url} does not accept metrics (it did not take the export); the run continues"
    ]
    rows = Catalog(store).query("SELECT step, value FROM metrics WHERE name = 'telemetry_undelivered'")
    assert rows == [{"step": 1, "value": 3.0}]


def measured(folder, steps):
    """The prefix of the event files of an execution that has measured a loss at each step."""
    emit = EventWriter(folder / f"{execution().files}1.jsonl", execution().execution)
    for step in steps:
        emit("metric", name="loss", step=step, value=1.0)
        emit("sample", index=step)
    emit.close()
    return folder / execution().files


def test_a_slow_collector_makes_nobody_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "LINGER_S", 0.05)
    monkeypatch.setattr(telemetry, "_silent", set())
    client = OtlpClient("http://127.0.0.1:9", 60.0)
    free = threading.Event()
    monkeypatch.setattr(client._exporter, "export", lambda *_: free.wait(30))
    tracker = Tracker(client, execution(), measured(tmp_path, range(20)), tmp_path / "state")
    for _ in range(10):
        tracker.wake()
    assert close_all([tracker], DONE) == 20
    free.set()


def test_event_files_hold_what_was_measured_and_two_attempts_have_one_each(tmp_path):
    for _ in range(2):
        client = TensorboardClient(tmp_path / "run" / "pretrain")
        assert client.open(execution(), 0) == {}
        client.send(POINTS)
        client.end(DONE)
    assert len(list((tmp_path / "run" / "pretrain").iterdir())) == 2
    first, second, *_ = scalars(tmp_path / "run" / "pretrain")
    assert first == ("loss", 1, 2.5, 1.0)
    assert second[:2] == ("loss/synth", 2)
    assert second[2] != second[2]


class Full(TensorboardClient):
    """A folder whose disk is full."""

    def __init__(self, folder):
        super().__init__(folder)
        self._event = self.refuse

    def refuse(self, **_):
        raise OSError(28, "No space left on device")


def test_a_tracker_that_fails_is_named_once_and_counted_and_the_others_go_on(tmp_path, caplog):
    events = measured(tmp_path, range(3))
    clients = {"full": Full(tmp_path / "full"), "board": TensorboardClient(tmp_path / "board")}
    trackers = [Tracker(client, execution(), events, tmp_path / name) for name, client in clients.items()]
    for tracker in trackers:
        tracker.wake()
    assert close_all(trackers, DONE) == 3
    assert len(scalars(tmp_path / "board")) == 3
    assert caplog.text.count("No space left on device") == 1


def test_nothing_is_wanted_unless_asked_and_no_key_depends_on_it(tmp_path):
    config = load(TOY)
    assert config.telemetry == TelemetryConfig()
    assert trackers_of(config.telemetry, tmp_path, execution(), tmp_path / "staging") == []
    other = config.model_copy(update={"telemetry": TelemetryConfig(otlp="http://127.0.0.1:4318")})
    assert [e.key for e in build_dag(config, toy_dag)] == [e.key for e in build_dag(other, toy_dag)]


@pytest.mark.parametrize("address", ["localhost:4318", "ftp://x", "http://", "http://me:secret@x", "http://x/?key=s"])
@pytest.mark.parametrize("sink", ["otlp", "mlflow"])
def test_an_address_that_is_none_or_holds_a_key_is_refused(sink, address):
    with pytest.raises(ValidationError, match=rf"telemetry\.{sink}"):
        TelemetryConfig(**{sink: address})


def test_an_extra_that_is_missing_and_a_folder_that_cannot_be_are_named(tmp_path, monkeypatch):
    def open_trackers(**config):
        trackers_of(TelemetryConfig(**config), tmp_path, execution(), tmp_path / "staging")

    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"telemetry\.tensorboard: .*file"):
        open_trackers(tensorboard=str(tmp_path / "file"))
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"nautile\[tensorboard\]"):
        open_trackers(tensorboard=str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"nautile\[wandb\]"):
        open_trackers(wandb=str(tmp_path))
