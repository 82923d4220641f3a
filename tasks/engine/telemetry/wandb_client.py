"""Write metrics for Weights & Biases, offline: `wandb sync FOLDER/wandb/offline-run-*` uploads the folder later.

This module sends nothing and reads no key. W&B counts rows itself, so a resumed run continues that count; the x axis of
the charts is the metric `step`.
"""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from nautile.tasks.engine.telemetry.points import Point
from nautile.tasks.engine.telemetry.trackers import Outcome, TrackedExecution


class WandbClient:
    """One run of W&B's project `project`; each attempt writes its own file, with the same run id."""

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
        self._row = sent  # points of a step share a row, so this is at least the number of rows written so far
        return {}

    def send(self, points: Sequence[Point]) -> None:
        """Log the points; consecutive points of one step become one row."""
        for step, group in groupby(points, lambda point: point.step):
            self._run.log({"step": step, **{point.tag: point.value for point in group}}, step=self._row)
            self._row += 1

    def end(self, outcome: Outcome) -> None:
        """Record the outcome in the summary, and close the file."""
        self._run.summary.update({"state": outcome.state, **{f"output/{k}": v for k, v in outcome.outputs.items()}})
        self._run.finish(exit_code=0 if outcome.state == "done" else 1)
