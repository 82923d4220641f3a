"""Run one work item in a child process of the current one: the parent of a stage, or a Ray worker on another host.

A work item names its attempt, and a lease file in the staging folder names the active attempt. When an attempt is over
(cancelled, failed, or replaced because its process died), the process of an item reads another lease or none, and ends
within a second, on whichever host it runs.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.common.retry import retry
from nautile.store.layout import ChildFiles, StagingFiles
from nautile.store.manifest import code_commit, host
from nautile.tasks.engine.child_process import pause, raise_for_exit, run_child
from nautile.tasks.engine.errors import ITEM_BACKOFF, NotWritable, RetryPolicy, StageCancelled
from nautile.tasks.engine.fanout.items import Markers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkItem:
    """One item of a fan-out, as plain values that any process with access to the store can use."""

    request: str  # path of the attempt's request.json
    attempt: int
    fan_out: str
    item: str
    slot: int  # unique among the items that run at the same time; part of the name of the event file
    url: str = ""  # of the store's remote, for a host that shares no disk (`tasks.engine.fanout.own_disk`)
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
    """Call `run` until it returns a result, or fails for good."""

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
    markers = Markers.of(item.staging, item.fan_out)
    if markers.is_done(item.item):
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
        finished=lambda: markers.is_done(item.item),
    )
    try:
        raise_for_exit(exit_status, files)
    # A full disk concerns every item: it must not count as a reason to skip this one.
    except NotWritable:
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


def check_same_commit(request: dict[str, Any]) -> None:
    """Raise `ConfigError` on a host with another commit, because output must not depend on the host."""
    # On the run's own host the code may be edited while it runs, so it is not checked there.
    if request["host"] != host() and request["commit"] != code_commit():
        raise ConfigError(
            f"host {host()} has commit {code_commit() or 'unknown'} of this code, but the run's host {request['host']} "
            f"has {request['commit'] or 'unknown'}: install the same commit on every host of the cluster"
        )
