"""Log progress in the log of a stage's process, which `nautile logs` prints."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nautile.store.events import EventWriter
from nautile.tasks.engine.progress import RateMeter, describe_progress

logger = logging.getLogger(__name__)

LOG_EVERY_S = 15.0


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
        """Write several events."""
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
