"""The measurements of an execution, read from its event files as they grow."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.events import read_events


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
        """The name for sinks that have no sources: `loss/synth`."""
        return f"{self.name}/{self.source}" if self.source else self.name


def read_points(events: Path, offsets: dict[str, int]) -> Iterator[tuple[list[Point], str, int]]:
    """The points in the files whose names begin with that of `events`, a block of a file at a time.

    Yields them with the file's name and the offset behind them; what `offsets` (by file name) cover is left out. The
    caller moves the offsets on. Raises `OSError` if a file cannot be read.
    """
    for path in sorted(events.parent.glob(f"{events.name}*.jsonl")):
        # A file may be longer than one read takes: until a read makes no progress.
        reached, offset = -1, offsets.get(path.name, 0)
        while reached != offset:
            reached = offset
            events_read, offset = read_events(path, reached)
            points = [point for event in events_read if event["kind"] == "metric" if (point := _point(event))]
            if offset != reached:
                yield points, path.name, offset


def _point(event: dict[str, Any]) -> Point | None:
    fields = event["fields"]
    try:
        value = float(fields["value"])
        return Point(
            str(fields["name"]), int(fields["step"]), value, int(event["time"]), str(fields.get("source") or "")
        )
    except (KeyError, TypeError, ValueError):
        return None
