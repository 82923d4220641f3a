"""Metrics sent on while a stage works: TensorBoard files, an OpenTelemetry collector, both, or (by default) nothing.

The stage's parent reads them from the event files that it also ingests, so the work itself knows nothing of this. A
collector is spoken to in a thread of its own: one that is slow or gone costs no step. What it did not take is counted.
"""

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.errors import ConfigError
from configs.operation import TelemetryConfig
from store.events import read_events
from tasks.engine.failure import slug

logger = logging.getLogger(__name__)

QUEUE = 64  # batches that may wait for a slow collector
LINGER_S = 6.0  # for what is left to be sent, once the stage has ended
_NANO = 1000  # the events tell microseconds


@dataclass(frozen=True)
class Point:
    """One measurement. `time_us` since 1970."""

    name: str
    step: int
    value: float
    time_us: int
    source: str = ""


class Sink(Protocol):
    """Takes points; `close` returns how many it could not deliver."""

    def take(self, points: Sequence[Point]) -> None: ...
    def close(self) -> int: ...


class Forwarder:
    """Reads the event files of one attempt as they grow, and hands their metrics to the sinks."""

    def __init__(self, pattern: Path, sinks: Sequence[Sink]) -> None:
        """`pattern`: the files are those of its folder that begin with its name."""
        self._pattern, self._sinks = pattern, list(sinks)
        self._offsets: dict[Path, int] = {}
        self._given_up = self._lost = 0

    def forward(self) -> None:
        """Send on what has been written since the last time. Raises nothing: the store has it all."""
        if not self._sinks and not self._given_up:
            return
        try:
            points = self._new()
        except OSError as error:
            logger.warning("telemetry: the events cannot be read: %s", error)
            return
        self._lost += len(points) * self._given_up
        for sink in self._sinks[:] if points else ():
            try:
                sink.take(points)
            except OSError as error:
                self._give_up(sink, error)
                self._lost += len(points)

    def close(self) -> int:
        """Send the rest; how many measurements were not delivered."""
        self.forward()
        for sink in self._sinks[:]:
            try:
                self._lost += sink.close()
            except OSError as error:
                self._give_up(sink, error)
        return self._lost

    def _give_up(self, sink: Sink, error: OSError) -> None:
        logger.warning("telemetry: the run goes on without its %s: %s", type(sink).__name__, error)
        self._sinks.remove(sink)
        self._given_up += 1

    def _new(self) -> list[Point]:
        points = []
        for path in sorted(self._pattern.parent.glob(f"{self._pattern.name}*.jsonl")):
            reached = -1
            while reached != self._offsets.get(path, 0):
                reached = self._offsets.get(path, 0)
                events, self._offsets[path] = read_events(path, reached)
                points += [point for event in events if event["kind"] == "metric" if (point := _point(event))]
        return points


def forwarder(config: TelemetryConfig, pattern: Path, run: str, stage: str, label: str) -> Forwarder:
    """What the configuration asks for. Raises `ConfigError` if its extra is not installed."""
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(_extra("tensorboard", lambda: EventFile(Path(config.tensorboard) / run / slug(label))))
    if config.otlp:
        about = {"nautile.run": run, "nautile.stage": stage, "nautile.label": label}
        sinks.append(_extra("otel", lambda: Collector(config.otlp, config.timeout_s, about)))
    return Forwarder(pattern, sinks)


class Collector:
    """An OpenTelemetry collector, told in batches from a thread. Each measurement is a point of a gauge in its own
    time; the step is a gauge beside it, for an attribute that always changes would make each point a series."""

    def __init__(self, address: str, timeout_s: float, about: dict[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        # It would tell of each failure by itself, and at length.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._address = address
        endpoint = address if address.rstrip("/").endswith("/v1/metrics") else address.rstrip("/") + "/v1/metrics"
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=timeout_s)
        self._about = about
        self._waiting: queue.Queue[Sequence[Point] | None] = queue.Queue(QUEUE)
        self._lock = threading.Lock()
        self._lost = self._open = 0
        self._thread = threading.Thread(target=self._work, name="telemetry", daemon=True)
        self._thread.start()

    def take(self, points: Sequence[Point]) -> None:
        with self._lock:
            self._open += len(points)
        try:
            self._waiting.put_nowait(points)
        except queue.Full:
            self._settle(points, sent=False)

    def close(self) -> int:
        try:
            self._waiting.put(None, timeout=LINGER_S)
            self._thread.join(LINGER_S)
        except queue.Full:
            logger.debug("telemetry: %s is too slow to be waited for", self._address)
        with self._lock:
            return self._lost + self._open

    def _work(self) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        while (points := self._waiting.get()) is not None:
            try:
                sent = self._exporter.export(_as_metrics(points, self._about)) is MetricExportResult.SUCCESS
            except Exception as error:
                logger.debug("telemetry: %s", error)
                sent = False
            self._settle(points, sent)
        self._exporter.shutdown()

    def _settle(self, points: Sequence[Point], sent: bool) -> None:
        with self._lock:
            self._open -= len(points)
            first = not sent and not self._lost
            self._lost += 0 if sent else len(points)
        if first:
            logger.warning("telemetry: %s does not take metrics; the run goes on without it", self._address)


def _as_metrics(points: Sequence[Point], about: dict[str, str]) -> Any:
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

    gauges: dict[str, list[NumberDataPoint]] = {}
    for point in points:
        marks = {"source": point.source} if point.source else {}
        for name, value in ((f"nautile.{point.name}", point.value), ("nautile.step", point.step)):
            marks_here = {"metric": point.name} if name == "nautile.step" else marks
            when = point.time_us * _NANO
            gauges.setdefault(name, []).append(NumberDataPoint(marks_here, when, when, value))
    metrics = [Metric(name, "", "", Gauge(data)) for name, data in gauges.items()]
    scope = ScopeMetrics(InstrumentationScope("nautile"), metrics, "")
    return MetricsData([ResourceMetrics(Resource({"service.name": "nautile", **about}), [scope], "")])


class EventFile:
    """A file for TensorBoard. Written directly: the usual writer of the library has a thread, which dies of a full
    disk and then lets the next measurement wait for ever."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")

    def take(self, points: Sequence[Point]) -> None:
        for point in points:
            name = f"{point.name}/{point.source}" if point.source else point.name
            summary = self._summary(value=[self._summary.Value(tag=name, simple_value=point.value)])
            self._writer.write_event(self._event(wall_time=point.time_us / 1e6, step=point.step, summary=summary))
        self._writer.flush()

    def close(self) -> int:
        self._writer.close()
        return 0


def _extra(name: str, make: Callable[[], Sink]) -> Sink:
    try:
        return make()
    except ImportError as error:
        raise ConfigError(
            f"telemetry: {error.name} is not installed; `pip install 'nautile[{name}]'` brings it"
        ) from None
    except OSError as error:
        raise ConfigError(f"telemetry.{name}: {error}") from None


def _point(event: dict[str, Any]) -> Point | None:
    fields = event["fields"]
    try:
        value = float(fields["value"])
        return Point(
            str(fields["name"]), int(fields["step"]), value, int(event["time"]), str(fields.get("source") or "")
        )
    except (KeyError, TypeError, ValueError):
        return None
