"""Threads that start XLA programs, so that two run at a time on CPU.

On CPU XLA runs the programs started by one thread one after the other, and those of two threads at the same time: two
cores stay busy with programs that do not divide over them. On an accelerator this gains nothing. Speeds are measured
with a clock that excludes the time a thread spends on tracing and compiling.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

Result = TypeVar("Result")

COMPILING = "/jax/core/compile/"  # JAX's events of tracing, lowering, and compiling or loading a program


class _Spans(threading.local):
    """Each thread's compilation spans (start, end), which do not overlap."""

    def __init__(self) -> None:
        self.all: list[tuple[float, float]] = []


_spans = _Spans()


def working_seconds() -> float:
    """A clock of the calling thread, in seconds, that stops while it traces and compiles; use only differences."""
    return time.perf_counter() - sum(end - start for start, end in _spans.all)


def counted_for_caller(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `function` for another thread to call while this one waits: its compilations stop this thread's clock."""
    spans = _spans.all

    def call(*arguments: Any) -> Result:
        _spans.all = spans
        return function(*arguments)

    return call


def _record(event: str, start_time: float, end_time: float, **_: str | int) -> None:
    if event.startswith(COMPILING):
        # Traces nest, and JAX reports the inner span first: the outer one replaces it.
        while _spans.all and _spans.all[-1][0] >= start_time:
            _spans.all.pop()
        _spans.all.append((start_time, end_time))


jax.monitoring.register_event_time_span_listener(_record)


CPU_THREADS = 2


def program_threads(mesh: Mesh | None, platform: str) -> list[Callable[..., Any]]:
    """Two functions for a single CPU device, else none: on several devices programs already run concurrently.

    Each calls a jitted function in a thread of its own, and returns its arrays, which may still be computing.
    Compilations there count as the caller's.
    """
    if platform != "cpu" or (mesh is not None and mesh.size > 1):
        return []
    return [_thread() for _ in range(CPU_THREADS)]


def _thread() -> Callable[..., Any]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="programs")
    return lambda function, *arguments: executor.submit(counted_for_caller(function), *arguments).result()
