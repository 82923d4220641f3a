"""What the terminal knows of a run: one line a stage, with progress, rate and time left. No drawing here."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from tasks.progress import Pace
from tasks.wording import amount, duration

State = Literal["waiting", "running", "reused", "done", "failed", "cancelled"]


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
    pace: Pace = field(default_factory=Pace)

    def rate(self) -> float | None:
        return self.pace.rate()

    def left(self) -> float | None:
        """Seconds to go at the present rate."""
        return self.pace.left(self.done, self.total)

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
        line.pace.begin()

    def advance(self, label: str, done: float | None, total: float | None, unit: str, note: str) -> None:
        line = self.lines[label]
        if line.state != "running":
            self.begin(label)
        line.done, line.total, line.unit, line.note = done, total, unit, note
        if done is not None:
            line.pace.add(self._clock(), done, unit)

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
