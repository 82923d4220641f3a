"""Lines about progress in the log of a stage's process, which `nautile logs` prints."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from store.events import EventWriter
from tasks.engine.progress import RateMeter, describe_progress

logger = logging.getLogger(__name__)

LOG_EVERY_S = 15.0


class LoggedProgress:
    """An `Emit` around a stage's event writer, which also logs the progress: count, rate, note (of a training its loss
    and its tokens a second) and time left.

    One line for each round of metrics, hence one every `log_every` steps of a training; where no metrics come, one
    every 15 seconds; and the last. `clock` gives seconds.
    """

    def __init__(self, emit: EventWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit, self._clock = emit, clock
        self._meter, self._lock = RateMeter(), threading.Lock()
        self._measured, self._logged_at = False, clock()
        self._logged: tuple[Any, ...] = ()
        self.sync = emit.sync

    def __call__(self, kind: str, **fields: Any) -> None:
        """Write the event, and perhaps a line."""
        self._emit(kind, **fields)
        if kind == "metric":
            self._measured = True
        elif kind == "progress" and fields.get("done") is not None:
            self._progress(fields["done"], fields.get("total"), fields.get("unit") or "", fields.get("note") or "")

    def many(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write several events."""
        self._emit.many(kind, rows)
        self._measured |= kind == "metric"

    def _progress(self, done: float, total: float | None, unit: str, note: str) -> None:
        with self._lock:
            now = self._clock()
            self._meter.add(now, done, unit)
            due = self._measured or now - self._logged_at >= LOG_EVERY_S or done == total
            if not due or self._logged == (done, unit):
                return
            self._measured, self._logged_at, self._logged = False, now, (done, unit)
            logger.info("%s", ", ".join(describe_progress(done, total, unit, note, self._meter)))
