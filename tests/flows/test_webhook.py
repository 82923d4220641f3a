"""The webhook against a real server: taken, tried again, given up; its URL is in no log and no message."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from flows.prefect_env import free_port
from flows.webhook import PAUSES_S, post

SECRET = "s3cr3t-t0ken"


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


@pytest.fixture
def told(monkeypatch, caplog):
    """told(url) -> (what `post` said, the pauses it made); checks that the secret is nowhere."""

    def tell(url):
        monkeypatch.setenv("HOOK", url)
        pauses = []
        with caplog.at_level(logging.DEBUG, "flows"), caplog.at_level(logging.INFO, "httpx"):
            said = post("HOOK", {"event": "nautile.regression"}, pauses.append)
        assert SECRET not in f"{said} {caplog.text}"
        return said, pauses

    return tell


def test_it_is_told_once_if_it_listens(told):
    with hook(204) as (url, heard):
        assert told(url) == (None, [])
    assert heard == [{"event": "nautile.regression"}]


def test_what_may_pass_is_tried_again(told):
    with hook(503, 429, 200) as (url, heard):
        assert told(url) == (None, list(PAUSES_S))
    assert len(heard) == 3


@pytest.mark.parametrize(("status", "attempts"), [(500, 3), (404, 1), (302, 1)])
def test_it_gives_up_and_says_so(told, status, attempts):
    with hook(status) as (url, heard):
        said, _ = told(url)
    assert said == f"the webhook in HOOK was not taken: status {status}"
    assert len(heard) == attempts


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"http://127.0.0.1:{free_port()}/{SECRET}", "ConnectError"),
        (f"ftp://127.0.0.1/{SECRET}", "UnsupportedProtocol"),
        (f"http://[::1/{SECRET}", "is it a whole URL"),
        ("", "HOOK is not set"),
    ],
)
def test_what_cannot_be_reached_never_raises(told, url, said):
    assert said in told(url)[0]
