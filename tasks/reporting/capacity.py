"""The `plan` stage (`nautile plan`): does each training stage fit a topology, and how long does it take?

As a stage, a plan is stored and reused by later requests for the same.
"""

import json
from collections.abc import Mapping
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.text import amount, first_line, markdown_table
from nautile.configs.model import ModelConfig
from nautile.configs.operation import PlanConfig
from nautile.configs.training import AlignConfig, PretrainConfig, ReasonConfig, SelfDistillConfig
from nautile.rl.objective_registry import Balance
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import stage

GIB = 2**30
_PRETRAINING = (
    "a chip holds",
    "rows at once",
    "state and batch",
    "temporaries",
    "program",
    "peak",
    "fits",
    "compiled in",
)
_REINFORCED: dict[str, type[AlignConfig] | type[ReasonConfig] | type[SelfDistillConfig]] = {
    "align": AlignConfig,
    "reason": ReasonConfig,
    "self_distill": SelfDistillConfig,
}
_REINFORCEMENT = ("reinforcement", "completions at once", "resident", "rollout", "update", "fits")


@stage("plan", version=3, outputs=("plan",))
def plan_capacity(job: Job) -> None:
    """Compile a step of each training stage for a topology; write its memory and time as plan.json and plan.md."""
    # Imported here because the command line imports this file, and JAX takes seconds. The compilers for other chips
    # must be enabled before JAX is imported.
    from nautile.model.capacity import topology

    topology.enable_compilers()
    import jax

    from nautile.model.capacity.compiled import plan_training
    from nautile.model.sharding import make_mesh
    from nautile.rl.ahead_of_time import estimate_memory

    def notify(note: str) -> None:
        job.emit("progress", done=0, total=None, unit="", note=note)

    config, model = job.part("plan", PlanConfig), job.part("model", ModelConfig)
    target = topology.parse_topology(config.topology)
    pretrain = job.part("pretrain", PretrainConfig)
    plan = plan_training(pretrain, model, config.row_length, target, config.mfu, config.largest, notify)
    # Self-distillation is estimated without a policy: its update is like that of pretraining.
    plan["reinforcement"] = {}
    sections = {name: job.part(name, model_class) for name, model_class in _REINFORCED.items() if name in job.section}
    for name, section in sections.items():
        policy = None if isinstance(section, SelfDistillConfig) else section.policy
        balance = Balance.of(section) if isinstance(section, ReasonConfig) else None
        fsdp = section.fsdp if isinstance(section, SelfDistillConfig) else section.policy.fsdp
        notify(f"compiling {name} for {target.name}")
        try:
            mesh = make_mesh(fsdp, topology.devices(target), part=name)
            plan["reinforcement"][name] = estimate_memory(model, section.rollout, policy, balance, mesh)
        except ConfigError as error:  # pretraining can be planned for more chips than these stages can use
            plan["reinforcement"][name] = {"refused": str(error)}
        except jax.errors.JaxRuntimeError as error:  # no memory, or the compiler fails
            plan["reinforcement"][name] = {"refused": f"the compiler refused it: {first_line(error)}"}
    starts = {"pretrain": pretrain.start} | {name: section.start for name, section in sections.items()}
    plan["starts"] = {name: start for name, start in starts.items() if start}
    folder = job.output("plan")
    (folder / "plan.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    (folder / "plan.md").write_text(markdown(plan), encoding="utf-8")
    job.describe("plan", topology=config.topology, advice=plan["advice"], stand_ins=[])


def markdown(plan: Mapping[str, Any]) -> str:
    """Format a plan of `model.capacity.compiled.plan_training`, with `reinforcement`, as Markdown."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    limit = plan["memory_limit"]
    memory = f" {_gib(limit)} each" if limit else ""
    rows = [_pretraining_row("as configured", plan["asked"])]
    if plan["largest"]:
        rows.append(_pretraining_row("the largest that fits", plan["largest"]))
    starts = [f"{name} begins from {start[:23]}" for name, start in plan.get("starts", {}).items()]
    parts = [
        f"# {amount(plan['parameters'])} parameters on {plan['topology']}",
        f"Chips: {plan['chips']}{memory}; hosts: {plan['hosts']}; mesh: {mesh}. A batch is {plan['batch_rows']} rows "
        f"of {plan['row_length']} tokens; {plan['steps']:,} steps are {amount(plan['tokens'])} tokens.",
        *([f"{'; '.join(starts)}."] if starts else []),
        f"**{plan['advice'][0].upper()}{plan['advice'][1:]}.**",
        markdown_table(_PRETRAINING, rows),
    ]
    compute = f"Operations by formula: {amount(plan['flops_per_token'])}FLOP a token, forward and backward."
    if plan["tokens_per_second"]:
        compute += (
            f"\nEstimated, not measured: at a utilisation of {plan['mfu_assumed']:.0%}, "
            f"{amount(plan['tokens_per_second'])} tokens/s, {plan['days']:.1f} days."
        )
    parts.append(compute)
    if plan["reinforcement"]:
        rows = [_reinforcement_row(name, needs, limit) for name, needs in plan["reinforcement"].items()]
        parts.append(markdown_table(_REINFORCEMENT, rows))
    return "\n\n".join(parts) + "\n"


def _pretraining_row(label: str, step: Mapping[str, Any]) -> list[str]:
    """A row of the table: the memory of a compiled training step, by kind."""
    rows = f"{step['micro_rows']} ({step['rows_per_chip']} a chip)"
    kinds = [_gib(step[name]) for name in ("arguments", "temporaries", "code", "peak")]
    return [label, rows, *kinds, "yes" if step["fits"] else "no", f"{step['compile_seconds']:.0f} s"]


def _reinforcement_row(name: str, needs: Mapping[str, Any], limit: int | None) -> list[str]:
    """A row of the table: memory per chip, resident and at the peaks of rollout and update, or why it was refused."""
    if "refused" in needs:
        return [name, needs["refused"], "", "", "", "no"]
    # The rollout and the update take turns, so the larger of their peaks is what must fit.
    peaks = [needs["rollout"], *([needs["update"]] if "update" in needs else [])]
    update = "as pretraining"
    if "update" in needs:
        update = f"{_gib(needs['update'])}, {needs['micro_rows']} rows at once"
    fits = "unknown" if limit is None else "yes" if max(peaks) <= limit else "no"
    return [name, needs["rows"], _gib(needs["resident"]), _gib(needs["rollout"]), update, fits]


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / GIB:.2f} GiB"
