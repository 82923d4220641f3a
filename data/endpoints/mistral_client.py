"""The client of Mistral's endpoints, over Mistral's SDK."""

import inspect
import itertools
import json
from collections.abc import Awaitable

import httpx2
from mistralai.client import Mistral
from mistralai.client.chat import Chat
from mistralai.client.errors import MistralError, ResponseValidationError
from mistralai.client.models import UnknownModelListData

from common.errors import ConfigError
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
    parse_completion,
    transport_error,
)

MISTRAL_URL = "https://api.mistral.ai"


class MistralClient:
    """One Mistral endpoint; `url` with or without /v1. Raises `ConfigError` for request fields that its API lacks."""

    def __init__(self, config: EndpointConfig, url: str, on_headers: OnHeaders) -> None:
        # The SDK takes the fields as keyword arguments, so an unknown one would fail at the first request.
        known_fields = inspect.signature(Chat.complete_async).parameters
        if unknown := [name for name in config.extra or () if name not in known_fields]:
            where = f"endpoint for model {config.model!r}: `extra`"
            raise ConfigError(f"{where} sets {', '.join(unknown)}, but Mistral's API has no such field")
        self.url, self._config = url, config
        self._http = http_clients(config, on_headers)
        self._clients = [
            Mistral(
                api_key=lambda: key_of(config),
                # The SDK adds /v1 itself.
                server_url=url.rstrip("/").removesuffix("/v1"),
                async_client=client,
                retry_config=None,
                timeout_ms=int(config.timeout_s * 1000),
            )
            for client in self._http
        ]
        self._next = itertools.cycle(self._clients)

    @property
    def sdk(self) -> Mistral:
        """The vendor's client, for its other interfaces."""
        return self._clients[0]

    async def complete(self, request: ChatRequest) -> RawReply:
        """Send a request once."""
        reply = await self.send(next(self._next).chat.complete_async(**chat_body(request, self._config)))
        try:
            return parse_completion(reply.model_dump(mode="json"), self._config)
        except (AttributeError, TypeError, LookupError):
            raise CallError("invalid_reply", f"no chat completion in the answer of {self.url}") from None

    async def models(self) -> list[str] | None:
        """Names of the models this key may use, aliases included."""
        page = await self.send(self.sdk.models.list_async())
        names: list[str] = []
        for entry in page.data or []:
            # The SDK keeps an entry of a type that it does not know as the JSON object that was sent.
            fields = entry.raw if isinstance(entry, UnknownModelListData) else entry.model_dump()
            names += filter(None, (fields.get("id"), *(fields.get("aliases") or ())))
        return names or None

    async def send(self, call: Awaitable[Result]) -> Result:
        """Await a call of the SDK. Raises `CallError`."""
        return await call_with_timeout(call, self._config, self.url, self._to_call_error)

    async def close(self) -> None:
        for client in self._http:
            await client.aclose()

    def _to_call_error(self, error: Exception) -> CallError | None:
        """Translate an error of the SDK; None for a programming error."""
        not_completion = CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
        if isinstance(error, ResponseValidationError):
            return not_completion
        if isinstance(error, MistralError):
            status = error.status_code
            # A success whose body the SDK cannot read.
            if status < 400:
                return not_completion
            return CallError(reason_of(status), error.message, str(status), retry_after(error.headers))
        if isinstance(error, (CallError, httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)):
            return transport_error(error, self.url)
        return None
