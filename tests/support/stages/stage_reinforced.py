"""A stage of an alignment and then a self-distillation, so that one set of processes shows both of them."""

import itertools
from dataclasses import replace
from typing import Any

from nautile.model.processes import on_first
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage
from nautile.tasks.reinforce import align, self_distill


@stage(
    "reinforced", version=1, outputs=("checkpoint", "rollouts", "calibration"), accelerator=True, multihost=True
)  # fmt: skip
def reinforced(job: Job) -> None:
    """Self-distillation begins with the alignment's checkpoint, in a folder of its own that is not published.

    A random policy solves nothing: none of the first round is right, which is saved untrained, and then every second
    completion by its length.
    """
    from nautile.rl import rollouts

    graded = itertools.count()
    first = job.section["self_distill"]["rollout"]
    first_round = first["prompts"] * first["group"]
    rollouts.verifiable = lambda problem, reply: float(next(graded) >= first_round and len(reply.reasoning or "") % 2)
    align.work(job)
    on_first(lambda: None)  # the first process writes the checkpoint that all read
    second = job.staging / "self_distill"
    second.mkdir(exist_ok=True)
    inputs = {"checkpoint": job.staging / "output" / "checkpoint"}

    def emit(kind: str, **fields: Any) -> None:
        job.emit(kind, **fields, **({"source": "self_distill"} if kind == "metric" else {}))

    self_distill.work(replace(job, staging=second, inputs=inputs, emit=emit))
