"""`nautile plan` as a stage, so that what it found lies in the store beside what came of it."""

import json

from configs.model import ModelConfig
from configs.schema import AlignConfig, PlanConfig, PretrainConfig, ReasonConfig, SelfDistillConfig
from tasks.job import Job
from tasks.stage import stage


@stage("plan", version=2, outputs=("plan",))
def planning(job: Job) -> None:
    """Compile the training step for a topology, and write what it needs as plan.json and plan.md.

    For a single chip, also a step of each reinforcement stage: those run on one device.
    """
    from model import topology

    topology.compilers()  # before JAX is used
    from model.planning import plan
    from rl.planning import plan as plan_reinforcement
    from tasks.planning_text import markdown

    def tell(note: str) -> None:
        job.emit("progress", done=0, total=None, unit="", note=note)

    config, model = job.part("plan", PlanConfig), job.part("model", ModelConfig)
    wanted = topology.topology(config.topology)
    pretrain = job.part("pretrain", PretrainConfig)
    found = plan(pretrain, model, config.row_length, wanted, config.mfu, config.largest, tell)
    found["reinforcement"] = {}
    if wanted.chips == 1:
        [device] = topology.devices(wanted)
        align, reason = job.part("align", AlignConfig), job.part("reason", ReasonConfig)
        traces = job.part("self_distill", SelfDistillConfig)
        for name, rollout, policy, mode in (
            ("align", align.rollout, align.policy, None),
            ("reason", reason.rollout, reason.policy, reason.balance),
            ("self_distill", traces.rollout, None, None),
        ):
            tell(f"compiling {name} for {wanted.name}")
            found["reinforcement"][name] = plan_reinforcement(model, rollout, policy, mode, device)
    folder = job.output("plan")
    (folder / "plan.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "plan.md").write_text(markdown(found), encoding="utf-8")
    job.describe("plan", topology=config.topology, advice=found["advice"], stand_ins=[])
