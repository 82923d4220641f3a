"""How the terminal, Prefect and tests hear what stages do: updates handed to listeners, in the stage's own thread."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger(__name__)

State = Literal["waiting", "running", "publishing", "reused", "done", "retrying", "failed", "cancelled"]


@dataclass(frozen=True)
class StageUpdate:
    """Where one use of a stage stands. `done` and `total` count `unit`s; None is "not known"."""

    stage: str
    label: str
    state: State
    key: str = ""
    run_id: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    note: str = ""
    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of each
    outputs: dict[str, str] = field(default_factory=dict)  # kind -> artifact id, once published
    attempt: int = 1
    seconds: float | None = None  # since this attempt started
    error: str | None = None
    time: float = field(default_factory=time.time)

    @property
    def share(self) -> float | None:
        """0..1, None while unknown."""
        return None if self.done is None or not self.total else min(1.0, max(0.0, self.done / self.total))


Listener = Callable[[StageUpdate], Any]

_listeners: list[Listener] = []
_lock = threading.Lock()


def subscribe(listener: Listener) -> Callable[[], None]:
    """Have `listener` called with every update of this process, from any thread. Returns what unsubscribes it."""
    with _lock:
        _listeners.append(listener)

    def unsubscribe() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)

    return unsubscribe


def notify(update: StageUpdate) -> None:
    """Hand `update` to the listeners. One that fails is logged: showing progress must not fail the work."""
    with _lock:
        listeners = tuple(_listeners)
    for listener in listeners:
        try:
            listener(update)
        except Exception:
            logger.warning("a progress listener failed on %s", update.label, exc_info=True)
