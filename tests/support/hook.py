"""A server that takes webhooks: what it was sent, and the statuses it gives."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

SECRET = "s3cr3t-t0ken"  # part of the URL: it must show up nowhere


@contextmanager
def hook(*statuses: int) -> Iterator[tuple[str, list[dict]]]:
    """A server that gives these statuses in turn, the last one for ever; its URL, and what it was sent."""
    heard: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            status = statuses[min(len(heard), len(statuses)) - 1]
            self.send_response(status)
            if status == 302:
                self.send_header("location", "http://127.0.0.1:1/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/{SECRET}", heard
    finally:
        server.shutdown()
        server.server_close()
