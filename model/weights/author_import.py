"""Imports weights in the layout of the paper's author: the published ones, or our own exports for transformers.

The author's decay is measured to the end of the context and clipped. `decay="window"` computes the same; then the
context changes the results, so it is read from the files next to the weights or has to be given. Tensors are read from
safetensors (one file or several) or a numpy archive (.npz); nothing is ever unpickled. A file may also hold tensors
that a plain conversion of the author's state dict includes: the tied output matrix and the RoPE tables, which must
equal those of this model, and cached copies of a layer's parameters, which are not read.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.label_set import copy_label_set
from nautile.model.layers.common import Params
from nautile.model.weights.author_config import read_author_config
from nautile.model.weights.author_files import TensorFile, check_digests, tensor_files
from nautile.model.weights.author_layout import author_shapes, from_author
from nautile.model.weights.files import CONFIG, refuse_not_finite, refuse_occupied, save_weights

ROPE = ("cos_emb", "sin_emb")  # the author's RoPE tables [positions, head dim / 2]
LARGEST_CONTEXT = 1 << 17  # rows of such a table: a few bytes of an archive can unpack to any amount of zeros
# Suffixes of cached copies of parameters, which the author's layers create in generation: a state dict saved afterwards
# includes them.
CACHED_SUFFIXES = (
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
    """Load the author's weights: parameters and configurations, as `load_weights` returns them for a checkpoint.

    path: a file of tensors, an index of several, or a folder with either.
    model: the sizes where the config.json next to the weights does not give them; None: those of the paper.
    context, sca_epsilon (of the SCA layers' first norm): take precedence over both.

    Raises ConfigError with the first difference if a tensor is missing or unknown or a shape does not fit, if the
    context is unknown, if two sources differ on it, and if a number is not finite.
    """
    tokenizer = tokenizer or TokenizerConfig()
    model = model or ModelConfig(vocabulary=tokenizer.vocabulary)
    author = {"decay": "window", "grid": "ordered", "integration": "normalised"}
    model = model.model_copy(update={"vocabulary": tokenizer.vocabulary, **author})
    folder = path if path.is_dir() else path.parent
    check_digests(folder)
    files = tensor_files(path)
    contexts = {"--context": context}
    if (folder / CONFIG).exists():
        model, tokenizer, contexts[CONFIG] = read_author_config(folder / CONFIG, model, tokenizer)
    names = _check_tensors(path, files, model)
    for name in (name for name in ROPE if name in names):
        contexts[name] = names[name][0].shapes[names[name][1]][0]
    contexts = {source: value for source, value in contexts.items() if value is not None}
    if not contexts:
        raise ConfigError(
            f"{path}: the context of these weights is unknown: there is neither `maxlen` in a {CONFIG} next to them "
            "nor a table `cos_emb`; the decays depend on it, so set --context (4096 for the published model)"
        )
    if len(set(contexts.values())) > 1:
        listed = ", ".join(f"{source} {value}" for source, value in contexts.items())
        raise ConfigError(f"{path}: the context of these weights is not one number: {listed}")
    changes = {"context": next(iter(contexts.values()))} | (
        {} if sca_epsilon is None else {"sca_norm_epsilon": sca_epsilon}
    )
    model = ModelConfig.model_validate({**model.model_dump(), **changes})
    tensors = {name: file.read(stored) for name, (file, stored) in names.items()}
    refuse_not_finite(tensors, f"{path}: cannot be imported", "the file is damaged, or its training diverged")
    _check_redundant(path, tensors, model)
    return from_author(tensors, model), model.with_tokenizer(tokenizer), tokenizer


def import_weights(
    path: Path,
    out: Path,
    model: ModelConfig,
    tokenizer: TokenizerConfig,
    *,
    context: int | None = None,
    sca_epsilon: float | None = None,
) -> list[Path]:
    """Load weights with `load_author_weights`, and save them as a checkpoint in the new or empty folder `out`."""
    refuse_occupied(out)
    params, model, tokenizer = load_author_weights(path, model, tokenizer, context=context, sca_epsilon=sca_epsilon)
    out.mkdir(parents=True, exist_ok=True)
    copy_label_set(path if path.is_dir() else path.parent, out)
    save_weights(out, params, model, tokenizer)
    return sorted(out.iterdir())


def _check_tensors(path: Path, files: list[TensorFile], model: ModelConfig) -> dict[str, tuple[TensorFile, str]]:
    """Map each tensor's plain name to its file and its name there. Raises ConfigError unless they fit the model.

    The plain name has no prefix such as "model."; cached copies of parameters are left out.
    """
    stored = {name: file for file in files for name in file.shapes}
    if sum(len(file.shapes) for file in files) != len(stored):
        raise ConfigError(f"{path}: two of its files hold a tensor of the same name")
    # Wrappers put a prefix before every name ("model.", "module."); the embedding shows which.
    prefixes = [name.removesuffix("embedding.weight") for name in stored if name.endswith("embedding.weight")]
    prefix = prefixes[0] if prefixes else ""
    names = {
        name.removeprefix(prefix): (file, name) for name, file in stored.items() if not name.endswith(CACHED_SUFFIXES)
    }
    shapes = {plain: file.shapes[name] for plain, (file, name) in names.items()}
    layers = model.blocks * len(model.pattern)
    if layers > len(shapes):
        raise ConfigError(f"{path}: has {len(shapes)} tensors, too few for {layers} layers")
    expected = dict(author_shapes(model))
    for name, shape in expected.items():
        if name not in shapes:
            raise ConfigError(f"{path}: lacks the tensor `{name}` of shape {shape}")
        spare = 2 * shape[0] + 1024  # unused rows, by which a table is padded for sharding
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
    """Raise `ConfigError` if a redundant tensor differs from what this model computes itself."""
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
