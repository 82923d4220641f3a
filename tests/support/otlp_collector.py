"""An OpenTelemetry collector for tests: a real HTTP server that decodes what it is sent, or misbehaves."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


class Collected:
    """What has come: requests decoded, their paths and headers. `status` is what the next ones are answered."""

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.url = ""

    def points(self) -> list[tuple[str, dict[str, str], float, int]]:
        """(metric, its marks, value, time in ns) of every point."""
        return [
            (metric.name, {mark.key: mark.value.string_value for mark in point.attributes},
             point.as_double if point.WhichOneof("value") == "as_double" else point.as_int, point.time_unix_nano)
            for request in self.requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.gauge.data_points
        ]  # fmt: skip

    def about(self) -> dict[str, str]:
        """The marks of the resource that all is about."""
        (resource, *others) = [r.resource for request in self.requests for r in request.resource_metrics]
        assert all(other == resource for other in others)
        return {mark.key: mark.value.string_value for mark in resource.attributes}


@contextmanager
def collecting() -> Iterator[Collected]:
    """A collector on loopback for the length of the block."""
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            if collected.status == 200:
                collected.requests.append(ExportMetricsServiceRequest.FromString(body))
            collected.paths.append(self.path)
            collected.headers.append(dict(self.headers))
            self.send_response(collected.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collected.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()
