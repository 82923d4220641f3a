"""The staging folder of one key, and the record that lets a later process go on with an execution.

An execution is one making of the artifacts of a key; it may take several attempts. Its id survives them in
`execution.json`, and with it the ids of metrics and samples, so that a resume doubles nothing.

    execution.json  request.json  live.json  error.json  done.json  log.txt  rounds/  scratch/  output/<kind>/  facts/
"""

import os
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import read_json, write_json
from store.artifacts import Artifact, Store
from store.events import EventWriter
from tasks.engine.child_process import Traces


@dataclass
class Workspace:
    """The open staging folder. Whoever holds it holds the key's lock."""

    path: Path
    execution: str
    attempt: int
    forced: bool
    inputs: dict[str, str]
    last_run: dict[str, Any] | None = field(default=None)  # the row of the attempt before, if it never ended

    @property
    def traces(self) -> Traces:
        return Traces(self.path)

    def done(self) -> list[str] | None:
        """The kinds that the finished work wrote; None while it is not finished."""
        done = read_json(self.path / "done.json")
        return done["outputs"] if isinstance(done, dict) else None

    def undo(self) -> None:
        """Take back that the work is finished."""
        (self.path / "done.json").unlink(missing_ok=True)

    def facts(self, kind: str) -> dict[str, Any]:
        return read_json(self.path / "facts" / f"{kind}.json") or {}

    def record(self, run: dict[str, Any] | None) -> None:
        """Write down who works here: `run` is the row of an attempt that is under way, None once it has ended."""
        write_json(
            self.path / "execution.json",
            {
                "execution": self.execution,
                "attempt": self.attempt,
                "forced": self.forced,
                "inputs": self.inputs,
                "run": run,
            },
        )


def open_workspace(store: Store, key: str, inputs: dict[str, Artifact], *, force: bool) -> Workspace:
    """Go on with what lies in `staging/<key>`, or begin anew.

    Begun anew when an input holds other bytes than it did (it was made again), and when `force` meets work that was
    not itself forced. A forced execution that was interrupted is gone on with, so that a preempted one gets on.
    """
    folder = store.staging(key)
    digests = {name: artifact.manifest["digest"] for name, artifact in inputs.items()}
    known = read_json(folder / "execution.json")
    if isinstance(known, dict) and known["inputs"] == digests and (known["forced"] or not force):
        space = Workspace(folder, known["execution"], known["attempt"] + 1, known["forced"], digests, known["run"])
    else:
        if any(folder.iterdir()):
            store.discard(folder)
        space = Workspace(store.staging(key), uuid.uuid4().hex, 1, force, digests)
    space.traces.forget()
    return space


_journals: dict[tuple[Path, int], "Journal"] = {}
_lock = threading.Lock()


class Journal:
    """Writes run rows; an event's id is the row's, and the newest event of a row is the row."""

    def __init__(self, path: Path) -> None:
        self._write = EventWriter(path, execution="")

    def run(self, row: dict[str, Any]) -> None:
        """Take the row of an attempt as it stands now."""
        self._write("run", **row)


def journal(store: Store) -> Journal:
    """This process's journal in `store`; a forked process gets one of its own, and so does a store made anew."""
    place = (store.root, os.getpid())
    with _lock:
        found = _journals.get(place)
        if found is None or not found._write.path.exists():
            path = store.root / "events" / f"runs-{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
            found = _journals[place] = Journal(path)
        return found
