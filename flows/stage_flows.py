"""Prefect flows that run one stage each, for deployments. `nautile run` uses only the pipeline's flow."""

from typing import Any

from prefect import Flow, flow
from prefect.client.schemas.objects import State

from nautile.flows.forms import ConfigName, Overrides, RunName, run_name
from nautile.flows.pipeline import Outputs, run_selected
from nautile.flows.selection import Selection


def stage_flow(stage: str) -> Flow[Any, Outputs | State[Any]]:
    """A flow that runs all steps of one stage, with the same keys and reuse as in the pipeline.

    The inputs of the stage must be in the store.
    """

    def rerun(
        config: ConfigName = "local", overrides: Overrides = (), force: bool = False, name: RunName = ""
    ) -> Outputs | State[Any]:
        return run_selected(config, overrides, Selection(only=stage, force=force))

    # Prefect takes the entry point of a deployment from the function's name and the form's texts from its docstring, so
    # each flow gets its own.
    rerun.__name__ = rerun.__qualname__ = stage
    rerun.__doc__ = f"""Run the stage `{stage}` of a configuration; what it reads must be in the store.

    Args:
        config: The configuration that is deployed here, the name of a shipped one, or the path of a file on the worker.
        overrides: Values that replace those of the configuration, one in each entry, such as `reason.policy.steps=3`.
        force: Run the stage again. What it replaces is kept.
        name: What the run is called. Without it, it keeps the name that it has.
    """
    return flow(name=stage, flow_run_name=run_name, log_prints=False)(rerun)


# Deployments name these by their path, as `flows.stage_flows.reason`.
held_out = stage_flow("held_out")
ingest = stage_flow("ingest")
index = stage_flow("index")
distill = stage_flow("distill")
pretrain = stage_flow("pretrain")
align = stage_flow("align")
reason = stage_flow("reason")
self_distill = stage_flow("self_distill")
evaluate = stage_flow("evaluate")
report = stage_flow("report")
STAGE_FLOWS = (held_out, ingest, index, distill, pretrain, align, reason, self_distill, evaluate, report)
