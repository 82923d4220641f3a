"""What a stage's processes use of the machine, reported while they work: memory, cores, device memory, free disk.

The measurements have an event file of their own: they are no progress of the stage and stand in no live display.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from common.processes import thread_beside
from store.events import EventWriter

EVERY_S = 5.0  # at first
MOST_POINTS = 500  # then ever more seldom, so that a run of days adds a few thousand rows and not a million


@contextmanager
def usage_reported(request: dict[str, Any], source: str | None = None) -> Iterator[None]:
    """Report the usage of this process and its children to the request's events until the block ends.

    The step of a measurement is the seconds since the execution began, so that a resumed stage continues its curves.
    `source`: the worker, where a stage has several. Work that ends before the first measurement leaves no file.
    """
    with thread_beside("usage", _report, request, source):
        yield


def _report(request: dict[str, Any], source: str | None, stop: threading.Event) -> None:
    # A full disk ends the stage by its own writes, with a message; a measurement is not worth one.
    with suppress(OSError), ExitStack() as at_end:
        _measure_until(stop, request, source, at_end)


def _measure_until(stop: threading.Event, request: dict[str, Any], source: str | None, at_end: ExitStack) -> None:
    events, store = Path(request["events"]), Path(request["store"])
    suffix = "usage" if source is None else f"{source.replace(' ', '-')}-usage"
    path = events.with_name(f"{events.stem}-{suffix}{events.suffix}")
    begun_file = Path(request["staging"]) / "execution.json"
    begun = begun_file.stat().st_mtime if begun_file.exists() else time.time()
    emit: EventWriter | None = None
    started = last = time.monotonic()
    seconds = _tree_usage()[1]
    while not stop.wait(max(EVERY_S, (last - started) / MOST_POINTS)):
        now = time.monotonic()
        resident, total = _tree_usage()
        figures = {
            "system/memory_bytes": resident,
            "system/cpu_cores": max(0.0, total - seconds) / (now - last),
            "system/device_bytes": _device_memory(),
            "system/store_free_bytes": psutil.disk_usage(str(store)).free,
        }
        last, seconds = now, total
        if emit is None:
            emit = EventWriter(path, request["execution"], stage=request["stage"])
            at_end.callback(emit.close)
        step = max(0, int(time.time() - begun))
        rows = [{"name": name, "step": step, "value": value} for name, value in figures.items() if value is not None]
        emit.many("metric", [row if source is None else {**row, "source": source} for row in rows])


def _tree_usage() -> tuple[int, float]:
    """Resident bytes and processor seconds of this process and all below it, as far as they still run."""
    resident, seconds = 0, 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            with process.oneshot():
                resident += process.memory_info().rss
                times = process.cpu_times()
        except psutil.Error:
            continue  # it ended meanwhile
        seconds += times.user + times.system
    return resident, seconds


def _device_memory() -> int | None:
    """Bytes in use on the first device; None if it does not say, or if this process has not started its devices."""
    # Asking JAX for its devices would start them, in a process that may never need them.
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        return None
    statistics = sys.modules["jax"].local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_in_use")
