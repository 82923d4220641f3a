"""Run a stage's fan-outs from the parent process: list the items, submit the unfinished ones, collect the results.

The marker files in the staging folder are the only persistent state: after a SIGKILL a new runner continues from them.
"""

import logging
import math
import os
import queue
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json
from nautile.configs.operation import LaunchConfig
from nautile.store.events import EventWriter, read_live
from nautile.store.layout import RUNNING_ITEMS, ChildFiles
from nautile.tasks.engine.child_process import (
    TICK_S,
    append_log,
    pause,
    raise_for_exit,
    run_child,
)
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.fanout.executor import Executor, ExecutorFactory
from nautile.tasks.engine.fanout.items import FanOut, Markers
from nautile.tasks.engine.fanout.work_item import WorkItem, lease

logger = logging.getLogger(__name__)

GIVE_UP = 3  # after so many items failed with all their retries, no more are submitted: the cause is not in the items
_POLL_S = 0.1


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
        if all(Markers.of(self.staging, fan_out.name).skipped is not None for fan_out in self.fan_outs):
            return
        # The lease is the inner context: closing the executor waits for running items, which end without the lease.
        with self.executors(self.launch) as executor, lease(self.staging, self.attempt):
            for fan_out in self.fan_outs:
                self._run(fan_out, executor)

    def _run(self, fan_out: FanOut, executor: Executor) -> None:
        markers = Markers.of(self.staging, fan_out.name)
        if markers.skipped is not None:
            return
        if markers.items is None:
            self._list_items(fan_out)
        item_pass = _Pass(fan_out, markers, self, executor)
        try:
            item_pass.run()
        except BaseException:
            # On a full disk the counts cannot be written either, which must not hide why the pass ended.
            with suppress(OSError):
                self._emit_counts(fan_out, item_pass)
            raise
        finally:
            self.peak_bytes = max(self.peak_bytes, item_pass.peak_bytes)
        self._emit_counts(fan_out, item_pass)
        # Only after a pass in which no item failed: with this file the fan-out is finished for good.
        markers.write_finished(item_pass.skipped)
        shutil.rmtree(markers.folder / RUNNING_ITEMS, ignore_errors=True)

    def _list_items(self, fan_out: FanOut) -> None:
        files = ChildFiles(self.staging)
        files.clear()
        note = {"note": f"{fan_out.name}: listing {fan_out.noun}"}
        exit_status = run_child(
            "nautile.tasks.engine.child_main",
            *(str(self.request_path), fan_out.name, "", "0", str(os.getpid())),
            log=files.log,
            store=self.request["store"],
            tick=lambda: self.on_progress(note | read_live(files.live)),
        )
        self.peak_bytes = max(self.peak_bytes, exit_status.peak_bytes)
        raise_for_exit(exit_status, files)

    def _emit_counts(self, fan_out: FanOut, item_pass: "_Pass") -> None:
        """Emit the numbers of items and of skipped items, and each skipped item with its reason."""
        events = Path(self.request["events"])
        path = events.with_name(f"{events.stem}-{fan_out.name}{events.suffix}")
        emit = EventWriter(path, self.request["execution"], stage=self.request["stage"])
        emit("metric", name=f"{fan_out.name}_items", step=0, value=len(item_pass.items))
        emit("metric", name=f"{fan_out.name}_skipped", step=0, value=len(item_pass.skipped))
        for item, message in item_pass.skipped.items():
            index = item_pass.items.index(item)
            emit("sample", set=f"{fan_out.name}: skipped", index=index, item=item, text=message)
        emit.close()


@dataclass
class _Pass:
    """One pass over the unfinished items of a fan-out."""

    fan_out: FanOut
    markers: Markers
    runner: FanOutRunner
    executor: Executor
    skipped: dict[str, str] = field(default_factory=dict)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    running: dict[str, tuple[WorkItem, Future[Any]]] = field(default_factory=dict)  # by the name of the item
    ended: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    peak_bytes: int = 0
    shown_at: float = -math.inf

    def __post_init__(self) -> None:
        self.items = self.markers.items or []
        self.done = self.markers.done()

    def run(self) -> None:
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
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)
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
