"""Record and report one attempt at a stage: its row in the catalog, updates to listeners, the page about a failure.

Rows are written as events to files of the store, from which the catalog and the remote are updated; so nothing is lost
when one of those is.
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import write_text, writing
from nautile.common.text import first_line
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog, CatalogBusy
from nautile.store.events import EventWriter
from nautile.store.manifest import code_commit, host, now
from nautile.store.mirror import MirroredStore
from nautile.tasks.engine.errors import failure_page, reason, run_page, slug
from nautile.tasks.engine.progress import StageUpdate, State, notify
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.engine.staging import Staging, note_failure

logger = logging.getLogger(__name__)

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
        """Set the number of measurements that the sinks of `[telemetry]` did not take; it is reported with the end."""
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
