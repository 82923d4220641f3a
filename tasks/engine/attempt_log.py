"""Record one attempt at a stage: in the staging folder of its key, as a row of the catalog, and as a page if it fails.

An execution writes the artifacts of a key once, in one or more attempts. All attempts share its id, kept in
`execution.json`, so metrics and samples have the same ids in each of them and a resume duplicates none. What a machine
publishes after it has taken the work over from another one has an id of its own, because the other may have published
it as well.

Rows are written as events to files of the store, from which the catalog and the remote are updated; so nothing is lost
when one of those is.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json, write_json, write_text, writing
from nautile.common.text import first_line
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog, CatalogBusy
from nautile.store.events import EventWriter
from nautile.store.layout import StagingFiles
from nautile.store.manifest import code_commit, execution_after_takeover, host, now
from nautile.store.mirror import MirroredStore
from nautile.tasks.engine.errors import failure_page, reason, run_page, slug
from nautile.tasks.engine.progress import StageUpdate, State, notify
from nautile.tasks.engine.stage import RunContext

logger = logging.getLogger(__name__)

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


# While the child works the catalog gets little time: ingesting a backlog must not stop the parent from watching it.
WATCHING: dict[str, float] = {"patience": 0.5, "most_s": 1.0}
AT_END: dict[str, float] = {"most_s": 60.0}

_writers: dict[tuple[Path, int], EventWriter] = {}
_lock = threading.Lock()
# Held while replies are uploaded: of two uploads of a file that grows, the earlier and shorter must not end last.
_uploading = threading.Lock()


def write_attempt_row(store: Store, row: dict[str, Any]) -> None:
    write_row(store, "run", row)


def write_row(store: Store, kind: str, row: dict[str, Any]) -> None:
    """Write a row of kind `run`, `plan` or `note`; the catalog shows the newest event with the row's `id`."""
    # One file per process (a forked one gets its own), and a new one after the store was deleted and created again.
    with _lock:
        writer = _writers.get((store.root, os.getpid()))
        if writer is None or not writer.path.exists():
            path = store.events / f"runs-{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
            writer = _writers[store.root, os.getpid()] = EventWriter(path, execution="")
    writer(kind, **row)


class AttemptLog:
    """The record of one attempt, from its first look at the store to its end."""

    def __init__(self, store: Store, stage: str, key: str, context: RunContext) -> None:
        self.label = context.label or stage
        self._store, self._context = store, context
        self._began = time.monotonic()
        self._update = StageUpdate(stage, self.label, "waiting", key, context.run_id)
        self._row: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "run": context.run_id,
            "config": context.config or None,
            "stage": stage,
            "label": self.label,
            "key": key,
            "attempt": 1,
            "reused": False,
            "forced": context.force,
            "host": host(),
            "commit": code_commit(),
        }

    def notify(self, state: State, **fields: Any) -> None:
        """Send the attempt's state to the listeners (terminal, Prefect)."""
        seconds = time.monotonic() - self._began
        self._update = replace(self._update, state=state, seconds=seconds, time=time.time(), **fields)
        notify(self._update)

    def set(self, **fields: Any) -> None:
        """Set fields of the row, which are written with its end."""
        self._row |= fields

    def undelivered(self, count: int) -> None:
        """Set the number of measurements that no tracker of `[telemetry]` took; it is reported with the end."""
        self._update = replace(self._update, undelivered=count)

    def reused(self, execution: str, outputs: dict[str, str]) -> None:
        moment = now()
        self._write(execution=execution, state="reused", reused=True, started=moment, outputs=outputs, ended=moment)
        self.ingest()
        self.mirror(outputs)
        self.notify("reused", outputs=outputs)

    def started(self, staging: Staging) -> None:
        """Record the attempt before any of its work, so that there is a record even after a SIGKILL."""
        if staging.run:
            # An earlier attempt could not record its end. This process holds its lock, so it has ended.
            killed = {"state": "interrupted", "error": "the process was killed"}
            write_attempt_row(self._store, staging.run | killed)
        self._write(execution=staging.execution, attempt=staging.attempt, state="running", started=now())
        # The event first, then this copy of it: if it is still here when the next attempt begins, this one was killed.
        staging.record(self._row)
        self._update = replace(self._update, attempt=staging.attempt)

    def done(self, outputs: dict[str, str]) -> None:
        """Record success, once everything is published."""
        self._write(state="done", ended=now(), outputs=outputs)
        self.ingest(at_end=True)
        # Last: if it fails, the next attempt reuses the published artifacts and mirrors them.
        self.mirror(outputs)
        self.notify("done", outputs=outputs)

    def failed(self, staging: Staging, error: BaseException) -> None:
        """Record failure or cancellation. Problems in this method are logged, so that they never hide `error`."""
        # Anything but an `Exception` is a cancellation: `StageCancelled`, `KeyboardInterrupt`, `SystemExit`.
        failure = ""
        state: State
        if isinstance(error, Exception):
            state, text, short_text = "failed", str(error), reason(error)
            failure = self._write_failure_page(staging, error)
            if self._context.sweep:
                note_failure(staging.path, self._context, first_line(error))
        else:
            state, text, short_text = "cancelled", "cancelled", "cancelled"
        try:
            self._write(state=state, ended=now(), error=text)
            # Its end is recorded, so the next attempt need not call it interrupted.
            if staging.path.is_dir():
                staging.record(None)
            self.ingest(at_end=state == "failed")
            if state == "failed":
                self.mirror()
        except (OSError, ConfigError, Retryable) as problem:
            logger.warning("the end of %s cannot be recorded: %s", self.label, problem)
        self.notify(state, error=text, reason=short_text, failure=failure)

    def ingest(self, *, at_end: bool = False, unless_s: float = 0.0) -> None:
        """Update the catalog from the event files. If it is busy or broken, nothing is lost: the files remain.

        `unless_s`: do nothing if the last update is less than so many seconds ago; any process updates for all.
        """
        catalog = Catalog(self._store)
        if catalog.age_s() < unless_s:
            return
        try:
            catalog.ingest(**(AT_END if at_end else WATCHING))
        except (CatalogBusy, ConfigError, OSError) as error:
            logger.log(logging.WARNING if at_end else logging.DEBUG, "catalog: %s", error)

    def mirror(self, outputs: dict[str, str] | None = None) -> None:
        """Send the artifacts, events and paid replies to the store's remote, if it has one."""
        if isinstance(self._store, MirroredStore):
            self._store.push([self._store.get(artifact_id) for artifact_id in (outputs or {}).values()])
            self._store.push_events()
            with _uploading:
                self._store.push_replies()

    def mirror_replies(self, models: Collection[str] = ()) -> None:
        """Send the paid replies so far to the store's remote, unless another thread does, and fetch those of `models`.

        What other hosts have paid for meanwhile need not be asked again. The end sends the replies again, so a failure
        is only logged.
        """
        if isinstance(self._store, MirroredStore) and _uploading.acquire(blocking=False):
            try:
                self._store.push_replies()
                self._store.pull_replies(models)
            except (ConfigError, Retryable, OSError) as error:
                logger.warning("paid replies are not mirrored: %s", error)
            finally:
                _uploading.release()

    def _write(self, **fields: Any) -> None:
        self._row |= fields
        # Only with the end: until then the row says that the attempt is running, for as long as it does.
        if "ended" in fields:
            self._row["seconds"] = time.monotonic() - self._began
        with writing(self._store.root):
            write_attempt_row(self._store, self._row)

    def _write_failure_page(self, staging: Staging, error: Exception) -> str:
        """Build the page about a failure as Markdown, and also write it to the store's logs."""
        context, key = self._context, self._row["key"]
        page = failure_page(
            self.label,
            staging.attempt,
            error,
            log=staging.files.log,
            log_tail=staging.files.log_tail(),
            resume=context.resume,
            page=run_page(context.run_id),
            ids={"run": context.run_id, "key": key, "execution": staging.execution, "host": host()},
        )
        try:
            folder = self._store.logs / "failures"
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{slug(self.label)}-{staging.execution[:12]}-{staging.attempt}.md", page)
        except OSError as problem:
            logger.warning("the page about the failure of %s cannot be written: %s", self.label, problem)
        return page
