"""Batch jobs on disk, so that after a crash the next process knows what was sent.

A job is two files in a folder beside the replies: its requests, written first, and its state. `phase` is saved before
the next step begins: "written", "creating" (the vendor may have the job although its id was not saved), "created" (the
id is known).
"""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nautile.common.errors import ConfigError
from nautile.common.files import write_atomically
from nautile.data.endpoints.budget import NO_USAGE, Usage
from nautile.data.endpoints.chat_types import ChatRequest

REQUESTS, STATE = ".requests.jsonl", ".job.json"
Phase = Literal["written", "creating", "created"]


@dataclass
class PendingJob:
    """A batch job of one endpoint: its requests by digest, and the budget that is reserved for them.

    `spent` and `unknown`: the cost of the replies that this process has recorded. `attempts`: by digest, which attempt
    at the request this job is.
    """

    folder: Path
    endpoint: str
    label: str  # unique, and in the vendor's metadata
    requests: dict[str, ChatRequest] = field(repr=False)
    reserved: Usage
    written_at: float  # seconds since the epoch
    attempts: dict[str, int] = field(default_factory=dict)
    phase: Phase = "written"
    file: str | None = None
    id: str | None = None
    spent: Usage = NO_USAGE
    unknown: Usage = NO_USAGE

    @classmethod
    def write(
        cls,
        folder: Path,
        endpoint: str,
        requests: dict[str, ChatRequest],
        reserved: Usage,
        attempts: dict[str, int],
        acquire: Callable[[str], bool],
    ) -> "PendingJob":
        """Create a job and write it to disk. `acquire` takes the lock of its label. Raises `OSError`."""
        job = cls(folder, endpoint, uuid.uuid4().hex, requests, reserved, time.time(), attempts)
        rows = (
            {"digest": digest, "attempt": attempts.get(digest, 1), "request": asdict(request)}
            for digest, request in requests.items()
        )
        write_atomically(job._path(REQUESTS), b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        # Locked before it exists: a process that starts now would take it for a dead one's, and both would send it.
        acquire(job.label)
        job.save()
        return job

    def save(self) -> None:
        """Write the state file."""
        state = {
            "endpoint": self.endpoint,
            "label": self.label,
            "reserved": [self.reserved.dollars, self.reserved.tokens],
            "written": self.written_at,
            "phase": self.phase,
            "file": self.file,
            "id": self.id,
        }
        write_atomically(self._path(STATE), json.dumps(state).encode())

    def remove(self) -> None:
        """Delete the files, once all replies are cached. The state is deleted first: it is what makes the job exist."""
        self._path(STATE).unlink(missing_ok=True)
        self._path(REQUESTS).unlink(missing_ok=True)

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.label}{suffix}"


def pending_jobs(folder: Path, endpoint: str, acquire: Callable[[str], bool]) -> list[PendingJob]:
    """Load the jobs of earlier processes, oldest first, except those whose lock another process holds.

    `acquire(label)` takes the lock of a job, or returns False. Raises `ConfigError` for an unreadable job.
    """
    jobs = []
    for path in sorted(folder.glob(f"*{STATE}")):
        label = path.name.removesuffix(STATE)
        state = _read_state(path)
        # Read the state again under the lock: the process that held it may have finished the job.
        if state is None or state["endpoint"] != endpoint or not acquire(label) or (state := _read_state(path)) is None:
            continue
        try:
            rows = [json.loads(line) for line in path.with_name(f"{label}{REQUESTS}").read_bytes().splitlines()]
            requests = {
                row["digest"]: ChatRequest(**{**row["request"], "messages": tuple(row["request"]["messages"])})
                for row in rows
            }
            attempts = {row["digest"]: row["attempt"] for row in rows}
            reserved = Usage(*state["reserved"])
            job = PendingJob(folder, endpoint, label, requests, reserved, state["written"], attempts)
            job.phase, job.file, job.id = state["phase"], state["file"], state["id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(_unreadable(path, error)) from None
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.written_at)


def check_no_pending_jobs(folder: Path, endpoint: str) -> None:
    """Raise `ConfigError` if an endpoint that is no longer in batch mode has a job in progress, which is paid for."""
    for path in sorted(folder.glob(f"*{STATE}")):
        if (state := _read_state(path)) is not None and state["endpoint"] == endpoint:
            job = state["id"] or path.name.removesuffix(STATE)
            raise ConfigError(
                f"endpoint {endpoint!r} has batch job {job} in progress, but its mode is no longer 'batch': "
                f"set it back until the job has ended, or cancel the job at the vendor's and delete {path}"
            )


def _read_state(path: Path) -> dict[str, Any] | None:
    """Read the state of a job; None if the job has ended. Raises `ConfigError` if it is unreadable."""
    try:
        state = json.loads(path.read_bytes())
        return {name: state[name] for name in ("endpoint", "reserved", "written", "phase", "file", "id")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path}: its batch job cannot be resumed ({error}); cancel the job at the vendor's and delete the file"
