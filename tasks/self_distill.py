"""Self-distillation as a stage (paper §4.4): a `checkpoint` in, its best traces and a better `checkpoint` out."""

from configs.training import SelfDistillConfig
from data.screening.contamination import load_contamination_index
from rl.problems import Screen, load
from tasks.engine.job import Job
from tasks.engine.stage import stage


@stage("self_distill", version=3, outputs=("traces", "checkpoint"), accelerator=True)
def self_distill(job: Job) -> None:
    """Sample the problems, keep what is better than its group, train on it in proportion."""
    # Imported here, not above: every command reads this file for the plan, and JAX takes seconds.
    from model.weights.files import load_weights, save_weights
    from rl.reinforce import on_device
    from rl.self_distillation import SelfDistillation, self_distil

    config = job.part("self_distill", SelfDistillConfig)
    screen = Screen(load_contamination_index(job.inputs.get("questions")))
    problems = load(config.problems, job.seed, screen=screen)
    params, model, tokenizer = load_weights(job.inputs["checkpoint"])
    student = SelfDistillation(
        model=model,
        tokenizer=tokenizer,
        config=config,
        problems=problems,
        identity={"execution": job.key},
        work=job.scratch,
        traces=job.output("traces") / "traces.jsonl",
        seed=job.seed,
        emit=job.emit,
    )
    params, facts = self_distil(student, on_device(params))
    save_weights(job.output("checkpoint"), params, model, tokenizer)
    job.describe("checkpoint", **facts)
    job.describe("traces", **facts, **screen.facts())
