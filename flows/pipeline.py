"""The flows: the whole pipeline (text in, an evaluated model and its report out; paper §3 to §5), and one a stage.

A flow runs the selected steps in order, and only artifact ids pass from step to step. Steps run one after another,
those of other runs on the same server included: each uses all the cores (or the accelerator) there are.
"""

import logging
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from prefect import Flow, flow
from prefect.artifacts import create_link_artifact
from prefect.runtime import deployment, flow_run

from configs.load import NamedConfig
from flows.dag import Need
from flows.operate import approval, concurrency
from flows.selection import PreparedRun, Selection, prepare_run
from store.mirror import open_store
from tasks.engine.child_process import cancelling
from tasks.engine.prefect_page import run_page
from tasks.engine.prefect_task import as_prefect_task
from tasks.engine.stage import RunContext

log = logging.getLogger(__name__)

Outputs = dict[str, dict[str, str]]

# What `nautile run` has checked before Prefect starts. Not a parameter: Prefect would store and show it.
prepared_run: ContextVar[PreparedRun | None] = ContextVar("prepared_run", default=None)


class StageFailed(RuntimeError):
    """A step did not succeed, retries included. `__cause__` is what it raised."""

    def __init__(self, label: str, cause: Exception) -> None:
        super().__init__(f"{label}: {cause}")
        self.label = label


@flow(name="pipeline", flow_run_name="{config.name}", retries=0, log_prints=False)
def pipeline(config: NamedConfig, selection: Selection = Selection(), store_root: str | None = None) -> Outputs:
    """Run `config`, or the selected part of it. Returns label -> kind -> artifact id of what was selected.

    Raises `ConfigError` before anything runs if the selection or an input it needs is missing, and `StageFailed`.
    """
    store = open_store(store_root)
    run = prepared_run.get() or prepare_run(config, selection, store)
    run_id = str(flow_run.id)
    artifacts, outputs_by_label = dict(run.inputs), Outputs()
    limited = concurrency.is_limited()
    _link_dashboard(run_id)
    with store.run_lock(run_id).for_life(), cancelling():
        for step in run.steps:
            # A deployment's run is retried with the values of its form; a run from a terminal by its command.
            retry = f"prefect flow-run retry {run_id}    # or Retry on the run's page"
            context = RunContext(
                run_id,
                str(store.root),
                selection.force,
                step.label,
                config.name,
                config.launch,
                config.telemetry,
                resume=retry if deployment.id else run.resume_command(step.label),
            )
            inputs = {name: artifacts[need] for name, need in step.needs.items()} | step.given
            try:
                approval.before_step(store, config, step, selection.force, run_id)
                with concurrency.permit(step.label) if limited else nullcontext():
                    outputs = as_prefect_task(step.stage)(step.section, inputs, context)
                approval.after_step(store, config, step, outputs, run_id, selection.force)
            except Exception as error:
                raise StageFailed(step.label, error) from error
            outputs_by_label[step.label] = outputs
            artifacts |= {Need(step.label, kind): artifact_id for kind, artifact_id in outputs.items()}
    return outputs_by_label


def stage_flow(stage: str) -> Flow[Any, Outputs]:
    """A flow that runs one stage wherever the pipeline uses it, with the same keys and the same reuse.

    What the stage reads must be in the store already.
    """

    def rerun(config: NamedConfig, force: bool = False, store_root: str | None = None) -> Outputs:
        return pipeline.fn(config, Selection(only=stage, force=force), store_root)

    rerun.__name__ = rerun.__qualname__ = stage
    rerun.__doc__ = f"Run the stage `{stage}` of a configuration; `force` runs it again and keeps what it replaces."
    return flow(name=stage, flow_run_name=f"{stage} of {{config.name}}", log_prints=False)(rerun)


# Deployments name these by their path, as `flows.pipeline.reason`.
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


def _link_dashboard(run_id: str) -> None:
    """Link the run's page in Prefect to the dashboard, if the dashboard's address is known."""
    page = run_page(run_id)
    if not page:
        return
    try:
        create_link_artifact(page, link_text="this run in the dashboard", key="dashboard")
    except Exception as error:  # the link is a convenience: the run continues without it
        log.warning("Prefect refused the link to the dashboard: %s", error)
