"""The staging folder of one key, and the record that lets a later process go on with an execution.

An execution is one making of the artifacts of a key; it may take several attempts. Its id survives them in
`execution.json`, and with it the ids of metrics and samples, so that a resume doubles nothing.

    execution.json  request.json  live.json  error.json  done.json  log.txt  rounds/  scratch/  output/<kind>/  facts/
"""

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import read_json, write_json
from store.artifacts import Artifact, Store
from tasks.engine.child_process import ChildFiles


@dataclass
class Staging:
    """The open staging folder. Whoever holds it holds the key's lock."""

    path: Path
    execution: str
    attempt: int
    forced: bool
    inputs: dict[str, str]
    last_run: dict[str, Any] | None = field(default=None)  # the row of the attempt before, if it never ended

    @property
    def traces(self) -> ChildFiles:
        return ChildFiles(self.path)

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


def open_staging(store: Store, key: str, inputs: dict[str, Artifact], *, force: bool) -> Staging:
    """Go on with what lies in `staging/<key>`, or begin anew.

    Begun anew when an input holds other bytes than it did (it was made again), and when `force` meets work that was
    not itself forced. A forced execution that was interrupted is gone on with, so that a preempted one gets on.
    """
    folder = store.staging(key)
    digests = {name: artifact.manifest["digest"] for name, artifact in inputs.items()}
    known = read_json(folder / "execution.json")
    if isinstance(known, dict) and known["inputs"] == digests and (known["forced"] or not force):
        space = Staging(folder, known["execution"], known["attempt"] + 1, known["forced"], digests, known["run"])
    else:
        if any(folder.iterdir()):
            store.discard(folder)
        space = Staging(store.staging(key), uuid.uuid4().hex, 1, force, digests)
    space.traces.forget()
    return space
