"""What the terminal knows of a run: one line a stage, with progress, rate and time left. No drawing here."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from common.text import amount, duration
from tasks.engine.progress import RateMeter

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
    pace: RateMeter = field(default_factory=RateMeter)

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


PLAIN_EVERY_S = 15.0
_MARKS: dict[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "running": ("▸", "cyan"),
    "reused": ("=", "blue"),
    "done": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "cancelled": ("■", "yellow"),
}


class Display(Protocol):
    """A context manager that is told when a line of its board changed."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def changed(self, label: str) -> None: ...


def display_for(board: Board, console: Console) -> Display:
    """The live display on a terminal, the plain one elsewhere."""
    return LiveDisplay(board, console) if console.is_terminal else PlainDisplay(board, console)


class LiveDisplay:
    """Redraws all lines a few times a second, in a thread of rich's."""

    def __init__(self, board: Board, console: Console) -> None:
        self._board = board
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def changed(self, label: str) -> None:
        """Nothing to do: the next redraw shows it."""

    def _draw(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(width=20)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        for line in self._board.lines.values():
            mark, style = _MARKS[line.state]
            elapsed = self._board.elapsed(line.label)
            share = line.share()
            middle: Text | ProgressBar = Text("")
            if line.state == "running":
                middle = ProgressBar(total=1.0, completed=share or 0.0, pulse=share is None, width=20)
            first = self._spinner if line.state == "running" else Text(mark, style=style)
            name = Text(line.label, style="bold" if line.state == "running" else style if style == "dim" else "")
            table.add_row(first, name, middle, duration(elapsed) if elapsed is not None else "", _right(line))
        return Group(table, Text(self._board.heading, style="dim")) if self._board.heading else table


class PlainDisplay:
    """One line at the start and the end of a stage, and one now and then while it runs."""

    def __init__(self, board: Board, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._console = console
        self._clock = clock
        self._shown: dict[str, tuple[State, int, float]] = {}

    def __enter__(self) -> Self:
        if self._board.heading:
            self._console.print(Text(self._board.heading))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def changed(self, label: str) -> None:
        line = self._board.lines[label]
        now = self._clock()
        state, attempt, at = self._shown.get(label, ("waiting", 1, 0.0))
        if (line.state, line.attempt) == (state, attempt) and now - at < PLAIN_EVERY_S:
            return
        if line.state == state and line.state != "running":
            return
        self._shown[label] = (line.state, line.attempt, now)
        elapsed = self._board.elapsed(label)
        took = f" after {duration(elapsed)}" if elapsed is not None and line.state not in ("running", "reused") else ""
        said = "started" if line.state == "running" and state != "running" else line.state
        detail = _right(line).plain
        text = f"{label}: {said}{took}" + (f" ({detail})" if detail else "")
        self._console.print(Text(text), soft_wrap=True)


def summary(board: Board) -> Table:
    """The closing table: stage, state, time, artifacts."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("stage", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("artifacts", overflow="fold")
    for line in board.lines.values():
        elapsed = board.elapsed(line.label)
        took = duration(elapsed) if elapsed is not None and line.state != "reused" else ""
        table.add_row(line.label, Text(line.state, style=_MARKS[line.state][1]), took, "  ".join(line.artifacts))
    return table


def _right(line: Line) -> Text:
    if line.state == "running":
        return Text(describe(line))
    return Text(line.note, style="dim")
