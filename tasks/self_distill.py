"""The `self_distill` stage (paper §4.4): from a `checkpoint` to its best traces and a better `checkpoint`."""

from collections.abc import Mapping
from typing import Any

from nautile.configs.training import SelfDistillConfig
from nautile.data.sources.reasoning_gym import derived_seed
from nautile.rl.problems.files import check_files
from nautile.tasks.engine.job import Job
from nautile.tasks.reinforced import TRACES_LOSS, reinforcement_stage


def _limits(section: Mapping[str, Any]) -> list[str]:
    part = section["self_distill"]
    return [f"{part['problems']['count'] * part['rollout']['group'] * part['rounds']:,} completions to draw"]


@reinforcement_stage(
    "self_distill",
    version=9,
    outputs=("traces", "checkpoint"),
    loss=TRACES_LOSS,
    limits=_limits,
    check=lambda config: check_files(config.problems, "self_distill"),
    rehearse="nautile.rl.rehearsal:rehearse_self_distillation",
)
def self_distill(job: Job) -> None:
    """Sample completions, keep those better than their group's mean, and train on them, weighted by advantage."""
    # Imported here because every command imports this file for the DAG, and JAX takes seconds.
    from nautile.model.weights.files import save_weights
    from nautile.rl.self_distillation import SelfDistillation, self_distil
    from nautile.rl.stage_inputs import load_inputs

    config = job.part("self_distill", SelfDistillConfig)
    seed = derived_seed(job.seed("data"), job.stage)
    params, inputs, screen = load_inputs(job.inputs, config.problems, config.rollout, None, seed)
    run = SelfDistillation(
        inputs=inputs,
        config=config,
        identity={"execution": job.key},
        work=job.scratch,
        traces=job.output("traces") / "traces.jsonl",
        sampling_seed=job.seed("sampling"),
        emit=job.emit,
        shared_disk=job.shared_disk,
    )
    params, facts = self_distil(run, params)
    if job.process == 0:
        save_weights(job.output("checkpoint"), params, inputs.model, inputs.tokenizer)
    job.describe("checkpoint", **facts)
    job.describe("traces", **facts, **screen.facts())
