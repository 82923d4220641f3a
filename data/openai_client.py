"""The client of OpenAI-compatible endpoints, over OpenAI's SDK. Imported where one is made, never before."""

import itertools
import json
from collections.abc import Awaitable
from typing import Any

import httpx2
import openai
from openai import AsyncOpenAI, Omit

from configs.endpoint import EndpointConfig
from data.calls import CallError, ChatRequest
from data.clients import Answered, Heard, Result, answered, bounded, broken, chat_body, key_of, lanes
from data.retry import reason_of, retry_after


class OpenAIClient:
    """An OpenAI-compatible endpoint, the embedded one included."""

    def __init__(self, config: EndpointConfig, url: str, heard: Heard) -> None:
        self.url, self._config = url, config
        key = self._key if config.key_variable else "none"
        self._lanes = [
            AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=lane) for lane in lanes(config, heard)
        ]
        self._next = itertools.cycle(self._lanes)
        # Said with every request, for the SDK checks only those: without a key of ours, none is sent.
        self.headers: dict[str, Any] = {} if config.key_variable else {"Authorization": Omit()}

    @property
    def sdk(self) -> AsyncOpenAI:
        """The vendor's client, for its other interfaces."""
        return self._lanes[0]

    async def complete(self, request: ChatRequest) -> Answered:
        """Ask once."""
        body = chat_body(request, self._config)
        post = next(self._next).post(
            "/chat/completions", cast_to=httpx2.Response, body=body, options={"headers": self.headers}
        )
        return answered((await self.send(post)).content, self.url, self._config)

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
        return await bounded(call, self._config, self.url, self._error)

    def _error(self, error: Exception) -> CallError | None:
        if isinstance(error, openai.APIStatusError):
            spent = getattr(error, "code", None) == "insufficient_quota"
            reason = "misconfigured" if spent else reason_of(error.status_code)
            return CallError(reason, error.message, str(error.status_code), retry_after(error.response.headers))
        if isinstance(error, openai.APITimeoutError):
            return CallError("timeout", f"{self.url} did not answer within {self._config.timeout_s:g} s")
        if isinstance(error, openai.APIConnectionError):
            return broken(error.__cause__ or error, self.url)
        if isinstance(error, (openai.APIResponseValidationError, json.JSONDecodeError, UnicodeDecodeError)):
            return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
        return broken(error, self.url) if isinstance(error, httpx2.HTTPError) else None
