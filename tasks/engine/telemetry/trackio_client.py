"""Write metrics to a folder of trackio databases; `TRACKIO_DIR=FOLDER trackio show` shows them. It is all local.

`trackio.init` prints, samples the machine and allows one run per process, so the storage layer below it is used, as
trackio's own importers do.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tasks.engine.telemetry.points import Point
from tasks.engine.telemetry.trackers import Outcome, TrackedExecution


class TrackioClient:
    """One run of trackio's project `project`."""

    def __init__(self, folder: Path, project: str) -> None:
        self.where, self._project = str(folder), project

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        """Prepare the run's name and configuration; trackio creates the run with its first measurement."""
        os.environ["TRACKIO_DIR"] = str(Path(self.where).absolute())  # trackio reads it on import
        from trackio.sqlite_storage import SQLiteStorage

        self._name, self._config = about.name, {**about.parameters(), **about.tags(), "_Group": about.run}
        self._id = about.execution
        # An earlier attempt may have written steps; the outcome is logged at the last one.
        self._step = SQLiteStorage.get_last_step(self._project, self._name, run_id=self._id) or 0
        return {}

    def send(self, points: Sequence[Point]) -> None:
        """Log the points, with the configuration."""
        times = [datetime.fromtimestamp(point.time_us / 1e6, UTC).isoformat() for point in points]
        self._write([{point.tag: point.value} for point in points], [point.step for point in points], times)

    def end(self, outcome: Outcome) -> None:
        """Log a measurement `done`, 1 or 0, and add the published artifacts to the configuration."""
        self._config |= {"state": outcome.state} | {f"output.{kind}": name for kind, name in outcome.outputs.items()}
        self._write([{"done": float(outcome.state == "done")}], [self._step], [datetime.now(UTC).isoformat()])

    def _write(self, values: list[dict[str, float]], steps: list[int], times: list[str]) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._step = max(self._step, *steps)
        SQLiteStorage.bulk_log(
            self._project, self._name, values, steps=steps, timestamps=times, config=self._config, run_id=self._id
        )
