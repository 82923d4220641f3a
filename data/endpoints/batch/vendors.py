"""One interface to the vendors' batch APIs: upload a file of requests, create a job, download files of replies.

Only this module knows each vendor's names and final states. All calls go through the vendors' SDKs and raise
`CallError`.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from configs.endpoint import EndpointConfig
from data.endpoints.chat_types import CallError, ChatRequest
from data.endpoints.circuit_breaker import reason_of
from data.endpoints.clients import OnHeaders, chat_body
from data.endpoints.completions import error_fields, json_of, message_of
from data.endpoints.endpoint import client_for

if TYPE_CHECKING:
    from data.endpoints.mistral_client import MistralClient
    from data.endpoints.openai_client import OpenAIClient

LABEL = "nautile_job"  # key in a job's metadata, by which a job is found whose id was lost
CHAT: Final = "/v1/chat/completions"
FILE_TIMEOUT_FACTOR = 5  # times the timeout of a chat request, for uploads and downloads
FILE_CONNECTIONS = 8
CLOCK_SKEW_S = 86_400.0  # maximum difference between the vendor's clock and ours


@dataclass(frozen=True)
class BatchJob:
    """The status of a job. `ended` with `files` of replies and errors, or (`failed`) refused as a whole."""

    id: str
    state: str  # in the vendor's words
    ended: bool
    failed: bool
    files: tuple[str, ...]
    message: str = ""


class BatchClient(Protocol):
    """A vendor's batch interface."""

    url: str

    def input_line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
        """A request as a line of the input file."""
        ...

    async def upload(self, name: str, content: bytes) -> str:
        """Upload an input file; returns its id."""
        ...

    async def create(self, file: str, label: str) -> str:
        """Create a job of an uploaded file; returns its id."""
        ...

    async def find(self, label: str, since: float) -> str | None:
        """The id of the job with this label, created after `since` (seconds of the epoch); None if there is none."""
        ...

    async def status(self, job: str) -> BatchJob: ...

    async def download(self, file: str) -> bytes: ...

    async def close(self) -> None: ...


def batch_client(config: EndpointConfig, on_headers: OnHeaders) -> BatchClient:
    """The batch interface of an endpoint."""
    timeout_s = FILE_TIMEOUT_FACTOR * config.timeout_s
    file_config = config.model_copy(update={"timeout_s": timeout_s, "concurrency": FILE_CONNECTIONS})
    client: Any = client_for(file_config, config.url, on_headers)
    return MistralBatches(client, config) if config.kind == "mistral" else OpenAIBatches(client, config)


class OpenAIBatches:
    """OpenAI's: /files and /batches."""

    def __init__(self, client: "OpenAIClient", config: EndpointConfig) -> None:
        self._client, self._config, self.url = client, config, client.url

    def input_line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
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
        async def search() -> str | None:
            async for batch in self._client.sdk.batches.list(limit=100, extra_headers=self._client.headers):
                if (batch.metadata or {}).get(LABEL) == label:
                    return batch.id
                if batch.created_at < since - CLOCK_SKEW_S:  # newest first
                    return None
            return None

        return await self._client.send(search())

    async def status(self, job: str) -> BatchJob:
        batch = await self._client.send(self._client.sdk.batches.retrieve(job, extra_headers=self._client.headers))
        files = tuple(file for file in (batch.output_file_id, batch.error_file_id) if file)
        errors = (batch.errors.data if batch.errors else None) or []
        message = "; ".join(f"{error.code}: {error.message}" for error in errors[:3])
        ended = batch.status in ("completed", "failed", "expired", "cancelled")
        return BatchJob(batch.id, batch.status, ended, batch.status == "failed", files, message)

    async def download(self, file: str) -> bytes:
        content = await self._client.send(self._client.sdk.files.content(file, extra_headers=self._client.headers))
        return content.content

    async def close(self) -> None:
        await self._client.close()


class MistralBatches:
    """Mistral's: /v1/files and /v1/batch/jobs."""

    def __init__(self, client: "MistralClient", config: EndpointConfig) -> None:
        self._client, self._config, self.url = client, config, client.url

    def input_line(self, digest: str, request: ChatRequest) -> dict[str, Any]:
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
        after = datetime.fromtimestamp(since - CLOCK_SKEW_S, UTC)
        async for job in self._jobs(after):
            if (job.metadata or {}).get(LABEL) == label:
                return job.id
        return None

    async def status(self, job: str) -> BatchJob:
        job_state = await self._client.send(self._client.sdk.batch.jobs.get_async(job_id=job))
        files = tuple(file for file in (job_state.output_file, job_state.error_file) if file)
        message = "; ".join(error.message for error in (job_state.errors or [])[:3])
        ended = job_state.status in ("SUCCESS", "FAILED", "TIMEOUT_EXCEEDED", "CANCELLED")
        # With files, the rows themselves say what became of each request.
        failed = job_state.status == "FAILED" and not files
        return BatchJob(job_state.id, job_state.status, ended, failed, files, message)

    async def download(self, file: str) -> bytes:
        async def read() -> bytes:
            return await (await self._client.sdk.files.download_async(file_id=file)).aread()

        return await self._client.send(read())

    async def close(self) -> None:
        await self._client.close()

    async def _jobs(self, after: datetime) -> AsyncIterator[Any]:
        page, size = 0, 100
        while True:
            call = self._client.sdk.batch.jobs.list_async(page=page, page_size=size, created_after=after)
            jobs = (await self._client.send(call)).data or []
            for job in jobs:
                yield job
            if len(jobs) < size:
                return
            page += 1


def parse_result_line(line: bytes) -> tuple[str, dict[str, Any] | CallError]:
    """Parse a line of a result file, which is alike for both vendors: (digest, body of the reply or the error).

    Raises `ValueError`, `LookupError`, `TypeError` or `AttributeError` if it is no such line.
    """
    row, _ = json_of(line)
    response, error = row.get("response") or {}, row.get("error")
    status = int(response.get("status_code") or 0)
    if status == 200 and not error:
        return row["custom_id"], response["body"]
    return row["custom_id"], _row_error(status, error or response.get("body"))


def _row_error(status: int, body: Any) -> CallError:
    code, message = error_fields(body).get("code"), message_of(body)
    if code in ("batch_expired", "batch_cancelled") or not status:
        return CallError("expired", f"the batch job ended without it ({message or code or 'no reason given'})")
    reason = reason_of(status)
    # A row's 404 or 403 concerns that row alone, because the job itself was accepted.
    return CallError("refused" if reason == "misconfigured" else reason, str(message or code or status), str(status))


def _id(answer: Any) -> str:
    """The id in a vendor's answer to an upload or creation. Raises `CallError` if there is none."""
    if not isinstance(getattr(answer, "id", None), str):
        raise CallError("invalid_reply", "the answer has no id of the file or job")
    return answer.id
