"""The client of OpenAI-compatible endpoints, over OpenAI's SDK. Imported where one is made, never before."""

import itertools
import json
from collections.abc import Awaitable
from typing import Any

import httpx2
import openai
from mistralai.client import Mistral
from mistralai.client.errors import MistralError, ResponseValidationError
from openai import AsyncOpenAI, Omit

from configs.endpoint import EndpointConfig
from data.endpoints.chat_types import CallError, ChatRequest
from data.endpoints.circuit_breaker import reason_of, retry_after
from data.endpoints.clients import (
    OnHeaders,
    RawReply,
    Result,
    call_with_timeout,
    chat_body,
    http_clients,
    key_of,
    parse_completion,
    parse_reply_body,
    transport_error,
)


class OpenAIClient:
    """An OpenAI-compatible endpoint, the embedded one included."""

    def __init__(self, config: EndpointConfig, url: str, heard: OnHeaders) -> None:
        self.url, self._config = url, config
        key = self._key if config.key_variable else "none"
        self._lanes = [
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=lane)
            for lane in http_clients(config, heard)
        ]
        self._next = itertools.cycle(self._lanes)
        # Said with every request, for the SDK checks only those: without a key of ours, none is sent.
        self.headers: dict[str, Any] = {} if config.key_variable else {"Authorization": Omit()}

    @property
    def sdk(self) -> AsyncOpenAI:
        """The vendor's client, for its other interfaces."""
        return self._lanes[0]

    async def complete(self, request: ChatRequest) -> RawReply:
        """Ask once."""
        body = chat_body(request, self._config)
        post = next(self._next).post(
            "/chat/completions", cast_to=httpx2.Response, body=body, options={"headers": self.headers}
        )
        return parse_reply_body((await self.send(post)).content, self.url, self._config)

    async def models(self) -> list[str] | None:
        """Names of the models served; None where the server does not say or takes any name, as llama.cpp's does."""
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

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()

    async def _key(self) -> str:
        return key_of(self._config)

    async def send(self, call: Awaitable[Result]) -> Result:
        """Await a call of the SDK. Raises `CallError`."""
        return await call_with_timeout(call, self._config, self.url, self._error)

    def _error(self, error: Exception) -> CallError | None:
        if isinstance(error, openai.APIStatusError):
            spent = getattr(error, "code", None) == "insufficient_quota"
            reason = "misconfigured" if spent else reason_of(error.status_code)
            return CallError(reason, error.message, str(error.status_code), retry_after(error.response.headers))
        if isinstance(error, openai.APITimeoutError):
            return CallError("timeout", f"{self.url} did not answer within {self._config.timeout_s:g} s")
        if isinstance(error, openai.APIConnectionError):
            return transport_error(error.__cause__ or error, self.url)
        if isinstance(error, (openai.APIResponseValidationError, json.JSONDecodeError, UnicodeDecodeError)):
            return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
        return transport_error(error, self.url) if isinstance(error, httpx2.HTTPError) else None


MISTRAL_URL = "https://api.mistral.ai"


class MistralClient:
    """One Mistral endpoint; `url` without its `/v1`, or with it."""

    def __init__(self, config: EndpointConfig, url: str, heard: OnHeaders) -> None:
        self.url, self._config = url, config
        self._http = http_clients(config, heard)
        self._lanes = [
            Mistral(
                api_key=lambda: key_of(config),
                server_url=url.rstrip("/").removesuffix("/v1"),
                async_client=lane,
                retry_config=None,
                timeout_ms=int(config.timeout_s * 1000),
            )
            for lane in self._http
        ]
        self._next = itertools.cycle(self._lanes)

    @property
    def sdk(self) -> Mistral:
        """The vendor's client, for its other interfaces."""
        return self._lanes[0]

    async def complete(self, request: ChatRequest) -> RawReply:
        """Ask once."""
        body = chat_body(request, self._config)
        reply = await self.send(next(self._next).chat.complete_async(**body))
        try:
            return parse_completion(reply.model_dump(mode="json"), self._config)
        except (AttributeError, TypeError, LookupError):
            raise CallError("invalid_reply", f"no chat completion in the answer of {self.url}") from None

    async def models(self) -> list[str] | None:
        """Names of the models this key may use, aliases included."""
        page = await self.send(self.sdk.models.list_async())
        names = [name for entry in page.data or [] for name in (entry.id, *(getattr(entry, "aliases", None) or []))]
        return names or None

    async def close(self) -> None:
        for lane in self._http:
            await lane.aclose()

    async def send(self, call: Awaitable[Result]) -> Result:
        """Await a call of the SDK. Raises `CallError`."""
        return await call_with_timeout(call, self._config, self.url, self._error)

    def _error(self, error: Exception) -> CallError | None:
        if isinstance(error, ResponseValidationError):
            return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
        if isinstance(error, MistralError):
            status = error.status_code
            if status < 400:
                return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
            return CallError(reason_of(status), error.message, str(status), retry_after(error.headers))
        if isinstance(error, (httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)):
            return transport_error(error, self.url)
        return None
