"""The whole chain as one Prefect flow: text in, an evaluated model and its report out (paper §3 to §5).

The flow runs the chosen part of the plan in order. Only artifact ids pass from task to task. Stages run one after
another: each uses all the cores (or the accelerator) there are.
"""

from prefect import flow
from prefect.runtime import flow_run

from configs.schema import RunConfig
from flows import plan as planning
from flows.links import link_to_dashboard
from flows.plan import Need
from flows.selection import Selection, choose, given_artifacts
from store.artifacts import Store
from tasks.child import cancelling
from tasks.stage import RunContext

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
    store = Store(store_root)
    executions = planning.plan(config)
    chosen = choose(executions, selection)
    made = given_artifacts(store, executions, chosen, config.name)
    run_id = str(flow_run.id)
    link_to_dashboard(run_id)
    done: Outputs = {}
    with cancelling():
        for execution in (e for e in executions if e.label in chosen):
            inputs = {name: made[need] for name, need in execution.needs.items()}
            context = RunContext(run_id, str(store.root), selection.force, execution.label, config.name, config.launch)
            try:
                outputs = planning.stage_named(execution.stage)(execution.section, inputs, context)
            except Exception as error:
                raise StageFailed(execution.label, error) from error
            done[execution.label] = outputs
            made |= {Need(execution.label, kind): artifact_id for kind, artifact_id in outputs.items()}
    return done
