"""The metrics of `GET /metrics` in Prometheus' text format: requests, latency, tokens, slots and the queue."""

import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nautile.model.decoding.engine import Engine

# From a refused request (10 ms) to a long reasoning on a slow machine (two minutes).
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CLIENT_CLOSED_REQUEST = 499  # only for metrics: the client has disconnected
_MEASURED = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")

Message = MutableMapping[str, Any]
Application = Callable[[Message, Any, Any], Awaitable[None]]


class ServerMetrics:
    """The metrics of one server. Those of the engine are read when the metrics are requested."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        labels = ["route", "status"]
        self.requests = Counter("nautile_requests", "Requests by route and status.", labels, registry=self._registry)
        self.seconds = Histogram(
            "nautile_request_seconds",
            "Seconds from a request's head to the end of its response.",
            ["route"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self.prompt_tokens = Counter("nautile_prompt_tokens", "Tokens of prompts.", registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """The current metrics of the engine; called by the registry."""
        engine = self._engine
        busy, waiting = engine.load()
        for name, text, value in (
            ("slots", "Completions that can be generated at the same time.", engine.capacity),
            ("slots_busy", "Completions that are being generated.", busy),
            ("queue_limit", "Completions that may wait.", engine.queue),
            ("queue_waiting", "Completions that wait for a slot.", waiting),
            ("ready", "1 once the programs are compiled, 0 before and after a failure.", engine.ready.is_set()),
        ):
            gauge = 0 if name == "ready" and engine.failure else value
            yield GaugeMetricFamily(f"nautile_{name}", text, float(gauge))
        yield CounterMetricFamily("nautile_generated_tokens", "Tokens that were generated.", float(engine.tokens))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class MeasuredRequests:
    """ASGI middleware that counts requests and measures the time until the end of their responses, streams included."""

    def __init__(self, app: Application, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            # Unknown paths share one label, so that clients cannot create any number of time series.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, status).inc()
            if route in _MEASURED:
                self._metrics.seconds.labels(route).observe(time.perf_counter() - begun)
