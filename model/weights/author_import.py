"""Import of the weights that the paper's author published: their layout and token ids are converted to ours.

Their linear weights are (out, in), the columns of their queries have (re, im) last, and their ids are ours + 1 (0 is
padding). Their decay is measured to the end of the context and clipped: `decay="window"` computes the same. Tensors are
read from safetensors or a numpy archive (.npz): nothing is ever unpickled. A file may also hold what a plain conversion
of their state dict keeps: the tied output matrix and RoPE's tables, which have to be those of this model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from common.errors import ConfigError
from common.text import first_line
from configs.model import ModelConfig, TokenizerConfig
from model.layers.common import Params
from model.layers.sca import projected
from model.nautile import sca_names
from model.weights.files import refuse_occupied, save_weights

ROPE = ("cos_emb", "sin_emb")  # their tables of RoPE, (positions, half a head)
LARGEST_CONTEXT = 1 << 17  # rows of such a table: a few bytes of an archive can unpack to any amount of zeros


def load_author_weights(
    path: Path, model: ModelConfig | None = None, tokenizer: TokenizerConfig | None = None
) -> tuple[Params, ModelConfig, TokenizerConfig]:
    """Parameters and configurations of one of the author's checkpoints, as `load_weights` returns them for ours.

    `model` describes its shape (None: the published one); vocabulary and decay are set here. Raises ConfigError with
    the first difference where a name is missing or unknown or a shape does not fit.
    """
    tokenizer = tokenizer or TokenizerConfig()
    changes = {"vocabulary": tokenizer.vocabulary, "decay": "window"}
    model = ModelConfig(**changes) if model is None else model.model_copy(update=changes)
    tensors = _read(path, model)
    _check_redundant(path, tensors, model)
    table_VD = np.zeros((model.padded_vocabulary, model.width), np.float32)
    table_VD[: model.vocabulary] = tensors["embedding.weight"][1 : model.vocabulary + 1]
    names = [*sca_names(model), "attention"]
    blocks: Params = {}
    for position, name in enumerate(names):
        layers = []
        for prefix in (f"blocks.{index * len(names) + position}." for index in range(model.blocks)):
            layer = {path.removeprefix(prefix): array for path, array in tensors.items() if path.startswith(prefix)}
            layers.append(_attention(layer) if name == "attention" else _sca(layer, model))
        blocks[name] = {part: jnp.asarray(np.stack([layer[part] for layer in layers])) for part in layers[0]}
    return {"embedding": jnp.asarray(table_VD), "blocks": blocks}, model, tokenizer


def import_weights(path: Path, out: Path, model: ModelConfig, tokenizer: TokenizerConfig) -> list[Path]:
    """Read with `load_author_weights` and write a checkpoint of ours into the new or empty folder `out`."""
    refuse_occupied(out)
    params, model, tokenizer = load_author_weights(path, model, tokenizer)
    save_weights(out, params, model, tokenizer)
    return sorted(out.iterdir())


def author_shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of their tensors; the embedding has at least a row for each id and one for padding."""
    width, hidden = model.width, model.feed_forward
    heads, head_dim, samples = model.memory_heads, model.head_dim, model.spectral_samples
    inner, gated, expanded = projected(model), 2 * heads * head_dim, model.readout_expand * head_dim
    shared = model.kv_heads * model.attention_head_dim
    sca = {
        "norm.scale": (width,),
        "attn.in_proj.weight": (inner, width),
        "attn.conv_weight": (inner, 1, model.convolution),
        _grid_name(model): (1, 1, heads, head_dim, samples),
        "attn.w_int_raw": (1, 1, model.query_heads, heads // model.query_heads, head_dim, samples),
        "attn.decay_slopes": (heads,),
        "attn.score_scale": (heads,),
        "attn.score_bias": (heads,),
        "attn.phase_scale": (heads,),
        "attn.gate_proj.weight": (gated, width),
        "attn.gated_norm.weight": (gated,),
        "attn.W_readout": (heads, 2 * head_dim, 2 * expanded),
        "attn.out_proj.weight": (width, expanded * heads),
    }
    transformer = {
        "norm1.scale": (width,),
        "norm2.scale": (width,),
        "attn.q_proj.weight": (width, width),
        "attn.k_proj.weight": (shared, width),
        "attn.v_proj.weight": (shared, width),
        "attn.out_proj.weight": (width, width),
        "ff_in.weight": (2 * hidden, width),
        "ff_in.bias": (2 * hidden,),
        "ff_out.weight": (width, hidden),
        "ff_out.bias": (width,),
    }
    yield "embedding.weight", (model.vocabulary + 1, width)
    each = model.sca_per_block + 1
    for index in range(model.blocks * each):
        layer = transformer if index % each == model.sca_per_block else sca
        yield from ((f"blocks.{index}.{name}", shape) for name, shape in layer.items())


def _read(path: Path, model: ModelConfig) -> dict[str, np.ndarray]:
    """All tensors as float32, by their names without the prefix that "embedding.weight" has in the file.

    Shapes are compared first: a few bytes of an archive can unpack to any amount of zeros.
    """
    try:
        if path.suffix == ".npz":
            with ZipFile(path) as archive:
                members = {name.removesuffix(".npy"): name for name in archive.namelist()}
                names = _checked(path, {name: _npy_shape(archive, member) for name, member in members.items()}, model)
                arrays = {}
                for plain, name in names.items():
                    with archive.open(members[name]) as file:
                        arrays[plain] = np.lib.format.read_array(file, allow_pickle=False).astype(np.float32)
                return arrays
        with safe_open(path, framework="flax") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            names = _checked(path, shapes, model)
            return {plain: np.asarray(opened.get_tensor(name), np.float32) for plain, name in names.items()}
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError, RuntimeError, NotImplementedError, BadZipFile, SafetensorError) as error:
        raise ConfigError(
            f"{path}: cannot be read as safetensors or as a numpy archive (.npz): {first_line(error)}"
        ) from None


def _npy_shape(archive: ZipFile, member: str) -> tuple[int, ...]:
    """The shape of an array in the archive, read from its header alone."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in headers:
            raise ValueError(f"{member} is of the array format {version}")
        shape, _, kind = headers[version](file)
        if kind.hasobject:
            raise ValueError(f"{member} holds pickled objects")
        return shape


def _checked(path: Path, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig) -> dict[str, str]:
    """Map each tensor's plain name to its name in the file. Raises `ConfigError` unless all are the model's."""
    prefixes = [name.removesuffix("embedding.weight") for name in shapes if name.endswith("embedding.weight")]
    names = {name.removeprefix(prefixes[0] if prefixes else ""): name for name in shapes}
    expected = dict(author_shapes(model))
    for name, shape in expected.items():
        if name not in names:
            raise ConfigError(f"{path}: lacks the tensor `{name}` of shape {shape}")
        actual = shapes[names[name]]
        spare = 2 * shape[0] + 1024  # rows that nothing reads, for the table to shard
        rows_fit = name == "embedding.weight" and actual[1:] == shape[1:] and shape[0] <= actual[0] <= spare
        if actual != shape and not rows_fit:
            raise ConfigError(f"{path}: `{name}` has shape {actual}, and this model's is {shape}")
    redundant = _redundant_shapes(shapes, names, model)
    for name in names:
        if name not in expected and name not in redundant:
            raise ConfigError(f"{path}: holds the tensor `{name}`, which this model does not have")
        if name in redundant and shapes[names[name]] != redundant[name]:
            raise ConfigError(
                f"{path}: `{name}` has shape {shapes[names[name]]}, and this model's is {redundant[name]}"
            )
    return names


def _redundant_shapes(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """What their state dict holds besides the parameters: a copy of the embedding, and RoPE's row of each position."""
    tables: dict[str, tuple[int, ...]] = {}
    for name in (name for name in ROPE if name in names):
        positions, *_ = (*shapes[names[name]], 0)
        tables[name] = (min(positions, LARGEST_CONTEXT), model.attention_head_dim // 2)
    return {"lm_head.weight": shapes[names["embedding.weight"]], **tables}


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


def _grid_name(model: ModelConfig) -> str:
    return "attn.theta_raw" if model.spectral_samples == 1 else "attn.theta_d_raw"


def _sca(layer: Mapping[str, np.ndarray], model: ModelConfig) -> dict[str, np.ndarray]:
    heads, head_dim, samples = model.memory_heads, model.head_dim, model.spectral_samples
    keys = heads * (head_dim + 1)
    pairs = keys + np.arange(2 * model.query_heads * head_dim * samples).reshape(-1, 2)
    columns = np.concatenate([np.arange(keys), pairs[:, 0], pairs[:, 1]])
    return {
        "norm": layer["norm.scale"],
        "in_proj": layer["attn.in_proj.weight"].T[:, columns],
        "conv": layer["attn.conv_weight"][:, 0].T[:, columns],
        "theta": layer[_grid_name(model)][0, 0],
        "integration": layer["attn.w_int_raw"].reshape(heads, head_dim, samples),
        "decay": layer["attn.decay_slopes"],
        "score_scale": layer["attn.score_scale"],
        "score_bias": layer["attn.score_bias"],
        "phase_scale": layer["attn.phase_scale"],
        "gate_proj": layer["attn.gate_proj.weight"].T,
        "gated_norm": layer["attn.gated_norm.weight"],
        "readout": layer["attn.W_readout"],
        "out_proj": layer["attn.out_proj.weight"].T,
    }


def _attention(layer: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    matrices = {name: layer[f"attn.{name}.weight"].T for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    return matrices | {
        "norm1": layer["norm1.scale"],
        "norm2": layer["norm2.scale"],
        "ff_in": layer["ff_in.weight"].T,
        "ff_in_bias": layer["ff_in.bias"],
        "ff_out": layer["ff_out.weight"].T,
        "ff_out_bias": layer["ff_out.bias"],
    }
