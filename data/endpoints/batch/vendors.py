"""The vendors' batch interfaces behind one: a file of requests goes up, is made a job, files of replies come down.

What each calls things, and which of its states are the end, is known here and nowhere else. All calls go through the
vendors' SDKs and raise `CallError`.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from configs.endpoint import EndpointConfig
from data.endpoints.chat_types import CallError, ChatRequest
from data.endpoints.circuit_breaker import reason_of
from data.endpoints.clients import OnHeaders, chat_body, client_for

if TYPE_CHECKING:
    from data.endpoints.vendors import OpenAIClient


LABEL = "nautile_job"  # in a job's metadata: by it a job is found whose id was never kept
CHAT = "/v1/chat/completions"
FILES_TAKE = 5  # times the timeout of a chat request
SKEW_S = 86_400.0  # by which the vendor's clock and ours may differ


@dataclass(frozen=True)
class BatchJob:
    """How a job stands. `ended` with `files` of replies and errors, or (`failed`) refused as a whole."""

    id: str
    state: str  # the vendor's word
    ended: bool
    failed: bool
    files: tuple[str, ...]
    message: str = ""


class BatchClient(Protocol):
    """A vendor's batch interface."""

    url: str

    def line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
        """A request as a line of the input file."""
        ...

    async def upload(self, name: str, content: bytes) -> str: ...

    async def create(self, file: str, label: str) -> str: ...

    async def find(self, label: str, since: float) -> str | None:
        """The id of the job of this label, made after `since` (seconds of the epoch)."""
        ...

    async def look(self, job: str) -> BatchJob: ...

    async def read(self, file: str) -> bytes: ...

    async def close(self) -> None: ...


def batch_client(config: EndpointConfig, heard: OnHeaders) -> BatchClient:
    """The batch interface of an endpoint."""
    patient = config.model_copy(update={"timeout_s": FILES_TAKE * config.timeout_s, "concurrency": 8})
    client: Any = client_for(patient, config.url, heard)
    return MistralBatches(client, config) if config.kind == "mistral" else OpenAIBatches(client, config)


class OpenAIBatches:
    """OpenAI's: /files and /batches."""

    def __init__(self, client: "OpenAIClient", config: EndpointConfig) -> None:
        self._client, self._config, self.url = client, config, client.url

    def line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
        return {"custom_id": digest, "method": "POST", "url": CHAT, "body": chat_body(request, self._config)}

    async def upload(self, name: str, content: bytes) -> str:
        files, headers = self._client.sdk.files, self._client.headers
        file = (name, content, "application/jsonl")
        return _id(await self._client.send(files.create(file=file, purpose="batch", extra_headers=headers)))

    async def create(self, file: str, label: str) -> str:
        call = self._client.sdk.batches.create(
            completion_window="24h",
            endpoint=CHAT,
            input_file_id=file,
            metadata={LABEL: label},
            extra_headers=self._client.headers,
        )
        return _id(await self._client.send(call))

    async def find(self, label: str, since: float) -> str | None:
        async def look() -> str | None:
            async for batch in self._client.sdk.batches.list(limit=100, extra_headers=self._client.headers):
                if (batch.metadata or {}).get(LABEL) == label:
                    return batch.id
                if batch.created_at < since - SKEW_S:  # newest first
                    return None
            return None

        return await self._client.send(look())

    async def look(self, job: str) -> BatchJob:
        batch = await self._client.send(self._client.sdk.batches.retrieve(job, extra_headers=self._client.headers))
        files = tuple(one for one in (batch.output_file_id, batch.error_file_id) if one)
        errors = (batch.errors.data if batch.errors else None) or []
        message = "; ".join(f"{one.code}: {one.message}" for one in errors[:3])
        ended = batch.status in ("completed", "failed", "expired", "cancelled")
        return BatchJob(batch.id, batch.status, ended, batch.status == "failed", files, message)

    async def read(self, file: str) -> bytes:
        content = await self._client.send(self._client.sdk.files.content(file, extra_headers=self._client.headers))
        return content.content

    async def close(self) -> None:
        await self._client.close()


class MistralBatches:
    """Mistral's: /v1/files and /v1/batch/jobs."""

    def __init__(self, client: Any, config: EndpointConfig) -> None:
        self._client, self._config, self.url = client, config, client.url

    def line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
        body = {name: value for name, value in chat_body(request, self._config).items() if name != "model"}
        return {"custom_id": digest, "body": body}

    async def upload(self, name: str, content: bytes) -> str:
        call = self._client.sdk.files.upload_async(file={"file_name": name, "content": content}, purpose="batch")
        return _id(await self._client.send(call))

    async def create(self, file: str, label: str) -> str:
        call = self._client.sdk.batch.jobs.create_async(
            endpoint=CHAT, input_files=[file], model=self._config.model, metadata={LABEL: label}
        )
        return _id(await self._client.send(call))

    async def find(self, label: str, since: float) -> str | None:
        after = datetime.fromtimestamp(since - SKEW_S, UTC)
        async for job in self._jobs(after):
            if (job.metadata or {}).get(LABEL) == label:
                return job.id
        return None

    async def look(self, job: str) -> BatchJob:
        seen = await self._client.send(self._client.sdk.batch.jobs.get_async(job_id=job))
        files = tuple(one for one in (seen.output_file, seen.error_file) if one)
        message = "; ".join(one.message for one in (seen.errors or [])[:3])
        ended = seen.status in ("SUCCESS", "FAILED", "TIMEOUT_EXCEEDED", "CANCELLED")
        return BatchJob(seen.id, seen.status, ended, seen.status == "FAILED" and not files, files, message)

    async def read(self, file: str) -> bytes:
        async def read() -> bytes:
            return await (await self._client.sdk.files.download_async(file_id=file)).aread()

        return await self._client.send(read())

    async def close(self) -> None:
        await self._client.close()

    async def _jobs(self, after: datetime) -> AsyncIterator[Any]:
        page, size = 0, 100
        while True:
            call = self._client.sdk.batch.jobs.list_async(page=page, page_size=size, created_after=after)
            found = (await self._client.send(call)).data or []
            for job in found:
                yield job
            if len(found) < size:
                return
            page += 1


def read_line(line: bytes) -> tuple[str, dict[str, Any] | CallError]:
    """The request's digest, and the body of the reply or what went wrong; both vendors' lines are alike.

    Raises `ValueError`, `LookupError`, `TypeError` or `AttributeError` if it is no such line.
    """
    row = json.loads(line)
    response, error = row.get("response") or {}, row.get("error")
    status = int(response.get("status_code") or 0)
    if status == 200 and not error:
        return row["custom_id"], response["body"]
    return row["custom_id"], _failure(status, error or (response.get("body") or {}).get("error") or {})


def _failure(status: int, error: Any) -> CallError:
    code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, str(error))
    if code in ("batch_expired", "batch_cancelled") or not status:
        return CallError("expired", f"the batch job ended without it ({message or code or 'no reason given'})")
    reason = reason_of(status)
    # One row's 404 or 403 is about that row: the job itself was taken.
    return CallError("refused" if reason == "misconfigured" else reason, str(message or code or status), str(status))


def _id(made: Any) -> str:
    """The id of what a vendor says it made. Raises `CallError` if it does not say."""
    if not isinstance(getattr(made, "id", None), str):
        raise CallError("invalid_reply", "the answer does not name what it made")
    return made.id
