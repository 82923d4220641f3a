"""The execution that tests of experiment trackers send the measurements of."""

from typing import Any

from nautile.tasks.engine.telemetry import TrackedExecution


def execution(**fields: Any) -> TrackedExecution:
    """An execution of the stage `sums`."""
    about = {"run": "r1", "stage": "sums", "label": "sums:A", "execution": "e" * 32, "config": "toy", "key": "k" * 64}
    return TrackedExecution(**{**about, "commit": "c" * 40, "host": "here", **fields})
