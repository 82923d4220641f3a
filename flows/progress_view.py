"""The terminal's view of a run: live lines on a terminal, log lines in a pipe, and the closing table.

`RunProgress` keeps what is known of each step; the views only draw it. Rate and time left come from `RateMeter` rather
than from rich's own estimate: a file that takes five minutes must not show a rate that comes and goes.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Table
from rich.text import Text

from common.text import amount, duration
from tasks.engine.progress import RateMeter

State = Literal["waiting", "running", "reused", "done", "failed", "cancelled"]

LOG_EVERY_S = 15.0
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
    """One step: its state, the last counts and note it reported, and how fast it goes."""

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

    def rate(self) -> float | None:
        """Units a second; None until it is known."""
        return self.meter.rate()

    def left(self) -> float | None:
        """Seconds to go at the present rate."""
        return self.meter.left(self.done, self.total)

    def share(self) -> float | None:
        """0..1, None while unknown."""
        return min(1.0, self.done / self.total) if self.total and self.done is not None else None

    def describe(self) -> str:
        """Count, rate, note, time left and attempt, as far as they are known; of a step that does not run, its note."""
        if self.state != "running":
            return self.note
        parts = []
        if self.done is not None:
            of = f"/{amount(self.total)}" if self.total else ""
            parts.append(f"{amount(self.done)}{of} {self.unit}".rstrip())
        if (rate := self.rate()) is not None:
            parts.append(f"{amount(rate)} {self.unit or 'items'}/s")
        if self.note:
            parts.append(self.note)
        if (left := self.left()) is not None:
            parts.append(f"{duration(left)} left")
        if self.attempt > 1:
            parts.append(f"attempt {self.attempt}")
        return ", ".join(parts)


class RunProgress:
    """The steps of a run, in order. `clock` gives seconds."""

    def __init__(self, labels: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = {label: StepProgress(label) for label in labels}
        self.heading = ""  # what happens before the first step starts
        self._clock = clock

    def begin(self, label: str, attempt: int = 1) -> None:
        """A step, or another attempt at it, starts."""
        step = self.steps[label]
        step.state, step.attempt = "running", attempt
        step.started = self._clock() if step.started is None else step.started
        step.meter.begin()

    def advance(self, label: str, done: float | None, total: float | None, unit: str, note: str) -> None:
        """A running step reports its counts."""
        step = self.steps[label]
        if step.state != "running":
            self.begin(label)
        step.done, step.total, step.unit, step.note = done, total, unit, note
        if done is not None:
            step.meter.add(self._clock(), done, unit)

    def end(self, label: str, state: State, artifacts: Iterable[str] = (), reason: str = "") -> None:
        """A step ends. `reason`: why it failed; without one the last note stays, for it shows what was reached."""
        step = self.steps[label]
        step.state, step.artifacts, step.note = state, tuple(artifacts), reason or step.note
        if step.started is not None:
            step.seconds = self._clock() - step.started

    def elapsed(self, label: str) -> float | None:
        """Seconds since the step started, or that it took."""
        step = self.steps[label]
        if step.seconds is not None or step.started is None:
            return step.seconds
        return self._clock() - step.started


class ProgressView(Protocol):
    """A context manager that is called when a step of its run changed."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def changed(self, label: str) -> None: ...


def view_for(run: RunProgress, console: Console) -> ProgressView:
    """The live view on a terminal, log lines elsewhere."""
    return LiveView(run, console) if console.is_terminal else LogView(run, console)


class LiveView(Progress):
    """One line a step, redrawn four times a second by rich's own thread."""

    def __init__(self, run: RunProgress, console: Console) -> None:
        columns = (_Mark(run), _Label(run), _Bar(run), _Elapsed(run), _Description(run))
        self._run = run
        super().__init__(*columns, console=console, refresh_per_second=4, expand=True)
        self._tasks_by_label = {label: self.add_task(label, total=None) for label in run.steps}

    def changed(self, label: str) -> None:
        """Pass the step's share to its bar. Without a share the bar pulses."""
        share = self._run.steps[label].share()
        self.update(self._tasks_by_label[label], completed=share or 0.0, total=None if share is None else 1.0)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines, and below them the heading as long as there is one."""
        yield self.make_tasks_table(self.tasks)
        if self._run.heading:
            yield Text(self._run.heading, style="dim")


class _StepColumn(ProgressColumn):
    """A column that draws from the run's `StepProgress`; the task's description is the step's label."""

    def __init__(self, run: RunProgress) -> None:
        super().__init__()
        self._run = run

    def step(self, task: Task) -> StepProgress:
        return self._run.steps[task.description]


class _Mark(_StepColumn):
    def __init__(self, run: RunProgress) -> None:
        super().__init__(run)
        self._spinner = SpinnerColumn("dots", style="cyan")

    def render(self, task: Task) -> RenderableType:
        state = self.step(task).state
        return self._spinner.render(task) if state == "running" else Text(*_MARKS[state])


class _Label(_StepColumn):
    def render(self, task: Task) -> Text:
        styles = {"running": "bold", "waiting": "dim"}
        return Text(task.description, style=styles.get(self.step(task).state, ""), no_wrap=True)


class _Bar(_StepColumn):
    """A bar for a step that runs, nothing for every other."""

    def __init__(self, run: RunProgress) -> None:
        super().__init__(run)
        self._bar = BarColumn(bar_width=20)

    def render(self, task: Task) -> RenderableType:
        return self._bar.render(task) if self.step(task).state == "running" else Text("")


class _Elapsed(_StepColumn):
    def render(self, task: Task) -> Text:
        elapsed = self._run.elapsed(task.description)
        return Text(duration(elapsed) if elapsed is not None else "", justify="right", no_wrap=True)


class _Description(_StepColumn):
    def render(self, task: Task) -> Text:
        step = self.step(task)
        style = "" if step.state == "running" else "dim"
        return Text(step.describe(), style=style, no_wrap=True, overflow="ellipsis")


class LogView:
    """A line at the start and the end of a step, and one every `LOG_EVERY_S` while it runs."""

    def __init__(self, run: RunProgress, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._console = console
        self._clock = clock
        self._printed: dict[str, tuple[State, int, float]] = {}  # label -> state, attempt and time of its last line

    def __enter__(self) -> Self:
        if self._run.heading:
            self._console.print(Text(self._run.heading))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def changed(self, label: str) -> None:
        """Print a line if the step's state or attempt is another than in its last line, or that is long ago."""
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


def summary_table(run: RunProgress) -> Table:
    """The closing table: stage, state, time, artifacts."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("stage", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("artifacts", overflow="fold")
    for step in run.steps.values():
        elapsed = run.elapsed(step.label)
        took = duration(elapsed) if elapsed is not None and step.state != "reused" else ""
        table.add_row(step.label, Text(step.state, style=_MARKS[step.state][1]), took, "  ".join(step.artifacts))
    return table
