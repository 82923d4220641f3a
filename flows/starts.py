"""The DAG of a configuration in a store: which checkpoint each step with a `start` begins from, and the keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import ConfigError
from configs.schema import RunConfig
from flows.dag import TRAINED, Step, build_dag
from model.weights.start import refuse_other_shape
from store.artifacts import Artifact, Store


def dag_in(store: Store, config: RunConfig) -> list[Step]:
    """The steps of `config` with the keys that they have in `store`. Raises as `resolve_starts` and `build_dag`."""
    return build_dag(resolve_starts(config, store), memory=store.digest_memory)


def resolve_starts(config: RunConfig, store: Store) -> RunConfig:
    """`config` with every `start` replaced by the full id of the checkpoint that it means in `store`.

    Raises `ConfigError` for an unknown or ambiguous id, something that is no checkpoint, and a pretraining that would
    begin from a model of another shape or tokenizer.
    """
    sections = {}
    for name in TRAINED:
        section = getattr(config, name)
        if section.start is None:
            continue
        try:
            # A checkpoint that this run makes would move the key of the step, and a resumed run would begin elsewhere.
            artifact = checkpoint_named(store, section.start, made_here=TRAINED[TRAINED.index(name) :])
        except ConfigError as error:
            raise ConfigError(f"{name}.start: {error}") from None
        if name == "pretrain" and store.has_files(artifact):  # else the stage compares, once it is fetched
            refuse_other_shape(artifact.folder, artifact.id, config.model, config.tokenizer)
        sections[name] = section.model_copy(update={"start": artifact.full_id})
    return config.model_copy(update=sections) if sections else config


def checkpoint_named(store: Store, start: str, made_here: Sequence[str]) -> Artifact:
    """The checkpoint that a `start` means; "newest" passes over those of the labels `made_here`.

    Raises `ConfigError` for an unknown or ambiguous id, and where there is no such checkpoint.
    """
    newest, _, label = start.partition(":")
    if newest != "newest":
        return store.get(start)
    if label in made_here:
        raise ConfigError(f"this run makes a checkpoint of {label} itself, so the newest changes: give an id")

    def fits(manifest: Mapping[str, Any]) -> bool:
        return label in (manifest["label"], manifest["stage"]) if label else manifest["label"] not in made_here

    checkpoints = [artifact for artifact in store.list("checkpoint") if fits(artifact.manifest)]
    if not checkpoints:
        others = f" of {label}" if label else f", other than of {', '.join(made_here)}"
        raise ConfigError(f"no checkpoint{others} in {store.location}: `nautile artifacts checkpoint` lists them")
    return checkpoints[-1]
