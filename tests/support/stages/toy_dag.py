"""The pipeline's DAG with the stand-in stages of `tests.support.stages.toy_stages`.

Apart from them because their child processes import that file: this one imports every stage of the project.
"""

from dataclasses import replace

from nautile.configs.schema import RunConfig
from nautile.flows.dag import Step, all_outputs, pipeline_steps
from nautile.tasks.engine.stage import Stage
from tests.support.stages.toy_stages import toy_stage

TOY_DAG = {"NAUTILE_DAG": "tests.support.stages.toy_dag:toy_dag"}  # for the environment of a process


def toy_dag(config: RunConfig) -> list[Step]:
    """The pipeline's steps with the stand-ins in place of its stages but the report; an argument of `build_dag`.

    What the real stages declare for approvals and forecasts holds for the stand-ins.
    """
    *steps, last = pipeline_steps(config)
    steps = [replace(step, stage=stand_in_of(step.stage)) for step in steps]
    return [*steps, replace(last, needs=all_outputs(steps))]


def stand_in_of(stage: Stage) -> Stage:
    """The stage with the name, version, outputs and function of its stand-in."""
    toy = toy_stage(stage.name)
    declared = {name: getattr(stage, name) for name in ("limits", "calls", "check", "compile_ahead")}
    return replace(toy, **declared)


def chain_dag(config: RunConfig) -> list[Step]:
    """The real steps with the evaluations of the first and the last checkpoint alone: the others show nothing more."""
    *steps, last = pipeline_steps(config)
    left_out = {f"evaluate:{name}" for name in config.trained[1:-1]}
    steps = [step for step in steps if step.label not in left_out]
    return [*steps, replace(last, needs=all_outputs(steps))]
