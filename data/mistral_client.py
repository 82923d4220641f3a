"""Mistral's API by its own SDK, behind the same interface as the OpenAI-compatible endpoints."""

import json
from collections.abc import Awaitable
from typing import Any

import httpx2
from mistralai.client import Mistral
from mistralai.client.errors import MistralError, ResponseValidationError

from configs.schema import EndpointConfig
from data.calls import ChatRequest, bounds
from data.clients import CONNECT_S, Answered, Result, answered, bounded, broken, key_of
from data.retry import CallError, reason_of, retry_after

MISTRAL_URL = "https://api.mistral.ai"


class MistralClient:
    """One Mistral endpoint; `url` without its `/v1`, or with it."""

    def __init__(self, config: EndpointConfig, url: str) -> None:
        self.url, self._config = url, config
        self._http = httpx2.AsyncClient(timeout=httpx2.Timeout(config.timeout_s, connect=CONNECT_S))
        self._client = Mistral(
            api_key=lambda: key_of(config),
            server_url=url.rstrip("/").removesuffix("/v1"),
            async_client=self._http,
            retry_config=None,
            timeout_ms=int(config.timeout_s * 1000),
        )

    async def complete(self, request: ChatRequest) -> Answered:
        """Ask once."""
        extra: dict[str, Any] = {}
        if schema := bounds(request, self._config).get("schema"):
            extra["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "reply", "schema": schema, "strict": True},
            }
        reply = await self._send(
            self._client.chat.complete_async(
                model=self._config.model,
                messages=list(request.messages),
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                random_seed=request.seed,
                **extra,
            )
        )
        return answered(reply, self.url, self._config)

    async def models(self) -> list[str] | None:
        """Names of the models this key may use, aliases included."""
        page = await self._send(self._client.models.list_async())
        names = [name for entry in page.data or [] for name in (entry.id, *(getattr(entry, "aliases", None) or []))]
        return names or None

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, call: Awaitable[Result]) -> Result:
        return await bounded(call, self._config, self.url, self._error)

    def _error(self, error: Exception) -> CallError | None:
        if isinstance(error, ResponseValidationError):
            return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
        if isinstance(error, MistralError):
            status = error.status_code
            if status < 400:
                return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
            return CallError(reason_of(status), error.message, str(status), retry_after(error.headers))
        if isinstance(error, (httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)):
            return broken(error, self.url)
        return None
