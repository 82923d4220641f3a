"""Send metrics to trackers while a stage works: those of `[telemetry]`, by default none.

A tracker has one remote run per execution of a step, with its configuration, its curves and its outcome; for
TensorBoard it is a folder, for an OpenTelemetry collector a set of attributes. A thread for each, in the parent process
of the stage, reads the event files of all attempts, which are its queue, so neither the stage nor any step waits for a
server. Points that it refused, or that a killed attempt did not send, are sent later, and those that are never
delivered are counted. A file in the staging folder records the last step sent of each metric. So a resumed attempt
continues the same remote run, and a step that is measured twice is sent once.
"""

import importlib.util
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Protocol

import httpx

from nautile.common.errors import ConfigError
from nautile.common.extras import how_to_install, package_of
from nautile.common.files import read_json, write_json
from nautile.configs.operation import TelemetryConfig
from nautile.store.events import read_events
from nautile.tasks.engine.errors import slug

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """One measurement; `time_us` is microseconds since 1970."""

    name: str
    step: int
    value: float
    time_us: int
    source: str = ""

    @property
    def tag(self) -> str:
        """The name for trackers without a notion of sources: `loss/synth`."""
        return f"{self.name}/{self.source}" if self.source else self.name


def read_points(events: Path, offsets: dict[str, int]) -> Iterator[tuple[list[Point], str, int]]:
    """Yield the points of the files whose names start with that of `events`, a block of a file at a time.

    Yields (points, file name, offset after them), starting at `offsets` (by file name), which the caller updates.
    Raises `OSError` if a file cannot be read.
    """
    for path in sorted(events.parent.glob(f"{events.name}*.jsonl"), key=_written_order):
        # One call of `read_events` may not reach the end of the file, so repeat until it makes no progress.
        start, offset = -1, offsets.get(path.name, 0)
        while start != offset:
            start = offset
            events_read, offset = read_events(path, start)
            points = [point for event in events_read if event["kind"] == "metric" if (point := _point(event))]
            if offset != start:
                yield points, path.name, offset


def _written_order(path: Path) -> list[str | int]:
    """A sort key by attempt, then by part of a file: numbers in the name compare as numbers.

    A tracker sends no step before the last one of its metric, so it would drop what is read too late.
    """
    # Without the suffix, a first part (`…-1`) is before its second (`…-1.2`). Every other entry is a number.
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", path.stem)]


def _point(event: dict[str, Any]) -> Point | None:
    """The point of a metric event; None if its fields are invalid."""
    fields = event["fields"]
    try:
        value = float(fields["value"])
        return Point(
            str(fields["name"]), int(fields["step"]), value, int(event["time"]), str(fields.get("source") or "")
        )
    except (KeyError, TypeError, ValueError):
        return None


BATCH = 500  # points of one request
LINGER_S = 6.0  # time to send the remaining points after the attempt has ended
SILENT_S = 0.5  # the same for a server that did not answer in this time at the end of an earlier attempt

_silent: set[str] = set()  # the addresses of such servers


@dataclass(frozen=True)
class TrackedExecution:
    """The execution that a remote run represents."""

    run: str
    stage: str
    label: str
    execution: str
    config: str  # the configuration's name
    key: str
    commit: str
    host: str
    section: Mapping[str, Any] = field(default_factory=dict)  # the configuration of the step
    inputs: Mapping[str, str] = field(default_factory=dict)  # name -> artifact id

    @property
    def name(self) -> str:
        """The name of the remote run; no two executions share it."""
        return f"{self.label}-{self.execution[:8]}"

    @property
    def files(self) -> str:
        """The prefix of the names of its event files; the number of the attempt follows."""
        return f"{self.stage}-{self.execution}-"

    def parameters(self) -> dict[str, str]:
        """The fields of the section by path (`pretrain.optimizer.clip`), and the ids of the inputs."""
        return dict(_flat(self.section)) | {f"input.{name}": artifact for name, artifact in self.inputs.items()}

    def tags(self) -> dict[str, str]:
        names = ("run", "stage", "label", "execution", "config", "key", "commit", "host")
        return {f"nautile.{name}": str(getattr(self, name)) for name in names if getattr(self, name)}


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: `done`, `failed` or `cancelled`, and the ids of what it published, by kind."""

    state: str
    outputs: Mapping[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A tracker refused a request. The message is displayed, so it must hold no secrets."""


class TrackerClient(Protocol):
    """The client of one remote run. It is used by one thread; every method may raise any exception."""

    where: str  # address of the server, or path of the folder

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        """Begin or continue the remote run, after `sent` points. Returns the last step of each metric that it has."""

    def send(self, points: Sequence[Point]) -> None: ...

    def end(self, outcome: Outcome) -> None: ...


class Tracker:
    """Sends the measurements of an execution through a client, in its own thread."""

    def __init__(self, client: TrackerClient, about: TrackedExecution, events: Path, state: Path) -> None:
        """`events`: the prefix of the paths of all event files of the execution. `state`: the file of what was sent."""
        self._client, self._about, self._events, self._state = client, about, events, state
        record = read_json(state)
        record = record if isinstance(record, dict) and record.get("execution") == about.execution else {}
        self._offsets: dict[str, int] = record.get("offsets", {})
        self._steps: dict[str, int] = record.get("steps", {})  # tag -> the last step that was sent
        self._sent: int = record.get("sent", 0)  # points
        self._opened = self._abandoned = self._warned = self._ended = False
        self._outcome: Outcome | None = None
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"telemetry-{type(client).__name__}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def end(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._woken.set()

    def close(self, start: float) -> int:
        """Wait a few seconds for the end. Returns the number of measurements that were not delivered.

        `start`: when the wait for all trackers started, on the monotonic clock.
        """
        patience = SILENT_S if self._client.where in _silent else LINGER_S
        # A tracker that is not done by then is abandoned: its thread may go on, but leaves the state file alone.
        self._thread.join(max(0.0, start + patience - time.monotonic()))
        self._abandoned = True
        if self._ended:
            _silent.discard(self._client.where)
            return 0
        if self._thread.is_alive():
            _silent.add(self._client.where)
        self._warn("it is too slow")
        # Count the points in the files that were not sent.
        steps = dict(self._steps)
        try:
            return sum(len(list(_new(points, steps))) for points, *_ in read_points(self._events, dict(self._offsets)))
        except OSError as error:
            logger.warning("telemetry: the events cannot be read: %s", error)
            return 0

    def _run(self) -> None:
        while not self._abandoned:
            self._woken.wait()
            self._woken.clear()
            outcome = self._outcome
            try:
                self._deliver()
                if outcome is not None and not self._abandoned:
                    self._client.end(outcome)
                    self._ended = True
            except Exception as error:  # an exception of a client must not end the run
                self._warn(str(error) if isinstance(error, Refused) else type(error).__name__)
            if outcome is not None:
                return

    def _deliver(self) -> None:
        # The server may have more points than the state file records, if an attempt was killed after sending.
        if not self._opened:
            for tag, step in self._client.open(self._about, self._sent).items():
                self._steps[tag] = max(step, self._steps.get(tag, step))
            self._opened = True
        for points, name, offset in read_points(self._events, dict(self._offsets)):
            # On a copy: `_steps` moves on only with what was really sent.
            new = _new(points, dict(self._steps))
            while batch := list(islice(new, BATCH)):
                if self._abandoned:
                    return
                self._client.send(batch)
                self._sent += len(batch)
                self._steps |= {point.tag: point.step for point in batch}
            if self._abandoned:
                return  # another attempt may be using the state file by now
            self._offsets[name] = offset
            if self._state.parent.is_dir():  # else the staging folder was published, and nothing resumes the execution
                record = {"execution": self._about.execution, "offsets": self._offsets, "steps": self._steps}
                write_json(self._state, {**record, "sent": self._sent}, durable=False)

    def _warn(self, reason: str) -> None:
        """Log once that metrics are not delivered."""
        if not self._warned:
            self._warned = True
            logger.warning("telemetry: %s does not accept metrics (%s); the run continues", self._client.where, reason)


def _new(points: Sequence[Point], steps: dict[str, int]) -> Iterator[Point]:
    """Yield the points of steps after the last one of their tag, and update `steps` (tag -> step) with them.

    A resumed attempt measures some steps again, which must not be sent twice.
    """
    for point in points:
        if point.step > steps.get(point.tag, -1):
            steps[point.tag] = point.step
            yield point


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    """The leaves of nested mappings, as (dotted path, text)."""
    if isinstance(value, Mapping) and value:
        rows = [_flat(part, f"{path}.{name}" if path else str(name)) for name, part in value.items()]
        return [row for part in rows for row in part]
    return [(path, str(value))] if path else []


PARAMETERS = 100  # limit of parameters in one request, and of tags
_LONGEST = {"params": 6000, "tags": 5000}  # limit of a value, in characters
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as in the JSON encoding of protocol buffers
_STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MlflowClient:
    """One run of MLflow's experiment `project`, identified by a tag with the id of the execution.

    Over the server's REST API (version 2.0, https://mlflow.org/docs/latest/rest-api.html), so that MLflow need not be
    installed. Credentials come from its own variables: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD.
    """

    def __init__(self, address: str, project: str, timeout_s: float) -> None:
        self.where, self._project = address, project
        token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
        self._http = httpx.Client(
            base_url=f"{address.rstrip('/')}/api/2.0/mlflow/",
            timeout=timeout_s,
            headers={"Authorization": f"Bearer {token}"} if token and not user else {},
            auth=(user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None,
        )
        self._run = ""

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        experiment = self._experiment()
        query = {"experiment_ids": [experiment], "filter": f"tags.`nautile.execution` = '{about.execution}'"}
        if runs := self._call("POST", "runs/search", {**query, "max_results": 1}).get("runs"):
            self._run = runs[0]["info"]["run_id"]
            self._call("POST", "runs/update", {"run_id": self._run, "status": "RUNNING"})
            return {row["key"]: int(row.get("step", 0)) for row in runs[0].get("data", {}).get("metrics", [])}
        source = {"mlflow.source.name": f"nautile {about.stage}", "mlflow.source.git.commit": about.commit}
        body: dict[str, Any] = {"experiment_id": experiment, "run_name": about.name}
        body |= {"start_time": time.time_ns() // 10**6, "tags": _rows("tags", about.tags() | source)}
        self._run = self._call("POST", "runs/create", body)["run"]["info"]["run_id"]
        self._log("params", about.parameters())
        return {}

    def send(self, points: Sequence[Point]) -> None:
        """Log the points. Sending a point twice does no harm: the server ignores a metric that it has."""
        metrics = []
        for point in points:
            value = _WORDS.get(str(point.value), point.value)
            moment = point.time_us // 1000
            metrics.append({"key": _name(point.tag), "value": value, "timestamp": moment, "step": point.step})
        self._call("POST", "runs/log-batch", {"run_id": self._run, "metrics": metrics})

    def end(self, outcome: Outcome) -> None:
        self._log("tags", {f"nautile.output.{kind}": artifact for kind, artifact in outcome.outputs.items()})
        status = {"status": _STATUS[outcome.state], "end_time": time.time_ns() // 10**6}
        self._call("POST", "runs/update", {"run_id": self._run, **status})

    def _experiment(self) -> str:
        for is_last in (False, True):
            try:
                name = {"experiment_name": self._project}
                return self._call("GET", "experiments/get-by-name", name)["experiment"]["experiment_id"]
            except Refused:
                if is_last:
                    raise
            try:
                return self._call("POST", "experiments/create", {"name": self._project})["experiment_id"]
            except Refused:  # another step may have created it meanwhile: look it up again
                continue
        raise AssertionError("unreachable")

    def _log(self, kind: str, values: Mapping[str, str]) -> None:
        rows = _rows(kind, values)
        for first in range(0, len(rows), PARAMETERS):
            self._call("POST", "runs/log-batch", {"run_id": self._run, kind: rows[first : first + PARAMETERS]})

    def _call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if method == "GET":
            reply = self._http.request(method, path, params=body)
        else:
            reply = self._http.request(method, path, json=body)
        if reply.status_code != 200:
            raise Refused(f"HTTP {reply.status_code} of {path}")
        return reply.json()


def _rows(kind: str, values: Mapping[str, str]) -> list[dict[str, str]]:
    pairs: Iterable[tuple[str, str]] = ((name, value[: _LONGEST[kind]]) for name, value in values.items())
    return [{"key": _name(name), "value": value} for name, value in pairs]


def _name(name: str) -> str:
    """A name that MLflow accepts: at most 250 characters, with invalid ones replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]


class WandbClient:
    """One offline run of W&B's project `project`; `wandb sync FOLDER/wandb/offline-run-*` uploads the folder later.

    Nothing is sent and no key is read. Each attempt writes its own file, with the same run id. W&B counts rows itself,
    so a resumed run continues that count; the x axis of the charts is the metric `step`.
    """

    def __init__(self, folder: Path, project: str) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ModuleNotFoundError("no module named wandb", name="wandb")
        self.where, self._folder, self._project = str(folder), folder, project

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            dir=str(self._folder),
            id=about.execution,
            name=about.name,
            group=about.run,
            job_type=about.stage,
            config={**about.parameters(), **about.tags()},
            resume="allow",
            settings=wandb.Settings(
                mode="offline",
                silent=True,
                console="off",
                reinit="create_new",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self._row = sent  # points of a step share a row, so this is at least the number of rows written so far
        return {}

    def send(self, points: Sequence[Point]) -> None:
        """Log the points; consecutive points of one step become one row."""
        for step, group in groupby(points, lambda point: point.step):
            self._run.log({"step": step, **{point.tag: point.value for point in group}}, step=self._row)
            self._row += 1

    def end(self, outcome: Outcome) -> None:
        self._run.summary.update({"state": outcome.state, **{f"output/{k}": v for k, v in outcome.outputs.items()}})
        self._run.finish(exit_code=0 if outcome.state == "done" else 1)


class TensorboardClient:
    """Writes an event file of TensorBoard into a folder, one for each attempt.

    tensorboardX's `SummaryWriter` blocks for ever once the disk is full, so only its file format is used
    (docs/decisions.md).
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self.where = str(folder)
        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        return {}

    def send(self, points: Sequence[Point]) -> None:
        try:
            for point in points:
                summary = self._summary(value=[self._summary.Value(tag=point.tag, simple_value=point.value)])
                self._writer.write_event(self._event(wall_time=point.time_us / 1e6, step=point.step, summary=summary))
            self._writer.flush()
        except OSError as error:
            raise Refused(str(error)) from None

    def end(self, outcome: Outcome) -> None:
        self._writer.close()


class OtlpClient:
    """Sends metrics to an OpenTelemetry collector.

    The library's `MeterProvider` exports only the newest value of each gauge, so its exporter is called directly with
    all points (docs/decisions.md). Each measurement is a point of a gauge, with its own time. The step is a second
    gauge, because an attribute with a new value for each point would make each point a time series of its own.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        # The exporter would log each failure itself, at length.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self.where = address
        endpoint = address if address.rstrip("/").endswith("/v1/metrics") else address.rstrip("/") + "/v1/metrics"
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=timeout_s)
        self._resource: dict[str, str] = {}

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        self._resource = {"nautile.run": about.run, "nautile.stage": about.stage, "nautile.label": about.label}
        return {}

    def send(self, points: Sequence[Point]) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        if self._exporter.export(_as_metrics(points, self._resource)) is not MetricExportResult.SUCCESS:
            raise Refused("it did not take the export")

    def end(self, outcome: Outcome) -> None:
        self._exporter.shutdown()


def _as_metrics(points: Sequence[Point], resource: dict[str, str]) -> Any:
    from opentelemetry.sdk.metrics.export import (
        Gauge,
        Metric,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    gauges: dict[str, list[NumberDataPoint]] = {}  # by name: the values, and the steps of all metrics
    for point in points:
        time_ns = point.time_us * 1000
        for name, value, attributes in (
            (f"nautile.{point.name}", point.value, {"source": point.source} if point.source else {}),
            ("nautile.step", point.step, {"metric": point.name}),
        ):
            gauges.setdefault(name, []).append(NumberDataPoint(attributes, time_ns, time_ns, value))
    metrics = [Metric(name, "", "", Gauge(data)) for name, data in gauges.items()]
    scope = ScopeMetrics(InstrumentationScope("nautile"), metrics, "")
    return MetricsData([ResourceMetrics(Resource({"service.name": "nautile", **resource}), [scope], "")])


def trackers_of(config: TelemetryConfig, folder: Path, execution: TrackedExecution, state: Path) -> list[Tracker]:
    """The configured trackers. Raises `ConfigError` if an optional package is not installed, or a folder cannot be.

    `folder`: of the event files. `state`: folder in which they record, between attempts, what they have delivered.
    """
    clients: dict[str, TrackerClient] = {}
    try:
        if config.tensorboard:
            curves = Path(config.tensorboard) / execution.run / slug(execution.label)
            clients["tensorboard"] = TensorboardClient(curves)
        if config.otlp:
            clients["otlp"] = OtlpClient(config.otlp, config.timeout_s)
        if config.mlflow:
            clients["mlflow"] = MlflowClient(config.mlflow, config.project, config.timeout_s)
        if config.wandb:
            clients["wandb"] = WandbClient(Path(config.wandb), config.project)
    except ImportError as error:
        command = how_to_install(package_of(str(error.name)))
        raise ConfigError(f"telemetry: {error.name} is not installed: {command}") from None
    except OSError as error:
        raise ConfigError(f"telemetry.tensorboard: {error}") from None
    return [
        Tracker(client, execution, folder / execution.files, state / f"telemetry-{name}.json")
        for name, client in clients.items()
    ]


def close_all(trackers: Sequence[Tracker], outcome: Outcome) -> int:
    """Send the remaining points and the outcome. Returns the number of measurements that were not delivered."""
    for tracker in trackers:
        tracker.end(outcome)
    # All of them share the few seconds from here.
    start = time.monotonic()
    return sum(tracker.close(start) for tracker in trackers)
