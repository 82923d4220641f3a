"""`nautile plan` as a stage, so that what it found lies in the store beside what came of it."""

import json

from configs.model import ModelConfig
from configs.reinforcement import AlignConfig, ReasonConfig, SelfDistillConfig
from configs.schema import PlanConfig, PretrainConfig
from configs.section import ConfigError
from tasks.job import Job
from tasks.stage import stage


@stage("plan", version=3, outputs=("plan",))
def planning(job: Job) -> None:
    """Compile a step of every training stage for a topology, and write what they need as plan.json and plan.md."""
    from model import topology

    topology.compilers()  # before JAX is used
    from model.planning import plan
    from model.sharding import make_mesh
    from rl.planning import plan as plan_reinforcement
    from tasks.planning_text import markdown

    def tell(note: str) -> None:
        job.emit("progress", done=0, total=None, unit="", note=note)

    config, model = job.part("plan", PlanConfig), job.part("model", ModelConfig)
    wanted = topology.topology(config.topology)
    pretrain = job.part("pretrain", PretrainConfig)
    found = plan(pretrain, model, config.row_length, wanted, config.mfu, config.largest, tell)
    found["reinforcement"] = {}
    align, reason = job.part("align", AlignConfig), job.part("reason", ReasonConfig)
    traces = job.part("self_distill", SelfDistillConfig)
    for name, rollout, policy, mode, fsdp in (
        ("align", align.rollout, align.policy, None, align.policy.fsdp),
        ("reason", reason.rollout, reason.policy, reason.balance, reason.policy.fsdp),
        ("self_distill", traces.rollout, None, None, traces.fsdp),
    ):
        tell(f"compiling {name} for {wanted.name}")
        try:
            mesh = make_mesh(fsdp, topology.devices(wanted), part=name)
            found["reinforcement"][name] = plan_reinforcement(model, rollout, policy, mode, mesh)
        except ConfigError as refused:  # pretraining may well be planned for more chips than these stages are for
            found["reinforcement"][name] = {"refused": str(refused)}
    folder = job.output("plan")
    (folder / "plan.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "plan.md").write_text(markdown(found), encoding="utf-8")
    job.describe("plan", topology=config.topology, advice=found["advice"], stand_ins=[])
