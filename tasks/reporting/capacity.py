"""`nautile plan` as a stage, so that what it found lies in the store beside what came of it."""

import json
from typing import Any

from common.errors import ConfigError
from common.text import amount
from configs.model import ModelConfig
from configs.operation import PlanConfig
from configs.training import AlignConfig, PretrainConfig, ReasonConfig, SelfDistillConfig
from tasks.engine.job import Job
from tasks.engine.stage import stage


@stage("plan", version=3, outputs=("plan",))
def planning(job: Job) -> None:
    """Compile a step of every training stage for a topology, and write what they need as plan.json and plan.md."""
    from model.capacity import topology

    topology.enable_compilers()  # before JAX is used
    from model.capacity.planner import plan_training
    from model.sharding import make_mesh
    from rl.capacity import estimate_memory as plan_reinforcement

    pass

    def tell(note: str) -> None:
        job.emit("progress", done=0, total=None, unit="", note=note)

    config, model = job.part("plan", PlanConfig), job.part("model", ModelConfig)
    wanted = topology.parse_topology(config.topology)
    pretrain = job.part("pretrain", PretrainConfig)
    found = plan_training(pretrain, model, config.row_length, wanted, config.mfu, config.largest, tell)
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


GIB = 2**30


_HEAD = ["| reinforcement | completions at once | stays | rollout | update | fits |", "|---|---|---|---|---|---|"]


def markdown(plan: dict[str, Any]) -> str:
    """What `model.capacity.planner.plan_training` found, for people."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    limit = plan["memory_limit"]
    has = f" {limit / GIB:.2f} GiB each" if limit else ""
    lines = [
        f"# {amount(plan['parameters'])} parameters on {plan['topology']}",
        "",
        f"Chips: {plan['chips']}{has}; hosts: {plan['hosts']}; mesh: {mesh}. A batch is {plan['batch_rows']} rows of "
        f"{plan['row_length']} tokens; {plan['steps']:,} steps make {amount(plan['tokens'])} tokens.",
        "",
        f"**{plan['advice'][0].upper()}{plan['advice'][1:]}.**",
        "",
        "| a chip holds | rows at once | state and batch | temporaries | program | peak | fits | compiled in |",
        "|---|---|---|---|---|---|---|---|",
        _memory("as configured", plan["asked"]),
    ]
    if plan["largest"]:
        lines.append(_memory("the most that fit", plan["largest"]))
    lines += ["", f"Operations by formula: {amount(plan['flops_per_token'])}FLOP a token, forward and backward."]
    if plan["tokens_per_second"]:
        lines.append(
            f"Reckoned, not measured: at a utilisation of {plan['mfu_assumed']:.0%}, "
            f"{amount(plan['tokens_per_second'])} tokens/s, {plan['days']:.1f} days."
        )
    if plan["reinforcement"]:
        lines += ["", *_HEAD]
        lines += [_stage(name, found, limit) for name, found in plan["reinforcement"].items()]
    return "\n".join(lines) + "\n"


def _stage(name: str, found: dict[str, Any], limit: int | None) -> str:
    """One reinforcement stage: what stays in memory of a chip, and the peaks of its two halves; or why it cannot be."""
    if "refused" in found:
        return f"| {name} | {found['refused']} | | | | no |"
    peaks = [found["rollout"], *([found["update"]] if "update" in found else [])]
    update = "as pretraining"
    if "update" in found:
        update = f"{found['update'] / GIB:.2f} GiB, {found['micro_rows']} rows at once"
    sizes = f"{found['resident'] / GIB:.2f} GiB | {found['rollout'] / GIB:.2f} GiB | {update}"
    fits = "not known" if limit is None else "yes" if max(peaks) <= limit else "no"
    return f"| {name} | {found['rows']} | {sizes} | {fits} |"


def _memory(label: str, found: dict[str, Any]) -> str:
    kinds = (found["arguments"], found["temporaries"], found["code"], found["peak"])
    cells = ["not told" if one is None else f"{one / GIB:.2f} GiB" for one in kinds]
    rows = f"{found['micro_rows']} ({found['rows_per_chip']} a chip)"
    row = [label, rows, *cells, "yes" if found["fits"] else "no", f"{found['compile_seconds']:.0f} s"]
    return f"| {' | '.join(row)} |"
