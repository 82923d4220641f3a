"""The checkpoints of a configuration's own pipeline, apart from those of sweeps, experiments and single uses.

A store has all of them. The scheduled evaluation watches one pipeline: the arm of a sweep that trained for two steps is
no regression of it.
"""

from nautile.common.errors import ConfigError
from nautile.configs.schema import RunConfig
from nautile.configs.stages import TRAINED
from nautile.flows.dag import dag_in
from nautile.store.artifacts import Artifact, Store
from nautile.store.catalog import Catalog

# Executions of which it is known that only runs of other configurations made them. (name)
_OF_OTHERS = """
SELECT execution FROM attempts WHERE execution IS NOT NULL AND NOT coalesce(reused, false)
GROUP BY execution HAVING bool_and(coalesce(config, ?) <> ?)
"""


def executions_of_others(store: Store, config: RunConfig) -> set[str]:
    """The executions that runs of other configurations made. A sweep names the configuration of each arm.

    One whose run is not recorded, as of an event file that was lost, is not among them.
    """
    catalog = Catalog(store)
    catalog.ingest()
    return {row["execution"] for row in catalog.query(_OF_OTHERS, [config.name, config.name])}


def newest_own(store: Store, config: RunConfig) -> Artifact | None:
    """The newest checkpoint that the training stages of the configuration made; None if there is none.

    Those with the keys of the configuration as it is come first; else those that runs of its name have made, with
    earlier settings.
    """
    checkpoints = store.by_publication(store.list("checkpoint"))
    trained = [artifact for artifact in checkpoints if artifact.manifest["stage"] in TRAINED]
    try:
        keys = {step.key for step in dag_in(store, config)}
    except ConfigError:  # a file of the configuration is not on this machine, so its keys are not known here
        keys = set()
    if own := [artifact for artifact in trained if artifact.key in keys]:
        return own[-1]
    others = executions_of_others(store, config)
    return next((artifact for artifact in reversed(trained) if artifact.recorded_execution not in others), None)
