"""Progress of `nautile run`: live lines on a terminal, log lines in a pipe, and the closing summary table.

`RunProgress` holds the state of each step; the views only render it. Rate and time left come from `RateMeter`, because
rich's own estimate fluctuates when an item such as a large file takes minutes.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nautile.common.text import duration
from nautile.flows.render import text_table
from nautile.tasks.engine.progress import RateMeter, describe_progress

State = Literal["waiting", "running", "reused", "done", "failed", "cancelled"]

LOG_EVERY_S = 15.0  # a log of a day's run stays readable, and silence is short enough not to worry
_MARKS: dict[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "running": ("▸", "cyan"),
    "reused": ("=", "blue"),
    "done": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "cancelled": ("■", "yellow"),
}


@dataclass
class StepProgress:
    """Progress of one step: its state, the counts and note of its last update, and its rate."""

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
    meter: RateMeter = field(default_factory=RateMeter)

    def share(self) -> float | None:
        """Completed share of the step, 0..1; None while unknown."""
        return min(1.0, self.done / self.total) if self.total and self.done is not None else None

    def describe(self) -> str:
        """Count, rate, note, time left and attempt, as far as known. For a step that does not run: its note."""
        if self.state != "running":
            return self.note
        parts = describe_progress(self.done, self.total, self.unit, self.note, self.meter)
        if self.attempt > 1:
            parts.append(f"attempt {self.attempt}")
        return ", ".join(parts)


class RunProgress:
    """Progress of all steps of a run, in order. `clock` returns seconds."""

    def __init__(self, labels: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = {label: StepProgress(label) for label in labels}
        self.heading = ""  # what happens before the first step starts
        self._clock = clock

    def begin(self, label: str, attempt: int = 1) -> None:
        """Record that a step, or a new attempt at it, starts."""
        step = self.steps[label]
        step.state, step.attempt = "running", attempt
        # A retry goes on with the time of the first attempt: the operator has waited since then.
        step.started = self._clock() if step.started is None else step.started
        step.meter.begin()

    def advance(self, label: str, done: float | None, total: float | None, unit: str, note: str) -> None:
        """Record the counts and note that a running step reports."""
        step = self.steps[label]
        if step.state != "running":
            self.begin(label)
        step.done, step.total, step.unit, step.note = done, total, unit, note
        if done is not None:
            step.meter.add(self._clock(), done, unit)

    def end(self, label: str, state: State, artifacts: Iterable[str] = (), reason: str = "") -> None:
        """Record that a step ends. `reason`: why it failed; without it the last note stays, which shows the result."""
        step = self.steps[label]
        note = "" if state == "reused" else step.note
        step.state, step.artifacts, step.note = state, tuple(artifacts), reason or note
        if step.started is not None:
            step.seconds = self._clock() - step.started

    def elapsed(self, label: str) -> float | None:
        """Seconds since the step started, or its total time once it has ended. None before it starts."""
        step = self.steps[label]
        if step.seconds is not None or step.started is None:
            return step.seconds
        return self._clock() - step.started


class LiveView(Live):
    """Terminal view with one line per step, redrawn four times a second by rich's thread, and the heading below."""

    def __init__(self, run: RunProgress, console: Console) -> None:
        self._run = run
        self._spinner = Spinner("dots", style="cyan")
        super().__init__(console=console, refresh_per_second=4, get_renderable=self._lines)

    def changed(self, label: str) -> None:
        """Do nothing: the next redraw shows the change."""

    def _lines(self) -> RenderableType:
        lines = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, None, None, None, 1):
            lines.add_column(no_wrap=True, ratio=ratio)
        for step in self._run.steps.values():
            elapsed = self._run.elapsed(step.label)
            took = Text(duration(elapsed) if elapsed is not None else "", justify="right")
            if step.state == "running":
                share = step.share()  # without one the bar pulses
                bar = ProgressBar(None if share is None else 1.0, share or 0.0, width=20)
                lines.add_row(self._spinner, Text(step.label, "bold"), bar, took, _ellipsis(step.describe()))
            else:
                label = Text(step.label, "dim" if step.state == "waiting" else "")
                lines.add_row(Text(*_MARKS[step.state]), label, "", took, _ellipsis(step.describe(), "dim"))
        return Group(lines, Text(self._run.heading, "dim")) if self._run.heading else lines


def _ellipsis(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


class LogView(nullcontext[None]):
    """Line output for pipes: a line at the start and the end of a step, and one every `LOG_EVERY_S` while it runs."""

    def __init__(self, run: RunProgress, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._console = console
        self._clock = clock
        self._printed: dict[str, tuple[State, int, float]] = {}  # label -> state, attempt and time of its last line

    def __enter__(self) -> None:
        if self._run.heading:
            self._console.print(Text(self._run.heading))

    def changed(self, label: str) -> None:
        """Print a line if the step's state or attempt has changed, or if its last line is older than `LOG_EVERY_S`."""
        step = self._run.steps[label]
        now = self._clock()
        state, attempt, printed_at = self._printed.get(label, ("waiting", 1, 0.0))
        if (step.state, step.attempt) == (state, attempt) and now - printed_at < LOG_EVERY_S:
            return
        if step.state == state and step.state != "running":
            return
        self._printed[label] = (step.state, step.attempt, now)
        elapsed = self._run.elapsed(label)
        took = f" after {duration(elapsed)}" if elapsed is not None and step.state not in ("running", "reused") else ""
        verb = "started" if step.state == "running" and state != "running" else step.state
        detail = step.describe()
        text = f"{label}: {verb}{took}" + (f" ({detail})" if detail else "")
        self._console.print(Text(text), soft_wrap=True)


def view_for(run: RunProgress, console: Console) -> LiveView | LogView:
    """The live view on a terminal, log lines elsewhere."""
    return LiveView(run, console) if console.is_terminal else LogView(run, console)


def summary_table(run: RunProgress) -> Table:
    """The closing table: stage, state, time, artifacts."""
    table = text_table("stage", "state", "time", "artifacts")
    for step in run.steps.values():
        elapsed = run.elapsed(step.label)
        took = duration(elapsed) if elapsed is not None and step.state != "reused" else ""
        table.add_row(step.label, Text(step.state, style=_MARKS[step.state][1]), took, "  ".join(step.artifacts))
    return table
