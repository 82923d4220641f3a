"""Requests that the server refuses before it does any work for them, with an engine that decodes nothing."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from data.tokenizer import tokenizer_for
from flows.serve import responses
from flows.serve.http import ServedModel, application
from tests.support.processes.serving import TOKENIZER

QUEUE = 8


class IdleEngine:
    """The parts of an engine that a request needs before it is submitted."""

    capacity, queue, tokens, failure = 2, QUEUE, 0, None
    config = SimpleNamespace(context=128)
    ready = threading.Event()

    def load(self) -> tuple[int, int]:
        return 0, 0


@pytest.fixture(scope="module")
def post() -> Any:
    engine: Any = IdleEngine()
    client = TestClient(
        application(ServedModel("m", 0, tokenizer_for(TOKENIZER), engine)), raise_server_exceptions=False
    )
    headers = {"Content-Type": "application/json"}
    return lambda path, body: client.post(path, content=json.dumps(body).encode(), headers=headers)


@pytest.mark.parametrize(
    "request_body", [{"prompt": ["x"] * (QUEUE + 1)}, {"prompt": [[1]] * 3, "n": 4}, {"prompt": "x", "n": QUEUE + 1}]
)
def test_more_samples_than_can_wait_are_refused_before_any_is_built(post, monkeypatch, request_body):
    """A body of 4 MiB has a million prompts, and `n` makes 128 samples of each: memory for them is not there."""
    built = []
    monkeypatch.setattr(responses, "DecodeRequest", lambda **fields: built.append(fields) or pytest.fail("built"))
    response = post("/v1/completions", request_body)
    assert (response.status_code, built) == (400, [])
    assert "exceed the queue of 8" in response.json()["error"]["message"]
