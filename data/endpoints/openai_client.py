"""The client of OpenAI-compatible endpoints, the embedded one included, over OpenAI's SDK.

Replies are parsed as plain JSON, because the SDK's validation, which `parse_completion` repeats anyway, reduces the
throughput of one HTTP client from 415 to 335 requests a second (bench/corpus/endpoints.py).
"""

import itertools
import json
from collections.abc import Awaitable
from typing import Any

import httpx2
import openai
from openai import AsyncOpenAI, Omit

from configs.endpoint import EndpointConfig
from data.endpoints.chat_types import CallError, ChatRequest
from data.endpoints.clients import OnHeaders, Result, call_with_timeout, chat_body, http_clients, transport_error
from data.endpoints.completions import RawReply, error_of_status, parse_reply_body, refused_field
from data.endpoints.keys import key_of


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
        self.headers: dict[str, Any] = {} if config.key_variable else {"Authorization": Omit()}

    @property
    def sdk(self) -> AsyncOpenAI:
        """The vendor's client, for its other interfaces."""
        return self._clients[0]

    async def complete(self, request: ChatRequest) -> RawReply:
        """Send a request once."""

        async def post() -> RawReply:
            response = await next(self._next).post(
                "/chat/completions",
                cast_to=httpx2.Response,
                body=chat_body(request, self._config),
                options={"headers": self.headers},
            )
            return parse_reply_body(response.content, self.url, self._config, response.headers)

        return await self.send(post())

    async def models(self) -> list[str] | None:
        """Names of the models served; None if the server does not list them, or accepts any name, as llama.cpp does."""
        try:
            page = await self.send(self.sdk.models.list(extra_headers=self.headers))
        except CallError as error:
            if error.status in ("404", "405", "501"):
                return None
            raise
        entries = getattr(page, "data", None) or []
        if any(getattr(entry, "owned_by", "") == "llamacpp" for entry in entries):
            return None
        return [entry.id for entry in entries] or None

    async def send(self, call: Awaitable[Result]) -> Result:
        """Await a call of the SDK. Raises `CallError`."""
        return await call_with_timeout(call, self._config, self.url, self._to_call_error)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    def _to_call_error(self, error: Exception) -> CallError | None:
        """Translate an error of the SDK; None for a programming error."""
        if isinstance(error, openai.APIStatusError):
            response = error.response
            call_error = error_of_status(response.status_code, response.content, response.headers, self.url)
            # If a field that all requests have is refused, no request would be accepted.
            if response.status_code in (400, 422) and refused_field(response.content) in self._fields:
                call_error.reason = "misconfigured"
            return call_error
        if isinstance(error, openai.APIConnectionError):  # a timeout too
            return transport_error(error.__cause__ or error, self.url)
        if isinstance(error, (openai.APIResponseValidationError, json.JSONDecodeError, UnicodeDecodeError)):
            return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
        return transport_error(error, self.url) if isinstance(error, (CallError, httpx2.HTTPError)) else None
