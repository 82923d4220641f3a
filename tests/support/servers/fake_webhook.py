"""A receiver of webhooks that answers with chosen statuses and keeps what it was sent."""

from typing import Any

from tests.support.servers.http_server import FakeServer, Request, Response

SECRET = "s3cr3t-t0ken"  # part of the URL: it must show up nowhere


class FakeWebhook(FakeServer):
    """Answers with `statuses` in turn, then always with the last one. `messages`: the JSON of every request."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = statuses
        self.messages: list[dict[str, Any]] = []

    @property
    def secret_url(self) -> str:
        """The URL to post to."""
        return f"{self.url}/{SECRET}"

    def respond(self, request: Request) -> Response:
        self.messages.append(request.json())
        status = self._statuses[min(len(self.messages), len(self._statuses)) - 1]
        return Response(status, headers={"Location": "http://127.0.0.1:1/elsewhere"} if status == 302 else {})
