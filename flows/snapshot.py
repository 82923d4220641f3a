"""`nautile store snapshot`: publish a saved step of an unfinished pretraining as a checkpoint to start others from."""

import uuid

from nautile.common.errors import ConfigError
from nautile.configs.schema import RunConfig
from nautile.flows.selection import Selection, prepare_run
from nautile.store.artifacts import Artifact, Store
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.pretrain import snapshot


def publish_snapshot(store: Store, config: RunConfig, argument: str, step: int | None) -> Artifact:
    """Publish the checkpoint of training step `step` (None: the newest) that the pretraining of `config` has saved.

    Raises `ConfigError`, with the saved steps, if that step is not saved.
    """
    [pretrain] = prepare_run(config, Selection(only="pretrain"), store, argument).steps
    folder = store.staging_files(pretrain.key).saved_steps
    saved = sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())
    if not saved or step not in (None, *saved):
        available = f"it has {', '.join(map(str, saved))}" if saved else "it is finished, or has not saved any yet"
        raise ConfigError(f"the pretraining of {argument} has no saved step{f' {step}' if step else ''}: {available}")
    number = step or saved[-1]
    context = RunContext(f"snapshot-{uuid.uuid4().hex[:8]}", str(store.root), config=config.name)
    outputs = run_stage(snapshot, {"of": pretrain.key, "step": number}, pretrain.inputs, context)
    return store.get(outputs["checkpoint"])
