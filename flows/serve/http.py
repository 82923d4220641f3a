"""The HTTP API of `nautile serve`: OpenAI's routes over one decoding engine.

Everything here runs in one event loop, and what takes long in threads, so that `/health` answers at once whatever the
others ask: the bridge puts requests into the engine's queue, and routes its events, which come once per step, back to
them. When a client disconnects, its samples are cancelled. Request bodies must have the content type JSON, so that web
pages cannot post to a loopback server without a CORS preflight. `GET /metrics` is in Prometheus' text format.

uvicorn closes an idle connection only after a response: one that never sends a request, or sends it byte by byte
(slowloris), would stay open forever, so that the protocol here has a time limit for the arrival of a request.
"""

import asyncio
import contextlib
import hmac
import json
import resource
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.exceptions import HTTPException as StarletteError
from uvicorn.protocols.http.h11_impl import H11Protocol

from nautile.common.errors import ConfigError
from nautile.data.tokenizer import Tokenizer
from nautile.flows.serve import protocol as bodies
from nautile.flows.serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
    described,
    documented,
    invalid_request,
)
from nautile.flows.serve.responses import ChatCompletionResponse, CompletionResponse, ResponseBuilder, constraint_for
from nautile.flows.serve.token_stream import StreamedText, bytes_of
from nautile.model.decoding.engine import Engine
from nautile.model.decoding.slots import (
    Chunk,
    DecodeRequest,
    EngineEvent,
    EngineStopped,
    Handle,
    PromptScores,
    QueueFull,
    RequestFailed,
)


class EngineBridge:
    """Submits the samples of HTTP requests to the engine, and routes its events back to them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._receivers: dict[Handle, tuple[RequestEvents, int]] = {}

    def start(self) -> None:
        """Start the engine, whose events are delivered to the running event loop."""
        loop = asyncio.get_running_loop()
        self._engine.start(lambda events: loop.call_soon_threadsafe(self._dispatch, events))

    def check_samples(self, count: int) -> None:
        """Raise `ApiError` 400 for more samples than can wait; 429 would tell the client to try the same again.

        Call it before the samples are built: a body of a few MiB can ask for a hundred million of them.
        """
        if count > self._engine.queue:
            message = f"n: {count} samples exceed the queue of {self._engine.queue}: send several requests"
            raise ApiError(400, message, "n")

    def submit(self, requests: list[DecodeRequest]) -> "RequestEvents":
        """Queue all samples of an HTTP request.

        Raises `ApiError`: 429 if the queue is full, 503 if the engine has stopped, 400 for invalid or too many samples.
        """
        self.check_samples(len(requests))
        try:
            handles = self._engine.submit(requests)
        except QueueFull as error:
            headers = {"Retry-After": str(error.retry_after)}
            raise ApiError(429, str(error), code="queue_full", headers=headers) from None
        except EngineStopped as error:
            raise ApiError(503, str(error), code="unavailable") from None
        except ConfigError as error:
            raise ApiError(400, str(error)) from None
        events = RequestEvents(self, handles)
        # The engine may have answered already, but its events arrive through this event loop, which is busy here.
        self._receivers |= {handle: (events, index) for index, handle in enumerate(handles)}
        return events

    def cancel(self, handles: list[Handle]) -> None:
        """Cancel these samples and ignore their remaining events. Finished samples are allowed."""
        # Forgotten first: events that are on their way then find no receiver.
        unfinished = [handle for handle in handles if self._receivers.pop(handle, None)]
        if unfinished:
            self._engine.cancel(unfinished)

    def _dispatch(self, events: list[tuple[Handle, EngineEvent]]) -> None:
        for handle, event in events:
            if handle in self._receivers:
                receiver, index = self._receivers[handle]
                receiver.queue.put_nowait((index, event))


class RequestEvents:
    """Queue of (index, event): the engine's events for the samples of one HTTP request."""

    def __init__(self, bridge: EngineBridge, handles: list[Handle]) -> None:
        self._bridge, self._handles = bridge, handles
        self.queue: asyncio.Queue[tuple[int, EngineEvent]] = asyncio.Queue()

    def close(self) -> None:
        """Cancel all samples that are not finished."""
        self._bridge.cancel(self._handles)

    def cancel(self, index: int) -> None:
        """Cancel one sample."""
        self._bridge.cancel([self._handles[index]])


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


REQUEST_S = 60.0  # from the connection, or the last response, to the end of a request; 4 MiB take that at 70 kB/s
CONNECTIONS = 16_384  # file descriptors that the server needs at most


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for the arrival of each request.

    There is no limit for the processing of a request, or for the client to read the response. uvicorn limits the head
    of a request to 64 KiB.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def on_response_complete(self) -> None:
        """Start the time limit of the next request."""
        super().on_response_complete()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_S, self._close_unless_arrived)

    def _close_unless_arrived(self) -> None:
        # `cycle` is a request whose head has arrived; `more_body` is True until the end of its body has arrived.
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            self.transport.abort()


def raise_descriptor_limit() -> None:
    """Raise the limit of open files up to `CONNECTIONS`, as far as the system allows: many shells set it to 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = CONNECTIONS if hard == resource.RLIM_INFINITY else min(CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


MAX_BODY_BYTES = 4 * 2**20  # hundreds of times the context as text; the list of tokens of a harness fits as well
MOST_MEMBERS = 64  # of an object of a request, but for a schema's and metadata's; each wrong one is an error in memory
MOST_CONTAINERS = 10_000  # objects and lists of a request: the event loop validates them, 50,000 of them in a second
_BODY_ERRORS = (400, 401, 413, 415)  # error statuses of all requests with a body


@dataclass(frozen=True)
class ServedModel:
    """The served model: its name for clients, its engine, and the API key that clients must send, if any."""

    name: str
    created: int
    tokenizer: Tokenizer
    engine: Engine
    key: str | None = None


class EventStream(StreamingResponse):
    """A response of server-sent events that cancels its samples when it ends, also if no chunk was read."""

    def __init__(self, chunks: AsyncIterator[bytes], events: RequestEvents) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._events = events

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            self._events.close()


class SizedRequest(Request):
    """A request that raises `ApiError` 413 once more than `MAX_BODY_BYTES` of its body have arrived."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        size = 0
        async for part in super().stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                message = f"the body is larger than {MAX_BODY_BYTES} bytes: send several requests"
                raise ApiError(413, message, headers={"Connection": "close"})
            yield part

    async def json(self) -> Any:
        """The parsed body. Raises `ApiError` 400 for one of too many parts."""
        body = await self.body()
        return await asyncio.to_thread(_parsed, body)


class GuardedRoute(APIRoute):
    """A route that checks the API key and the content type before it reads the body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            # Compared in constant time, so that the time of an answer does not tell how many characters are right.
            if (key := request.app.state.key) is not None:
                scheme, _, sent = request.headers.get("authorization", "").partition(" ")
                if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), key.encode()):
                    raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            if request.method == "POST":
                content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if content_type != "application/json":
                    raise ApiError(415, "the content type must be application/json")
            return await handle(SizedRequest(request.scope, request.receive))

        return guarded


def guarded_app(router: APIRouter, key: str | None, lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """An application of `router` (of `GuardedRoute`) whose errors all have OpenAI's format."""
    # Only the OpenAPI description is served: FastAPI's documentation pages load scripts from other servers.
    app = FastAPI(title="nautile serve", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.key = key
    app.include_router(router)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = invalid_request(error.errors())
        elif not isinstance(error, StarletteError):
            error = ApiError(500, f"unexpected {type(error).__name__}")
        elif not isinstance(error, ApiError):  # raised by FastAPI itself
            if error.status_code == 400:
                error = ApiError(400, "the body is not JSON", code="invalid_json")
            else:
                headers = dict(error.headers or {})  # a 405 lists the allowed methods
                error = ApiError(error.status_code, f"no {request.method} {request.url.path} here", headers=headers)
        return JSONResponse(error.body(), error.status_code, error.headers)

    for kind in (RequestValidationError, StarletteError, Exception):
        app.add_exception_handler(kind, refuse)
    return app


def application(served: ServedModel) -> FastAPI:
    """The server's application. It starts and closes the engine."""
    engine, tokenizer = served.engine, served.tokenizer
    bridge, metrics = EngineBridge(engine), ServerMetrics(engine)
    api = APIRouter(route_class=GuardedRoute)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bridge.start()
        yield
        # In a thread, because it waits for the engine's thread, which delivers its last events to this loop.
        await asyncio.to_thread(engine.close)

    @api.get("/v1/models", responses=documented(bodies.ModelList, 401))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_object(served)]})

    @api.get("/v1/models/{name:path}", responses=documented(bodies.ModelObject, 401, 404))
    async def model(name: str) -> Response:
        _served_name(name, served)
        return JSONResponse(_model_object(served))

    @api.post(
        "/v1/completions", responses=documented(bodies.TextCompletion, *_BODY_ERRORS, 404, 429, 503, streams=True)
    )
    async def completions(connection: Request, request: CompletionRequest) -> Response:
        name = _served_name(request.model, served)
        bridge.check_samples(len(request.prompts) * (request.n or 1))
        response = await asyncio.to_thread(CompletionResponse, request, tokenizer, engine.config.context, name)
        return await _respond(connection, request, response, bridge, metrics)

    @api.post(
        "/v1/chat/completions",
        responses=documented(bodies.ChatCompletion, *_BODY_ERRORS, 404, 429, 500, 503, streams=True),
    )
    async def chat_completions(connection: Request, request: ChatCompletionRequest) -> Response:
        name = _served_name(request.model, served)
        bridge.check_samples(request.n or 1)
        constraint = await asyncio.to_thread(constraint_for, tokenizer, request.response_format)
        response = await asyncio.to_thread(
            ChatCompletionResponse, request, tokenizer, engine.config.context, name, constraint
        )
        return await _respond(connection, request, response, bridge, metrics)

    # vLLM's routes, with which evaluation harnesses use the tokenizer.

    @api.get("/tokenizer_info", responses=documented(bodies.TokenizerInfo, 401))
    async def tokenizer_info() -> Response:
        special = {"eos_token": "<|endoftext|>", "bos_token": None, "pad_token": "<|endoftext|>"}
        context = engine.config.context
        return JSONResponse({**special, "model_max_length": context, "fingerprint": tokenizer.fingerprint})

    @api.post("/tokenize", responses=documented(bodies.TokenizeResponse, *_BODY_ERRORS, 404))
    async def tokenize(request: TokenizeRequest) -> Response:
        _served_name(request.model, served)
        # A prompt that is exactly the name of a special token gives its id, as harnesses expect.
        special = tokenizer.specials.get(request.prompt)
        ids = await asyncio.to_thread(tokenizer.encode, request.prompt) if special is None else [special]
        content = {"tokens": ids, "count": len(ids), "max_model_len": engine.config.context}
        return await asyncio.to_thread(JSONResponse, content)

    @api.post("/detokenize", responses=documented(bodies.DetokenizeResponse, *_BODY_ERRORS, 404))
    async def detokenize(request: DetokenizeRequest) -> Response:
        _served_name(request.model, served)

        def decoded() -> Response:
            text = b"".join(bytes_of(tokenizer, token) for token in request.tokens).decode("utf-8", "replace")
            return JSONResponse({"prompt": text})

        return await asyncio.to_thread(decoded)

    app = guarded_app(api, served.key, lifespan)
    app.openapi = lambda: described(app)  # type: ignore[method-assign]
    app.add_middleware(MeasuredRequests, metrics=metrics)

    # Routes that do not require the API key.

    state: dict[int | str, dict[str, Any]] = {
        200: {"model": bodies.ServerState},
        503: {"model": bodies.ServerState, "description": "Not yet, or failed"},
    }

    @app.get("/health", responses=state)
    async def health() -> Response:
        return _state(served)

    @app.get("/ready", responses=state)
    async def ready() -> Response:
        return _state(served, ready=True)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _respond(
    connection: Request,
    request: SamplingRequest,
    response: ResponseBuilder,
    bridge: EngineBridge,
    metrics: ServerMetrics,
) -> Response:
    """Submit the samples of a completion request, and respond with a stream or with one body."""
    events = bridge.submit([choice.request for choice in response.choices])
    metrics.prompt_tokens.inc(response.usage()["prompt_tokens"])
    if request.stream:
        return EventStream(_stream(response, events, request.include_usage), events)
    try:
        if not await _unless_disconnected(connection, _collect(response, events)):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return await asyncio.to_thread(_whole, response)
    finally:
        events.close()


def _whole(response: ResponseBuilder) -> Response:
    """The body of a response that is not streamed."""
    body = response.whole()
    # One at a time: no other thread runs during a call of the encoder, and the log-probabilities of 128 take seconds.
    choices = b",".join(_json(choice) for choice in body.pop("choices"))
    return Response(_json(body)[:-1] + b',"choices":[' + choices + b"]}", media_type="application/json")


async def _collect(response: ResponseBuilder, events: RequestEvents) -> None:
    """Collect the events of all samples until they are finished. Raises `ApiError` if the engine or an answer fails."""
    while not response.finished:
        index, event = await events.queue.get()
        if isinstance(event, RequestFailed):
            raise ApiError(503, event.message, code="unavailable")
        if _add_event(response, events, index, event) is not None:
            await _check(response, index)


async def _stream(response: ResponseBuilder, events: RequestEvents, include_usage: bool) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a streamed response."""
    for opening in response.opening_chunks():
        yield _server_sent(opening)
    while not response.finished:
        index, event = await events.queue.get()
        if isinstance(event, RequestFailed):
            # The head with status 200 is sent already, so the error is an event, and `[DONE]` does not follow.
            yield _server_sent(ApiError(503, event.message, code="unavailable").body())
            return
        # The index of the first new token, for the log-probabilities of this chunk: `_add_event` appends to the ids.
        first = len(response.choices[index].ids)
        added = _add_event(response, events, index, event)
        if added is None:
            continue
        try:
            await _check(response, index)
        except ApiError as error:
            yield _server_sent(error.body())
            return
        if chunk := response.chunk(index, event, added, first):
            yield _server_sent(chunk)
    if include_usage:
        yield _server_sent(response.usage_chunk())
    yield b"data: [DONE]\n\n"


async def _check(response: ResponseBuilder, index: int) -> None:
    """Raise `ApiError` 500 if a sample is finished and breaks the schema of its answer."""
    if response.choices[index].finish_reason == "stop" and (fault := await asyncio.to_thread(response.fault, index)):
        raise ApiError(500, f"the answer does not meet the response_format: {fault}", code="invalid_answer")


def _add_event(
    response: ResponseBuilder, events: RequestEvents, index: int, event: Chunk | PromptScores
) -> StreamedText | None:
    """Add an event to its choice and return the new text; None if a stop string has already ended the choice."""
    choice = response.choices[index]
    if choice.finish_reason:
        return None
    added = choice.add(event)
    if choice.finish_reason:
        # A stop string has ended it here, but the engine does not know stop strings and would go on.
        events.cancel(index)
    return added


async def _unless_disconnected(connection: Request, work: Awaitable[None]) -> bool:
    """Await `work` and return True; if the client disconnects first, cancel it and return False."""

    async def disconnect() -> None:
        while (await connection.receive())["type"] != "http.disconnect":
            pass

    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            return False
        work_task.result()
        return True
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task


def _parsed(body: bytes) -> Any:
    """The value of a JSON body of not too many parts. Raises `ApiError` and json's errors."""
    value = json.loads(body)
    waiting: list[Any] = [value]
    seen = 0
    while waiting:
        part = waiting.pop()
        seen += isinstance(part, dict | list)
        if seen > MOST_CONTAINERS:
            raise ApiError(400, f"the body: has over {MOST_CONTAINERS} objects and lists: send several requests")
        if isinstance(part, dict):
            if len(part) > MOST_MEMBERS:
                raise ApiError(
                    400, f"the body: an object has {len(part)} members, and at most {MOST_MEMBERS} are known"
                )
            waiting += [inner for name, inner in part.items() if name not in ("schema", "metadata")]
        elif isinstance(part, list):
            waiting += [inner for inner in part if isinstance(inner, dict | list)]
    return value


def _served_name(name: str | None, served: ServedModel) -> str:
    """The name of the served model. Raises `ApiError` 404 if a request names another model."""
    if name not in (None, served.name):
        message = f"model: {name!r} is not served here, only {served.name!r}"
        raise ApiError(404, message, "model", "model_not_found")
    return served.name


def _model_object(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "nautile",
        "max_model_len": served.engine.config.context,
    }


def _state(served: ServedModel, ready: bool = False) -> Response:
    """The state of the engine. `/health`: 503 after a failure; `/ready`: also 503 until its programs are compiled."""
    engine = served.engine
    busy, waiting = engine.load()
    status = "failed" if engine.failure else "ok" if engine.ready.is_set() else "starting"
    state = {"status": status, "model": served.name, "slots": engine.capacity, "busy": busy, "waiting": waiting}
    healthy = status == "ok" or (status == "starting" and not ready)
    return JSONResponse({**state, "tokens": engine.tokens, "error": engine.failure}, 200 if healthy else 503)


def _server_sent(value: dict[str, Any]) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
