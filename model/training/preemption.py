"""SIGTERM as a request: a preempted machine or a cancelled stage lets the loop save before it ends.

With several processes one of them may be told first, and all must stop after the same step: JAX's preemption service
catches the signal then, and has every process hear of it at one step that all still have before them.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils

Asked = Callable[[int], bool]


@contextmanager
def termination() -> Iterator[Asked]:
    """Within, SIGTERM only makes `asked(done)` true, in every process for the same number of steps done.

    It is to be asked after every step. Outside the main thread signals are not ours: it stays false.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: told.is_set()
        return

    def tell(_signal: int, _frame: FrameType | None) -> None:
        told.set()

    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield lambda _: told.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
