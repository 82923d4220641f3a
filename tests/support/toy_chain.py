"""The toy chain without Prefect: the plan's executions run one after another."""

from pathlib import Path

from configs.schema import RunConfig
from flows.plan import Need, plan
from store.artifacts import Store
from tasks.stage import RunContext
from tests.support.toy_stages import toy_stage


def make_all(root: Path, config: RunConfig, run_id: str = "toy") -> dict[str, dict[str, str]]:
    """Label -> kind -> artifact id, all made in the store at `root`."""
    made: dict[str, dict[str, str]] = {}
    for execution in plan(config, toy_stage):
        inputs = {name: _id(made, need) for name, need in execution.needs.items()}
        context = RunContext(run_id, str(root), label=execution.label, config=config.name)
        made[execution.label] = toy_stage(execution.stage).run(execution.section, inputs, context)
        for kind in execution.outputs:
            assert Store(root).find(kind, execution.key), "the plan's key is not the one it was published under"
    return made


def _id(made: dict[str, dict[str, str]], need: Need) -> str:
    return made[need.producer][need.kind]
