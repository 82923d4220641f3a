"""The staging folder of a key, and the record that lets a later process continue its execution.

An execution writes the artifacts of a key once, in one or more attempts. All attempts share its id, kept in
`execution.json`, so metrics and samples have the same ids in each of them and a resume duplicates none. What a machine
publishes after it has taken the work over from another one has an id of its own, because the other may have published
it as well.
"""

import logging
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError

from nautile.common.files import read_json, write_json
from nautile.store.artifacts import Artifact, Store
from nautile.store.layout import StagingFiles
from nautile.store.manifest import execution_after_takeover
from nautile.tasks.engine.stage import RunContext

logger = logging.getLogger(__name__)

LATE_S = 60.0  # a retry note is stale so long after the time at which the attempt was due


_Execution = Annotated[str, Field(pattern=r"^[0-9a-f]{32}(-[0-9]+)?$")]  # also a part of file names


class _Form(BaseModel):
    """The form of a file in a staging folder."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None if the file is missing, or of another form, as that of another version is."""
        content = read_json(path)
        try:
            return None if content is None else cls.model_validate(content)
        except ValidationError as error:
            where = ".".join(map(str, error.errors(include_input=False)[0]["loc"]))
            logger.warning("%s is not of this version's form (%s): its work is done again", path, where)
            return None


class PublishedAs(_Form):
    """`publication.json`: the id and the fence under which all outputs of an execution are published."""

    execution: _Execution
    fence: int


class _Done(_Form):
    """`done.json`."""

    outputs: list[str]
    environment: dict[str, Any] = {}


class Staging(_Form):
    """The open staging folder, whose record `execution.json` may come from another machine.

    Whoever holds it holds the key's lock.
    """

    path: Path = Field(default=Path(), exclude=True)
    execution: _Execution
    attempt: int
    forced: bool
    inputs: dict[str, str]  # name -> digest of the artifact's content
    began: float  # when the first attempt did, in seconds since 1970
    fence: int  # of the lease under which the first attempt began
    run: dict[str, Any] | None  # the row of an earlier attempt that never recorded its end

    @property
    def files(self) -> StagingFiles:
        return StagingFiles(self.path)

    def done(self) -> list[str] | None:
        """The kinds that the finished work wrote; None while it is not finished."""
        record = _Done.read(self.files.done)
        return record.outputs if record else None

    def mark_unfinished(self) -> None:
        """Have the next attempt work again instead of publishing what is here."""
        self.files.done.unlink(missing_ok=True)
        self.files.publication.unlink(missing_ok=True)

    def publication(self, fence: int) -> PublishedAs:
        """The id of the artifacts, of which an earlier attempt may have published some; `fence`: of the lease."""
        if record := PublishedAs.read(self.files.publication):
            return record
        execution = self.execution if fence == self.fence else execution_after_takeover(self.execution, fence)
        # Before the first rename, and not sent to the remote: another machine that takes the work over publishes all.
        published = PublishedAs(execution=execution, fence=fence)
        write_json(self.files.publication, published.model_dump())
        return published

    def facts(self, kind: str) -> dict[str, Any]:
        """The facts that `Job.describe` recorded, and the environment in which the work was done."""
        record = _Done.read(self.files.done)
        environment = {"environment": record.environment} if record and record.environment else {}
        return (read_json(self.files.facts(kind)) or {}) | environment

    def digests(self, kind: str) -> dict[str, str]:
        """The digests that `Job.add_digests` recorded: relative path -> sha256."""
        return read_json(self.files.digests(kind)) or {}

    def record(self, row: dict[str, Any] | None) -> None:
        """Write `execution.json`. `row` is the row of the running attempt, None once its end is recorded."""
        write_json(self.files.execution, self.model_dump() | {"run": row})


def open_staging(store: Store, key: str, inputs: dict[str, Artifact], *, force: bool, fence: int = 0) -> Staging:
    """Continue the execution in `staging/<key>`, or start a new one in an empty folder. `fence`: of the lease.

    A new one starts if the content of an input has changed since (it was written again), or if `force` is set and the
    existing execution was not forced. An interrupted forced execution continues, so that preemption loses no progress.
    """
    folder = store.staging(key)
    digests = {name: artifact.manifest["digest"] for name, artifact in inputs.items()}
    staging = Staging.read(StagingFiles(folder).execution)
    # Continue only with the same inputs, and never reuse work that was not forced in a forced run.
    if staging is not None and staging.inputs == digests and (staging.forced or not force):
        staging = staging.model_copy(update={"path": folder, "attempt": staging.attempt + 1})
    else:
        if any(folder.iterdir()):
            store.discard(folder)
        staging = Staging(
            path=store.staging(key),
            execution=uuid.uuid4().hex,
            attempt=1,
            forced=force,
            inputs=digests,
            began=time.time(),
            fence=fence,
            run=None,
        )
    # What the previous attempt left for its parent must not be taken for this one's.
    staging.files.clear()
    # The attempt that they announced begins here: the display and the other runs of a sweep see it at work.
    for path in (staging.files.retry, staging.files.failure):
        path.unlink(missing_ok=True)
    return staging


def write_retry_note(folder: Path, note: str, pause_s: float) -> None:
    """Record in a staging folder, for displays, why the next attempt starts only in `pause_s` seconds."""
    with suppress(OSError):  # the folder may be missing, or its disk full: the pause is the same
        write_json(StagingFiles(folder).retry, {"note": note, "at": time.time() + pause_s})


def read_retry_note(folder: Path) -> str | None:
    """The note of a step that pauses between two attempts; None if it does not."""
    retry = read_json(StagingFiles(folder).retry)
    note, at = (retry.get("note"), retry.get("at")) if isinstance(retry, dict) else (None, None)
    # A folder that comes from another machine may be of another version.
    is_due = isinstance(note, str) and isinstance(at, (int, float)) and time.time() < at + LATE_S
    return note if is_due else None


def note_failure(folder: Path, context: RunContext, reason: str) -> None:
    """Record in a staging folder, for the other runs of the sweep, that this run failed there. It may retry."""
    note = {"sweep": context.sweep, "run": context.run_id, "config": context.config, "reason": reason, "final": False}
    with suppress(OSError):  # as in `write_retry_note`
        write_json(StagingFiles(folder).failure, note)


def note_giving_up(folder: Path, context: RunContext) -> None:
    """Mark the recorded failure as final, if it is this run's own."""
    note = read_json(StagingFiles(folder).failure)
    if isinstance(note, dict) and note.get("run") == context.run_id:
        with suppress(OSError):
            write_json(StagingFiles(folder).failure, note | {"final": True})


def failure_in_sweep(store: Store, key: str, sweep: str) -> dict[str, Any] | None:
    """The recorded failure of another run of this sweep at a key, if that run has given up (`final`) or will retry.

    None if there is no such record, or if the run that wrote it no longer exists.
    """
    note = read_json(store.staging_files(key).failure) if sweep else None
    if not isinstance(note, dict) or note.get("sweep") != sweep or not {"run", "config", "reason"} <= note.keys():
        return None
    # A run that is alive will try again, so the others wait for it. One that was killed will not, and its note is void.
    return note if note.get("final") or store.run_lock(note["run"]).held_elsewhere() else None
