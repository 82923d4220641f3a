"""One unit of a round, done in a child process of whichever process was given the order: a thread here, a Ray worker.

The order says which attempt it belongs to. Once that attempt is over (cancelled, failed, its process dead and another
at work) the unit ends by itself within a second, wherever it is: it looks at a file of the staging folder as it goes.
"""

import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import read_json, write_json
from store.manifest import code_commit, host
from tasks.engine.child_process import ChildFiles, command, environment, pause, raise_for_exit, run_child
from tasks.engine.errors import StageCancelled
from tasks.engine.fanout import Markers

RETRY_AFTER_S = (2.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class WorkItem:
    """One unit to be done, as any process that shares the store can be told of it."""

    request: str  # the path of the attempt's request
    attempt: int
    step: str  # the round
    unit: str
    slot: int  # no two units under way have the same; it names the event file

    @property
    def staging(self) -> Path:
        return Path(self.request).parent

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ItemResult:
    """How a unit ended, if it did not fail: done, or set aside with a message."""

    set_aside: str | None = None
    peak_bytes: int = 0


def run_item(order: WorkItem, before: int = 0) -> ItemResult:
    """Do the unit; `before` is how often that was tried, which is waited for accordingly.

    Raises `Retryable` and `StageCrash` for what may pass, `ConfigError` for what concerns more than this unit, and
    `StageCancelled`.
    """
    _check_order(order)
    if before:
        _wait(order, RETRY_AFTER_S[min(before, len(RETRY_AFTER_S)) - 1] * random.uniform(1.0, 1.5))
    place = Markers.of(order.staging, order.step)
    if (place.folder / "done" / order.unit).exists():
        return ItemResult()  # its process was lost after the last write
    traces = ChildFiles(place.work(order.unit))
    traces.folder.mkdir(parents=True, exist_ok=True)
    traces.forget()
    request = json.loads(Path(order.request).read_text(encoding="utf-8"))
    _check_code(request)
    arguments = (order.request, order.step, order.unit, str(order.slot), str(os.getpid()))
    ended = run_child(
        command("tasks.engine.child_main", *arguments),
        log=traces.log,
        environment=environment(request["store"], accelerator=False),
        tick=lambda: _check_order(order),
        finished=lambda: (place.folder / "done" / order.unit).exists(),
    )
    try:
        raise_for_exit(ended, traces, f"{order.step} {order.unit}")
    except ConfigError as error:
        if traces.of_the_store():
            raise
        return ItemResult(str(error), ended.peak_bytes)
    return ItemResult(None, ended.peak_bytes)


def open_lease(staging: Path, attempt: int) -> None:
    """From now on the orders of `attempt` hold, and no others."""
    (staging / "rounds").mkdir(exist_ok=True)
    write_json(staging / "rounds" / "attempt.json", {"attempt": attempt})


def revoke_lease(staging: Path) -> None:
    """End every unit that is under way, on whichever host."""
    (staging / "rounds" / "attempt.json").unlink(missing_ok=True)


def _check_order(order: WorkItem) -> None:
    found = read_json(order.staging / "rounds" / "attempt.json")
    if found is None and not order.staging.exists() and not order.staging.parent.exists():
        raise ConfigError(
            f"{order.staging} is not there on this host: with several hosts the store (NAUTILE_STORE) must lie on a "
            "file system that all of them share, under the same path"
        )
    if found != {"attempt": order.attempt}:
        raise StageCancelled(f"{order.step} {order.unit}: its attempt is over")


def _check_code(request: dict[str, Any]) -> None:
    """Bytes must not depend on the host. On the run's own host the code may be edited while it runs."""
    if request["host"] != host() and request["commit"] != code_commit():
        raise ConfigError(
            f"host {host()} has commit {code_commit() or 'unknown'} of this code, and the run's host {request['host']} "
            f"has {request['commit'] or 'unknown'}: install the same on every host of the cluster"
        )


def _wait(order: WorkItem, seconds: float) -> None:
    """Between two tries. Not Prefect's own waiting, which nothing can interrupt."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        pause(min(left, 0.3))
        _check_order(order)
