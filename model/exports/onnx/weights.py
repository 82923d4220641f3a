"""Writes the parameters of a checkpoint as the graphs need them: unstacked, rearranged, spectra computed, quantised."""

import math

import jax
import numpy as np

from nautile.configs.model import ModelConfig
from nautile.model.exports.onnx.graph import WeightFile
from nautile.model.exports.onnx.signature import CHUNK
from nautile.model.layers.common import Params
from nautile.model.layers.sca import spectrum

# The table (embedding and head) and the readouts lose most accuracy at 4 bits, so they keep 8.
TABLE_BITS = READOUT_BITS = 8
# Inputs that share a scale, by bits. Large blocks are faster, and lose nothing at 8 bits. At 4 bits the input
# projections, which contain the queries, lose most, so their blocks are finer.
BLOCKS = {32: 0, 8: 256, 4: 128}
FINE_BLOCK = 64
UNUSED = "unused"  # name of the mask of ids that no token has; absent where every id has one
LEAST_TAP = 1e-12  # replaces a last tap of 0, by which other taps are divided


def heads_at_once(heads: int) -> int:
    """Number of heads whose readouts share a quantised matrix: a product reads it once for up to four rows."""
    return math.gcd(heads, 4)


def write_weights(file: WeightFile, params: Params, config: ModelConfig) -> None:
    """Write all parameters, without the rows of the table that only pad the vocabulary."""
    table_VD = np.asarray(params["embedding"], np.float32)[: config.vocabulary]
    if file.bits == 32:
        file.add("embedding", table_VD)
    else:
        file.add_matrix("embedding", table_VD.T, TABLE_BITS, BLOCKS[TABLE_BITS])
        rows, inputs, _, block = file.matrices["embedding"]
        file.add_view("embedding.rows", "embedding.levels", (rows, -(-inputs // block) * block))
    if config.unused_ids:
        is_unused_V = np.zeros(config.vocabulary, bool)
        for first, end in config.unused_ids:
            is_unused_V[first:end] = True
        file.add(UNUSED, is_unused_V)
    if "A" in config.pattern:
        _rope_tables(file, config)
        file.add("ones", np.ones(config.attention_head_dim, np.float32))
    for block in range(config.blocks):
        layers = jax.tree.map(lambda leaf, block=block: np.asarray(leaf[block], np.float32), params["blocks"])
        for letter, name in config.layers:
            if letter == "S":
                _sca(file, f"block_{block}.{name}", layers[name], config)
            else:
                _attention(file, f"block_{block}.{name}", layers[name])


def _rope_tables(file: WeightFile, config: ModelConfig) -> None:
    """Write cosine and sine of the RoPE angles of all positions, from float64, up to the longest padded prompt."""
    half = config.attention_head_dim // 2
    angles_SH = np.arange(-(-config.context // CHUNK) * CHUNK)[:, None] * config.rope_base ** (-np.arange(half) / half)
    file.add("rope.cosine", np.cos(angles_SH).astype(np.float32))
    file.add("rope.sine", np.sin(angles_SH).astype(np.float32))


def _sca(file: WeightFile, name: str, layer: Params, config: ModelConfig) -> None:
    heads, head_dim, samples = config.memory_heads, config.head_dim, config.spectral_samples
    # Permute the query columns from [2, Q, H, M], real and imaginary, to [Q, 2, M, H].
    fixed, query = heads * (head_dim + 1), config.query_heads * head_dim * samples
    order = np.arange(2 * query).reshape(2, config.query_heads, head_dim, samples).transpose(1, 0, 3, 2).ravel()
    columns = np.concatenate([np.arange(fixed), fixed + order])
    file.add(f"{name}.norm", layer["norm"])
    # Scale the input projection so that the convolution's last tap is 1, which saves an operator.
    *earlier_TC, last_C = layer["conv"][:, columns]
    last_C = np.where(np.abs(last_C) < LEAST_TAP, np.float32(LEAST_TAP), last_C)
    in_proj_DC = layer["in_proj"][:, columns] * last_C
    file.add_matrix(f"{name}.in_proj", in_proj_DC, file.bits, FINE_BLOCK if file.bits == 4 else BLOCKS[file.bits])
    for tap, earlier_C in enumerate(earlier_TC):
        file.add(f"{name}.conv.{tap}", earlier_C / last_C)
    # From here on in float64: the exponents of the decay are multiplied by up to 32 columns before they are rounded.
    decay_K, grid_KHM, weights_KHM = (np.asarray(part, np.float64) for part in spectrum(layer, config))
    file.add(f"{name}.grid", _single(grid_KHM.swapaxes(1, 2)))
    file.add(f"{name}.shares", _single(weights_KHM.swapaxes(1, 2) * head_dim**-0.5))
    file.add(f"{name}.phase_scale", layer["phase_scale"][:, None, None])
    file.add(f"{name}.score_scale", layer["score_scale"])
    file.add(f"{name}.score_bias", layer["score_bias"])
    if config.decay == "window":
        # The decay is in the gates, and the sums do not decay.
        file.add(f"{name}.window", _single(-decay_K))
        decay_K = np.zeros_like(decay_K)
    # Decay weights: of a step (retention), inside a chunk (within), of the state before it (carry), between chunks
    # (rate, an exponent: how many chunks are between depends on the prompt).
    column_C = np.arange(CHUNK)
    distance_CS = column_C[:, None] - column_C
    within_KCS = np.where(distance_CS >= 0, np.exp(-decay_K[:, None, None] * np.maximum(distance_CS, 0)), 0)
    file.add(f"{name}.retention", _single(np.exp(-decay_K)[:, None, None]))
    file.add(f"{name}.within", _single(within_KCS[:, None]))
    file.add(f"{name}.carry", _single(np.exp(-decay_K[:, None] * (column_C + 1))[:, None, :, None]))
    file.add(f"{name}.rate", _single(-decay_K[:, None, None] * CHUNK))
    file.add_matrix(f"{name}.gate_proj", layer["gate_proj"], file.bits, BLOCKS[file.bits])
    file.add(f"{name}.gated_norm", layer["gated_norm"])
    if file.bits == 32:
        file.add(f"{name}.readout", layer["readout"])
    else:
        count = heads_at_once(heads)
        for index in range(heads // count):
            group_IO = np.concatenate(list(layer["readout"][index * count : (index + 1) * count]), axis=1)
            file.add_matrix(f"{name}.readout.{index}", group_IO, READOUT_BITS, BLOCKS[READOUT_BITS])
    file.add_matrix(f"{name}.out_proj", layer["out_proj"], file.bits, BLOCKS[file.bits])


def _attention(file: WeightFile, name: str, layer: Params) -> None:
    file.add_matrix(
        f"{name}.qkv_proj", np.concatenate([layer[part] for part in ("q_proj", "k_proj", "v_proj")], axis=1),
        file.bits, BLOCKS[file.bits],
    )  # fmt: skip
    for part in ("out_proj", "ff_in", "ff_out"):
        file.add_matrix(f"{name}.{part}", layer[part], file.bits, BLOCKS[file.bits])
    for part in ("norm1", "norm2", "ff_in_bias", "ff_out_bias"):
        file.add(f"{name}.{part}", layer[part])


def _single(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)
