"""The whole chain as one Prefect flow: text in, an evaluated model and its report out (paper §3 to §5).

The flow runs the chosen part of the plan in order. Only artifact ids pass from task to task. Stages run one after
another, those of other runs on the same server included: each uses all the cores (or the accelerator) there are.
"""

import logging
from contextlib import nullcontext
from dataclasses import replace

from prefect import flow
from prefect.artifacts import create_link_artifact
from prefect.runtime import flow_run

from configs.schema import RunConfig
from flows import dag as planning
from flows.dag import Need
from flows.operate import approval_questions as questions
from flows.operate import concurrency as turns
from flows.selection import Selection, choose, given_artifacts, way_on
from store.mirror import open_store
from tasks.engine.child_process import cancelling
from tasks.engine.prefect_page import run_page
from tasks.engine.prefect_task import as_prefect_task
from tasks.engine.stage import RunContext

log = logging.getLogger(__name__)

Outputs = dict[str, dict[str, str]]


class StageFailed(RuntimeError):
    """An execution did not succeed, retries included. `__cause__` is what it raised."""

    def __init__(self, label: str, cause: Exception) -> None:
        super().__init__(f"{label}: {cause}")
        self.label = label


@flow(name="pipeline", flow_run_name="{config.name}", retries=0, log_prints=False)
def pipeline(config: RunConfig, selection: Selection = Selection(), store_root: str | None = None) -> Outputs:
    """Run `config`, or the selected part of it. Returns label -> kind -> artifact id of what was chosen.

    Raises `ConfigError` before anything runs if the selection or an input it needs is missing, and `StageFailed`.
    """
    store = open_store(store_root)
    executions = planning.plan(config)
    chosen = choose(executions, selection)
    store.refresh()
    made = given_artifacts(store, executions, chosen, config.name)
    run_id = str(flow_run.id)
    done: Outputs = {}
    take_turns = turns.limited()
    _link(run_id)
    with store.run_lock(run_id).for_life(), cancelling():
        for execution in (e for e in executions if e.label in chosen):
            inputs = {name: made[need] for name, need in execution.needs.items()}
            context = RunContext(run_id, str(store.root), selection.force, execution.label, config.name, config.launch)
            again = way_on(config, selection, execution.label)
            context = replace(context, telemetry=config.telemetry, resume=again)
            try:
                questions.before(store, config, execution, selection.force, run_id)
                with turns.turn(execution.label) if take_turns else nullcontext():
                    outputs = as_prefect_task(planning.stage_named(execution.stage))(execution.section, inputs, context)
                questions.after(store, config, execution, outputs, run_id)
            except Exception as error:
                raise StageFailed(execution.label, error) from error
            done[execution.label] = outputs
            made |= {Need(execution.label, kind): artifact_id for kind, artifact_id in outputs.items()}
    return done


def _link(run_id: str) -> None:
    """A link on the run's page to the dashboard, where that is known."""
    page = run_page(run_id)
    if not page:
        return
    try:
        create_link_artifact(page, link_text="this run in the dashboard", key="dashboard")
    except Exception as error:  # a server that does not take it fails nothing
        log.warning("Prefect did not take the link to the dashboard: %s", error)
