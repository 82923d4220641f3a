"""Our own checkpoints as models under test: their weights, the tokenizer they were made with, and a name."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from configs.model import ModelConfig, TokenizerConfig
from configs.section import ConfigError

if TYPE_CHECKING:
    from model.layers import Params


def load_checkpoint(folder: Path, wanted: TokenizerConfig | None) -> tuple["Params", ModelConfig, TokenizerConfig, str]:
    """Weights, model, tokenizer, and a name that follows from the weights alone.

    Raises `ConfigError` for an unreadable checkpoint, or a tokenizer other than `wanted` or too large for the model.
    """
    from model.weights import WEIGHTS, load_weights

    params, model, tokenizer = load_weights(folder)
    if wanted is not None and tokenizer != wanted:
        raise ConfigError(
            f"{folder}: the checkpoint was made with a tokenizer of {tokenizer.ranks} ranks, the configuration's has "
            f"{wanted.ranks}; evaluate it with its own"
        )
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(
            f"{folder}: config.json pairs a tokenizer of {tokenizer.vocabulary} ids with a model of "
            f"{model.vocabulary} rows; the checkpoint belongs to another tokenizer"
        )
    with (folder / WEIGHTS).open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    return params, model, tokenizer, f"checkpoint {weights[:12]}"
