"""Checks that a checkpoint fits the pretraining run that starts from its weights. Does not import JAX."""

from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.configs.model import ModelConfig, TokenizerConfig

# Fields in which the model may differ from the checkpoint: they change no parameter's shape or meaning.
_MAY_DIFFER = {"context", "compute_dtype", "mixing", "chunk", "remat"}


def refuse_other_shape(folder: Path, name: str, model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Raise `ConfigError` with the first difference unless the checkpoint in `folder` fits. `name` is for messages."""
    saved = read_json(folder / "config.json") or {}
    for part, expected in (("model", model), ("tokenizer", tokenizer)):
        actual = saved.get(part)
        if not isinstance(actual, dict):
            raise ConfigError(f"pretrain.start: {name} is not a checkpoint: its config.json has no `{part}`")
        for field, value in expected.model_dump(mode="json").items():
            if field not in _MAY_DIFFER and actual.get(field, value) != value:
                raise ConfigError(
                    f"pretrain.start: {name} has {part}.{field} {actual[field]!r}, and this run {value!r}: set it as "
                    "the checkpoint has it, or start from another"
                )
