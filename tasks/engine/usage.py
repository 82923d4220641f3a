"""Report the resource usage of a stage's processes while they work: memory, cores, device memory, free disk.

The measurements go to a separate event file, because they are not progress of the stage and no live display shows them.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from nautile.common.processes import thread_beside
from nautile.store.events import EventWriter

EVERY_S = 5.0  # interval at first
MOST_POINTS = 500  # then the interval is 1/500 of the elapsed time, so that days of work add few rows


@contextmanager
def usage_reported(request: dict[str, Any], source: str | None = None) -> Iterator[None]:
    """Emit the usage of this process and its children to the request's events until the block ends.

    The step of a measurement is the number of seconds since the execution began, so a resumed stage continues its
    curves. `source`: name of the worker, if the stage has several. Work that ends before the first measurement leaves
    no file.
    """
    with thread_beside("usage", _report, request, source):
        yield


def _report(request: dict[str, Any], source: str | None, stop: threading.Event) -> None:
    # On a full disk the stage's own writes fail with a message; a lost measurement needs none.
    with suppress(OSError), ExitStack() as at_end:
        _measure_until(stop, request, source, at_end)


def _measure_until(stop: threading.Event, request: dict[str, Any], source: str | None, at_end: ExitStack) -> None:
    events, store = Path(request["events"]), Path(request["store"])
    suffix = "usage" if source is None else f"{source.replace(' ', '-')}-usage"
    path = events.with_name(f"{events.stem}-{suffix}{events.suffix}")
    execution_start = request.get("began", time.time())
    emit: EventWriter | None = None  # opened with the first measurement
    start = last = time.monotonic()
    # Rates are differences from here on: what the process used to start up is in none of them.
    last_cpu_s = _tree_usage()[1]
    while not stop.wait(max(EVERY_S, (last - start) / MOST_POINTS)):
        now = time.monotonic()
        resident, cpu_s = _tree_usage()
        figures = {
            "system/memory_bytes": resident,
            "system/cpu_cores": max(0.0, cpu_s - last_cpu_s) / (now - last),
            "system/device_bytes": _device_memory(),
            "system/store_free_bytes": psutil.disk_usage(str(store)).free,
        }
        last, last_cpu_s = now, cpu_s
        if emit is None:
            emit = EventWriter(path, request["execution"], stage=request["stage"])
            at_end.callback(emit.close)
        step = max(0, int(time.time() - execution_start))
        rows = [{"name": name, "step": step, "value": value} for name, value in figures.items() if value is not None]
        emit.many("metric", [row if source is None else {**row, "source": source} for row in rows])


def _tree_usage() -> tuple[int, float]:
    """Resident bytes and CPU seconds of this process and its running descendants."""
    resident, seconds = 0, 0.0
    root = psutil.Process()
    for process in (root, *root.children(recursive=True)):
        try:
            with process.oneshot():
                resident += process.memory_info().rss
                times = process.cpu_times()
        except psutil.Error:
            continue  # the process has ended meanwhile
        seconds += times.user + times.system
    return resident, seconds


def _device_memory() -> int | None:
    """Bytes in use on the first device; None if the backend does not report them or is not initialised here."""
    # `jax.local_devices()` would initialise the backend, in a process that may never need it.
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        return None
    statistics = sys.modules["jax"].local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_in_use")
