"""Mistral's API by its own SDK, behind the same interface as the OpenAI-compatible endpoints."""

import itertools
import json
from collections.abc import Awaitable

import httpx2
from mistralai.client import Mistral
from mistralai.client.errors import MistralError, ResponseValidationError

from configs.endpoint import EndpointConfig
from data.calls import CallError, ChatRequest
from data.clients import Answered, Heard, Result, bounded, broken, chat_body, key_of, lanes, read_completion
from data.retry import reason_of, retry_after

MISTRAL_URL = "https://api.mistral.ai"


class MistralClient:
    """One Mistral endpoint; `url` without its `/v1`, or with it."""

    def __init__(self, config: EndpointConfig, url: str, heard: Heard) -> None:
        self.url, self._config = url, config
        self._http = lanes(config, heard)
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

    async def complete(self, request: ChatRequest) -> Answered:
        """Ask once."""
        body = chat_body(request, self._config)
        reply = await self.send(next(self._next).chat.complete_async(**body))
        try:
            return read_completion(reply.model_dump(mode="json"), self._config)
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
