"""The `supervise` stage: from a `checkpoint` to one that is trained on worked solutions. Not of the paper.

Reinforcement learns from the model's own right answers, and finds none to learn from where there are too few of them.
"""

from collections.abc import Mapping
from typing import Any

from nautile.common.errors import ConfigError
from nautile.configs.stages import TRAINED
from nautile.configs.training import SuperviseConfig
from nautile.data.sources.reasoning_gym import derived_seed
from nautile.rl.problems import SOLVED_SOURCES, check_files
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import Curve, stage
from nautile.tasks.rehearsal import STEPS, few_problems


def _check(config: SuperviseConfig) -> None:
    check_files(config.problems, "supervise")
    for number, source in enumerate(config.problems.sources or (config.problems,)):
        if source.source not in SOLVED_SOURCES:
            place = f"problems.sources[{number}]" if config.problems.sources else "problems"
            raise ConfigError(
                f"supervise.{place}.source: {source.source!r} has answers without solutions, so there is nothing to "
                f"train on; those with solutions are {', '.join(SOLVED_SOURCES)}"
            )


def _rows(section: Mapping[str, Any]) -> list[str]:
    part = section["supervise"]
    return [f"{part['problems']['count'] * part['epochs']:,} solutions to train on"]


def _rehearsal(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Two rows at once of a few solutions, after the stage before it."""
    part = settings["supervise"]
    few = {"problems": few_problems(part["problems"]), "epochs": 1, "batch_rows": min(STEPS, part["batch_rows"])}
    start = part["start"] if part["start"] in TRAINED else None
    return {"supervise": part | few | {"fsdp": 1, "save_every": 1, "start": start}}


@stage(
    "supervise",
    version=1,
    outputs=("checkpoint",),
    accelerator=True,
    multihost=True,
    trains=True,
    page="training",
    heading="Supervised training",
    curves=(
        Curve("loss on solutions", ("loss",), "nats per token"),
        Curve("updates that were not finite", ("skipped_updates",), "updates"),
    ),
    limits=_rows,
    check=_check,
    rehearsal=_rehearsal,
)
def supervise(job: Job) -> None:
    """Train the input checkpoint on solutions of the problems, with the prompts masked."""
    from nautile.model.training.optimizer import distance
    from nautile.model.weights.files import save_weights
    from nautile.rl.rollouts import load_inputs
    from nautile.rl.supervised import Supervision
    from nautile.rl.supervised import supervise as train

    config = job.part("supervise", SuperviseConfig)
    seed = derived_seed(job.seed("data"), job.stage)
    params, inputs, screen = load_inputs(job.inputs, config.problems, None, None, seed)
    run = Supervision(
        inputs=inputs,
        config=config,
        identity={"execution": job.key},
        work=job.scratch,
        sampling_seed=job.seed("sampling"),
        emit=job.emit,
        shared_disk=job.shared_disk,
    )
    trained, facts = train(run, params)
    if job.process == 0:
        save_weights(job.output("checkpoint"), trained, inputs.model, inputs.tokenizer)
    job.describe("checkpoint", **facts, distance=distance(params, trained), **screen.facts())
