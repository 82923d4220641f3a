"""Weights & Biases, offline: a folder that `wandb sync FOLDER/wandb/offline-run-*` uploads when you like.

Nothing is sent from here and no key is read. W&B counts rows itself, so a resumed run continues that count; the axis of
the charts is our `step`.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tasks.engine.telemetry.points import Point
from tasks.engine.telemetry.trackers import Outcome, TrackedExecution


class WandbClient:
    """One run of W&B's project `project`; each attempt writes a file of its own, under the same id."""

    def __init__(self, folder: Path, project: str) -> None:
        self.where, self._folder, self._project = str(folder), folder, project

    def open(self, about: TrackedExecution, sent: int) -> Mapping[str, int]:
        """Begin the attempt's file."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            dir=str(self._folder),
            id=about.execution,
            name=about.name,
            group=about.run,
            job_type=about.stage,
            config={**about.parameters(), **about.tags()},
            resume="allow",
            settings=wandb.Settings(
                mode="offline",
                silent=True,
                console="off",
                reinit="create_new",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self._row = sent  # no two points make fewer rows than that
        return {}

    def send(self, points: Sequence[Point]) -> None:
        """Log the points, those of a step in a row."""
        for step, group in groupby(points, lambda point: point.step):
            self._run.log({"step": step, **{point.tag: point.value for point in group}}, step=self._row)
            self._row += 1

    def end(self, outcome: Outcome) -> None:
        """Note how it ended, and close the file."""
        self._run.summary.update({"state": outcome.state, **{f"output/{k}": v for k, v in outcome.outputs.items()}})
        self._run.finish(exit_code=0 if outcome.state == "done" else 1)
