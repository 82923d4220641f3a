"""Import of weights in the layout of the paper's author: as he published them, or as we exported them for transformers.

His decay is measured to the end of the context and clipped: `decay="window"` computes the same, and then the context
is part of the arithmetic, so it is read from what lies beside the weights or has to be named. Tensors are read from
safetensors (in several files too) or a numpy archive (.npz): nothing is ever unpickled. A file may also hold what a
plain conversion of his state dict keeps: the tied output matrix, RoPE's tables, which have to be those of this model,
and what a layer remembers of its own parameters between steps, which is not read.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from common.errors import ConfigError
from configs.model import ModelConfig, TokenizerConfig
from model.layers.common import Params
from model.weights.author_config import read_author_config
from model.weights.author_files import TensorFile, check_digests, tensor_files
from model.weights.author_layout import author_shapes, from_author
from model.weights.files import CONFIG, refuse_occupied, save_weights

ROPE = ("cos_emb", "sin_emb")  # his tables of RoPE, (positions, half a head)
LARGEST_CONTEXT = 1 << 17  # rows of such a table: a few bytes of an archive can unpack to any amount of zeros
# Copies that his layers make of their parameters when they generate; a state dict taken afterwards holds them.
REMEMBERED = (
    *("_conv_kernel_t", "_decay_slopes_cached", "_anchor_slopes_cached", "_phase_scale_b"),
    *("_score_bias_b", "_score_scale_b", "_theta_cached", "_w_int_cached"),
)


def load_author_weights(
    path: Path,
    model: ModelConfig | None = None,
    tokenizer: TokenizerConfig | None = None,
    *,
    context: int | None = None,
    sca_epsilon: float | None = None,
) -> tuple[Params, ModelConfig, TokenizerConfig]:
    """Parameters and configurations of such weights, as `load_weights` returns them for a checkpoint of ours.

    `path` is a file of tensors, an index of several, or a folder with either. `model` describes the shape (None: the
    published one) where the config.json beside the weights does not; `context` and `sca_epsilon` (of the SCA layers'
    first norm) count before both. Raises ConfigError with the first difference where a name is missing or unknown or a
    shape does not fit, where nothing says what the context is, and where two sources differ on it.
    """
    tokenizer = tokenizer or TokenizerConfig()
    model = model or ModelConfig(vocabulary=tokenizer.vocabulary)
    model = model.model_copy(update={"vocabulary": tokenizer.vocabulary, "decay": "window"})
    folder = path if path.is_dir() else path.parent
    check_digests(folder)
    files = tensor_files(path)
    contexts = {"--context": context}
    if (folder / CONFIG).exists():
        model, tokenizer, contexts[CONFIG] = read_author_config(folder / CONFIG, model, tokenizer)
    names = _checked(path, files, model)
    for name in (name for name in ROPE if name in names):
        contexts[name] = names[name][0].shapes[names[name][1]][0]
    named = {source: value for source, value in contexts.items() if value is not None}
    if not named:
        raise ConfigError(
            f"{path}: nothing says for which context these weights are: neither `maxlen` in a {CONFIG} beside them nor "
            "a table `cos_emb`; decays depend on it, so name it with --context (4096 for the published model)"
        )
    if len(set(named.values())) > 1:
        listed = ", ".join(f"{source} {value}" for source, value in named.items())
        raise ConfigError(f"{path}: the context of these weights is not one number: {listed}")
    changes = {"context": next(iter(named.values()))} | (
        {} if sca_epsilon is None else {"sca_norm_epsilon": sca_epsilon}
    )
    model = ModelConfig.model_validate({**model.model_dump(), **changes})
    tensors = {name: file.read(stored) for name, (file, stored) in names.items()}
    _check_redundant(path, tensors, model)
    return from_author(tensors, model), model, tokenizer


def import_weights(
    path: Path,
    out: Path,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    *,
    context: int | None = None,
    sca_epsilon: float | None = None,
) -> list[Path]:
    """Read with `load_author_weights` and write a checkpoint of ours into the new or empty folder `out`."""
    refuse_occupied(out)
    params, model, tokenizer = load_author_weights(path, model, tokenizer, context=context, sca_epsilon=sca_epsilon)
    save_weights(out, params, model, tokenizer)
    return sorted(out.iterdir())


def _checked(path: Path, files: list[TensorFile], model: ModelConfig) -> dict[str, tuple[TensorFile, str]]:
    """Map each tensor's plain name to its file and its name there. Raises ConfigError unless all are the model's.

    The plain name has no prefix such as "model." before it, and no suffix of what a layer remembers.
    """
    stored = {name: file for file in files for name in file.shapes}
    if sum(len(file.shapes) for file in files) != len(stored):
        raise ConfigError(f"{path}: two of its files hold a tensor of the same name")
    prefixes = [name.removesuffix("embedding.weight") for name in stored if name.endswith("embedding.weight")]
    prefix = prefixes[0] if prefixes else ""
    names = {name.removeprefix(prefix): (file, name) for name, file in stored.items() if not name.endswith(REMEMBERED)}
    shapes = {plain: file.shapes[name] for plain, (file, name) in names.items()}
    if model.blocks * (model.sca_per_block + 1) > len(shapes):
        raise ConfigError(
            f"{path}: has {len(shapes)} tensors, too few for {model.blocks * (model.sca_per_block + 1)} layers"
        )
    expected = dict(author_shapes(model))
    for name, shape in expected.items():
        if name not in shapes:
            raise ConfigError(f"{path}: lacks the tensor `{name}` of shape {shape}")
        spare = 2 * shape[0] + 1024  # rows that nothing reads, for the table to shard
        actual = shapes[name]
        rows_fit = name == "embedding.weight" and actual[1:] == shape[1:] and shape[0] <= actual[0] <= spare
        if actual != shape and not rows_fit:
            raise ConfigError(f"{path}: `{name}` has shape {actual}, and this model's is {shape}")
    redundant = {"lm_head.weight": shapes["embedding.weight"]}
    for name in (name for name in ROPE if name in shapes):
        positions, *_ = (*shapes[name], 0)
        redundant[name] = (min(positions, LARGEST_CONTEXT), model.attention_head_dim // 2)
    for name in shapes:
        if name not in expected and name not in redundant:
            raise ConfigError(f"{path}: holds the tensor `{name}`, which this model does not have")
        if name in redundant and shapes[name] != redundant[name]:
            raise ConfigError(f"{path}: `{name}` has shape {shapes[name]}, and this model's is {redundant[name]}")
    return names


def _check_redundant(path: Path, tensors: Mapping[str, np.ndarray], model: ModelConfig) -> None:
    """Raise `ConfigError` if a redundant tensor is not what this model computes from its own."""
    if not np.array_equal(tensors.get("lm_head.weight", tensors["embedding.weight"]), tensors["embedding.weight"]):
        raise ConfigError(
            f"{path}: `lm_head.weight` is not equal to `embedding.weight`, and this model has one matrix for both"
        )
    half = model.attention_head_dim // 2
    for name in (name for name in ROPE if name in tensors):
        # In float64: at position 2,000 the model's own float32 angles are already 2e-4 off. bfloat16 is 4e-3 off.
        angles_LH = np.arange(len(tensors[name]))[:, None] * model.rope_base ** (-np.arange(half) / half)
        if not np.allclose(tensors[name], np.cos(angles_LH) if name == "cos_emb" else np.sin(angles_LH), atol=1e-2):
            raise ConfigError(f"{path}: `{name}` is not RoPE's table with base {model.rope_base:g}")
