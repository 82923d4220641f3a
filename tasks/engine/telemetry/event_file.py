"""Write metrics for TensorBoard.

tensorboardX's `SummaryWriter` blocks for ever once the disk is full, so only its file format is used
(docs/decisions.md).
"""

import uuid
from collections.abc import Sequence
from pathlib import Path

from nautile.tasks.engine.telemetry.points import Point


class EventFile:
    """A TensorBoard event file, written in the caller's thread, so that a full disk raises an error."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{uuid.uuid4().hex[:8]}")

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            summary = self._summary(value=[self._summary.Value(tag=point.tag, simple_value=point.value)])
            self._writer.write_event(self._event(wall_time=point.time_us / 1e6, step=point.step, summary=summary))
        self._writer.flush()

    def close(self) -> int:
        self._writer.close()
        return 0
