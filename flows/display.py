"""Draws a `Board`: live bars on a terminal, plain lines elsewhere (a file, a pipe, a CI log), and the closing table."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flows.board import Board, Line, State, describe
from tasks.wording import duration

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
