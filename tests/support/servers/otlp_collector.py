"""An OpenTelemetry collector for tests: it decodes the metrics that it is sent, or refuses them."""

import gzip

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.support.servers.http_server import FakeServer, Request, Response


class FakeCollector(FakeServer):
    """Keeps the requests decoded, with their paths and headers. `status` is what the next ones are answered with."""

    keep_alive = False  # a client must notice at once that the collector is gone

    def __init__(self) -> None:
        self.requests: list[ExportMetricsServiceRequest] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200

    def respond(self, request: Request) -> Response:
        compressed = request.headers.get("Content-Encoding") == "gzip"
        if self.status == 200:
            body = gzip.decompress(request.body) if compressed else request.body
            self.requests.append(ExportMetricsServiceRequest.FromString(body))
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        return Response(self.status)

    def points(self) -> list[tuple[str, dict[str, str], float, int]]:
        """(metric, its attributes, value, time in ns) of every point."""
        return [
            (metric.name, {entry.key: entry.value.string_value for entry in point.attributes},
             point.as_double if point.WhichOneof("value") == "as_double" else point.as_int, point.time_unix_nano)
            for request in self.requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.gauge.data_points
        ]  # fmt: skip

    def resource(self) -> dict[str, str]:
        """The attributes of the resource, which all requests have in common."""
        (resource, *others) = [r.resource for request in self.requests for r in request.resource_metrics]
        assert all(other == resource for other in others)
        return {entry.key: entry.value.string_value for entry in resource.attributes}
