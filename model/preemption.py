"""SIGTERM as a request: a preempted machine or a cancelled stage lets the loop save before it ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination() -> Iterator[threading.Event]:
    """Within, SIGTERM only sets the event given back. Outside the main thread signals are not ours: it stays unset."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(_signal: int, _frame: FrameType | None) -> None:
        asked.set()

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
