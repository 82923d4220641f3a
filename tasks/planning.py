"""`nautile plan` as a stage, so that what it found lies in the store beside what came of it."""

import json

from configs.model import ModelConfig
from configs.schema import PlanConfig, PretrainConfig
from tasks.job import Job
from tasks.stage import stage


@stage("plan", version=1, outputs=("plan",))
def planning(job: Job) -> None:
    """Compile the training step for a topology, and write what it needs as plan.json and plan.md."""
    from model import topology

    topology.compilers()  # before JAX is used
    from model.planning import plan
    from tasks.planning_text import markdown

    config = job.part("plan", PlanConfig)
    found = plan(
        job.part("pretrain", PretrainConfig),
        job.part("model", ModelConfig),
        config.row_length,
        topology.topology(config.topology),
        config.mfu,
        config.largest,
        lambda note: job.emit("progress", done=0, total=None, unit="", note=note),
    )
    folder = job.output("plan")
    (folder / "plan.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "plan.md").write_text(markdown(found), encoding="utf-8")
    job.describe("plan", topology=config.topology, advice=found["advice"], stand_ins=[])
