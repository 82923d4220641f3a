"""Batch jobs on disk, so that whatever kills this process, the next one knows what it had asked for.

A job is two files in a folder beside the replies: its requests, written first, and its state, which says how far it is.
`phase` moves on before the step that follows it: "written", "creating" (the vendor may have the job although its id was
not kept), "created" (the id is known).
"""

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.files import write_atomically
from data.endpoints.budget import Usage
from data.endpoints.chat_types import ChatRequest

REQUESTS, STATE = ".requests.jsonl", ".job.json"
Phase = Literal["written", "creating", "created"]


@dataclass
class PendingJob:
    """A job of one endpoint: its requests by digest, and what was set aside for them."""

    folder: Path
    endpoint: str
    label: str  # unique, and in the vendor's metadata
    requests: dict[str, ChatRequest] = field(repr=False)
    reserved: Usage
    written: float  # seconds of the epoch
    attempts: dict[str, int] = field(default_factory=dict)
    phase: Phase = "written"
    file: str | None = None
    id: str | None = None

    @classmethod
    def write(
        cls, folder: Path, endpoint: str, requests: dict[str, ChatRequest], reserved: Usage, attempts: dict[str, int]
    ) -> "PendingJob":
        """A new job, on disk. Raises `OSError` if it cannot be written."""
        job = cls(folder, endpoint, uuid.uuid4().hex, requests, reserved, time.time(), attempts)
        rows = (
            {"digest": digest, "attempt": attempts.get(digest, 1), "request": asdict(request)}
            for digest, request in requests.items()
        )
        write_atomically(job._path(REQUESTS), b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        job.save()
        return job

    def save(self) -> None:
        """Keep how far it is."""
        state = {
            "endpoint": self.endpoint,
            "label": self.label,
            "reserved": [self.reserved.dollars, self.reserved.tokens],
            "written": self.written,
            "phase": self.phase,
            "file": self.file,
            "id": self.id,
        }
        write_atomically(self._path(STATE), json.dumps(state).encode())

    def remove(self) -> None:
        """Forget it: all its replies are in the ledger. The state goes first, for without it there is no job."""
        self._path(STATE).unlink(missing_ok=True)
        self._path(REQUESTS).unlink(missing_ok=True)

    def _path(self, ending: str) -> Path:
        return self.folder / f"{self.label}{ending}"


def pending_jobs(folder: Path, endpoint: str) -> list[PendingJob]:
    """The jobs that an earlier process left, the oldest first. Raises `ConfigError` if one is unreadable."""
    jobs = []
    for path in sorted(folder.glob(f"*{STATE}")):
        try:
            state = json.loads(path.read_bytes())
            if state["endpoint"] != endpoint:
                continue
            label = state["label"]
            lines = path.with_name(f"{label}{REQUESTS}").read_bytes().splitlines()
            rows = [json.loads(line) for line in lines]
            requests = {row["digest"]: _request(row["request"]) for row in rows}
            attempts = {row["digest"]: row["attempt"] for row in rows}
            reserved = Usage(*state["reserved"])
            job = PendingJob(folder, endpoint, label, requests, reserved, state["written"], attempts)
            job.phase, job.file, job.id = state["phase"], state["file"], state["id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(_unreadable(path, error)) from None
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.written)


def refuse_forgotten_jobs(folder: Path, endpoints: Iterable[str]) -> None:
    """Raise `ConfigError` if there are jobs under way that none of these endpoints would take up: they are paid for."""
    for path in sorted(folder.glob(f"*{STATE}")):
        try:
            state = json.loads(path.read_bytes())
            name, job = state["endpoint"], state["id"] or state["label"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(_unreadable(path, error)) from None
        if name not in endpoints:
            raise ConfigError(
                f"endpoint {name!r} has batch job {job} under way, but is not of mode 'batch' now: set it back until "
                f"the job has ended, or cancel the job at the vendor's and delete {path}"
            )


def _unreadable(path: Path, error: Exception) -> str:
    return (
        f"{path}: the batch job that it tells of cannot be taken up ({error}); cancel the job at the vendor's and "
        "delete the file"
    )


def _request(fields: dict) -> ChatRequest:
    return ChatRequest(**{**fields, "messages": tuple(fields["messages"])})
