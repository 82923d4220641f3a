"""The DAG of a configuration in a store, with the stored checkpoints that `start` settings refer to."""

from collections.abc import Mapping, Sequence
from typing import Any

from nautile.common.errors import ConfigError
from nautile.configs.model import refuse_other_shape
from nautile.configs.schema import RunConfig
from nautile.configs.training import TRAINED
from nautile.flows.dag import Step, build_dag
from nautile.store.artifacts import Artifact, Store


def dag_in(store: Store, config: RunConfig) -> list[Step]:
    """The steps of `config` with their keys in `store`. Raises like `resolve_starts` and `build_dag`."""
    return build_dag(resolve_starts(config, store), memory=store.digest_memory)


def resolve_starts(config: RunConfig, store: Store) -> RunConfig:
    """`config` with every `start` replaced by the full id of the checkpoint that it refers to in `store`.

    Raises `ConfigError` for an unknown or ambiguous id, an artifact that is not a checkpoint, and a pretraining that
    would start from a model of another shape or tokenizer.
    """
    sections = {}
    for name in config.trained:
        section = getattr(config, name)
        if section.start is None or section.start in TRAINED:  # a stage of this run: an input like any other
            continue
        try:
            # Checkpoints of this run are excluded: they would change the key of the step when the run is resumed.
            artifact = checkpoint_named(store, section.start, own_labels=TRAINED[TRAINED.index(name) :])
        except ConfigError as error:
            raise ConfigError(f"{name}.start: {error}") from None
        if name == "pretrain" and store.has_files(artifact):  # else the stage checks it after fetching the files
            refuse_other_shape(artifact.folder, artifact.id, config.model, config.tokenizer)
        sections[name] = section.model_copy(update={"start": artifact.full_id})
    return config.model_copy(update=sections) if sections else config


def checkpoint_named(store: Store, start: str, own_labels: Sequence[str]) -> Artifact:
    """The checkpoint that a `start` refers to: an id, `newest` or `newest:LABEL`.

    `newest` skips checkpoints of `own_labels`, the labels that the run itself writes. Raises `ConfigError` for an
    unknown or ambiguous id, and if there is no such checkpoint.
    """
    newest, _, label = start.partition(":")
    if newest != "newest":
        return store.get(start)
    if label in own_labels:
        raise ConfigError(f"this run makes a checkpoint of {label} itself, so the newest changes: give an id")

    def matches(manifest: Mapping[str, Any]) -> bool:
        return label in (manifest["label"], manifest["stage"]) if label else manifest["label"] not in own_labels

    checkpoints = [artifact for artifact in store.list("checkpoint") if matches(artifact.manifest)]
    if not checkpoints:
        others = f" of {label}" if label else f", other than of {', '.join(own_labels)}"
        raise ConfigError(f"no checkpoint{others} in {store.location}: `nautile artifacts checkpoint` lists them")
    return checkpoints[-1]
