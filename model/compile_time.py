"""A clock that excludes the time a thread spends on tracing and compiling, to measure speeds."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

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
