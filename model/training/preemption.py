"""SIGTERM handling: a preempted machine or a cancelled stage saves a checkpoint before it exits.

Of several processes one may get the signal before the others, but all must stop after the same step. So with several
processes JAX's preemption service catches the signal, and chooses a step that all of them have yet to reach.
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
    """Yield `stop_requested(done)`, which SIGTERM makes true, in every process after the same number of steps done.

    Call it after every step. Outside the main thread, which alone can handle signals, it is always false.
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
    """`termination` if there are several processes; with a single one SIGTERM is not handled and ends it as usual."""
    if jax.process_count() == 1:
        yield lambda _: False
        return
    with termination() as stop_requested:
        yield stop_requested
