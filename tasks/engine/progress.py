"""How the terminal, Prefect and tests hear what stages do: updates handed to listeners, in the stage's own thread."""

import logging
import threading
import time
from collections import deque
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
    failure: str = ""  # of an attempt that failed: the whole account, as markdown
    time: float = field(default_factory=time.time)

    @property
    def share(self) -> float | None:
        """0..1, None while unknown."""
        return None if self.done is None or not self.total else min(1.0, max(0.0, self.done / self.total))


RATE_WINDOW_S = 30.0


class RateMeter:
    """How fast a count rises, over the last half minute; over longer if it has risen only once in that time.

    Files of five minutes each must not show a rate that comes and goes.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, float]] = deque(maxlen=256)
        self._unit = ""

    def begin(self) -> None:
        """Forget all: something else is counted from now on."""
        self._reports.clear()

    def add(self, now: float, done: float, unit: str) -> None:
        """Another unit, or a count that fell, is another part of the stage: its rate is its own."""
        reports = self._reports
        if unit != self._unit or (reports and done < reports[-1][1]):
            self.begin()
        self._unit = unit
        if len(reports) > 1 and reports[-1][1] == reports[-2][1] == done:
            reports.pop()
        reports.append((now, done))
        while len(reports) > 2 and now - reports[0][0] > RATE_WINDOW_S and reports[1][1] < done:
            reports.popleft()

    def rate(self) -> float | None:
        """A second; None until two reports have come."""
        if len(self._reports) < 2:
            return None
        (then, before), (now, after) = self._reports[0], self._reports[-1]
        return (after - before) / (now - then) if now > then and after > before else None

    def left(self, done: float | None, total: float | None) -> float | None:
        """Seconds to go at the present rate."""
        rate = self.rate()
        return (total - done) / rate if rate and total and done is not None else None


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
