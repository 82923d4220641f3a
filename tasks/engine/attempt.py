"""One attempt at a stage: reuse the artifacts of its key, or run its child process, watch it, and publish its output.

The order of writes makes a crash harmless at any point:

1. `execution.json`, before the child process starts;
2. `done.json`, by the child, when its work is complete;
3. one rename for each kind of artifact;
4. the staging folder is removed.

So a later process sees either the artifacts, or a staging folder that records how far the work got.
"""

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import write_json, writing
from nautile.configs.plugins import required
from nautile.store.artifacts import Artifact, KeyLease, Store
from nautile.store.events import EventWriter, read_live
from nautile.store.locks import KeyLock
from nautile.store.manifest import code_commit, host
from nautile.store.mirror import MirroredStore, open_store
from nautile.tasks.engine.attempt_log import AttemptLog, PublishedAs, Staging, failure_in_sweep, open_staging
from nautile.tasks.engine.child_process import crash_of, pause, raise_for_exit, run_child
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.fanout import ExecutorFactory, FanOutRunner, local_executor, ray_executor
from nautile.tasks.engine.job import check_inputs
from nautile.tasks.engine.remote_child import run_item_on_own_disk, through_remote
from nautile.tasks.engine.stage import RunContext, Stage
from nautile.tasks.engine.telemetry import Outcome, TrackedExecution, Tracker, close_all, trackers_of

logger = logging.getLogger(__name__)

INGEST_EVERY_S = 5.0
LOCK_POLL_S = 0.2
MIRROR_REPLIES_EVERY_S = 60.0

Artifacts = dict[str, Artifact]  # by kind, or by the name of an input
Progress = Callable[[dict[str, Any]], None]  # called with the content of a child's live.json


def run_stage(
    stage: Stage,
    section: dict[str, Any],
    inputs: dict[str, str],
    context: RunContext,
    executors: ExecutorFactory | None = None,
    slot: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> dict[str, str]:
    """Make one attempt: reuse artifacts, or work in a child process and publish. Returns kind -> artifact id.

    It needs no Prefect. `inputs` maps names to artifact ids, short or full. `executors` opens the executor that runs
    the items of the stage's fan-outs, by default that of `launch.engine`. `slot` is entered for the length of the work;
    it may wait until others have ended theirs, which a stage that only reuses artifacts does not. Raises `ConfigError`,
    `Retryable`, `StageCrash`, and `StageCancelled` (or `KeyboardInterrupt`); the child and its children have ended by
    then.
    """
    store = open_store(context.store_root)
    store.prepare()
    store.refresh()
    # Matplotlib's font cache belongs in the store, not in the home folder; children inherit the setting.
    os.environ.setdefault("MPLCONFIGDIR", str(store.cache / "matplotlib"))
    artifacts = {name: store.get(artifact_id) for name, artifact_id in inputs.items()}
    key = stage.key(section, {name: artifact.full_id for name, artifact in artifacts.items()})
    log = AttemptLog(store, stage.name, key, context)
    return _Attempt(store, stage, section, artifacts, context, key, executors, log, slot).run()


@dataclass(frozen=True)
class _Attempt:
    store: Store
    stage: Stage
    section: dict[str, Any]
    inputs: Artifacts
    context: RunContext
    key: str
    executors: ExecutorFactory | None
    log: AttemptLog
    slot: Callable[[], AbstractContextManager[None]]

    def run(self) -> dict[str, str]:
        try:
            # Without the lock first: a run of finished steps then waits for nobody.
            reusable = self._reusable()
        except (ConfigError, Retryable):
            reusable = None  # another process may be replacing the artifacts: check again under the lock
        if reusable and self._is_sent(reusable):
            return self._reuse(reusable)
        with self.slot():
            return self._run_with_slot()

    def _run_with_slot(self) -> dict[str, str]:
        lock = self._take_lock()
        try:
            # The previous holder of the lock may have published the artifacts.
            reusable = self._reusable()
            if reusable and self._is_sent(reusable):
                return self._reuse(reusable)
            # The lock excludes processes of this machine, the lease those of other machines that share the remote.
            with self.store.lease(self.key, pause, self._wait_for_host) as lease:
                if self.store.url is not None:
                    self.store.refresh(held=self.key)
                    if reusable := self._reusable():  # likewise the previous holder of the lease
                        return self._reuse(reusable)
                send = not self._hosts_have_own_disks()

                def check() -> None:
                    lease.check()
                    self._check_inputs()

                with self.store.mirrored_staging(self.key, send=send, check=check):
                    return self._produce(lease)
        finally:
            lock.release()

    def _take_lock(self) -> KeyLock:
        """Wait for the lock of the key and return it, held.

        The runs of a sweep share failures: while one of them pauses before another attempt at this key, the others
        wait, and once it has given up they raise `ConfigError`, so that a failing step is not paid for in each run.
        """
        lock, announced = self.store.lock(self.key), False
        # Once per poll: take the lock, look whether the sweep has a say, and either keep the lock or give it back.
        while True:
            if lock.try_acquire():
                failure = failure_in_sweep(self.store, self.key, self.context.sweep)
                if failure is None or failure["run"] == self.context.run_id:
                    return lock
                lock.release()
                if failure["final"]:
                    raise ConfigError(
                        f"it failed in run {failure['run'][:8]} of this sweep ({failure['reason']}), and is not tried "
                        "again for each run; `nautile sweep` with the same file does"
                    )
            if not announced:
                self.log.notify("waiting", note="another run works on it")
                announced = True
            pause(LOCK_POLL_S)

    def _wait_for_host(self, name: str) -> None:
        self.log.notify("waiting", note=f"{name} works on it")

    # Reuse

    def _reusable(self) -> Artifacts | None:
        """The verified artifacts of this key, all of one execution; None if there is work to do.

        Raises `ConfigError` if they exist but are damaged. A forced run reuses only artifacts of its own: those of an
        attempt that was interrupted after the last rename.
        """
        if self.context.force:
            try:
                artifacts = self._published()
            except ConfigError:
                return None
            # Published by this very run: it was interrupted between its last rename and the next step.
            is_own = artifacts and all(a.manifest["run"] == self.context.run_id for a in artifacts.values())
            return artifacts if is_own else None
        artifacts = self._published()
        for artifact in (artifacts or {}).values():
            self.store.check(artifact)
        return artifacts

    def _published(self) -> Artifacts | None:
        """The artifacts of this key; None if they are of several executions or kinds of their execution are missing."""
        candidates = {kind: self.store.find(kind, self.key, label=self.log.label) for kind in self.stage.outputs}
        artifacts = {kind: artifact for kind, artifact in candidates.items() if artifact}
        executions = {artifact.execution for artifact in artifacts.values()}
        # Each manifest lists the kinds that its execution published; a crash between two renames leaves fewer.
        complete = all(set(a.manifest["outputs"]) == artifacts.keys() for a in artifacts.values())
        return artifacts if complete and len(executions) == 1 else None

    def _is_sent(self, artifacts: Artifacts) -> bool:
        """Whether the store's remote, if it has one, has the artifacts.

        Those that an earlier attempt could not send are reused only under the lease: another machine may have taken
        the work over since, and then its artifacts are the ones that all machines use.
        """
        store = self.store
        return not isinstance(store, MirroredStore) or all(map(store.is_mirrored, artifacts.values()))

    def _reuse(self, artifacts: Artifacts) -> dict[str, str]:
        outputs = {kind: artifact.id for kind, artifact in artifacts.items()}
        self.log.reused(next(iter(artifacts.values())).recorded_execution, outputs)
        return outputs

    # Work

    def _produce(self, lease: KeyLease) -> dict[str, str]:
        """Fetch the inputs, open the staging folder, work and publish; record how it ends."""
        # An input that was damaged since is found now, not in the results of hours of work.
        for artifact in self.inputs.values():
            self.store.check(artifact)
            if not self.store.has_files(artifact):
                self.log.notify("waiting", note=f"fetching {artifact.id} from {self.store.location}")
                self.store.fetch(artifact, without=self.stage.on_demand.get(artifact.kind))
        with writing(self.store.root):
            staging = open_staging(self.store, self.key, self.inputs, force=self.context.force, fence=lease.fence)
            self.log.started(staging)
        self.log.ingest()
        try:
            trackers = self._trackers(staging)
            try:
                # If an attempt was interrupted between `done.json` and its last rename, publishing is all to do.
                if staging.done() is None:
                    self._work(staging, lease.check, trackers)
                lease.check()
                outcome = Outcome("done", self._publish(staging, lease.fence))
            except BaseException as error:
                outcome = Outcome("failed" if isinstance(error, Exception) else "cancelled")
                raise
            finally:
                self._end_telemetry(staging, close_all(trackers, outcome))
        except BaseException as error:
            self.log.failed(staging, error)
            raise
        self.log.done(dict(outcome.outputs))
        return dict(outcome.outputs)

    def _work(self, staging: Staging, check_lease: Callable[[], None], trackers: list[Tracker]) -> None:
        """Run the fan-outs, then the stage's function in a child process; send metrics to the trackers.

        Raises the error that the exit code stands for.
        """
        if self._runs_in_several_processes() and not self.stage.multihost:
            raise ConfigError(
                f"launch.stages lists {self.stage.name!r}, which runs in one process only: remove it from the list"
            )
        self.log.notify("running")
        self._write_request(staging)
        ingested_at = mirrored_at = time.monotonic()
        # Replies that other machines have paid for are fetched before the first request is sent.
        models = {endpoint["model"] for endpoint in self.section.get("endpoints", {}).values()}
        if models and isinstance(self.store, MirroredStore):
            self.store.pull_replies(models)

        # Called several times a second: catalog, telemetry and mirror are updated at longer intervals.
        def on_progress(live: dict[str, Any]) -> None:
            nonlocal ingested_at, mirrored_at
            check_lease()
            fields = {name: live[name] for name in ("done", "total", "unit", "note") if live.get(name) is not None}
            self.log.notify("running", metrics=live.get("metrics", {}), phase=live.get("phase", ""), **fields)
            if time.monotonic() - ingested_at > INGEST_EVERY_S:
                self._check_inputs()
                self.log.ingest(unless_s=INGEST_EVERY_S)
                for tracker in trackers:
                    tracker.wake()
                ingested_at = time.monotonic()
            if models and time.monotonic() - mirrored_at > MIRROR_REPLIES_EVERY_S:
                # In a thread: an upload must not stop this loop, which also watches the child and the lease.
                threading.Thread(target=self.log.mirror_replies, args=(models,), daemon=True).start()
                mirrored_at = time.monotonic()

        def tick() -> None:
            on_progress(read_live(staging.files.live))

        # The fan-outs must be complete before the function, which reads what they wrote.
        peak_bytes = self._run_fan_outs(staging, on_progress) if self.stage.fan_outs else 0
        exit_status = run_child(
            "nautile.tasks.engine.multihost" if self._runs_in_several_processes() else self._child_module(),
            str(staging.files.request),
            log=staging.files.log,
            store=str(self.store.root),
            tick=tick,
            accelerator=self.stage.accelerator,
            finished=lambda: staging.done() is not None,
        )
        self.log.set(peak_bytes=max(exit_status.peak_bytes, peak_bytes), exit_code=exit_status.code)
        tick()
        raise_for_exit(exit_status, staging.files)
        if staging.done() is None:
            raise crash_of(exit_status, staging.files)  # exit code 0, but not from the end of the child's `main`

    def _check_inputs(self) -> None:
        """Raise `Retryable` if an input has been replaced, so that nothing is made or sent that is of two versions."""
        folders = {name: artifact.folder for name, artifact in self.inputs.items()}
        check_inputs(self.store.staging_files(self.key).folder, folders)

    def _run_fan_outs(self, staging: Staging, on_progress: Progress) -> int:
        """Run the items that are not done. Returns the peak memory of any one of them, in bytes."""
        launch = self.context.launch
        executors = self.executors or (ray_executor if launch.engine == "ray" else local_executor)
        if launch.engine == "ray" and isinstance(self.store, MirroredStore):
            remote = self.executors or partial(ray_executor, run=run_item_on_own_disk)
            executors = through_remote(remote, self.store, staging.path, staging.attempt, self.stage.fan_outs)
        runner = FanOutRunner(
            self.stage.fan_outs, staging.files.request, staging.attempt, launch, executors, on_progress
        )
        try:
            runner.run()
        finally:
            self.log.set(peak_bytes=runner.peak_bytes)
        staging.files.clear()
        return runner.peak_bytes

    def _runs_in_several_processes(self) -> bool:
        return self.context.launch.processes > 1 and self.stage.name in self.context.launch.stages

    def _hosts_have_own_disks(self) -> bool:
        """Whether the stage runs on other hosts that share only the store's remote; the first host sends its output
        there."""
        launch = self.context.launch
        on_other_hosts = self._runs_in_several_processes() and (bool(launch.command) or launch.on_ray)
        return self.store.url is not None and on_other_hosts

    def _child_module(self) -> str:
        """The module of the child process: another one if it needs the store's remote.

        For files of the inputs that are only there, or for claims on requests that other hosts may send, too.
        """
        asks = self.store.url is not None and bool(self.section.get("endpoints"))
        all_local = all(map(self.store.has_files, self.inputs.values()))
        return "nautile.tasks.engine.child_main" if all_local and not asks else "nautile.tasks.engine.remote_child"

    def _events(self, staging: Staging) -> Path:
        """The path that the names of this attempt's event files start with."""
        name = f"{self.stage.name}-{staging.execution}-{staging.attempt}"
        if isinstance(self.store, MirroredStore):
            # The remote has one folder for all machines. One that takes over may count an attempt that the lost machine
            # counted too, if that was lost before it had sent the number.
            name += f"-{self.store.machine[:8]}"
        return self.store.events / name

    def _write_request(self, staging: Staging) -> None:
        """Write request.json, the arguments of `tasks.engine.child_main` and `tasks.engine.multihost`."""
        write_json(
            staging.files.request,
            {
                "stage": self.stage.name,
                "module": self.stage.work.__module__,
                "attribute": self.stage.work.__name__,
                "key": self.key,
                "execution": staging.execution,
                "began": staging.began,
                "section": self.section,
                "inputs": {name: str(artifact.folder) for name, artifact in self.inputs.items()},
                "child": self._child_module(),
                "staging": str(staging.path),
                "store": str(self.store.root),
                "ask_again": self.context.ask_again,
                "events": f"{self._events(staging)}.jsonl",
                # The child ends with this process.
                "parent": os.getpid(),
                "launch": self.context.launch.model_dump(mode="json"),
                "niceness": self.context.operation.niceness,
                "commit": code_commit(),
                "host": host(),
                "plug_ins": required(),
                # Lets the child import whatever this process can (`tasks.engine.child_main`).
                "sys_path": [str(Path(entry).absolute()) for entry in sys.path],
                **({"url": self.store.url} if self._hosts_have_own_disks() else {}),
            },
        )

    def _trackers(self, staging: Staging) -> list[Tracker]:
        execution = TrackedExecution(
            self.context.run_id,
            self.stage.name,
            self.log.label,
            staging.execution,
            self.context.config,
            self.key,
            code_commit() or "",
            host(),
            self.section,
            {name: artifact.id for name, artifact in self.inputs.items()},
        )
        return trackers_of(self.context.telemetry, self.store.events, execution, staging.path)

    def _end_telemetry(self, staging: Staging, count: int) -> None:
        if not count:
            return
        logger.warning("%s: %d measurements were not delivered; the store has them", self.log.label, count)
        self.log.undelivered(count)
        path = self._events(staging)
        emit = EventWriter(path.with_name(f"{path.name}-telemetry.jsonl"), staging.execution, stage=self.stage.name)
        emit("metric", name="telemetry_undelivered", step=staging.attempt, value=count)
        emit.close()

    # Publication

    def _publish(self, staging: Staging, fence: int) -> dict[str, str]:
        """Publish with one rename per kind; kinds that an earlier attempt of this execution published are skipped."""
        self.log.notify("publishing")
        written_kinds = staging.done() or []
        publication = staging.publication(fence)
        kinds = [kind for kind in self.stage.outputs if kind in written_kinds]
        # One rename for each kind, in the order of the stage's declaration.
        published = {}
        for kind in kinds:
            folder = staging.files.output(kind)
            # The rename moves the folder away, so a folder with files is one that is still to be published.
            if folder.is_dir() and any(folder.iterdir()):
                published[kind] = self._publish_kind(kind, kinds, staging, publication).id
                continue
            # The folder has been moved: an earlier attempt of this execution must have published this kind.
            artifact = self.store.find(kind, self.key)
            if artifact is None or artifact.execution != publication.execution:
                # Or it did, and another machine has published its own since: then all kinds are written again.
                staging.mark_unfinished()
                raise StageCrash(f"its output {kind} is missing from {folder}")
            published[kind] = artifact.id
        # With everything published, the staging folder can be removed; its log moves to the store's logs.
        with writing(self.store.root):
            if staging.files.log.exists():
                # Copied, not moved: the folder goes last, and as a whole.
                log = self.store.execution_log(self.stage.name, staging.execution)
                shutil.copyfile(staging.files.log, log)
            self.store.discard(staging.path)
        return published

    def _publish_kind(self, kind: str, kinds: list[str], staging: Staging, publication: PublishedAs) -> Artifact:
        try:
            return self.store.publish(
                kind,
                self.key,
                staging.files.output(kind),
                stage=self.stage.name,
                version=self.stage.number,
                config=self.section,
                inputs=self.inputs,
                facts=staging.facts(kind),
                execution=publication.execution,
                fence=publication.fence,
                outputs=tuple(kinds),
                run=self.context.run_id,
                label=self.log.label,
                supersede=True,
                digests=staging.digests(kind),
            )
        except ConfigError:
            raise
        except ValueError as error:
            # The output cannot be an artifact, so the next attempt must work again instead of publishing it again.
            staging.mark_unfinished()
            raise StageCrash(f"its output {kind} cannot be published: {error}") from error
