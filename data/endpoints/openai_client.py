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

from common.retry import retry_after
from configs.endpoint import EndpointConfig
from data.endpoints.chat_types import CallError, ChatRequest
from data.endpoints.circuit_breaker import reason_of
from data.endpoints.clients import (
    OnHeaders,
    RawReply,
    Result,
    call_with_timeout,
    chat_body,
    http_clients,
    key_of,
    parse_reply_body,
    transport_error,
)


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
        post = next(self._next).post(
            "/chat/completions",
            cast_to=httpx2.Response,
            body=chat_body(request, self._config),
            options={"headers": self.headers},
        )
        return parse_reply_body((await self.send(post)).content, self.url, self._config)

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
            no_credit = getattr(error, "code", None) == "insufficient_quota"  # a 429, but waiting does not help
            # If a field that all requests have is refused, no request would be accepted.
            refused_field = error.status_code in (400, 422) and error.param in self._fields
            reason = "misconfigured" if no_credit or refused_field else reason_of(error.status_code)
            return CallError(reason, error.message, str(error.status_code), retry_after(error.response.headers))
        if isinstance(error, openai.APIConnectionError):  # a timeout too
            return transport_error(error.__cause__ or error, self.url)
        if isinstance(error, (openai.APIResponseValidationError, json.JSONDecodeError, UnicodeDecodeError)):
            return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
        return transport_error(error, self.url) if isinstance(error, (CallError, httpx2.HTTPError)) else None
