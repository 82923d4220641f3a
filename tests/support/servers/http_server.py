"""The base of the fake HTTP servers: a real server on a loopback socket; a subclass makes its answers and its faults.

class Echo(FakeServer):
    def respond(self, request: Request) -> Response:
        return Response(body=request.body)

with Echo() as server:
    httpx.post(server.url, content=b"hello")
"""

import json
import sys
import threading
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

POLL_S = 0.02  # how soon the server notices that it is to stop


@dataclass(frozen=True)
class Request:
    """What a client sent. `path` is unquoted and without the query; names of `headers` have no case."""

    method: str
    path: str
    query: str
    headers: Message
    body: bytes

    def json(self) -> Any:
        """The body as JSON data."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Response:
    """What a server answers. `length`: announce another length than the body has, and close the connection after it,
    as a connection that breaks."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/octet-stream"
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(status, json.dumps(value).encode(), "application/json", headers or {})


class FakeServer:
    """A context manager: serves while the block runs, each connection in a thread of its own."""

    keep_alive = True  # False: one request a connection
    port = 0  # 0: a free one
    address = "127.0.0.1"
    base_path = ""  # the end of `url`

    def respond(self, request: Request) -> Response | None:
        """The answer to one request; None closes the connection without any. Called from several threads."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._server = _Server((self.address, self.port), _handler_of(self))
        self.url = f"http://{self.address}:{self._server.server_port}{self.base_path}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # connections that clients open together

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing when a client hangs up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler_of(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1" if server.keep_alive else "HTTP/1.0"
        wbufsize = -1  # the head and the body leave in one packet: two would wait for an acknowledgement
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            body = self._body()
            response = server.respond(Request(self.command, unquote(parts.path), parts.query, self.headers, body))
            if response is None:
                self.close_connection = True
                return
            length = len(response.body) if response.length is None else response.length
            self.send_response(response.status)
            headers = {"Content-Type": response.content_type, "Content-Length": str(length), **response.headers}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.body)
                self.wfile.flush()
                self.close_connection = self.close_connection or length != len(response.body)

        do_HEAD = do_POST = do_PUT = do_GET

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            chunks = []
            while length := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def log_message(self, *args: object) -> None:
            """Write nothing to the test's output."""

    return Handler
