"""Forward metrics while a stage works: to TensorBoard files, an OpenTelemetry collector, both, or (by default) nowhere.

The stage's parent reads them from the event files that it also ingests, so the stage knows nothing of this. A thread of
its own talks to the collector: one that is slow or gone delays no step. Measurements not delivered are counted.

The libraries' own writers were tried and are not used (docs/log.md): OpenTelemetry's `MeterProvider` exports only the
newest value of each gauge, and tensorboardX's `SummaryWriter` blocks for ever once the disk is full.
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
LINGER_S = 6.0  # to send the rest once the stage has ended
_NS_PER_US = 1000


@dataclass(frozen=True)
class Point:
    """One measurement; `time_us` is microseconds since 1970."""

    name: str
    step: int
    value: float
    time_us: int
    source: str = ""


class Sink(Protocol):
    """Where points go; `close` returns how many it could not deliver. Both may raise `OSError`."""

    def write(self, points: Sequence[Point]) -> None: ...
    def close(self) -> int: ...


class Forwarder:
    """Reads the event files of one attempt as they grow, and hands their metrics to the sinks."""

    def __init__(self, events: Path, sinks: Sequence[Sink]) -> None:
        """`events`: the files are those in its folder whose names begin with its name."""
        self._events, self._sinks = events, list(sinks)
        self._offsets: dict[Path, int] = {}
        self._dropped_sinks = self._undelivered = 0

    def forward(self) -> None:
        """Forward what was written since the last call. Raises nothing, because the store has all of it."""
        if not self._sinks and not self._dropped_sinks:
            return
        try:
            points = self._new_points()
        except OSError as error:
            logger.warning("telemetry: the events cannot be read: %s", error)
            return
        self._undelivered += len(points) * self._dropped_sinks
        for sink in self._sinks[:] if points else ():
            try:
                sink.write(points)
            except OSError as error:
                self._drop(sink, error)
                self._undelivered += len(points)

    def close(self) -> int:
        """Forward the rest; the number of measurements that were not delivered."""
        self.forward()
        for sink in self._sinks[:]:
            try:
                self._undelivered += sink.close()
            except OSError as error:
                self._drop(sink, error)
        return self._undelivered

    def _drop(self, sink: Sink, error: OSError) -> None:
        logger.warning("telemetry: the run continues without its %s: %s", type(sink).__name__, error)
        self._sinks.remove(sink)
        self._dropped_sinks += 1

    def _new_points(self) -> list[Point]:
        points = []
        for path in sorted(self._events.parent.glob(f"{self._events.name}*.jsonl")):
            # Events are read a block at a time, until a read makes no progress.
            reached = -1
            while reached != self._offsets.get(path, 0):
                reached = self._offsets.get(path, 0)
                events, self._offsets[path] = read_events(path, reached)
                points += [point for event in events if event["kind"] == "metric" if (point := _point(event))]
        return points


def forwarder_of(config: TelemetryConfig, events: Path, run: str, stage: str, label: str) -> Forwarder:
    """The forwarder to the sinks configured. Raises `ConfigError` if an optional package is not installed."""
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(_extra("tensorboard", lambda: EventFile(Path(config.tensorboard) / run / slug(label))))
    if config.otlp:
        resource = {"nautile.run": run, "nautile.stage": stage, "nautile.label": label}
        sinks.append(_extra("otel", lambda: Collector(config.otlp, config.timeout_s, resource)))
    return Forwarder(events, sinks)


class Collector:
    """An OpenTelemetry collector, sent batches from a thread.

    Each measurement is a point of a gauge, with its own time. The step is a second gauge, because an attribute that
    changes with each point would make each point a series.
    """

    def __init__(self, address: str, timeout_s: float, resource: dict[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        # It would log each failure itself, at length.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._address = address
        endpoint = address if address.rstrip("/").endswith("/v1/metrics") else address.rstrip("/") + "/v1/metrics"
        self._exporter = OTLPMetricExporter(endpoint=endpoint, timeout=timeout_s)
        self._resource = resource
        self._queue: queue.Queue[Sequence[Point] | None] = queue.Queue(QUEUE)
        self._lock = threading.Lock()
        self._undelivered = self._pending = 0
        self._thread = threading.Thread(target=self._send_batches, name="telemetry", daemon=True)
        self._thread.start()

    def write(self, points: Sequence[Point]) -> None:
        with self._lock:
            self._pending += len(points)
        try:
            self._queue.put_nowait(points)
        except queue.Full:
            self._count(points, sent=False)

    def close(self) -> int:
        try:
            self._queue.put(None, timeout=LINGER_S)
            self._thread.join(LINGER_S)
        except queue.Full:
            logger.debug("telemetry: %s is too slow to wait for", self._address)
        with self._lock:
            return self._undelivered + self._pending

    def _send_batches(self) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        while (points := self._queue.get()) is not None:
            try:
                sent = self._exporter.export(_as_metrics(points, self._resource)) is MetricExportResult.SUCCESS
            except Exception as error:
                logger.debug("telemetry: %s", error)
                sent = False
            self._count(points, sent)
        self._exporter.shutdown()

    def _count(self, points: Sequence[Point], sent: bool) -> None:
        with self._lock:
            self._pending -= len(points)
            first = not sent and not self._undelivered
            self._undelivered += 0 if sent else len(points)
        if first:
            logger.warning("telemetry: %s does not take metrics; the run continues without it", self._address)


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

    gauges: dict[str, list[NumberDataPoint]] = {}
    for point in points:
        time_ns = point.time_us * _NS_PER_US
        for name, value, attributes in (
            (f"nautile.{point.name}", point.value, {"source": point.source} if point.source else {}),
            ("nautile.step", point.step, {"metric": point.name}),
        ):
            gauges.setdefault(name, []).append(NumberDataPoint(attributes, time_ns, time_ns, value))
    metrics = [Metric(name, "", "", Gauge(data)) for name, data in gauges.items()]
    scope = ScopeMetrics(InstrumentationScope("nautile"), metrics, "")
    return MetricsData([ResourceMetrics(Resource({"service.name": "nautile", **resource}), [scope], "")])


class EventFile:
    """A TensorBoard event file, written in the caller's thread, so that a full disk is an error and not a hang."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")

    def write(self, points: Sequence[Point]) -> None:
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
        raise ConfigError(f"telemetry: {error.name} is not installed: pip install 'nautile[{name}]'") from None
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
