"""The whole chain as one Prefect flow: text in, an evaluated model and its report out (paper §3 to §5).

The flow runs the chosen part of the plan in order. Only artifact ids pass from task to task. Stages run one after
another: each uses all the cores (or the accelerator) there are.
"""

from collections.abc import Sequence

from prefect import flow
from prefect.runtime import flow_run

from configs.schema import RunConfig
from configs.section import ConfigError
from flows import plan as planning
from flows.plan import Execution, Need, Selection, choose, outside_needs
from store.artifacts import Store
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
    done: Outputs = {}
    for execution in executions:
        if execution.label not in chosen:
            continue
        inputs = {name: made[need] for name, need in execution.needs.items()}
        context = RunContext(run_id, str(store.root), selection.force, execution.label, config.name)
        try:
            outputs = planning.stage_named(execution.stage)(execution.section, inputs, context)
        except Exception as error:
            raise StageFailed(execution.label, error) from error
        done[execution.label] = outputs
        made |= {Need(execution.label, kind): artifact_id for kind, artifact_id in outputs.items()}
    return done


def given_artifacts(store: Store, executions: Sequence[Execution], chosen: set[str], config: str) -> dict[Need, str]:
    """Ids of what the chosen executions read of the others, which must be in the store under the plan's keys.

    Raises `ConfigError` naming the first that is missing and the command that makes it; `config` is its argument.
    """
    found: dict[Need, str] = {}
    keys = {execution.label: execution.key for execution in executions}
    for label, needs in outside_needs(executions, chosen).items():
        for need in needs:
            artifact = store.find(need.kind, keys[label])
            if artifact is None:
                readers = [e.label for e in executions if e.label in chosen and need in e.needs.values()]
                raise ConfigError(
                    f"{readers[0]} needs the {need.kind} of {label} ({need.kind}/{keys[label][:12]}), which is not in "
                    f"{store.root}: make it with `nautile run {config} --until {label}`"
                )
            found[need] = artifact.full_id
    return found
