"""Report the progress of stages to listeners (the terminal, Prefect, tests), called in the thread of the stage."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nautile.common.files import read_json, write_json
from nautile.common.text import amount, duration
from nautile.store.events import EventWriter
from nautile.store.layout import StagingFiles

logger = logging.getLogger(__name__)

State = Literal["waiting", "running", "publishing", "reused", "done", "retrying", "failed", "cancelled"]
RATE_WINDOW_S = 30.0
LOG_EVERY_S = 15.0
LATE_S = 60.0  # a retry note is stale so long after the time at which the attempt was due


@dataclass(frozen=True)
class StageUpdate:
    """The state of one step. `done` and `total` count in `unit`; None means not known."""

    stage: str
    label: str
    state: State
    key: str = ""
    run_id: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    note: str = ""
    phase: str = ""  # which part of the stage `done` counts: the name of a fan-out, or empty
    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of each
    outputs: dict[str, str] = field(default_factory=dict)  # kind -> artifact id, once published
    attempt: int = 1
    seconds: float | None = None  # since this attempt started
    error: str | None = None  # with the log's last lines
    reason: str = ""  # the error without the log
    failure: str = ""  # of a failed attempt: its page, as Markdown
    question: str = ""  # the question to the user, while the step waits for an answer
    outage_until: float | None = None  # during an outage: the time at which retrying stops
    undelivered: int = 0  # measurements of this attempt that were not delivered to the trackers of `[telemetry]`
    time: float = field(default_factory=time.time)

    @property
    def share(self) -> float | None:
        """The completed share, 0..1; None while unknown."""
        return None if self.done is None or not self.total else min(1.0, max(0.0, self.done / self.total))


class RateMeter:
    """Measure the rate at which a count rises, over the last half minute, or longer if it rose only once in that time.

    So a count of files that take five minutes each still shows a steady rate.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, float]] = deque(maxlen=256)
        self._unit = ""

    def begin(self) -> None:
        """Drop all reports, because something else is counted from now on."""
        self._reports.clear()

    def add(self, now: float, done: float, unit: str) -> None:
        """Take a report. Another unit or a lower count means another part of the stage: the measurement restarts."""
        reports = self._reports
        if unit != self._unit or (reports and done < reports[-1][1]):
            self.begin()
        self._unit = unit
        # Of successive reports with the same count, keep the first and the last: they bound the time without progress.
        if len(reports) > 1 and reports[-1][1] == reports[-2][1] == done:
            reports.pop()
        reports.append((now, done))
        # Drop what is older than the window, as long as a rise remains to measure the rate by.
        while len(reports) > 2 and now - reports[0][0] > RATE_WINDOW_S and reports[1][1] < done:
            reports.popleft()

    def rate(self) -> float | None:
        if len(self._reports) < 2:
            return None
        (then, before), (now, after) = self._reports[0], self._reports[-1]
        return (after - before) / (now - then) if now > then and after > before else None

    def left_s(self, done: float | None, total: float | None) -> float | None:
        """Seconds until `total` at the present rate; None if unknown."""
        rate = self.rate()
        return max(0.0, total - done) / rate if rate and total and done is not None else None


def describe_progress(done: float | None, total: float | None, unit: str, note: str, meter: RateMeter) -> list[str]:
    """Count, rate, note and remaining time as texts, as far as they are known."""
    parts = []
    if done is not None:
        parts.append(f"{amount(done)}{f'/{amount(total)}' if total else ''} {unit}".rstrip())
    if (rate := meter.rate()) is not None:
        parts.append(f"{amount(rate)} {unit or 'items'}/s")
    if note:
        parts.append(note)
    if (left_s := meter.left_s(done, total)) is not None:
        parts.append(f"{duration(left_s)} left")
    return parts


Listener = Callable[[StageUpdate], Any]

_listeners: list[Listener] = []
_lock = threading.Lock()


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` with every update of this process, from any thread. Returns the function that unsubscribes it."""
    with _lock:
        _listeners.append(listener)

    def unsubscribe() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)

    return unsubscribe


def notify(update: StageUpdate) -> None:
    """Call all listeners. An exception of a listener is logged, because a display must not fail the work."""
    with _lock:
        listeners = tuple(_listeners)
    for listener in listeners:
        try:
            listener(update)
        except Exception:
            logger.warning("a progress listener failed on %s", update.label, exc_info=True)


class LoggedProgress:
    """An `Emit` around a stage's event writer that also logs progress: count, rate, note and remaining time.

    (The note of a training holds its loss and its tokens per second.) It logs one line after each batch of metrics,
    which a training emits every `log_every` steps; without metrics one line every 15 seconds; and the last report.
    `clock` returns seconds.
    """

    def __init__(self, emit: EventWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit, self._clock = emit, clock
        self._meter, self._lock = RateMeter(), threading.Lock()
        self._has_new_metrics, self._logged_at = False, clock()
        self._last_report: tuple[Any, ...] = ()  # (count, unit) of the last line
        self.sync = emit.sync

    def __call__(self, kind: str, **fields: Any) -> None:
        """Write the event, and a line of the log if it is due."""
        self._emit(kind, **fields)
        if kind == "metric":
            self._has_new_metrics = True
        elif kind == "progress" and fields.get("done") is not None:
            self._progress(fields["done"], fields.get("total"), fields.get("unit") or "", fields.get("note") or "")

    def many(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._emit.many(kind, rows)
        self._has_new_metrics |= kind == "metric"

    def _progress(self, done: float, total: float | None, unit: str, note: str) -> None:
        with self._lock:
            now = self._clock()
            self._meter.add(now, done, unit)
            is_due = self._has_new_metrics or now - self._logged_at >= LOG_EVERY_S or done == total
            if not is_due or self._last_report == (done, unit):
                return
            self._has_new_metrics, self._logged_at, self._last_report = False, now, (done, unit)
            logger.info("%s", ", ".join(describe_progress(done, total, unit, note, self._meter)))


def write_retry_note(folder: Path, note: str, pause_s: float) -> None:
    """Record in a staging folder, for displays, why the next attempt starts only in `pause_s` seconds."""
    with suppress(OSError):  # the folder may be missing, or its disk full: the pause is the same
        write_json(StagingFiles(folder).retry, {"note": note, "at": time.time() + pause_s})


def read_retry_note(folder: Path) -> str | None:
    """The note of a step that pauses between two attempts; None if it does not."""
    retry = read_json(StagingFiles(folder).retry)
    note, at = (retry.get("note"), retry.get("at")) if isinstance(retry, dict) else (None, None)
    # A folder that comes from another machine may be of another version.
    is_due = isinstance(note, str) and isinstance(at, (int, float)) and time.time() < at + LATE_S
    return note if is_due else None
