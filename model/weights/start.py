"""What must agree between a checkpoint and the pretraining that begins from its weights. Loads no JAX."""

from pathlib import Path

from common.errors import ConfigError
from common.files import read_json
from configs.model import ModelConfig, TokenizerConfig

# A model may differ from the one that it begins from in these: they change no parameter's shape or meaning.
_MAY_DIFFER = {"context", "compute_dtype", "mixing", "chunk", "remat"}


def refuse_other_shape(folder: Path, name: str, model: ModelConfig, tokenizer: TokenizerConfig) -> None:
    """Raise `ConfigError`, with the first difference, unless the checkpoint in `folder`, called `name`, fits."""
    saved = read_json(folder / "config.json") or {}
    for part, wanted in (("model", model), ("tokenizer", tokenizer)):
        theirs = saved.get(part)
        if not isinstance(theirs, dict):
            raise ConfigError(f"pretrain.start: {name} is not a checkpoint: its config.json has no `{part}`")
        for field, value in wanted.model_dump(mode="json").items():
            if field not in _MAY_DIFFER and theirs.get(field, value) != value:
                raise ConfigError(
                    f"pretrain.start: {name} has {part}.{field} {theirs[field]!r}, and this run {value!r}: set it as "
                    "the checkpoint has it, or begin from another"
                )
