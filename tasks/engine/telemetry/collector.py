"""Send metrics to an OpenTelemetry collector.

The library's `MeterProvider` exports only the newest value of each gauge, so its exporter is called directly with all
points (docs/decisions.md).
"""

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from nautile.tasks.engine.telemetry.points import Point

logger = logging.getLogger(__name__)

QUEUE = 64  # batches that may wait for a slow collector
LINGER_S = 6.0  # time to send the remaining points after the stage has ended
_NS_PER_US = 1000


class Collector:
    """The sink for an OpenTelemetry collector; a thread sends the batches.

    Each measurement is a point of a gauge, with its own time. The step is a second gauge, because an attribute with a
    new value for each point would make each point a time series of its own.
    """

    def __init__(self, address: str, timeout_s: float, resource: dict[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        # The exporter would log each failure itself, at length.
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
            # A collector that falls behind loses measurements rather than delaying the stage.
            self._count(points, sent=False)

    def close(self) -> int:
        try:
            # The end of the queue: the thread sends what is before it, then returns.
            self._queue.put(None, timeout=LINGER_S)
            self._thread.join(LINGER_S)
        except queue.Full:
            logger.debug("telemetry: %s is too slow; measurements are dropped", self._address)
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
            logger.warning("telemetry: %s does not accept metrics; the run continues without it", self._address)


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
        time_ns = point.time_us * _NS_PER_US
        for name, value, attributes in (
            (f"nautile.{point.name}", point.value, {"source": point.source} if point.source else {}),
            ("nautile.step", point.step, {"metric": point.name}),
        ):
            gauges.setdefault(name, []).append(NumberDataPoint(attributes, time_ns, time_ns, value))
    metrics = [Metric(name, "", "", Gauge(data)) for name, data in gauges.items()]
    scope = ScopeMetrics(InstrumentationScope("nautile"), metrics, "")
    return MetricsData([ResourceMetrics(Resource({"service.name": "nautile", **resource}), [scope], "")])
