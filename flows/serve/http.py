"""The HTTP side of `nautile serve`: OpenAI's routes over one engine, and who waits for which of its events.

Everything here runs in one event loop; the engine's thread hands its events over once a turn. A client that goes away
takes its samples with it, streamed or not. Requests must be JSON by their content type, so that no web page can send
one to a loopback server unasked.
"""

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from common.errors import ConfigError
from data.tokenizer import Tokenizer
from flows.serve.protocol import ApiError, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from flows.serve.responses import ChatReply, CompletionReply, Reply
from flows.serve.token_stream import bytes_of
from model.decoding.engine import Engine
from model.decoding.requests import DecodeRequest, EngineEvent, EngineStopped, Handle, QueueFull, RequestFailed

LARGEST_BODY = 4 * 2**20
CLIENT_GONE = 499  # nobody reads it


@dataclass(frozen=True)
class Served:
    """What is served, under which name, and the key to show, if one is asked for."""

    name: str
    created: int
    tokenizer: Tokenizer
    engine: Engine
    key: str | None = None


class Inbox:
    """What the engine tells of one request's orders, until it is closed."""

    def __init__(self, desk: "Desk", tickets: list[Handle]) -> None:
        self._desk, self._tickets = desk, tickets
        self.events: asyncio.Queue[tuple[int, EngineEvent]] = asyncio.Queue()

    def close(self) -> None:
        """Nothing more is wanted; samples under way are dropped."""
        self._desk.forget(self._tickets)

    def drop(self, index: int) -> None:
        """Nothing more is wanted of one order."""
        self._desk.forget([self._tickets[index]])


class Desk:
    """Between the engine's thread and the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inboxes: dict[Handle, tuple[Inbox, int]] = {}

    def open(self) -> None:
        """Start the engine, telling this loop."""
        loop = asyncio.get_running_loop()
        self._engine.start(lambda events: loop.call_soon_threadsafe(self._hand_out, events))

    def order(self, orders: list[DecodeRequest]) -> Inbox:
        """Queue all of them. Raises `ApiError` 429 when there is no room, 503 when the engine takes none, or 400."""
        if len(orders) > self._engine.queue:
            raise ApiError(
                400, f"n: {len(orders)} samples at once, and the queue holds {self._engine.queue}: ask in parts", "n"
            )
        try:
            tickets = self._engine.submit(orders)
        except QueueFull as error:
            later = {"Retry-After": str(error.retry_after)}
            raise ApiError(429, str(error), code="queue_full", headers=later) from None
        except EngineStopped as error:
            raise ApiError(503, str(error), code="unavailable") from None
        except ConfigError as error:
            raise ApiError(400, str(error)) from None
        inbox = Inbox(self, tickets)
        self._inboxes |= {ticket: (inbox, index) for index, ticket in enumerate(tickets)}
        return inbox

    def forget(self, tickets: list[Handle]) -> None:
        known = [ticket for ticket in tickets if self._inboxes.pop(ticket, None)]
        if known:
            self._engine.cancel(known)

    def _hand_out(self, events: list[tuple[Handle, EngineEvent]]) -> None:
        for ticket, event in events:
            if ticket in self._inboxes:
                inbox, index = self._inboxes[ticket]
                inbox.events.put_nowait((index, event))


class _Streamed(StreamingResponse):
    """Closes the inbox however it ends, even if nobody ever read a chunk."""

    def __init__(self, chunks: AsyncIterator[bytes], inbox: Inbox) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._inbox = inbox

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self._inbox.close()


def application(served: Served) -> FastAPI:
    """The routes. The engine starts and ends with the application."""
    desk = Desk(served.engine)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        desk.open()
        yield
        await asyncio.to_thread(served.engine.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)

    @app.exception_handler(ApiError)
    async def _refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def _nowhere(request: Request, error: Any) -> Response:
        return JSONResponse(
            ApiError(error.status_code, f"no {request.method} {request.url.path} here").body(), error.status_code
        )

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, f"unexpected {type(error).__name__}").body(), 500)

    @app.get("/health")
    async def health() -> Response:
        return _state(served)

    @app.get("/ready")
    async def ready() -> Response:
        return _state(served, ready=True)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _let_in(request, served.key)
        return JSONResponse({"object": "list", "data": [_model(served)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _let_in(request, served.key)
        _named(name, served)
        return JSONResponse(_model(served))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parse(CompletionRequest, await _body(request, served.key))
        _named(asked.model, served)
        reply = CompletionReply(asked, served.tokenizer, served.engine.config.context)
        return await _answer(request, reply, desk, bool(asked.stream), asked.usage_wanted)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = parse(ChatRequest, await _body(request, served.key))
        _named(asked.model, served)
        reply = ChatReply(asked, served.tokenizer, served.engine.config.context)
        return await _answer(request, reply, desk, bool(asked.stream), asked.usage_wanted)

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        _let_in(request, served.key)
        context = served.engine.config.context
        described = {"eos_token": "<|endoftext|>", "bos_token": None, "pad_token": "<|endoftext|>"}
        return JSONResponse({**described, "model_max_length": context, "fingerprint": served.tokenizer.fingerprint})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = parse(TokenizeRequest, await _body(request, served.key))
        # Only the whole name of a special means its id, which is how harnesses ask for it; in a text it is text.
        one = served.tokenizer.specials.get(asked.prompt)
        ids = served.tokenizer.encode(asked.prompt) if one is None else [one]
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.engine.config.context})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = parse(DetokenizeRequest, await _body(request, served.key))
        text = b"".join(bytes_of(served.tokenizer, one) for one in asked.tokens).decode("utf-8", "replace")
        return JSONResponse({"prompt": text})

    return app


async def _answer(request: Request, reply: Reply, desk: Desk, stream: bool, usage: bool) -> Response:
    inbox = desk.order(reply.orders)
    if stream:
        return _Streamed(_chunks(reply, inbox, usage), inbox)
    try:
        if not await _unless_gone(request, _collect(reply, inbox)):
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(reply.whole())
    finally:
        inbox.close()


async def _collect(reply: Reply, inbox: Inbox) -> None:
    while not reply.finished:
        index, event = await inbox.events.get()
        if isinstance(event, RequestFailed):
            raise ApiError(503, event.message, code="unavailable")
        _take(reply, inbox, index, event)


async def _chunks(reply: Reply, inbox: Inbox, usage: bool) -> AsyncIterator[bytes]:
    for chunk in reply.opening():
        yield _event(chunk)
    while not reply.finished:
        index, event = await inbox.events.get()
        if isinstance(event, RequestFailed):
            yield _event(ApiError(503, event.message, code="unavailable").body())
            return
        first = len(reply.choices[index].ids)
        told = _take(reply, inbox, index, event)
        if told is not None and (chunk := reply.chunk(index, event, told, first)):
            yield _event(chunk)
    if usage:
        yield _event(reply.body([], reply.chunk_kind, reply.usage()))
    yield b"data: [DONE]\n\n"


def _take(reply: Reply, inbox: Inbox, index: int, event: Any) -> Any:
    """What the event added; None for a choice that a stop string has ended already."""
    choice = reply.choices[index]
    if choice.finish:
        return None
    told = choice.take(event)
    if choice.finish:
        inbox.drop(index)
    return told


async def _unless_gone(request: Request, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, unless the client goes away before it is done: then False."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, key: str | None) -> bytes:
    """The body of a request that is let in, JSON by its type and not too large."""
    _let_in(request, key)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type must be application/json")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise ApiError(413, f"the body is over {LARGEST_BODY} bytes: ask in parts", headers={"Connection": "close"})
        parts.append(part)
    return b"".join(parts)


def _let_in(request: Request, key: str | None) -> None:
    if key is None:
        return
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), key.encode()):
        raise ApiError(401, "the key is missing or wrong", code="invalid_api_key")


def _named(name: str, served: Served) -> None:
    if name != served.name:
        raise ApiError(404, f"model: {name!r} is not served here, {served.name!r} is", "model", "model_not_found")


def _model(served: Served) -> dict[str, Any]:
    context = served.engine.config.context
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "nautile",
        "max_model_len": context,
    }


def _state(served: Served, ready: bool = False) -> Response:
    """`health`: 503 once the engine has failed; `ready`: 200 once the programs are compiled."""
    engine = served.engine
    busy, waiting = engine.load()
    state = "failed" if engine.failure else "ok" if engine.ready.is_set() else "starting"
    told = {"status": state, "model": served.name, "slots": engine.capacity, "busy": busy, "waiting": waiting}
    well = state == "ok" or (state == "starting" and not ready)
    return JSONResponse({**told, "tokens": engine.tokens, "error": engine.failure}, 200 if well else 503)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


__all__ = ["Served", "application"]
