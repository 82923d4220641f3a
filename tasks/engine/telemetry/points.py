"""Read the measurements of an execution from its event files as they grow."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nautile.store.events import read_events


@dataclass(frozen=True)
class Point:
    """One measurement; `time_us` is microseconds since 1970."""

    name: str
    step: int
    value: float
    time_us: int
    source: str = ""

    @property
    def tag(self) -> str:
        """The name for sinks without a notion of sources: `loss/synth`."""
        return f"{self.name}/{self.source}" if self.source else self.name


def read_points(events: Path, offsets: dict[str, int]) -> Iterator[tuple[list[Point], str, int]]:
    """Yield the points of the files whose names start with that of `events`, a block of a file at a time.

    Yields (points, file name, offset after them), starting at `offsets` (by file name), which the caller updates.
    Raises `OSError` if a file cannot be read.
    """
    for path in sorted(events.parent.glob(f"{events.name}*.jsonl"), key=_written_order):
        # One call of `read_events` may not reach the end of the file, so repeat until it makes no progress.
        start, offset = -1, offsets.get(path.name, 0)
        while start != offset:
            start = offset
            events_read, offset = read_events(path, start)
            points = [point for event in events_read if event["kind"] == "metric" if (point := _point(event))]
            if offset != start:
                yield points, path.name, offset


def _written_order(path: Path) -> list[str | int]:
    """A sort key by attempt, then by part of a file: numbers in the name compare as numbers.

    A tracker sends no step before the last one of its metric, so it would drop what is read too late.
    """
    # Without the suffix, a first part (`…-1`) is before its second (`…-1.2`). Every other entry is a number.
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", path.stem)]


def _point(event: dict[str, Any]) -> Point | None:
    """The point of a metric event; None if its fields are invalid."""
    fields = event["fields"]
    try:
        value = float(fields["value"])
        return Point(
            str(fields["name"]), int(fields["step"]), value, int(event["time"]), str(fields.get("source") or "")
        )
    except (KeyError, TypeError, ValueError):
        return None
