"""What the terminal knows of a run: one line a stage, with progress, rate and time left. No drawing here."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from tasks.wording import amount, duration

State = Literal["waiting", "running", "reused", "done", "failed", "cancelled"]
RATE_WINDOW_S = 30.0


@dataclass
class Line:
    """One execution: where it stands, what it last said, and how fast it goes."""

    label: str
    state: State = "waiting"
    done: float | None = None
    total: float | None = None
    unit: str = ""
    note: str = ""
    attempt: int = 1
    artifacts: tuple[str, ...] = ()
    started: float | None = None
    seconds: float | None = None
    history: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=256))

    def rate(self) -> float | None:
        """Units a second over the last half minute; None until two reports have come."""
        if len(self.history) < 2:
            return None
        (then, before), (now, after) = self.history[0], self.history[-1]
        return (after - before) / (now - then) if now > then and after > before else None

    def left(self) -> float | None:
        """Seconds to go at the present rate."""
        rate = self.rate()
        return (self.total - self.done) / rate if rate and self.total and self.done is not None else None

    def share(self) -> float | None:
        return min(1.0, self.done / self.total) if self.total and self.done is not None else None


class Board:
    """The lines of a run, in order. `clock` gives seconds."""

    def __init__(self, labels: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.lines = {label: Line(label) for label in labels}
        self.heading = ""  # what goes on while no stage has begun
        self._clock = clock

    def begin(self, label: str, attempt: int = 1) -> None:
        line = self.lines[label]
        line.state, line.attempt = "running", attempt
        line.started = self._clock() if line.started is None else line.started
        line.history.clear()

    def advance(self, label: str, done: float | None, total: float | None, unit: str, note: str) -> None:
        line = self.lines[label]
        if line.state != "running":
            self.begin(label)
        if unit != line.unit or (done is not None and line.done is not None and done < line.done):
            line.history.clear()  # another part of the stage began: its rate is its own
        line.done, line.total, line.unit, line.note = done, total, unit, note
        if done is not None:
            now = self._clock()
            line.history.append((now, done))
            while len(line.history) > 2 and now - line.history[0][0] > RATE_WINDOW_S:
                line.history.popleft()

    def end(self, label: str, state: State, artifacts: Iterable[str] = (), reason: str = "") -> None:
        """`reason`: why it failed. Without one the last note stays, for it says what was reached."""
        line = self.lines[label]
        line.state, line.artifacts, line.note = state, tuple(artifacts), reason or line.note
        if line.started is not None:
            line.seconds = self._clock() - line.started

    def elapsed(self, label: str) -> float | None:
        line = self.lines[label]
        if line.seconds is not None or line.started is None:
            return line.seconds
        return self._clock() - line.started


def describe(line: Line) -> str:
    """What stands to the right of the bar: how far, how fast, the note, time left."""
    parts = []
    if line.done is not None:
        of = f"/{amount(line.total)}" if line.total else ""
        parts.append(f"{amount(line.done)}{of} {line.unit}".rstrip())
    if (rate := line.rate()) is not None:
        parts.append(f"{amount(rate)} {line.unit or 'items'}/s")
    if line.note:
        parts.append(line.note)
    if (left := line.left()) is not None:
        parts.append(f"{duration(left)} left")
    if line.attempt > 1:
        parts.append(f"attempt {line.attempt}")
    return ", ".join(parts)
