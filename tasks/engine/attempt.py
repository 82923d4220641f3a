"""One attempt at one stage: reuse what has its key, or run its child, watch it, and publish what it made.

The order of writes is what makes a crash harmless at any point: the execution's record before the child, `done.json`
by the child, then one rename a kind, then the staging folder goes. A process that comes after finds either artifacts,
or a staging folder that says how far it got.
"""

import logging
import os
import shutil
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import write_json, write_text, writing
from store.artifacts import Artifact, Store
from store.catalog import Catalog, CatalogBusy
from store.events import EventWriter, read_live
from store.manifest import code_commit, host, now
from store.mirror import MirroredStore, open_store
from tasks.engine.attempt_log import write_attempt_row
from tasks.engine.child_process import command, crash, environment, pause, raise_for_exit, run_child
from tasks.engine.errors import StageCancelled, StageCrash
from tasks.engine.executors import ExecutorFactory, local_executor
from tasks.engine.failure import LOG_LINES, Failure
from tasks.engine.fanout_runner import FanOutRunner
from tasks.engine.prefect_page import run_page
from tasks.engine.progress import StageUpdate, State, notify
from tasks.engine.stage import RunContext, Stage
from tasks.engine.staging import Staging, open_staging
from tasks.engine.telemetry import Forwarder, forwarder

logger = logging.getLogger(__name__)

INGEST_EVERY_S = 5.0
INGEST_PATIENCE_S = 0.5


def run_stage(
    stage: Stage,
    section: dict[str, Any],
    inputs: dict[str, str],
    context: RunContext,
    crews: ExecutorFactory = local_executor,
) -> dict[str, str]:
    """See `Stage.run`. `crews` gives who does the units of a stage that has rounds."""
    store = open_store(context.store_root)
    store.prepare()
    store.refresh()
    given = {name: store.get(artifact_id) for name, artifact_id in inputs.items()}
    key = stage.key(section, {name: artifact.full_id for name, artifact in given.items()})
    return _Attempt(store, stage, section, given, context, key, crews).run()


@dataclass
class _Attempt:
    store: Store
    stage: Stage
    section: dict[str, Any]
    inputs: dict[str, Artifact]
    context: RunContext
    key: str
    crews: ExecutorFactory
    row: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)
    ingested: float = field(default_factory=time.monotonic)
    update: StageUpdate = field(init=False)
    forwarder: Forwarder = field(init=False)

    def __post_init__(self) -> None:
        label = self.context.label or self.stage.name
        self.update = StageUpdate(self.stage.name, label, "waiting", self.key, self.context.run_id)

    def run(self) -> dict[str, str]:
        try:
            reused = self._reusable()
        except (ConfigError, Retryable):
            reused = None  # it may be being replaced just now: look again once nobody works on it
        if reused:
            return self._reuse(reused)
        lock = self.store.lock(self.key)
        if not lock.try_acquire():
            self._notify("waiting", note="another run works on it")
            lock.acquire(wait=pause)
        try:
            # Whoever held the lock before may have made it.
            if reused := self._reusable():
                return self._reuse(reused)
            return self._make()
        finally:
            lock.release()

    def _reusable(self) -> dict[str, Artifact] | None:
        """The verified artifacts that have this key, all kinds of one execution; None if it must be made.

        Raises `ConfigError` if they are there but damaged. A forced run takes only what it has made itself (an
        earlier attempt that was interrupted after the last rename).
        """
        if self.context.force:
            try:
                found = self._complete()
            except ConfigError:
                return None
            mine = found and all(a.manifest["run"] == self.context.run_id for a in found.values())
            return found if mine else None
        found = self._complete()
        for artifact in (found or {}).values():
            self.store.check(artifact)
        return found

    def _complete(self) -> dict[str, Artifact] | None:
        label = self.update.label
        found = {kind: self.store.find(kind, self.key, label=label) for kind in self.stage.outputs}
        present = {kind: artifact for kind, artifact in found.items() if artifact}
        whole = present and all(
            set(a.manifest["outputs"]) == present.keys() and a.execution == next(iter(present.values())).execution
            for a in present.values()
        )
        return present if whole else None

    def _reuse(self, found: dict[str, Artifact]) -> dict[str, str]:
        outputs = {kind: artifact.id for kind, artifact in found.items()}
        moment = now()
        self._record(
            execution=next(iter(found.values())).execution,
            state="reused",
            reused=True,
            started=moment,
            ended=moment,
            seconds=time.monotonic() - self.begun,
            outputs=outputs,
        )
        self._ingest(INGEST_PATIENCE_S)
        self._send(outputs)
        self._notify("reused", outputs=outputs)
        return outputs

    def _make(self) -> dict[str, str]:
        for artifact in self.inputs.values():
            self.store.check(artifact)
            if not self.store.has_files(artifact):
                self._notify("waiting", note=f"{artifact.id} is fetched from {self.store.location}")
                _ = artifact.path
        with writing(self.store.root):
            space = open_staging(self.store, self.key, self.inputs, force=self.context.force)
            if space.last_run:
                # Its process had no chance to say how it ended; holding its lock, we know that it did.
                write_attempt_row(
                    self.store, {**space.last_run, "state": "interrupted", "error": "the process was killed"}
                )
            self._record(execution=space.execution, attempt=space.attempt, state="running", started=now())
            space.record(self.row)
        self.update = replace(self.update, attempt=space.attempt)
        self._ingest(INGEST_PATIENCE_S)
        try:
            if space.done() is None:
                self._work(space)
            outputs = self._publish(space)
        except BaseException as error:
            self._lost(space, error)
            raise
        self._ended("done", outputs=outputs)
        self._ingest()
        # Only now: what fails here is tried again by the next attempt, which finds everything made and sends the rest.
        self._send(outputs)
        self._notify("done", outputs=outputs)
        return outputs

    def _work(self, space: Staging) -> None:
        """The work itself, its metrics sent on to whoever the configuration names."""
        self._notify("running")
        request = self._request(space)
        self.forwarder = self._forwarder(space)
        try:
            self._rounds_and_child(space, request)
        finally:
            self._count_lost(space, self.forwarder.close())

    def _rounds_and_child(self, space: Staging, request: str) -> None:
        """Run the rounds and the child to their end; raise what its exit code means."""
        if self.stage.fan_outs:
            effort = FanOutRunner(
                self.stage.fan_outs, space, Path(request), self.context.launch, self.crews, self._hear
            )
            try:
                effort.run()
            finally:
                self.row |= {"peak_bytes": effort.peak_bytes}
            space.traces.forget()

        def tick() -> None:
            self._hear(read_live(space.traces.live))

        ended = run_child(
            command("tasks.engine.multihost" if self._together() else "tasks.engine.child_main", request),
            log=space.traces.log,
            environment=environment(str(self.store.root), accelerator=self.stage.accelerator),
            tick=tick,
            finished=lambda: space.done() is not None,
        )
        self.row |= {"peak_bytes": max(ended.peak_bytes, self.row.get("peak_bytes", 0)), "exit_code": ended.code}
        tick()
        who = f"stage {self.update.label}"
        raise_for_exit(ended, space.traces, who)
        if space.done() is None:
            raise crash(ended, space.traces, who)

    def _forwarder(self, space: Staging) -> Forwarder:
        events = self.store.root / "events" / f"{self.stage.name}-{space.execution}-{space.attempt}"
        context = self.context
        return forwarder(context.telemetry, events, context.run_id, self.stage.name, self.update.label)

    def _count_lost(self, space: Staging, points: int) -> None:
        """A row about measurements that a collector did not take."""
        if not points:
            return
        logger.warning("%s: %d measurements were not delivered; the store has them", self.update.label, points)
        path = self.store.root / "events" / f"{self.stage.name}-{space.execution}-{space.attempt}-telemetry.jsonl"
        emit = EventWriter(path, space.execution, stage=self.stage.name)
        emit("metric", name="telemetry_undelivered", step=space.attempt, value=points)
        emit.close()

    def _hear(self, live: dict[str, Any]) -> None:
        """Show the progress and metrics in `live`, and now and then bring the catalog up to date."""
        shown = {name: live[name] for name in ("done", "total", "unit", "note") if live.get(name) is not None}
        self._notify("running", metrics=live.get("metrics", {}), **shown)
        if time.monotonic() - self.ingested > INGEST_EVERY_S:
            self._ingest(INGEST_PATIENCE_S)
            self.forwarder.forward()
            self.ingested = time.monotonic()

    def _together(self) -> bool:
        """Whether several processes do this stage. Raises `ConfigError` where they are asked to and cannot."""
        wanted = self.context.launch
        if wanted.processes == 1 or self.stage.name not in wanted.stages:
            return False
        if not self.stage.multihost:
            raise ConfigError(f"launch.stages names {self.stage.name!r}, which only one process can do: leave it out")
        return True

    def _request(self, space: Staging) -> str:
        path = space.path / "request.json"
        events = self.store.root / "events" / f"{self.stage.name}-{space.execution}-{space.attempt}.jsonl"
        write_json(
            path,
            {
                "stage": self.stage.name,
                "module": self.stage.work.__module__,
                "attribute": self.stage.work.__name__,
                "key": self.key,
                "execution": space.execution,
                "section": self.section,
                "inputs": {name: str(artifact.path) for name, artifact in self.inputs.items()},
                "staging": str(space.path),
                "store": str(self.store.root),
                "events": str(events),
                "parent": os.getpid(),
                "launch": self.context.launch.model_dump(mode="json"),
                "commit": code_commit(),
                "host": host(),
                "sys_path": [str(Path(entry).absolute()) for entry in sys.path],
            },
        )
        return str(path)

    def _publish(self, space: Staging) -> dict[str, str]:
        """One rename a kind. What an earlier attempt of this execution has published already is left as it is."""
        self._notify("publishing")
        written = space.done() or []
        kinds = [kind for kind in self.stage.outputs if kind in written]
        published = {}
        for kind in kinds:
            source = space.path / "output" / kind
            if not source.is_dir() or not any(source.iterdir()):
                artifact = self.store.find(kind, self.key)
                if artifact is None or artifact.execution != space.execution:
                    raise StageCrash(f"stage {self.update.label}: its output {kind} is gone from {source}")
            else:
                artifact = self._publish_one(kind, kinds, space)
            published[kind] = artifact.id
        with writing(self.store.root):
            if space.traces.log.exists():
                shutil.copyfile(space.traces.log, self.store.root / "logs" / f"{self.stage.name}-{space.execution}.txt")
            self.store.discard(space.path)
        return published

    def _publish_one(self, kind: str, kinds: list[str], space: Staging) -> Artifact:
        try:
            return self.store.publish(
                kind,
                self.key,
                space.path / "output" / kind,
                stage=self.stage.name,
                version=self.stage.version,
                config=self.section,
                inputs=self.inputs,
                facts=space.facts(kind),
                execution=space.execution,
                outputs=tuple(kinds),
                run=self.context.run_id,
                label=self.update.label,
                supersede=True,
            )
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            # What was written cannot be an artifact: the next attempt must work again, not publish the same again.
            space.undo()
            raise StageCrash(f"stage {self.update.label}: its output {kind} cannot be published: {error}") from error

    def _lost(self, space: Staging, error: BaseException) -> None:
        """Write down how the attempt ended. Must not hide `error` by one of its own."""
        stopped = isinstance(error, (KeyboardInterrupt, StageCancelled)) or not isinstance(error, Exception)
        text = "cancelled" if stopped else str(error)
        account = "" if stopped or not isinstance(error, Exception) else self._account(space, error)
        try:
            self._ended("cancelled" if stopped else "failed", error=text)
            if space.path.is_dir():
                space.record(None)
            self._ingest(INGEST_PATIENCE_S if stopped else None)
            if not stopped:
                self._send()
        except (OSError, ConfigError, Retryable) as problem:
            logger.warning("the end of %s cannot be recorded: %s", self.update.label, problem)
        self._notify("cancelled" if stopped else "failed", error=text, failure=account)

    def _account(self, space: Staging, error: Exception) -> str:
        """What is to be known of a failure, kept in the store's logs as well."""
        failure = Failure(
            self.update.label,
            space.attempt,
            self.context.run_id,
            self.key,
            space.execution,
            host(),
            error,
            space.traces.log,
            space.traces.tail(LOG_LINES),
            self.context.resume,
            run_page(self.context.run_id),
        )
        text = failure.markdown()
        try:
            folder = self.store.root / "logs" / "failures"
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / failure.file, text)
        except OSError as problem:
            logger.warning("the account of %s cannot be kept: %s", self.update.label, problem)
        return text

    def _ended(self, state: str, **fields: Any) -> None:
        self._record(state=state, ended=now(), seconds=time.monotonic() - self.begun, **fields)

    def _record(self, **fields: Any) -> None:
        """The attempt's row as it now stands, as an event: the newest with its id is what the catalog shows."""
        if not self.row:
            self.row = {
                "id": uuid.uuid4().hex,
                "run": self.context.run_id,
                "config": self.context.config or None,
                "stage": self.stage.name,
                "label": self.update.label,
                "key": self.key,
                "attempt": 1,
                "reused": False,
                "forced": self.context.force,
                "host": host(),
                "commit": code_commit(),
            }
        self.row |= fields
        with writing(self.store.root):
            write_attempt_row(self.store, self.row)

    def _send(self, outputs: dict[str, str] | None = None) -> None:
        """Send what was made, and how it was made, to the store's remote, where it has one."""
        if isinstance(self.store, MirroredStore):
            self.store.push([self.store.get(name) for name in (outputs or {}).values()])
            self.store.push_events()

    def _ingest(self, patience: float | None = None) -> None:
        """Bring the catalog up to date. It is built from files, so one that is busy or broken loses nothing."""
        try:
            Catalog(self.store).ingest(**({} if patience is None else {"patience": patience}))
        except (CatalogBusy, ConfigError) as error:
            logger.log(logging.DEBUG if patience else logging.WARNING, "catalog: %s", error)

    def _notify(self, state: State, **fields: Any) -> None:
        self.update = replace(
            self.update, state=state, seconds=time.monotonic() - self.begun, time=time.time(), **fields
        )
        notify(self.update)
