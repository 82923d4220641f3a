"""Requests that the server refuses before it does any work for them, with an engine that decodes nothing; answers that
it refuses; and `/health`, which waits for no other request."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from nautile.data.tokenizer import Tokenizer, tokenizer_for
from nautile.flows.operate.own_page import OwnPageOnly
from nautile.flows.serve import http, responses
from nautile.flows.serve.http import ServedModel, application
from nautile.model.decoding.slots import Chunk, Handle
from tests.support.processes.serving import TOKENIZER
from tests.support.samples.instant_engine import NAME, InstantEngine, instant_application

QUEUE = 8
CHAT = {"messages": [{"role": "user", "content": "a"}]}


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


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/completions", {"prompt": "word " * 200_000}),
        ("/v1/completions", {"prompt": ["x", "\N{GRINNING FACE}" * 400]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_without_encoding_it(post, monkeypatch, path, request_body):
    """A token of this vocabulary is one byte, of the whole one at most 128."""
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: pytest.fail("encoded"))
    response = post(path, request_body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "tokens do not fit into the model's context of 128" in error["message"]


@pytest.mark.parametrize("prompt", [[1, 261], [[1], [300, 2]], [100_256]])
def test_an_id_without_a_token_is_no_prompt(post, prompt):
    response = post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert response.status_code == 400
    assert "no token of the vocabulary of 261 has the id" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": [{"role": "system", "content": ""}] * 10_000 + [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}]},
        {"messages": [{"role": "user", "content": "a"}], "user": [[]] * 10_000},
    ],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_validated(post, request_body):
    response = post("/v1/chat/completions", request_body)
    assert response.status_code == 400
    assert "the body: has over 10000 objects and lists" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "schema", [{"minimum": float("nan"), "type": "number"}, {"$schema": ["a"]}, {"const": float("inf")}]
)
def test_a_schema_that_is_none_is_refused(post, schema):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert post("/v1/chat/completions", {**CHAT, "response_format": form}).status_code == 400


class Gate:
    """Holds the threads that enter it until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Semaphore(0), threading.Event()

    def enter(self) -> None:
        self.entered.release()
        assert self.opened.wait(60)


async def asked_beside(requests: list[tuple[str, Any]], gate: Gate) -> list[int]:
    """The statuses of requests that are all held in a gate while `/health` answers beside them."""
    app = instant_application()
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client,
    ):
        others = [asyncio.ensure_future(client.post(path, json=body)) for path, body in requests]
        for _ in others:
            assert await asyncio.get_running_loop().run_in_executor(
                ThreadPoolExecutor(1), gate.entered.acquire, True, 60
            )
        assert (await client.get("/health")).status_code == 200
        assert not any(other.done() for other in others)
        gate.opened.set()
        return [response.status_code for response in await asyncio.gather(*others)]


@pytest.mark.parametrize(
    ("holder", "name", "requests"),
    [
        (Tokenizer, "encode", [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]),
        (Tokenizer, "encode", [("/tokenize", {"prompt": "a"})]),
        (http, "bytes_of", [("/detokenize", {"tokens": [97]})]),
        (http, "_parsed", [("/tokenize", {"prompt": "a"})]),
        (http, "_whole", [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]),
    ],
)
def test_health_waits_for_no_other_request(monkeypatch, holder, name, requests):
    """The event loop would stand still while a thread of it encodes, decodes or parses."""
    gate, whole = Gate(), getattr(holder, name)

    def held(*arguments: Any) -> Any:
        gate.enter()
        return whole(*arguments)

    monkeypatch.setattr(holder, name, held)
    assert asyncio.run(asked_beside(requests, gate)) == [200] * len(requests)


class SpeakingEngine(InstantEngine):
    """Gives one answer to each request, whatever its constraint allows."""

    answer = ""

    def submit(self, requests: Any) -> list[Handle]:
        tokenizer = tokenizer_for(TOKENIZER)
        ids = [tokenizer.think_end, *tokenizer.encode(f"\n{self.answer}"), tokenizer.im_end]
        handles = [Handle(request) for request in requests]
        self._listener([(handle, Chunk(ids, [-1.0] * len(ids), [], "stop")) for handle in handles])
        return handles


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [("6", 200, ""), ("5", 500, "5 is less than or equal to the minimum of 5"), ("6,", 500, "Extra data")],
)
def test_an_answer_that_breaks_its_schema_is_refused(answer, status, message):
    engine = SpeakingEngine()
    engine.answer = answer
    app = application(ServedModel(NAME, 0, tokenizer_for(TOKENIZER), engine))
    schema = {"type": "integer", "exclusiveMinimum": 5}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    with TestClient(app) as client:
        whole = client.post("/v1/chat/completions", json=body)
        assert whole.status_code == status
        assert message in whole.text
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True}).text
        assert ("[DONE]" in streamed) == (status == 200)
        assert message in streamed
        # A stop string ends an answer where it is no document yet.
        assert client.post("/v1/chat/completions", json={**body, "stop": answer}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:8000"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_a_page_of_another_site_reaches_nothing(headers, status):
    """As `nautile serve` is put together on loopback; the error has OpenAI's form."""
    body_of: Any = lambda code, reason: http.ApiError(code, reason).body()  # noqa: E731
    inner = instant_application()
    app = OwnPageOnly(inner, "127.0.0.1", 8000, body_of)

    async def asked() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            inner.router.lifespan_context(inner),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers) as client,
        ):
            for path in ("/metrics", "/health", "/v1/models"):
                response = await client.get(path)
                assert response.status_code == status
                if status != 200:
                    assert response.json()["error"]["message"]
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == status

    asyncio.run(asked())
