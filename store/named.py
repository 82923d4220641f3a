"""The artifact that a command names: by its id, or the stage that trained it; the newest without a name."""

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import did_you_mean
from nautile.configs.stages import TRAINED
from nautile.store.artifacts import Artifact, Store
from nautile.store.layout import SCRATCH, STAGING, STEPS


def named_or_newest(store: Store, kind: str, artifact_id: str | None = None) -> Artifact:
    """The artifact with this id, which must be of this kind, or the newest of the kind; of a checkpoint also by stage.

    The newest is one that no run of a sweep made, if there is one: the last arm may have trained for two steps. Raises
    `ConfigError` if there is none.
    """
    store.refresh()
    if artifact_id:
        if kind == "checkpoint" and (checkpoint := trained_by(store, artifact_id)):
            return checkpoint
        # Digits alone may also be those of other artifacts of the same key, such as the traces of a self-distillation.
        digits = artifact_id.partition(".")[0]
        is_of_kind = any(key.startswith(digits) for _, key, *_ in store.folders(kind))
        artifact = store.get(f"{kind}/{artifact_id}" if is_of_kind else artifact_id)
        if artifact.kind != kind:
            raise ConfigError(f"{artifact.id} is not of kind {kind}: `nautile artifacts {kind}` lists those")
        return artifact
    artifacts = store.list(kind)
    if not artifacts:
        raise ConfigError(f"no {kind} in {store.root} yet: `nautile run` makes one{_in_training(store, kind)}")
    return _without_sweeps(store, artifacts)[-1]


def _without_sweeps(store: Store, artifacts: list[Artifact]) -> list[Artifact]:
    """Those that no run of a sweep made; all of them if there are no others.

    A sweep made an artifact of a key in its record if it is newer than the record: it reused an older one.
    """
    begun: dict[str, str] = {}
    for record in (read_json(path) for path in store.sweeps.glob("*.json")):
        for run in record.get("runs", ()) if isinstance(record, dict) else ():
            begun |= {step["key"]: run["begun"] for step in run["steps"] if "begun" in run}
    return [
        artifact
        for artifact in artifacts
        if artifact.key not in begun or artifact.manifest["created"] < begun[artifact.key]
    ] or artifacts


def trained_by(store: Store, stage: str) -> Artifact | None:
    """The newest checkpoint of a stage of training; None if `stage` is no name of one.

    Raises `ConfigError` if the stage has no checkpoint, or for a name that is almost one.
    """
    if stage not in TRAINED:
        if close := did_you_mean(stage, TRAINED):
            raise ConfigError(f"no artifact or stage {stage!r}{close}")
        return None
    checkpoints = [artifact for artifact in store.list("checkpoint") if artifact.manifest["stage"] == stage]
    if not checkpoints:
        raise ConfigError(
            f"no checkpoint of {stage} in {store.location}: `nautile run CONFIG --until {stage}` makes one"
            + (_in_training(store) if stage == "pretrain" else "")
        )
    return _without_sweeps(store, checkpoints)[-1]


def _in_training(store: Store, kind: str = "checkpoint") -> str:
    """The command for a message that says there is no checkpoint, while a pretraining has saved steps; else ""."""
    if kind != "checkpoint" or not any(store.root.glob(f"{STAGING}/*/{SCRATCH}/{STEPS}/*")):
        return ""
    return "; `nautile store snapshot CONFIG` makes one of what is trained so far"
