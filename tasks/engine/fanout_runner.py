"""The rounds of one attempt, seen from its parent: list, hand out what is not done yet, hear how each unit ended.

The staging folder is the memory: nothing here is needed to go on after a `kill -9`.
"""

import logging
import math
import os
import queue
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import read_json
from configs.operation import LaunchConfig
from store.events import EventWriter, read_live
from tasks.engine.child_process import TICK_S, command, environment, merged, pause, raise_for_exit, run_child
from tasks.engine.errors import StageCrash
from tasks.engine.executors import Executor, ExecutorFactory, Future
from tasks.engine.fanout import FanOut, Markers
from tasks.engine.fanout_item import WorkItem, open_lease, revoke_lease
from tasks.engine.staging import Staging

logger = logging.getLogger(__name__)

GIVE_UP = 3  # units that failed for good, retries included: then it is hardly for the units' sake
_POLL_S = 0.1


@dataclass
class FanOutRunner:
    """Does what is left of `rounds`. `hear` is given live values (done, total, unit, note) as a child writes them."""

    rounds: Sequence[FanOut]
    space: Staging
    request: Path
    launch: LaunchConfig
    crews: ExecutorFactory
    hear: Callable[[dict[str, Any]], object]
    peak_bytes: int = 0

    def run(self) -> None:
        """Raises `ConfigError` if too much is set aside, and what the units failed with, once the others are done."""
        staging = self.space.path
        if all(Markers.of(staging, step.name).settled is not None for step in self.rounds):
            return
        open_lease(staging, self.space.attempt)
        try:
            with self.crews(self.launch) as crew:
                try:
                    for step in self.rounds:
                        self._round(step, crew)
                finally:
                    revoke_lease(staging)  # the crew waits for units under way: they see it, and end
        finally:
            revoke_lease(staging)

    def _round(self, step: FanOut, crew: Executor) -> None:
        place = Markers.of(self.space.path, step.name)
        if place.settled is not None:
            return
        if place.listing is None:
            self._list(step)
        sweep = _Pass(step, place, self, crew)
        try:
            sweep.run()
        finally:
            self.peak_bytes = max(self.peak_bytes, sweep.peak_bytes)
            self._tell(step, sweep)
        place.settle(sweep.aside)
        shutil.rmtree(place.folder / "work", ignore_errors=True)

    def _list(self, step: FanOut) -> None:
        traces = self.space.traces
        traces.forget()
        request = read_json(self.request) or {}
        ended = run_child(
            command("tasks.engine.child_main", str(self.request), step.name, "", "0", str(os.getpid())),
            log=traces.log,
            environment=environment(request["store"], accelerator=False),
            tick=lambda: self.hear({"note": f"{step.name}: listing {step.noun}"} | read_live(traces.live)),
        )
        self.peak_bytes = max(self.peak_bytes, ended.peak_bytes)
        raise_for_exit(ended, traces, f"list of {step.name}")

    def _tell(self, step: FanOut, sweep: "_Pass") -> None:
        """Events of the parent's own: how many units there were, and each that was set aside with its reason."""
        request = read_json(self.request) or {}
        events = Path(request["events"])
        path = events.with_name(f"{events.stem}-{step.name}{events.suffix}")
        emit = EventWriter(path, request["execution"], stage=request["stage"])
        emit("metric", name=f"{step.name}_units", step=0, value=len(sweep.units))
        emit("metric", name=f"{step.name}_set_aside", step=0, value=len(sweep.aside))
        for unit, message in sweep.aside.items():
            emit("sample", set=f"{step.name}: set aside", index=sweep.units.index(unit), unit=unit, text=message)
        emit.close()


@dataclass
class _Pass:
    """One pass over the units of a round that are not done."""

    step: FanOut
    place: Markers
    effort: FanOutRunner
    crew: Executor
    units: list[str] = field(init=False)
    tolerated: float = field(init=False)
    done: set[str] = field(init=False)
    aside: dict[str, str] = field(default_factory=dict)
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    under_way: dict[str, tuple[Future, int]] = field(default_factory=dict)
    ended: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    peak_bytes: int = 0
    shown_at: float = -math.inf

    def __post_init__(self) -> None:
        listing = self.place.listing or {}
        self.units, self.tolerated = listing["units"], listing["tolerated"]
        self.done = self.place.done()

    def run(self) -> None:
        todo = [unit for unit in reversed(self.units) if unit not in self.done]
        while True:
            while todo and len(self.failed) < GIVE_UP and len(self.under_way) < self.crew.room():
                self._start(todo.pop())
            if not self.under_way:
                break
            pause(0.0)
            self._show()
            try:
                unit = self.ended.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self._take(unit)
        self._show(now=True)
        if self.failed:
            unit, error = self.failed[0]
            left = len(self.units) - len(self.done) - len(self.aside)
            kind = Retryable if isinstance(error, Retryable) else StageCrash
            raise kind(
                f"{self.step.name}: {left} of {len(self.units)} {self.step.noun} left; {unit}: {error}"
            ) from error

    def _start(self, unit: str) -> None:
        taken = {slot for _, slot in self.under_way.values()}
        slot = next(number for number in range(1, len(taken) + 2) if number not in taken)
        order = WorkItem(str(self.effort.request), self.effort.space.attempt, self.step.name, unit, slot)
        flight = self.crew.submit(order)
        self.under_way[unit] = (flight, slot)
        flight.add_done_callback(lambda _: self.ended.put(unit))

    def _take(self, unit: str) -> None:
        flight, _ = self.under_way.pop(unit)
        try:
            outcome = flight.result()
        except ConfigError:
            raise
        except Exception as error:
            logger.warning("%s %s failed: %s", self.step.name, unit, error)
            self.failed.append((unit, error))
            return
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        folder = self.place.work(unit)
        merged(folder / "log.txt", self.effort.space.traces.log, f"{self.step.name} {unit}")
        shutil.rmtree(folder, ignore_errors=True)
        if outcome.set_aside is None:
            self.done.add(unit)
            return
        logger.warning("%s: %s is set aside: %s", self.step.name, unit, outcome.set_aside)
        self.aside[unit] = outcome.set_aside
        if len(self.aside) > self.tolerated * len(self.units):
            first, message = next(iter(self.aside.items()))
            raise ConfigError(
                f"{message} ({first} is the first of {len(self.aside)} of {len(self.units)} {self.step.noun} set aside "
                f"in {self.step.name}, and at most {self.tolerated:.3g} of them may be)"
            )

    def _show(self, *, now: bool = False) -> None:
        """Units done, and the shares of those under way. Many of them are looked at less often."""
        moment = time.monotonic()
        if not now and moment - self.shown_at < max(TICK_S, 0.01 * len(self.under_way)):
            return
        self.shown_at = moment
        part = sum(_share(read_live(self.place.work(unit) / "live.json")) for unit in self.under_way)
        note = f"{self.step.name}, {len(self.aside)} set aside" if self.aside else self.step.name
        done = len(self.done) + len(self.aside) + part
        self.effort.hear({"done": done, "total": len(self.units), "unit": self.step.noun, "note": note})


def _share(live: dict[str, Any]) -> float:
    done, total = live.get("done"), live.get("total")
    return min(1.0, max(0.0, done / total)) if done and total else 0.0
