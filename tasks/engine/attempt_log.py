"""Record and report one attempt at a stage: its row in the catalog, updates to listeners, the page about a failure.

Rows are events in files of the store; the catalog, the remote and the listeners all follow from them, so that losing
any of those loses nothing.
"""

import logging
import os
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import write_text, writing
from common.text import first_line
from store.artifacts import Store
from store.catalog import Catalog, CatalogBusy
from store.events import EventWriter
from store.manifest import code_commit, host, now
from store.mirror import MirroredStore
from tasks.engine.failure import failure_page, reason, slug
from tasks.engine.prefect_page import run_page
from tasks.engine.progress import StageUpdate, State, notify
from tasks.engine.stage import RunContext
from tasks.engine.staging import Staging, note_failure

logger = logging.getLogger(__name__)

# While there is other work to do the catalog gets little time: a backlog must not keep the child from being watched.
WATCHING: dict[str, float] = {"patience": 0.5, "most_s": 1.0}
AT_END: dict[str, float] = {"most_s": 60.0}

_writers: dict[tuple[Path, int], EventWriter] = {}
_lock = threading.Lock()


def write_attempt_row(store: Store, row: dict[str, Any]) -> None:
    """Write the row of an attempt as it now stands."""
    write_row(store, "run", row)


def write_row(store: Store, kind: str, row: dict[str, Any]) -> None:
    """Write a row of a `run`, `plan` or `note`; the newest event with a row's `id` is what the catalog shows."""
    # One file per process (a forked one gets its own), and a new one where the store was deleted and created again.
    with _lock:
        writer = _writers.get((store.root, os.getpid()))
        if writer is None or not writer.path.exists():
            path = store.root / "events" / f"runs-{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
            writer = _writers[store.root, os.getpid()] = EventWriter(path, execution="")
    writer(kind, **row)


class AttemptLog:
    """One attempt, from its first look at the store to its end."""

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
        """Tell the listeners (terminal, Prefect) where the attempt stands."""
        seconds = time.monotonic() - self._began
        self._update = replace(self._update, state=state, seconds=seconds, time=time.time(), **fields)
        notify(self._update)

    def set(self, **fields: Any) -> None:
        """Fields of the row that are written with its end."""
        self._row |= fields

    def undelivered(self, points: int) -> None:
        """Report with the end how many measurements the sinks of `[telemetry]` did not take."""
        self._update = replace(self._update, undelivered=points)

    def reused(self, execution: str, outputs: dict[str, str]) -> None:
        """Record that nothing had to be done."""
        moment = now()
        self._write(execution=execution, state="reused", reused=True, started=moment, outputs=outputs, ended=moment)
        self.ingest()
        self.mirror(outputs)
        self.notify("reused", outputs=outputs)

    def started(self, staging: Staging) -> None:
        """Record the attempt before any of its work, so that a SIGKILL leaves a trail."""
        if staging.unfinished_row:
            # Its process could not record its end. We hold its lock, so we know that it did end.
            killed = {"state": "interrupted", "error": "the process was killed"}
            write_attempt_row(self._store, staging.unfinished_row | killed)
        self._write(execution=staging.execution, attempt=staging.attempt, state="running", started=now())
        staging.record(self._row)
        self._update = replace(self._update, attempt=staging.attempt)

    def done(self, outputs: dict[str, str]) -> None:
        """Record success, once everything is published."""
        self._write(state="done", ended=now(), outputs=outputs)
        self.ingest(at_end=True)
        # Last: if this fails, the next attempt finds everything published and sends what is missing.
        self.mirror(outputs)
        self.notify("done", outputs=outputs)

    def failed(self, staging: Staging, error: BaseException) -> None:
        """Record failure or cancellation. Problems in here are logged, so that they never hide `error`."""
        # What is no `Exception` is a cancellation: `StageCancelled`, `KeyboardInterrupt`, `SystemExit`.
        failure = ""
        if isinstance(error, Exception):
            state, text, why = "failed", str(error), reason(error)
            failure = self._write_failure_page(staging, error)
            if self._context.sweep:
                note_failure(staging.path, self._context, first_line(error))
        else:
            state, text, why = "cancelled", "cancelled", "cancelled"
        try:
            self._write(state=state, ended=now(), error=text)
            if staging.path.is_dir():
                staging.record(None)
            self.ingest(at_end=state == "failed")
            if state == "failed":
                self.mirror()
        except (OSError, ConfigError, Retryable) as problem:
            logger.warning("the end of %s cannot be recorded: %s", self.label, problem)
        self.notify(state, error=text, reason=why, failure=failure)

    def ingest(self, *, at_end: bool = False, unless_s: float = 0.0) -> None:
        """Bring the catalog up to date. It is built from files, so one that is late, busy or broken loses nothing.

        `unless_s`: not if another process has within so many seconds, for each ingests what all of them wrote.
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
            self._store.push_replies()

    def mirror_replies(self) -> None:
        """Send the paid replies so far to the store's remote; a failure is only logged: the stage's end sends them."""
        if isinstance(self._store, MirroredStore):
            try:
                self._store.push_replies()
            except (ConfigError, Retryable, OSError) as error:
                logger.warning("paid replies are not mirrored: %s", error)

    def _write(self, **fields: Any) -> None:
        self._row |= fields
        if "ended" in fields:
            self._row["seconds"] = time.monotonic() - self._began
        with writing(self._store.root):
            write_attempt_row(self._store, self._row)

    def _write_failure_page(self, staging: Staging, error: Exception) -> str:
        """The page about a failure as markdown, also written to the store's logs."""
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
            folder = self._store.root / "logs" / "failures"
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{slug(self.label)}-{staging.execution[:12]}-{staging.attempt}.md", page)
        except OSError as problem:
            logger.warning("the page about the failure of %s cannot be written: %s", self.label, problem)
        return page
