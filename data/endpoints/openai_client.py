"""The client of OpenAI-compatible endpoints, the embedded one included, over OpenAI's SDK; batches are /batches.

Replies are parsed as plain JSON, because the SDK's validation, which `parse_completion` repeats anyway, reduces the
throughput of one HTTP client from 415 to 335 requests a second (bench/corpus/endpoints.py).
"""

import itertools
import json
from collections.abc import Awaitable
from typing import Any

import httpx2
import openai
from openai import AsyncOpenAI, Omit, OpenAI

from nautile.common.files import parse_json
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import CallError, ChatRequest
from nautile.data.endpoints.clients import (
    CLOCK_SKEW_S,
    CONNECT_S,
    LABEL,
    BatchJob,
    OnHeaders,
    Result,
    call_with_timeout,
    chat_body,
    http_clients,
    id_of,
    proxies_readable,
    transport_error,
    uses_proxy,
    without_key,
)
from nautile.data.endpoints.completions import RawReply, error_of_status, parse_reply_body, refused_field, token_count
from nautile.data.endpoints.keys import key_of


class OpenAIClient:
    """An OpenAI-compatible endpoint at `url`, which ends in /v1."""

    def __init__(self, config: EndpointConfig, url: str, on_headers: OnHeaders) -> None:
        self.url, self._config = url, config
        self._fields = {"max_tokens", "max_completion_tokens", "temperature", "seed", *(config.extra or ())}

        async def read_key() -> str:  # the SDK calls it for each request
            return key_of(config)

        key = read_key if config.key_variable else "none"
        self._clients = [
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=client)
            for client in http_clients(config, on_headers)
        ]
        self._next = itertools.cycle(self._clients)
        # Without a configured key no Authorization header is sent; the SDK lets only a request's headers omit it.
        self._headers: dict[str, Any] = {} if config.key_variable else {"Authorization": Omit()}
        self._sdk = self._clients[0]  # for all but completions

    async def complete(self, request: ChatRequest) -> RawReply:

        async def post() -> RawReply:
            response = await next(self._next).post(
                self._config.vendor.chat_path,
                cast_to=httpx2.Response,
                body=chat_body(request, self._config),
                options={"headers": self._headers},
            )
            return parse_reply_body(response.content, self.url, self._config, response.headers)

        return await self.send(post())

    async def models(self) -> list[str] | None:
        """Names of the models served; None if the server does not list them, or accepts any name, as llama.cpp does."""
        # Not through the SDK's types, which expect OpenAI's form: others answer with a bare list, or in other forms.
        call = self._sdk.get("/models", cast_to=httpx2.Response, options={"headers": self._headers})
        try:
            body = parse_json((await self.send(call)).content)
        except CallError as error:
            if error.status in ("404", "405", "501"):
                return None
            raise
        listed = body.get("data") if isinstance(body, dict) else body
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if any(entry.get("owned_by") == "llamacpp" for entry in entries):
            return None
        names = [name for entry in entries if isinstance(name := entry.get("id"), str)]
        # Gemini lists models by a path, and takes their names alone too.
        return [*names, *(name.removeprefix("models/") for name in names if name.startswith("models/"))] or None

    def input_line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
        body = chat_body(request, self._config)
        return {"custom_id": digest, "method": "POST", "url": f"/v1{self._config.vendor.chat_path}", "body": body}

    async def upload(self, name: str, content: bytes) -> str:
        file = (name, content, "application/jsonl")
        return id_of(await self.send(self._sdk.files.create(file=file, purpose="batch", extra_headers=self._headers)))

    async def create(self, file: str, label: str) -> str:
        endpoint: Any = f"/v1{self._config.vendor.chat_path}"  # to the SDK, one of the paths that its vendor has
        call = self._sdk.batches.create(
            completion_window="24h",
            endpoint=endpoint,
            input_file_id=file,
            metadata={LABEL: label},
            extra_headers=self._headers,
        )
        return id_of(await self.send(call))

    async def find(self, label: str, since: float) -> str | None:
        """The id of the job with this label, created after `since`; None if there is none."""

        async def search() -> str | None:
            async for batch in self._sdk.batches.list(limit=100, extra_headers=self._headers):
                if (batch.metadata or {}).get(LABEL) == label:
                    return batch.id
                if batch.created_at < since - CLOCK_SKEW_S:  # newest first
                    return None
            return None

        return await self.send(search())

    async def status(self, job: str) -> BatchJob:
        batch = await self.send(self._sdk.batches.retrieve(job, extra_headers=self._headers))
        files = tuple(file for file in (batch.output_file_id, batch.error_file_id) if file)
        errors = (batch.errors.data if batch.errors else None) or []
        return BatchJob(str(batch.status), files, "; ".join(f"{error.code}: {error.message}" for error in errors[:3]))

    async def download(self, file: str) -> bytes:
        content = await self.send(self._sdk.files.content(file, extra_headers=self._headers))
        return content.content

    async def send(self, call: Awaitable[Result]) -> Result:
        return await call_with_timeout(call, self._config, self.url, self._to_call_error)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    def _to_call_error(self, error: Exception) -> CallError | None:
        """Translate an error of the SDK; None for a programming error."""
        call_error = _call_error(error, self.url)
        if call_error is not None and isinstance(error, openai.APIStatusError):
            content = error.response.content
            # If a field that all requests have is refused, no request would be accepted.
            if error.response.status_code in (400, 422) and refused_field(content) in self._fields:
                call_error.reason = "misconfigured"
        return call_error


class OpenAIEmbeddings:
    """Embeddings of an OpenAI-compatible endpoint; may be used in several threads."""

    def __init__(self, config: EndpointConfig) -> None:
        self._config, self._url = config, config.address
        timeout = httpx2.Timeout(config.timeout_s, connect=CONNECT_S)
        with proxies_readable(self._url):
            client = httpx2.Client(timeout=timeout, trust_env=uses_proxy(self._url))
        self._sdk = OpenAI(
            base_url=self._url,
            api_key=lambda: key_of(config) or "none",
            max_retries=0,
            timeout=timeout,
            http_client=client,
        )
        self._headers: dict[str, Any] = {} if config.key_variable else {"Authorization": Omit()}

    def embed(self, texts: list[str]) -> tuple[list[Any], int | None]:
        """Send one request; returns (entries with `embedding` and `index`, tokens or None). Raises `CallError`."""
        try:
            # Without `encoding_format` the SDK asks for base64, which not every compatible server speaks.
            reply = self._sdk.embeddings.create(
                model=self._config.model, input=texts, encoding_format="float", extra_headers=self._headers
            )
            rows = list(reply.data)
        except (openai.APIResponseValidationError, AttributeError, TypeError, ValueError):
            raise CallError("invalid_reply", f"no embeddings in the answer of {self._url}") from None
        except Exception as raised:
            error = _call_error(raised, self._url)
            if error is None:
                raise
            raise without_key(error, self._config) from None
        return rows, token_count(getattr(getattr(reply, "usage", None), "prompt_tokens", None))


def _call_error(error: Exception, url: str) -> CallError | None:
    """Translate an error of the SDK; None for a programming error."""
    if isinstance(error, openai.APIStatusError):
        response = error.response
        return error_of_status(response.status_code, response.content, response.headers, url)
    if isinstance(error, openai.APIConnectionError):  # a timeout too
        return transport_error(error.__cause__ or error, url)
    if isinstance(error, (openai.APIResponseValidationError, json.JSONDecodeError, UnicodeDecodeError)):
        return CallError("invalid_reply", f"the answer of {url} is not JSON of a chat completion")
    return transport_error(error, url) if isinstance(error, (CallError, httpx2.HTTPError)) else None
