"""The staging folder of one key, and the record that lets a later process continue an execution.

An execution is what it takes to write the artifacts of a key once; it may need several attempts. Its id survives them
in `execution.json`, and with it the ids of metrics and samples, so that a resume doubles none of them.

    execution.json  request.json  live.json  error.json  retry.json  failure.json  done.json  log.txt
    rounds/  scratch/  output/<kind>/  facts/<kind>.json  digests/<kind>.json
"""

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import read_json, write_json
from store.artifacts import Artifact, Store
from tasks.engine.child_process import ChildFiles
from tasks.engine.stage import RunContext

LATE_S = 60.0  # after which an attempt that was to begin is no longer expected


@dataclass
class Staging:
    """The open staging folder. Whoever holds it holds the key's lock."""

    path: Path
    execution: str
    attempt: int
    forced: bool
    inputs: dict[str, str]  # name -> digest of the artifact's content
    unfinished_row: dict[str, Any] | None = None  # the row of an earlier attempt that never recorded its end

    @property
    def files(self) -> ChildFiles:
        return ChildFiles(self.path)

    @property
    def request(self) -> Path:
        return self.path / "request.json"

    def output(self, kind: str) -> Path:
        return self.path / "output" / kind

    def done(self) -> list[str] | None:
        """The kinds that the finished work wrote; None while it is not finished."""
        done = read_json(self.path / "done.json")
        return done["outputs"] if isinstance(done, dict) else None

    def mark_unfinished(self) -> None:
        """Have the next attempt work again instead of publishing what is here."""
        (self.path / "done.json").unlink(missing_ok=True)

    def facts(self, kind: str) -> dict[str, Any]:
        """What `Job.describe` noted, and the environment that the work was done in."""
        done = read_json(self.path / "done.json") or {}
        made_in = {"environment": done["environment"]} if "environment" in done else {}
        return (read_json(self.path / "facts" / f"{kind}.json") or {}) | made_in

    def digests(self, kind: str) -> dict[str, str]:
        """What `Job.add_digests` noted."""
        return read_json(self.path / "digests" / f"{kind}.json") or {}

    def record(self, row: dict[str, Any] | None) -> None:
        """Write `execution.json`. `row` is that of the running attempt, None once its end is recorded."""
        write_json(
            self.path / "execution.json",
            {
                "execution": self.execution,
                "attempt": self.attempt,
                "forced": self.forced,
                "inputs": self.inputs,
                "run": row,
            },
        )


def open_staging(store: Store, key: str, inputs: dict[str, Artifact], *, force: bool) -> Staging:
    """Continue the execution in `staging/<key>`, or start a new one in an empty folder.

    A new one starts where an input has other bytes than before (it was written again), and where `force` meets work
    that was not itself forced. An interrupted forced execution is continued, so that a preempted one makes progress.
    """
    folder = store.staging(key)
    digests = {name: artifact.manifest["digest"] for name, artifact in inputs.items()}
    known = read_json(folder / "execution.json")
    if isinstance(known, dict) and known["inputs"] == digests and (known["forced"] or not force):
        staging = Staging(folder, known["execution"], known["attempt"] + 1, known["forced"], digests, known["run"])
    else:
        if any(folder.iterdir()):
            store.discard(folder)
        staging = Staging(store.staging(key), uuid.uuid4().hex, 1, force, digests)
    staging.files.clear()
    for name in ("retry.json", "failure.json"):
        (staging.path / name).unlink(missing_ok=True)
    return staging


def write_retry_note(folder: Path, note: str, pause_s: float) -> None:
    """Note in a staging folder what is waited for, for `pause_s` seconds, before the next attempt. For displays."""
    with suppress(OSError):  # the folder may be gone, or its disk full: the wait is the same
        write_json(folder / "retry.json", {"note": note, "at": time.time() + pause_s})


def read_retry_note(folder: Path) -> str | None:
    """What a step waits for between two attempts; None if it does not."""
    retry = read_json(folder / "retry.json")
    return retry["note"] if isinstance(retry, dict) and time.time() < retry["at"] + LATE_S else None


def note_failure(folder: Path, context: RunContext, reason: str) -> None:
    """Note in a staging folder, for the other runs of the sweep, that this run failed there. It may try again."""
    note = {"sweep": context.sweep, "run": context.run_id, "config": context.config, "reason": reason, "final": False}
    with suppress(OSError):  # as with a retry
        write_json(folder / "failure.json", note)


def note_giving_up(folder: Path, context: RunContext) -> None:
    """Note that this run does not try again, if the failure is its own."""
    note = read_json(folder / "failure.json")
    if isinstance(note, dict) and note["run"] == context.run_id:
        with suppress(OSError):
            write_json(folder / "failure.json", note | {"final": True})


def failure_in_sweep(store: Store, key: str, sweep: str) -> dict[str, Any] | None:
    """What was noted of a run of this sweep that failed at a key and has given up (`final`) or will try again."""
    note = read_json(store.root / "staging" / key / "failure.json") if sweep else None
    if not isinstance(note, dict) or note["sweep"] != sweep:
        return None
    return note if note["final"] or store.run_lock(note["run"]).held_elsewhere() else None
