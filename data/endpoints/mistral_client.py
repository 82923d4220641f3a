"""The client of Mistral's endpoints, over Mistral's SDK."""

import inspect
import itertools
import json
from collections.abc import Awaitable

import httpx2
from mistralai.client import Mistral
from mistralai.client.chat import Chat
from mistralai.client.errors import MistralError
from mistralai.client.models import UnknownModelListData

from common.errors import ConfigError
from configs.endpoint import EndpointConfig
from data.endpoints.chat_types import CallError, ChatRequest
from data.endpoints.clients import (
    OnHeaders,
    Result,
    call_with_timeout,
    chat_body,
    http_clients,
    tls_context,
    transport_error,
)
from data.endpoints.completions import RawReply, error_of_status, parse_completion, parse_reply_body
from data.endpoints.keys import key_of

MISTRAL_URL = "https://api.mistral.ai"
NOT_FIELDS = {"self", "retries", "server_url", "timeout_ms", "http_headers"}  # parameters of the SDK, not of the API


class MistralClient:
    """One Mistral endpoint; `url` with or without /v1. Raises `ConfigError` for request fields that its API lacks."""

    def __init__(self, config: EndpointConfig, url: str, on_headers: OnHeaders) -> None:
        # The SDK takes the fields as keyword arguments, so an unknown one would fail at the first request.
        known_fields = inspect.signature(Chat.complete_async).parameters.keys() - NOT_FIELDS
        if unknown := [name for name in config.extra or () if name not in known_fields]:
            where = f"endpoint for model {config.model!r}: `extra`"
            raise ConfigError(f"{where} sets {', '.join(unknown)}, but Mistral's API has no such field")
        self.url, self._config = url, config
        self._http = http_clients(config, on_headers)
        # The SDK's blocking calls, which are not used, would else get a client that reads the proxy settings.
        self._blocking = httpx2.Client(verify=tls_context(), trust_env=False)
        self._clients = [
            Mistral(
                api_key=lambda: key_of(config),
                # The SDK adds /v1 itself.
                server_url=url.rstrip("/").removesuffix("/v1"),
                client=self._blocking,
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

        async def post() -> RawReply:
            try:
                reply = await next(self._next).chat.complete_async(**chat_body(request, self._config))
            except MistralError as error:
                if error.status_code != 200:
                    raise
                # The SDK refuses more than what makes a reply unreadable, such as counts that are null or fractions.
                return parse_reply_body(error.raw_response.content, self.url, self._config, error.headers)
            try:
                return parse_completion(reply.model_dump(mode="json"), self._config)
            except (AttributeError, TypeError, LookupError):
                raise CallError("invalid_reply", f"no chat completion in the answer of {self.url}") from None

        return await self.send(post())

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
        self._blocking.close()
        for client in self._http:
            await client.aclose()

    def _to_call_error(self, error: Exception) -> CallError | None:
        """Translate an error of the SDK; None for a programming error."""
        if isinstance(error, MistralError):
            # A success whose body the SDK cannot read.
            if error.status_code < 300:
                return CallError("invalid_reply", f"the answer of {self.url} is not JSON of a chat completion")
            return error_of_status(error.status_code, error.body, error.headers, self.url)
        if isinstance(error, (CallError, httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)):
            return transport_error(error, self.url)
        return None
