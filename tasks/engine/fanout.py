"""Fan-outs: parts of a stage that run item by item, each item in its own process, here or on another host.

A stage declares its fan-outs; its parent process runs them in order before the stage's function: it lists the items,
submits the unfinished ones to an executor and collects the results. Marker files in the staging folder are the only
record of what is done, so any process that holds the key's lock can continue, with any number of workers:

    fan_outs/<fan-out>/list.json       the items, and the share of them that may be skipped; written once
                       done/<item>     marks a finished item
                       items/<item>/   a running item: live.json, log.txt, error.json
                       finished.json   marks a finished fan-out: the skipped items and why

An item can be restarted after a crash, and can even run twice at once (if its host counted as lost but still works). So
an item must write only its own files, each atomically, and the same bytes every time.

A work item names its attempt, and a lease file in the staging folder names the active attempt. When an attempt is over
(cancelled, failed, or replaced because its process died), the process of an item reads another lease or none, and ends
within a second, on whichever host it runs.
"""

import concurrent.futures
import json
import logging
import math
import os
import queue
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit
from nautile.common.files import read_json, write_json
from nautile.common.retry import retry
from nautile.configs.operation import LaunchConfig
from nautile.store.events import EventWriter, read_live
from nautile.store.layout import (
    DONE_ITEMS,
    FAN_OUTS,
    FINISHED,
    ITEM_LIST,
    LOG,
    RUNNING_ITEMS,
    SCRATCH,
    ChildFiles,
    StagingFiles,
)
from nautile.tasks.engine.child_process import (
    TICK_S,
    append_log,
    check_same_commit,
    pause,
    raise_for_exit,
    run_child,
)
from nautile.tasks.engine.errors import ITEM_BACKOFF, EndsStage, RetryPolicy, StageCancelled, StageCrash
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.ray_cluster import connected

logger = logging.getLogger(__name__)

_ITEM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
LOST_WORKERS = 4  # per item on a Ray cluster, before it counts as failed
_END_S = 30.0  # for the items of a cluster to end without their lease
GIVE_UP = 3  # after so many items failed with all their retries, no more are submitted: the cause is not in the items
_POLL_S = 0.1


@dataclass(frozen=True)
class FanOut:
    """A part of a stage whose items are independent: they run in any order, in any process, on any host.

    `list_items` returns the names of the items, which must be valid file names. It is called once, in a child process,
    and the result is stored. `work` processes one item: a `ConfigError` skips it with that message, other errors are
    retried. `skippable` is the share of items (0..1) that may be skipped before the stage fails. `reads` returns the
    files and folders of staging that an item reads, for hosts that share no disk.
    """

    name: str
    list_items: Callable[[Job], list[str]]
    work: Callable[[Job, str], None]
    skippable: Callable[[Job], float] = lambda _: 0.0
    noun: str = "files"  # the unit that progress shows
    reads: Callable[[str], tuple[str, ...]] = lambda _: (SCRATCH,)  # item -> its files and folders in staging


class Markers:
    """The marker files of one fan-out in a staging folder."""

    def __init__(self, staging: Path, fan_out: str) -> None:
        self.folder = StagingFiles(staging).fan_out(fan_out)

    @property
    def items(self) -> list[str] | None:
        """None until the items have been listed."""
        listing = read_json(self.folder / ITEM_LIST)
        return listing["items"] if isinstance(listing, dict) else None

    @property
    def skippable(self) -> float:
        """The share of the items that may be skipped."""
        listing = read_json(self.folder / ITEM_LIST)
        if listing is None:
            raise RuntimeError(f"{self.folder / ITEM_LIST} is missing or damaged")
        return listing["skippable"]

    @property
    def skipped(self) -> dict[str, str] | None:
        """Item -> why it was skipped; None until the fan-out is finished."""
        finished = read_json(self.folder / FINISHED)
        return finished["skipped"] if isinstance(finished, dict) else None

    def done(self) -> set[str]:
        folder = self.folder / DONE_ITEMS
        return {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()

    def marker(self, item: str) -> Path:
        return self.folder / DONE_ITEMS / item

    def item_folder(self, item: str) -> Path:
        return self.folder / RUNNING_ITEMS / item

    def write_finished(self, skipped: dict[str, str]) -> None:
        write_json(self.folder / FINISHED, {"skipped": skipped})


def finished_items(job: Job, fan_out: str) -> list[str]:
    """The items of a finished fan-out that were not skipped, in the order of its list."""
    skipped = skipped_items(job, fan_out)
    return [item for item in Markers(job.staging, fan_out).items or () if item not in skipped]


def skipped_items(job: Job, fan_out: str) -> dict[str, str]:
    """The skipped items of a finished fan-out: item -> message."""
    skipped = Markers(job.staging, fan_out).skipped
    if skipped is None:
        raise RuntimeError(f"stage {job.stage}: fan-out {fan_out!r} is not finished (or does not exist)")
    return skipped


def write_item_list(fan_out: FanOut, job: Job) -> None:
    """Call `fan_out.list_items` and store the result. Raises `RuntimeError` for names that are not valid file names."""
    items = list(fan_out.list_items(job))
    if invalid := [item for item in items if not _ITEM_NAME.fullmatch(item)]:
        raise RuntimeError(f"fan-out {fan_out.name}: {invalid[0]!r} is no valid file name ({len(invalid)} such items)")
    if len(set(items)) < len(items):
        raise RuntimeError(f"fan-out {fan_out.name}: its list names an item twice")
    skippable = float(fan_out.skippable(job))
    if not 0.0 <= skippable <= 1.0:
        raise RuntimeError(f"fan-out {fan_out.name}: the share that may be skipped is {skippable}, not within 0..1")
    folder = Markers(job.staging, fan_out.name).folder
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / ITEM_LIST, {"items": items, "skippable": skippable})


def process_item(fan_out: FanOut, job: Job, item: str) -> None:
    fan_out.work(job, item)
    marker = Markers(job.staging, fan_out.name).marker(item)
    marker.parent.mkdir(exist_ok=True)
    # Only now: all that the item writes is complete, and each file of it was renamed into place.
    write_json(marker, {})


def item_logs(staging: Path) -> list[Path]:
    return sorted(staging.glob(f"{FAN_OUTS}/*/{RUNNING_ITEMS}/*/{LOG}"))


def emit_with_source(emit: Emit, fan_out: str, item: str) -> Emit:
    """An `Emit` that sets the source of metrics to the item, so that items with equal names and steps stay apart."""

    def emit_item_event(kind: str, **fields: Any) -> None:
        if kind == "metric":
            fields.setdefault("source", f"{fan_out}/{item}")
        emit(kind, **fields)

    return emit_item_event


@dataclass(frozen=True)
class WorkItem:
    """One item of a fan-out, as plain values that any process with access to the store can use."""

    request: str  # path of the attempt's request.json
    attempt: int
    fan_out: str
    item: str
    slot: int  # unique among the items that run at the same time; part of the name of the event file
    url: str = ""  # of the store's remote, for a host that shares no disk (`tasks.engine.remote_child`)
    files: tuple[tuple[str, str], ...] = ()  # for such a host: files of the staging folder -> objects at the remote

    @property
    def staging(self) -> Path:
        return Path(self.request).parent

    def __str__(self) -> str:
        return f"{self.fan_out} {self.item}"


@dataclass(frozen=True)
class ItemResult:
    """The result of an item that did not fail: done, or skipped with a message."""

    skipped: str | None = None
    peak_bytes: int = 0
    files: tuple[tuple[str, str], ...] = ()  # from a host that shares no disk: files it wrote -> objects at the remote
    removed: tuple[str, ...] = ()  # likewise: files that it received and removed


def run_item(item: WorkItem) -> ItemResult:
    """Run the item, and again after failures that a retry may solve, as `RetryPolicy` with `ITEM_BACKOFF` says.

    Raises the last `Retryable` or `StageCrash`, `ConfigError` for errors that concern more than this item, and
    `StageCancelled`.
    """
    check_lease = partial(_check_lease, item)
    return with_retries(item, lambda: run_once(item, check_lease), check_lease)


def with_retries(item: WorkItem, run: Callable[[], ItemResult], check_lease: Callable[[], object]) -> ItemResult:
    def announce(error: Exception, attempt: int, pause_s: float) -> None:
        logger.warning("%s failed, and is retried in %.0f s: %s", item, pause_s, error)

    def sleep(seconds: float) -> None:
        until = time.monotonic() + seconds
        while (remaining_s := until - time.monotonic()) > 0:
            # In small steps, so that an attempt that ends meanwhile ends this pause too.
            pause(min(remaining_s, 0.3))
            check_lease()

    should_retry = RetryPolicy(ITEM_BACKOFF).should_retry
    return retry(run, ITEM_BACKOFF, should_retry=should_retry, before_pause=announce, sleep=sleep)


def run_once(item: WorkItem, check_lease: Callable[[], object]) -> ItemResult:
    """Run the item once. `check_lease` raises `StageCancelled` once the item's attempt is over."""
    check_lease()
    markers = Markers(item.staging, item.fan_out)
    if markers.marker(item.item).exists():
        return ItemResult()  # an earlier try had finished, but its result was lost

    files = ChildFiles(markers.item_folder(item.item))
    files.folder.mkdir(parents=True, exist_ok=True)
    files.clear()
    request = json.loads(Path(item.request).read_text(encoding="utf-8"))
    check_same_commit(request)
    exit_status = run_child(
        "nautile.tasks.engine.child_main",
        *(item.request, item.fan_out, item.item, str(item.slot), str(os.getpid())),
        log=files.log,
        store=request["store"],
        tick=check_lease,
        finished=lambda: markers.marker(item.item).exists(),
    )
    try:
        raise_for_exit(exit_status, files)
    except EndsStage:
        raise
    except ConfigError as error:
        return ItemResult(str(error), exit_status.peak_bytes)
    return ItemResult(None, exit_status.peak_bytes)


@contextmanager
def lease(staging: Path, attempt: int) -> Iterator[None]:
    """Make `attempt` the active one: only its items may run. At the end of the block running items end, on any host."""
    path = StagingFiles(staging).lease
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"attempt": attempt})
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _check_lease(item: WorkItem) -> None:
    active = read_json(StagingFiles(item.staging).lease)
    if active is None and not item.staging.exists() and not item.staging.parent.exists():
        raise ConfigError(
            f"{item.staging} does not exist on this host: with several hosts the store (NAUTILE_STORE) must lie on a "
            "file system that all of them share, under the same path"
        )
    if active != {"attempt": item.attempt}:
        raise StageCancelled(f"{item}: its attempt is over")


@dataclass(frozen=True)
class Executor:
    """Runs work items, at most `capacity()` at a time. `result` is called once the item's future is done."""

    submit: Callable[[WorkItem], Future[Any]]
    capacity: Callable[[], int]
    result: Callable[[WorkItem, Future[Any]], ItemResult] = lambda item, future: future.result()


ExecutorFactory = Callable[[LaunchConfig], AbstractContextManager[Executor]]


def local_workers(launch: LaunchConfig) -> int:
    """`launch.workers`; by default one per core that this process may use."""
    if launch.workers is not None:
        return launch.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Run items in child processes of this one."""
    workers = local_workers(launch)
    with ThreadPoolExecutor(workers, "work-item") as pool:
        # Leaving the block waits for the running items; they end as soon as their lease is gone.
        # In the context of the run, with which they are cancelled.
        yield Executor(lambda item: pool.submit(copy_context().run, run_item, item), lambda: workers)


@contextmanager
def ray_executor(launch: LaunchConfig, run: Callable[[WorkItem], ItemResult] = run_item) -> Iterator[Executor]:
    """Run items on the existing Ray cluster. Raises `ConfigError` if none answers.

    A worker runs `run` in its process, and so the item in a child process, as a local thread would. When a worker dies,
    its child ends too, and Ray assigns the item to another worker.
    """
    with connected(launch):
        import ray  # an optional extra

        # A core for each item, spread over the hosts, so that they share network and disks. `run` retries failures, Ray
        # only lost workers.
        options: dict[str, Any] = {"num_cpus": 1, "max_retries": LOST_WORKERS, "scheduling_strategy": "SPREAD"}
        remote = ray.remote(**options)(_outcome)
        running: set[Future[Any]] = set()

        def submit(item: WorkItem) -> Future[Any]:
            future: Future[Any] = remote.remote(run, item).future()
            running.add(future)
            return future

        def capacity() -> int:
            # Queried for each item, so that hosts which join the cluster later get work.
            return launch.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

        def result(item: WorkItem, future: Future[Any]) -> ItemResult:
            running.discard(future)
            outcome = future.result()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        try:
            yield Executor(submit, capacity, result)
        finally:
            concurrent.futures.wait(running, _END_S)


def _outcome(run: Callable[[WorkItem], ItemResult], item: WorkItem) -> ItemResult | BaseException:
    """The result of an item or its error, as a value: raised, Ray would wrap it in an error of its own."""
    try:
        return run(item)
    except BaseException as error:
        return error


@dataclass
class FanOutRunner:
    """Run the unfinished items of a stage's fan-outs in one attempt.

    `on_progress` is called with the values of live.json (done, total, unit, note) as the children write them.
    """

    fan_outs: Sequence[FanOut]
    request_path: Path
    attempt: int
    launch: LaunchConfig
    executors: ExecutorFactory
    on_progress: Callable[[dict[str, Any]], object]
    peak_bytes: int = 0
    request: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.request = read_json(self.request_path) or {}

    @property
    def staging(self) -> Path:
        return self.request_path.parent

    def run(self) -> None:
        """Run all fan-outs in order.

        Raises `ConfigError` if too many items are skipped; otherwise the first failure, once the other items are done.
        """
        unfinished = [fan_out for fan_out in self.fan_outs if Markers(self.staging, fan_out.name).skipped is None]
        if not unfinished:
            return
        # The lease is the inner context: closing the executor waits for running items, which end without the lease.
        with self.executors(self.launch) as executor, lease(self.staging, self.attempt):
            for fan_out in unfinished:
                _Pass(fan_out, self, executor).run()


@dataclass
class _Pass:
    """The unfinished items of one fan-out."""

    fan_out: FanOut
    runner: FanOutRunner
    executor: Executor
    skipped: dict[str, str] = field(default_factory=dict)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    running: dict[str, tuple[WorkItem, Future[Any]]] = field(default_factory=dict)  # by the name of the item
    ended: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    shown_at: float = -math.inf

    def __post_init__(self) -> None:
        self.markers = Markers(self.runner.staging, self.fan_out.name)

    def run(self) -> None:
        if self.markers.items is None:
            self._list_items()
        self.items, self.done = self.markers.items or [], self.markers.done()
        try:
            self._run_items()
        except BaseException:
            # On a full disk the counts cannot be written either, which must not hide why the pass ended.
            with suppress(OSError):
                self._emit_counts()
            raise
        self._emit_counts()
        # Only after a pass in which no item failed: with this file the fan-out is finished for good.
        self.markers.write_finished(self.skipped)
        shutil.rmtree(self.markers.folder / RUNNING_ITEMS, ignore_errors=True)

    def _list_items(self) -> None:
        runner, files = self.runner, ChildFiles(self.runner.staging)
        files.clear()
        note = {"note": f"{self.fan_out.name}: listing {self.fan_out.noun}"}
        exit_status = run_child(
            "nautile.tasks.engine.child_main",
            *(str(runner.request_path), self.fan_out.name, "", "0", str(os.getpid())),
            log=files.log,
            store=runner.request["store"],
            tick=lambda: runner.on_progress(note | read_live(files.live)),
        )
        runner.peak_bytes = max(runner.peak_bytes, exit_status.peak_bytes)
        raise_for_exit(exit_status, files)

    def _emit_counts(self) -> None:
        """Emit the numbers of items and of skipped items, and each skipped item with its reason."""
        request, name = self.runner.request, self.fan_out.name
        events = Path(request["events"])
        path = events.with_name(f"{events.stem}-{name}{events.suffix}")
        emit = EventWriter(path, request["execution"], stage=request["stage"])
        emit("metric", name=f"{name}_items", step=0, value=len(self.items))
        emit("metric", name=f"{name}_skipped", step=0, value=len(self.skipped))
        for item, message in self.skipped.items():
            emit("sample", set=f"{name}: skipped", index=self.items.index(item), item=item, text=message)
        emit.close()

    def _run_items(self) -> None:
        # Reversed, so that `pop` takes the items in the order of the list.
        pending = [item for item in reversed(self.items) if item not in self.done]
        while True:
            # Keep the executor full; after `GIVE_UP` failures only wait for the running items.
            while pending and len(self.failed) < GIVE_UP and len(self.running) < self.executor.capacity():
                self._submit(pending.pop())
            if not self.running:
                break
            pause(0.0)  # raises if the run is cancelled
            self._show()
            try:
                item = self.ended.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self._collect(item)
        self._show(now=True)
        if self.failed:
            self._raise_failure()

    def _submit(self, item: str) -> None:
        used_slots = {other.slot for other, _ in self.running.values()}
        # The lowest free number: it names the item's event file, of which there are then as many as items at a time.
        slot = next(number for number in range(1, len(used_slots) + 2) if number not in used_slots)
        work_item = WorkItem(str(self.runner.request_path), self.runner.attempt, self.fan_out.name, item, slot)
        future = self.executor.submit(work_item)
        self.running[item] = (work_item, future)
        # The callback may run in any thread, so it only puts the name into a queue that this thread reads.
        future.add_done_callback(lambda _: self.ended.put(item))

    def _collect(self, item: str) -> None:
        """Take the result of an item that has ended.

        Raises `ConfigError` if the fan-out cannot succeed any more: too many skipped items, or an error of the store.
        """
        try:
            result = self.executor.result(*self.running.pop(item))
        except ConfigError:
            raise
        except Exception as error:
            pause(0.0)  # an item that was cancelled with the run is no failure
            logger.warning("%s %s failed: %s", self.fan_out.name, item, error)
            self.failed.append((item, error))
            return
        self.runner.peak_bytes = max(self.runner.peak_bytes, result.peak_bytes)
        # Append the item's log to the stage's and remove its folder.
        folder = self.markers.item_folder(item)
        stage_log = ChildFiles(self.runner.staging).log
        append_log(ChildFiles(folder).log, stage_log, f"{self.fan_out.name} {item}")
        shutil.rmtree(folder, ignore_errors=True)
        if result.skipped is None:
            self.done.add(item)
            return
        logger.warning("%s: %s is skipped: %s", self.fan_out.name, item, result.skipped)
        self.skipped[item] = result.skipped
        share = self.markers.skippable
        if len(self.skipped) > share * len(self.items):
            first, message = next(iter(self.skipped.items()))
            raise ConfigError(
                f"{message} ({first} is the first of {len(self.skipped)} of {len(self.items)} {self.fan_out.noun} "
                f"skipped in {self.fan_out.name}; at most a share of {share:.3g} may be)"
            )

    def _raise_failure(self) -> None:
        item, error = self.failed[0]
        # The first failure stands for all; the message says how much is left, because a retry continues there.
        remaining = len(self.items) - len(self.done) - len(self.skipped)
        prefix = f"{self.fan_out.name}: {remaining} of {len(self.items)} {self.fan_out.noun} left; {item}: "
        if isinstance(error, Retryable):
            raise Retryable(f"{prefix}{error}") from error
        if isinstance(error, StageCrash):
            raise error.prefixed(prefix) from error
        raise StageCrash(f"{prefix}{error}") from error

    def _show(self, *, now: bool = False) -> None:
        """Report the number of finished items plus the completed shares of the running items."""
        moment = time.monotonic()
        # Reading the progress of many running items takes time, so the interval grows with their number.
        if not now and moment - self.shown_at < max(TICK_S, 0.01 * len(self.running)):
            return
        self.shown_at = moment
        reports = [read_live(ChildFiles(self.markers.item_folder(item)).live) for item in self.running]
        shares = sum(
            min(1.0, max(0.0, (report.get("done") or 0.0) / (report.get("total") or math.inf))) for report in reports
        )
        note = f"{self.fan_out.name}, {len(self.skipped)} skipped" if self.skipped else self.fan_out.name
        count = len(self.done) + len(self.skipped) + shares
        fields = {"done": count, "total": len(self.items), "unit": self.fan_out.noun, "note": note}
        self.runner.on_progress(fields | {"phase": self.fan_out.name})
