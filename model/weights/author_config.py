"""Reads and writes the config.json of weights in the layout of the paper's author, who names the fields differently.

The author's files have only the sizes of the model, whose blocks are SCA layers and then a Transformer layer. Exports
by `nautile export --format transformers` also have the pattern, the forms of decay, θ and ω, the epsilons of the norms
and the tokenizer, so that an import restores the checkpoint exactly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.model.weights.files import LARGEST

# Names of fields here, by the author's names. Not listed: the number of layers and the ratio of the two kinds, which
# together determine `blocks` and `pattern`.
FIELD_NAMES = {
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
# Fields that only exports have, under the same names.
EXTRA_FIELDS = (
    "pattern",
    "decay",
    "grid",
    "integration",
    "chunk",
    "rope_base",
    "sca_norm_epsilon",
    "norm_epsilon",
    "compute_dtype",
)


def author_fields(model: ModelConfig, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The fields of config.json for a model and its tokenizer."""
    values, ratio = model.model_dump(mode="json"), model.pattern.count("S")
    return {
        "vocab_size": model.vocabulary + 1,
        "num_layers": model.blocks * len(model.pattern),
        **({"seqcond_ratio": ratio} if model.pattern == "S" * ratio + "A" else {}),
        **{author_name: values[name_here] for author_name, name_here in FIELD_NAMES.items()},
        **{name: values[name] for name in EXTRA_FIELDS},
        "tokenizer_ranks": tokenizer.ranks,
        "tokenizer_fingerprint": tokenizer_for(tokenizer).fingerprint,
    }


def read_author_config(
    path: Path, model: ModelConfig, tokenizer: TokenizerConfig
) -> tuple[ModelConfig, TokenizerConfig, int | None]:
    """Update `model` and `tokenizer` with the file's fields; also return the context it names, if any.

    Raises ConfigError, naming file and field, for values that no model can have, and if the file's tokenizer is not
    available here.
    """
    table = read_bounded_json(path)
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: is not a table of settings")
    if "format" in table and "model" in table:
        raise ConfigError(
            f"{path}: belongs to a checkpoint of this project, which needs no import: use its folder as CHECKPOINT, or "
            "add it with `nautile store add`"
        )
    changes: dict[str, Any] = {
        name_here: table[author_name]
        for author_name, name_here in FIELD_NAMES.items()
        if table.get(author_name) is not None
    }
    changes |= {name: table[name] for name in EXTRA_FIELDS if name in table}
    # null there means that every query head has keys and values of its own.
    if "num_kv_heads" in table and table["num_kv_heads"] is None and "attention_heads" in changes:
        changes["kv_heads"] = changes["attention_heads"]
    layers, ratio = (_integer(path, table, name) for name in ("num_layers", "seqcond_ratio"))
    if layers is not None and isinstance(changes.get("pattern"), str):
        each = len(changes["pattern"])
        if not layers or not each or layers % each:
            raise ConfigError(f"{path}: `num_layers` {layers} is no multiple of the {each} letters of `pattern`")
        changes["blocks"] = layers // each
    elif layers is not None and ratio is not None and "pattern" not in changes:
        if layers == 0 or layers % (ratio + 1):
            raise ConfigError(f"{path}: `num_layers` {layers} is no multiple of `seqcond_ratio` + 1 = {ratio + 1}")
        changes |= {"blocks": layers // (ratio + 1), "pattern": "S" * ratio + "A"}
    if table.get("qk_norm_eps", model.norm_epsilon) != changes.get("norm_epsilon", model.norm_epsilon):
        raise ConfigError(f"{path}: `qk_norm_eps` {table['qk_norm_eps']!r}: this model has one epsilon for these norms")
    try:
        if "tokenizer_ranks" in table:
            tokenizer = TokenizerConfig.model_validate({"ranks": table["tokenizer_ranks"]})
            rows = _integer(path, table, "vocab_size")
            if rows is None or rows <= tokenizer.vocabulary:
                raise ConfigError(
                    f"{path}: `vocab_size` {rows} is too small for its tokenizer, which has {tokenizer.vocabulary} ids "
                    "beside padding: these weights are of another tokenizer"
                )
            changes["vocabulary"] = rows - 1
        changed = ModelConfig.model_validate({**model.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        names = {name_here: author_name for author_name, name_here in FIELD_NAMES.items()}
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


def _integer(path: Path, table: Mapping[str, Any], name: str) -> int | None:
    """A field that must be an integer of a plausible size, or None if it is absent."""
    value = table.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ConfigError(f"{path}: `{name}`: {value!r} is not an integer from 0 to {LARGEST}")
    return value
