"""The client of Mistral's endpoints, over Mistral's SDK except for completions; batches are /files and /batch/jobs."""

import inspect
import itertools
import json
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime
from typing import Any, cast

import httpx2
from mistralai.client import Mistral
from mistralai.client.chat import Chat
from mistralai.client.errors import MistralError
from mistralai.client.models import UnknownModelListData

from nautile.common.errors import ConfigError
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import CallError, ChatRequest
from nautile.data.endpoints.clients import (
    CLOCK_SKEW_S,
    LABEL,
    BatchJob,
    OnHeaders,
    Result,
    call_with_timeout,
    chat_body,
    http_clients,
    id_of,
    tls_context,
    transport_error,
)
from nautile.data.endpoints.completions import RawReply, error_of_status, parse_reply_body
from nautile.data.endpoints.keys import key_of

NOT_FIELDS = {"self", "retries", "server_url", "timeout_ms", "http_headers"}  # parameters of the SDK, not of the API


class MistralClient:
    """One Mistral endpoint; `url` with or without /v1. Raises `ConfigError` for request fields that its API lacks."""

    def __init__(self, config: EndpointConfig, url: str, on_headers: OnHeaders) -> None:
        # The SDK's call has a parameter for each field of the API.
        known_fields = inspect.signature(Chat.complete_async).parameters.keys() - NOT_FIELDS
        if unknown := [name for name in config.extra or () if name not in known_fields]:
            where = f"endpoint for model {config.model!r}: `extra`"
            raise ConfigError(f"{where} sets {', '.join(unknown)}, but Mistral's API has no such field")
        self.url, self._config = url, config
        self._http = http_clients(config, on_headers)
        self._next = itertools.cycle(self._http)
        server = url.rstrip("/").removesuffix("/v1")  # the SDK adds /v1 itself
        self._chat_path = f"/v1{config.vendor.chat_path}"
        self._chat_url = f"{server}{self._chat_path}"
        # The SDK's blocking calls, which are not used, would else get a client that reads the proxy settings.
        self._blocking = httpx2.Client(verify=tls_context(), trust_env=False)
        self.sdk = Mistral(
            api_key=lambda: key_of(config),
            server_url=server,
            client=self._blocking,
            async_client=self._http[0],
            retry_config=None,
            timeout_ms=int(config.timeout_s * 1000),
        )

    async def complete(self, request: ChatRequest) -> RawReply:
        """Send a request once.

        Not through the SDK, whose validation refuses more than what makes a reply unreadable (counts that are null or
        fractions), and leaves out fields that it does not know, such as an error in a choice.
        """

        async def post() -> RawReply:
            response = await next(self._next).post(
                self._chat_url,
                json=chat_body(request, self._config),
                headers={"Authorization": f"Bearer {key_of(self._config)}"},
            )
            if not response.is_success:
                raise error_of_status(response.status_code, response.content, response.headers, self.url)
            return parse_reply_body(response.content, self.url, self._config, response.headers)

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

    def input_line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
        body = {name: value for name, value in chat_body(request, self._config).items() if name != "model"}
        return {"custom_id": digest, "body": body}

    async def upload(self, name: str, content: bytes) -> str:
        call = self.sdk.files.upload_async(file={"file_name": name, "content": content}, purpose="batch")
        return id_of(await self.send(call))

    async def create(self, file: str, label: str) -> str:
        call = self.sdk.batch.jobs.create_async(
            endpoint=cast(Any, self._chat_path), input_files=[file], model=self._config.model, metadata={LABEL: label}
        )
        return id_of(await self.send(call))

    async def find(self, label: str, since: float) -> str | None:
        """The id of the job with this label, created after `since`; None if there is none."""
        async for job in self._jobs(datetime.fromtimestamp(since - CLOCK_SKEW_S, UTC)):
            if (job.metadata or {}).get(LABEL) == label:
                return str(job.id)
        return None

    async def status(self, job: str) -> BatchJob:
        state = await self.send(self.sdk.batch.jobs.get_async(job_id=job))
        files = tuple(file for file in (state.output_file, state.error_file) if file)
        message = "; ".join(str(error.message) for error in (state.errors or [])[:3])
        return BatchJob(str(state.status), files, message)

    async def download(self, file: str) -> bytes:

        async def read() -> bytes:
            return await (await self.sdk.files.download_async(file_id=file)).aread()

        return await self.send(read())

    async def _jobs(self, after: datetime) -> AsyncIterator[Any]:
        page, size = 0, 100
        while True:
            call = self.sdk.batch.jobs.list_async(page=page, page_size=size, created_after=after)
            jobs = (await self.send(call)).data or []
            for job in jobs:
                yield job
            if len(jobs) < size:
                return
            page += 1

    async def send(self, call: Awaitable[Result]) -> Result:
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
