"""Shared code of the vendors' clients: HTTP connections, request JSON, errors below HTTP.

A client sends one chat completion and returns a `RawReply`, or raises a `CallError` that says whether to try again. The
SDKs' own retries are disabled, because the pool counts, rate-limits and pays for every attempt.

Each HTTP client gets only 8 connections, because httpcore looks at all connections of a client for every request
(bench/corpus/endpoints.py, 1,000 requests with 256 in flight, a server that takes 50 ms: one client 415 requests/s and
2.4 ms of a core each, 32 clients 889/s and 1.1 ms).
"""

import asyncio
import functools
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import httpx2

from nautile.common.errors import ConfigError
from nautile.common.processes import is_loopback
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import CallError, ChatRequest, output_constraint
from nautile.data.endpoints.completions import RawReply, is_page
from nautile.data.endpoints.keys import safe_message

CONNECT_S = 5.0
CONNECTIONS_PER_CLIENT = 8
GZIP = b"\x1f\x8b"  # how a member begins
# Encodings that are decoded here, by zlib's number of each; httpx2 decodes no other without further packages.
ENCODINGS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
PIECE = 1 << 20
MOST_CONTENT = 1 << 30  # bytes; the replies of a batch job are one body
WEB_PAGE = "html"  # the status of an answer that is a web page
Result = TypeVar("Result")
LABEL = "nautile_job"  # key in a batch job's metadata, by which a job is found whose id was lost
CLOCK_SKEW_S = 86_400.0  # maximum difference between the vendor's clock and ours
OnHeaders = Callable[[Mapping[str, str]], None]  # called with the headers of every response


@dataclass(frozen=True)
class BatchJob:
    """The status of a batch job: its state in the vendor's words, and the files of replies and errors so far."""

    state: str
    files: tuple[str, ...]
    message: str


class Client(Protocol):
    """One endpoint at one address; `upload` to `download` are its batch API. The calls raise `CallError`."""

    url: str

    async def complete(self, request: ChatRequest) -> RawReply: ...

    async def models(self) -> list[str] | None: ...  # None: the server does not list them, or accepts any name

    async def close(self) -> None: ...

    def input_line(self, digest: str, request: ChatRequest) -> dict[str, Any]: ...  # a request in an input file

    async def upload(self, name: str, content: bytes) -> str: ...  # an input file; returns its id

    async def create(self, file: str, label: str) -> str: ...  # a job of an uploaded file; returns its id

    # The id of the job with this label, created after `since` (seconds of the epoch); None if there is none.
    async def find(self, label: str, since: float) -> str | None: ...

    async def status(self, job: str) -> BatchJob: ...

    async def download(self, file: str) -> bytes: ...


def http_clients(config: EndpointConfig, on_headers: OnHeaders) -> list[httpx2.AsyncClient]:
    """Create HTTP clients with `concurrency` connections in all; `on_headers` sees every response."""

    async def on_response(response: httpx2.Response) -> None:
        on_headers(response.headers)
        encoding = response.headers.get("content-encoding", "").strip().lower()
        response.stream = _Bounded(cast(httpx2.AsyncByteStream, response.stream), encoding)
        if encoding in ENCODINGS:
            del response.headers["content-encoding"]
        is_html = response.status_code == 200 and response.headers.get("content-type", "").startswith("text/html")
        if is_html and is_page(await response.aread()):
            message = f"{response.url} answers with a web page (HTML), not as a chat API: check `url`"
            raise CallError("misconfigured", message, WEB_PAGE)

    count = -(-config.concurrency // CONNECTIONS_PER_CLIENT)
    with proxies_readable(config.url):
        return [
            httpx2.AsyncClient(
                timeout=httpx2.Timeout(config.timeout_s, connect=CONNECT_S),
                # No limit of connections: the breaker bounds the requests in flight, and one that waited here for a
                # connection would spend its timeout on that.
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=2 * CONNECTIONS_PER_CLIENT),
                verify=tls_context(),
                trust_env=not config.is_own and uses_proxy(config.url),
                event_hooks={"response": [on_response]},
            )
            for _ in range(count)
        ]


class _Bounded(httpx2.AsyncByteStream):
    """The content of a body in pieces; raises `DecodingError` for more than `MOST_CONTENT` bytes.

    A small body that is compressed may hold as much, and one that is not may have no end. All members of a gzip body
    are read; httpx2 reads the first alone.
    """

    def __init__(self, body: httpx2.AsyncByteStream, encoding: str) -> None:
        self._body, self._bits = body, ENCODINGS.get(encoding)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = 0
        async for piece in self._body if self._bits is None else self._decompressed(self._bits):
            if (content := content + len(piece)) > MOST_CONTENT:
                raise httpx2.DecodingError(f"a body of more than {MOST_CONTENT} bytes")
            yield piece

    async def _decompressed(self, bits: int) -> AsyncIterator[bytes]:
        member, begun = zlib.decompressobj(bits), False
        async for data in self._body:
            while True:
                try:
                    piece = member.decompress(data, PIECE)
                except zlib.error as error:
                    if begun or bits != zlib.MAX_WBITS:
                        raise httpx2.DecodingError(str(error)) from error
                    # Some servers send `deflate` without the header that it should have.
                    member, begun = zlib.decompressobj(-zlib.MAX_WBITS), True
                    continue
                begun = begun or bool(data)
                if piece:
                    yield piece
                data = member.unconsumed_tail
                if member.eof:
                    data, member = member.unused_data, zlib.decompressobj(bits)
                    if not GZIP.startswith(data[:2]):  # padding
                        return
                if not data and not piece:
                    break

    async def aclose(self) -> None:
        await self._body.aclose()


def uses_proxy(url: str) -> bool:
    """Whether the proxy settings of the environment apply to a URL: never to a server of this machine."""
    return not is_loopback(urlsplit(url).hostname or "")


@contextmanager
def proxies_readable(url: str) -> Iterator[None]:
    """Raise `ConfigError` if the block cannot use the proxies that the environment names (`ALL_PROXY=ftp://…`)."""
    try:
        yield
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        # The address itself may contain a password.
        reason = error if isinstance(error, ImportError) else "its address cannot be read"
        raise ConfigError(
            f"{url or 'the endpoint'}: the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used ({reason}); "
            "unset it, or name the host in NO_PROXY"
        ) from None


@functools.cache
def tls_context() -> ssl.SSLContext:
    """The TLS context, cached because loading the CA certificates takes 20 ms."""
    return httpx2.create_ssl_context()


def chat_body(request: ChatRequest, config: EndpointConfig) -> dict[str, Any]:
    """The JSON body of a request, the same for all vendors and their batch interfaces except for field names."""
    body: dict[str, Any] = {
        "model": config.model,
        "messages": list(request.messages),
        config.token_limit or "max_tokens": request.max_tokens,
        **(config.extra or {}),
    }
    omitted = config.omit or ()
    if "temperature" not in omitted:
        body["temperature"] = request.temperature
    if "seed" not in omitted:
        body[config.vendor.seed_field] = request.seed
    constraint = output_constraint(request, config)
    if "grammar" in constraint and config.vendor.takes_grammar:
        body |= constraint
    if "schema" in constraint:
        form = {"name": "reply", "schema": constraint["schema"], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return body


async def call_with_timeout(
    call: Awaitable[Result], config: EndpointConfig, url: str, to_call_error: Callable[[Exception], CallError | None]
) -> Result:
    """Await an SDK's call within the endpoint's timeout, which covers the whole response, slow bodies included.

    `to_call_error` translates the SDK's errors; the key is removed from the message. An error for which it returns None
    is raised unchanged.
    """
    try:
        return await asyncio.wait_for(call, config.timeout_s)
    except TimeoutError:
        raise CallError("timeout", f"{url} did not answer within {config.timeout_s:g} s") from None
    except Exception as raised:
        error = to_call_error(raised)
        if error is None:
            raise
        raise without_key(error, config) from None


def without_key(error: CallError, config: EndpointConfig) -> CallError:
    """The error with its message and status in one line, without the endpoint's key."""
    message, status = safe_message(error.message, config), safe_message(error.status, config)
    return replace(error, message=message, status=status)


def id_of(answer: Any) -> str:
    """The id in a vendor's answer to an upload or creation. Raises `CallError` if there is none."""
    if not isinstance(getattr(answer, "id", None), str):
        raise CallError("invalid_reply", "the answer has no id of the file or job")
    identifier: str = answer.id
    return identifier


def transport_error(error: BaseException, url: str) -> CallError:
    """Translate an error below HTTP, or from the response hook of `http_clients`, into a `CallError`."""
    if isinstance(error, CallError):
        return error
    # A connection that was never made cost nothing, so it is no "timeout", which counts as paid for.
    if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
        return CallError("timeout", f"{url} did not answer in time")
    if isinstance(error, (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.DecodingError)):
        return CallError("cut", f"the answer of {url} broke off ({error or type(error).__name__})")
    if isinstance(error, ValueError):
        return CallError("invalid_reply", f"the answer of {url} is not JSON of a chat completion")
    return CallError("connection", f"{url} cannot be reached ({error or type(error).__name__})")
