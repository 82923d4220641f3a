"""The layout of the paper's author: tensors and the fields of config.json, converted in both directions.

There linear weights are [out, in], query columns have (re, im) last, and token ids are ours + 1 (0 is padding). Free θ
and ω, which the author does not have, have names of their own: `attn.theta` and `attn.w_int`.

The author's config.json has only the sizes of the model, whose blocks are SCA layers and then a Transformer layer.
Exports for transformers also have the pattern, the forms of decay, θ and ω, the epsilons of the norms and the
tokenizer, so that an import restores the checkpoint exactly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.tokenizer import read_tokenizer, tokenizer_for
from nautile.model.layers.common import Params
from nautile.model.weights.author_shapes import author_shapes, spectrum_shapes
from nautile.model.weights.files import LARGEST

# The author's tensor names by our parameter names, for parameters that differ at most by a transpose.
_SCA = {
    "norm": "norm.scale",
    "decay": "attn.decay_slopes",
    "score_scale": "attn.score_scale",
    "score_bias": "attn.score_bias",
    "phase_scale": "attn.phase_scale",
    "gate_proj": "attn.gate_proj.weight",
    "gated_norm": "attn.gated_norm.weight",
    "readout": "attn.W_readout",
    "out_proj": "attn.out_proj.weight",
}
_ATTENTION = {
    "norm1": "norm1.scale",
    "norm2": "norm2.scale",
    "q_proj": "attn.q_proj.weight",
    "k_proj": "attn.k_proj.weight",
    "v_proj": "attn.v_proj.weight",
    "out_proj": "attn.out_proj.weight",
    "ff_in": "ff_in.weight",
    "ff_in_bias": "ff_in.bias",
    "ff_out": "ff_out.weight",
    "ff_out_bias": "ff_out.bias",
}


def from_author(tensors: Mapping[str, np.ndarray], model: ModelConfig) -> Params:
    """Convert tensors of `author_shapes` to our parameters, without embedding rows beyond the vocabulary."""
    table_VD = np.zeros((model.padded_vocabulary, model.width), np.float32)
    table_VD[: model.vocabulary] = tensors["embedding.weight"][1 : model.vocabulary + 1]
    blocks: Params = {}
    # The layers at one position in each block are stacked over the blocks.
    for position, (letter, name) in enumerate(model.layers):
        layers = []
        for prefix in (f"blocks.{index * len(model.pattern) + position}." for index in range(model.blocks)):
            layer = {path.removeprefix(prefix): array for path, array in tensors.items() if path.startswith(prefix)}
            common = _SCA if letter == "S" else _ATTENTION
            parts = {ours: _transpose_linear(author_name, layer[author_name]) for ours, author_name in common.items()}
            layers.append(parts | _sca_from(layer, model) if letter == "S" else parts)
        blocks[name] = {part: jnp.asarray(np.stack([layer[part] for layer in layers])) for part in layers[0]}
    return {"embedding": jnp.asarray(table_VD), "blocks": blocks}


def to_author(params: Params, model: ModelConfig) -> dict[str, np.ndarray]:
    """Convert our parameters to float32 tensors of `author_shapes`: the inverse of `from_author`. Row 0 is zero."""
    table_VD = np.zeros((model.vocabulary + 1, model.width), np.float32)
    table_VD[1:] = np.asarray(params["embedding"])[: model.vocabulary]
    tensors = {"embedding.weight": table_VD}
    for index, (letter, name) in enumerate(model.blocks * model.layers):
        block = index // len(model.pattern)
        layer = {part: np.asarray(stacked[block]) for part, stacked in params["blocks"][name].items()}
        common = _SCA if letter == "S" else _ATTENTION
        converted = {author_name: _transpose_linear(author_name, layer[ours]) for ours, author_name in common.items()}
        converted |= _sca_to(layer, model) if letter == "S" else {}
        tensors |= {f"blocks.{index}.{name}": array for name, array in converted.items()}
    shapes = dict(author_shapes(model))
    return {name: np.ascontiguousarray(array, np.float32).reshape(shapes[name]) for name, array in tensors.items()}


def _columns(model: ModelConfig) -> np.ndarray:
    """The author's column of the input projection for each of our columns."""
    keys = model.memory_heads * (model.head_dim + 1)
    # Their query columns alternate re and im; ours have all re before all im.
    # Row i of the pairs: the author's columns of the real and of the imaginary part of our query column i.
    pairs = keys + np.arange(2 * model.query_heads * model.head_dim * model.spectral_samples).reshape(-1, 2)
    return np.concatenate([np.arange(keys), pairs[:, 0], pairs[:, 1]])


def _sca_from(layer: Mapping[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    """Convert the tensors of an SCA layer that differ by more than a transpose."""
    columns, (grid, integration) = _columns(model), spectrum_shapes(model)
    return {
        "in_proj": layer["attn.in_proj.weight"].T[:, columns],
        "conv": layer["attn.conv_weight"][:, 0].T[:, columns],
        "theta": layer[grid][0, 0],
        "integration": layer[integration].reshape(-1, model.head_dim, model.spectral_samples),
    }


def _sca_to(layer: Mapping[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    """The inverse of `_sca_from`, except for the axes of size 1, which `to_author` adds."""
    columns, (grid, integration) = np.argsort(_columns(model)), spectrum_shapes(model)
    return {
        "attn.in_proj.weight": layer["in_proj"][:, columns].T,
        "attn.conv_weight": layer["conv"][:, columns].T,
        grid: layer["theta"],
        integration: layer["integration"],
    }


def _transpose_linear(name: str, array: np.ndarray) -> np.ndarray:
    """Convert a tensor between the two layouts, by its author's name: linear weights are transposed."""
    return array.T if name.endswith(".weight") else array


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
EXTRA_FIELDS = (  # that only exports have, under the same names
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
        **{f"tokenizer_{name}": value for name, value in tokenizer.fields.items()},
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
            named = {name: table[f"tokenizer_{name}"] for name in ("ranks", "trained") if f"tokenizer_{name}" in table}
            tokenizer = read_tokenizer(named, path.parent)
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
