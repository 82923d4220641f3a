"""SIGTERM handling: a preempted machine or a cancelled stage saves a checkpoint before it ends.

With several processes one may get the signal before the others, and all must stop after the same step: JAX's preemption
service catches the signal then, and makes every process stop at a step that all of them still have ahead.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils

StopRequested = Callable[[int], bool]


@contextmanager
def termination() -> Iterator[StopRequested]:
    """In the block, SIGTERM only makes `stop_requested(done)` true, in every process for the same number of steps done.

    Call it after every step. Only the main thread can handle signals: in any other it stays false.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: received.is_set()
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        received.set()

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda _: received.is_set()
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def joint_termination() -> Iterator[StopRequested]:
    """As `termination` for several processes; with a single one SIGTERM keeps its meaning, and nothing is requested."""
    if jax.process_count() == 1:
        yield lambda _: False
        return
    with termination() as stop_requested:
        yield stop_requested
