"""The config.json beside weights in the author's layout: his names for the fields of the model, read and written.

His own files have the shape alone. Ours, from `nautile export --format transformers`, also have the decay, the norms'
epsilons and the tokenizer, so that a checkpoint comes back as it was.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import ConfigError
from common.files import read_bounded_json
from configs.model import ModelConfig, TokenizerConfig
from data.tokenizer import tokenizer_for
from model.weights.files import LARGEST

# Ours by his. The number of layers and the ratio of the two kinds are not here: our blocks follow from both.
NAMES = {
    "d_model": "width",
    "d_ff": "feed_forward",
    "maxlen": "context",
    "seqcond_heads": "memory_heads",
    "num_query_heads": "query_heads",
    "num_thetas": "spectral_samples",
    "expand_factor": "expand",
    "out_expand_factor": "readout_expand",
    "conv_kernel_size": "convolution",
    "num_heads": "attention_heads",
    "num_kv_heads": "kv_heads",
    "qk_norm": "qk_norm",
}
OWN_NAMES = ("decay", "chunk", "rope_base", "sca_norm_epsilon", "norm_epsilon", "compute_dtype")


def author_fields(model: ModelConfig, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """What config.json says of a model and its tokenizer."""
    values = model.model_dump(mode="json")
    each = model.sca_per_block + 1
    return {
        "vocab_size": model.vocabulary + 1,
        "num_layers": model.blocks * each,
        "seqcond_ratio": model.sca_per_block,
        **{theirs: values[ours] for theirs, ours in NAMES.items()},
        **{name: values[name] for name in OWN_NAMES},
        "tokenizer_ranks": tokenizer.ranks,
        "tokenizer_fingerprint": tokenizer_for(tokenizer).fingerprint,
    }


def read_author_config(
    path: Path, model: ModelConfig, tokenizer: TokenizerConfig
) -> tuple[ModelConfig, TokenizerConfig, int | None]:
    """`model` and `tokenizer` with what the file says of them, and the context that it names (None: it does not).

    Raises ConfigError, naming file and field, for what no model has, and for another tokenizer than the file's ranks
    give here.
    """
    table = read_bounded_json(path)
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: is not a table of settings")
    if "format" in table and "model" in table:
        raise ConfigError(
            f"{path}: is that of a checkpoint of this project: it needs no import; name its folder where CHECKPOINT is "
            "asked for, or `nautile store add` it"
        )
    changes: dict[str, Any] = {ours: table[theirs] for theirs, ours in NAMES.items() if table.get(theirs) is not None}
    changes |= {name: table[name] for name in OWN_NAMES if name in table}
    if "num_kv_heads" in table and table["num_kv_heads"] is None and "attention_heads" in changes:
        changes["kv_heads"] = changes["attention_heads"]
    layers, ratio = (_whole(path, table, name) for name in ("num_layers", "seqcond_ratio"))
    if layers is not None and ratio is not None:
        if layers == 0 or layers % (ratio + 1):
            raise ConfigError(f"{path}: `num_layers` {layers} is no multiple of `seqcond_ratio` + 1 = {ratio + 1}")
        changes |= {"blocks": layers // (ratio + 1), "sca_per_block": ratio}
    if table.get("qk_norm_eps", model.norm_epsilon) != changes.get("norm_epsilon", model.norm_epsilon):
        raise ConfigError(f"{path}: `qk_norm_eps` {table['qk_norm_eps']!r}: this model has one epsilon for these norms")
    try:
        if "tokenizer_ranks" in table:
            tokenizer = TokenizerConfig.model_validate({"ranks": table["tokenizer_ranks"]})
            rows = _whole(path, table, "vocab_size")
            if rows is None or rows <= tokenizer.vocabulary:
                raise ConfigError(
                    f"{path}: `vocab_size` {rows} is too small for its tokenizer, which has {tokenizer.vocabulary} ids "
                    "beside padding: these weights are of another tokenizer"
                )
            changes["vocabulary"] = rows - 1
        changed = ModelConfig.model_validate({**model.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = {ours: theirs for theirs, ours in NAMES.items()}
        where = ".".join(names.get(str(part), str(part)) for part in first["loc"]) or "its sizes"
        raise ConfigError(f"{path}: `{where}`: {first['msg'].removeprefix('Value error, ')}") from None
    for name, value in changed:
        if isinstance(value, int) and value > LARGEST:
            raise ConfigError(f"{path}: `{name}`: {value} is more than any model has")
    fingerprint = table.get("tokenizer_fingerprint")
    if fingerprint is not None and fingerprint != tokenizer_for(tokenizer).fingerprint:
        raise ConfigError(
            f"{path}: these weights are of another tokenizer than cl100k_base with {tokenizer.ranks} ranks"
        )
    return changed, tokenizer, changes.get("context")


def _whole(path: Path, table: Mapping[str, Any], name: str) -> int | None:
    """A field that is a whole number of a size that a model can have, or absent."""
    value = table.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ConfigError(f"{path}: `{name}`: {value!r} is no number that a model can have")
    return value
