"""The decoding cache: the parallel prefill that creates it, and the step that advances it by one token.

Prompts of different lengths are right-aligned in their batch (padding on the left), so the next token of every row goes
to the same column: a step writes one slice per layer in place and copies nothing of the context's size. The columns are
a ring buffer: after the last column the first is overwritten, so rows can end and others begin as long as no row is
longer than the ring. Keys are stored with their columns last: with the head dimension last, XLA on CPU transposed all
of them at every step, its most expensive operation. The step unrolls the blocks, each with its own arrays, because a
scan over stacked caches would copy them at every step.

Letters, in addition to those of `model.nautile`: P prompt columns, S cache columns, G key-value heads, R query heads
per key-value head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.model.layers.attention import attention, feed_forward, project
from nautile.model.layers.common import MASKED, Params, Transposed, compute_dtype, linear
from nautile.model.layers.mixing.operator import empty_state
from nautile.model.layers.sca import SCAState, Spectrum, sca, sca_step, spectrum
from nautile.model.nautile import embed


def length_buckets(longest: int, shortest: int = 64) -> list[int]:
    """Bucket lengths: `shortest` and its doublings below `longest`, then `longest` itself."""
    lengths = []
    length = shortest
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


# Cast to the compute type once per generation; the other parameters of a layer stay float32.
_MATRICES = {
    "embedding", "in_proj", "conv", "gate_proj", "readout", "out_proj", "q_proj", "k_proj", "v_proj", "ff_in", "ff_out",
}  # fmt: skip
# Used by a lookup, a sum over taps and a product by heads, which read them as they are.
_OTHER_PRODUCTS = {"embedding", "conv", "readout"}


class KeysValues(NamedTuple):
    """The cache of a Transformer layer."""

    keys_BGHS: Array
    values_BGSH: Array


# The cache of a block: that of each of its layers, in the order of the pattern.
BlockCache = tuple[SCAState | KeysValues, ...]


class Cache(NamedTuple):
    """The cache of all blocks."""

    blocks: tuple[BlockCache, ...]
    start_B: Array  # column number at which each row's prompt starts
    filled: Array  # number of the next column, the same in every row; column n is stored at n modulo S

    @property
    def columns(self) -> int:
        """The size S of the ring."""
        return columns_of(self.blocks)


class DecodeWeights(NamedTuple):
    """The parameters prepared for the step: a dict per block, matrices in the compute type, spectra computed."""

    embedding: Array
    blocks: tuple[Params, ...]
    spectra: tuple[dict[str, Spectrum], ...]  # by the name of the SCA layer


def empty_block(config: ModelConfig, count: int, columns: int) -> BlockCache:
    """The cache of a block for `count` rows without a token, with `columns` columns."""
    dtype = compute_dtype(config)
    history_BTC = jnp.zeros((count, config.convolution - 1, config.projection_width), dtype)
    state = SCAState(empty_state(count, config.memory_heads, config.head_dim, config.spectral_samples), history_BTC)
    heads, head_dim = config.kv_heads, config.attention_head_dim
    keys_BGHS = jnp.zeros((count, heads, head_dim, columns), dtype)
    values_BGSH = jnp.zeros((count, heads, columns, head_dim), dtype)
    return tuple(state if letter == "S" else KeysValues(keys_BGHS, values_BGSH) for letter in config.pattern)


def columns_of(blocks: Sequence[BlockCache]) -> int:
    """The columns of the cache; 1, of which nothing is stored, in a model without attention."""
    return next((layer.keys_BGHS.shape[3] for layer in blocks[0] if isinstance(layer, KeysValues)), 1)


def map_columns(block: BlockCache, change: Callable[[Array, int], Array]) -> BlockCache:
    """A block with `change(array, axis of its columns)` in place of each array of keys and values."""
    return tuple(
        KeysValues(change(layer.keys_BGHS, 3), change(layer.values_BGSH, 2)) if isinstance(layer, KeysValues) else layer
        for layer in block
    )


@partial(jax.jit, static_argnames=("config", "transposed"))
def decode_weights(params: Params, config: ModelConfig, transposed: bool = False) -> DecodeWeights:
    """Unstack and cast the parameters, once per generation.

    transposed: store the matrices of `linear` as `Transposed`, faster for a few rows; sums are then rounded in another
    order.
    """
    cast = cast_matrices(params, config)
    blocks = tuple(unstack(cast["blocks"], index) for index in range(config.blocks))
    spectra = tuple(
        {name: spectrum(layers[name], config) for letter, name in config.layers if letter == "S"} for layers in blocks
    )
    if transposed:

        def transpose(path: tuple, leaf: Array) -> Array | Transposed:
            return Transposed(leaf.T) if path[-1].key in _MATRICES - _OTHER_PRODUCTS else leaf

        blocks = jax.tree_util.tree_map_with_path(transpose, blocks)
    return DecodeWeights(cast["embedding"], blocks, spectra)


def cast_matrices(params: Params, config: ModelConfig) -> Params:
    """Cast the matrices to the compute type once, so that no later program casts them again."""
    dtype = compute_dtype(config)

    def cast(path: tuple, leaf: Array) -> Array:
        return leaf.astype(dtype) if path[-1].key in _MATRICES else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def prefill(
    params: Params, config: ModelConfig, tokens_BP: Array, lengths_B: Array, capacity: int
) -> tuple[Array, Cache]:
    """Run right-aligned prompts in parallel: the hidden state of every token [B, P, D], and a cache.

    The last `lengths_B` columns (1 to P) of each row are its prompt. The cache has `capacity` columns. Raises
    ConfigError if that is less than P.
    """
    length = tokens_BP.shape[1]
    if capacity < length:
        raise ConfigError(f"cache: a prompt of {length} tokens does not fit a cache of {capacity} columns")
    start_B = length - lengths_B
    offset_BP = jnp.arange(length) - start_B[:, None]
    segments_BP, positions_BP = (offset_BP >= 0).astype(jnp.int32), jnp.maximum(offset_BP, 0)
    free = (0, capacity - length)

    def body(x_BPD: Array, block: Params) -> tuple[Array, BlockCache]:
        states: list[SCAState | KeysValues] = []
        for letter, name in config.layers:
            if letter == "S":
                x_BPD, state = sca(block[name], config, x_BPD, segments_BP, positions_BP)
                states.append(state)
                continue
            x_BPD, (k, v) = attention(block[name], config, x_BPD, segments_BP, positions_BP)
            keys_BGHS = jnp.pad(k.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), free))
            values_BGSH = jnp.pad(v.transpose(0, 2, 1, 3), ((0, 0), (0, 0), free, (0, 0)))
            states.append(KeysValues(keys_BGHS, values_BGSH))
        return x_BPD, tuple(states)

    x_BPD, stacked = jax.lax.scan(body, embed(params, config, tokens_BP), params["blocks"])
    blocks = tuple(unstack(stacked, index) for index in range(config.blocks))
    return x_BPD, Cache(blocks, start_B, jnp.asarray(length, jnp.int32))


def decode_step(weights: DecodeWeights, config: ModelConfig, tokens_B: Array, cache: Cache) -> tuple[Array, Cache]:
    """Run one token of every row: its hidden state [B, D], and the next cache. No row may outgrow the ring."""
    column = cache.filled % cache.columns
    # The column number stored at each index of the ring; negative where nothing was written yet.
    number_S = cache.filled - (cache.filled - jnp.arange(cache.columns)) % cache.columns
    visible_BS = number_S >= cache.start_B[:, None]

    def write(cached: KeysValues, k_BGH: Array, v_BGH: Array) -> KeysValues:
        return KeysValues(
            jax.lax.dynamic_update_slice(cached.keys_BGHS, k_BGH[..., None], (0, 0, 0, column)),
            jax.lax.dynamic_update_slice(cached.values_BGSH, v_BGH[:, :, None], (0, 0, column, 0)),
        )

    positions_B = cache.filled - cache.start_B
    x_BD, blocks = _advance(weights, config, tokens_B, cache.blocks, positions_B, visible_BS, write)
    return x_BD, Cache(blocks, cache.start_B, cache.filled + 1)


def decode_ragged(
    weights: DecodeWeights, config: ModelConfig, tokens_B: Array, blocks: tuple[BlockCache, ...], positions_B: Array
) -> tuple[Array, tuple[BlockCache, ...]]:
    """`decode_step` for rows at different positions: each starts at column 0 and writes at its own position."""
    rows = jnp.arange(positions_B.shape[0])
    visible_BS = jnp.arange(columns_of(blocks)) <= positions_B[:, None]

    def write(cached: KeysValues, k_BGH: Array, v_BGH: Array) -> KeysValues:
        return KeysValues(
            cached.keys_BGHS.at[rows, :, :, positions_B].set(k_BGH, unique_indices=True, mode="drop"),
            cached.values_BGSH.at[rows, :, positions_B].set(v_BGH, unique_indices=True, mode="drop"),
        )

    return _advance(weights, config, tokens_B, blocks, positions_B, visible_BS, write)


def unstack(tree: Any, index: int) -> Any:
    """One block of a tree whose leaves are stacked over blocks."""
    return jax.tree.map(lambda part: part[index], tree)


def repack(cache: Cache, source_B: Array, capacity: int) -> Cache:
    """Copy a cache into one of `capacity` columns; row b becomes row source_B[b] of the original.

    The last columns are copied, as many as both have: a longer row loses its start.
    """
    count = min(cache.columns, capacity)  # columns to copy
    shift = -(cache.filled % cache.columns)

    def move_columns(cached: Array, axis: int) -> Array:
        # Unroll the ring into the order of writing, the latest column last.
        ordered = jnp.roll(cached[source_B], shift, axis=axis)
        last = jax.lax.slice_in_dim(ordered, cache.columns - count, cache.columns, axis=axis)
        return jnp.pad(last, [(0, capacity - count if axis == other else 0) for other in range(cached.ndim)])

    def move(layer: SCAState | KeysValues) -> SCAState | KeysValues:
        if isinstance(layer, KeysValues):
            return KeysValues(move_columns(layer.keys_BGHS, 3), move_columns(layer.values_BGSH, 2))
        return jax.tree.map(lambda part: part[source_B], layer)

    blocks = tuple(tuple(move(layer) for layer in block) for block in cache.blocks)
    return Cache(blocks, cache.start_B[source_B] - cache.filled + count, jnp.asarray(count, jnp.int32))


def _advance(
    weights: DecodeWeights,
    config: ModelConfig,
    tokens_B: Array,
    cached_blocks: tuple[BlockCache, ...],
    positions_B: Array,
    visible_BS: Array,
    write: Callable[[KeysValues, Array, Array], KeysValues],
) -> tuple[Array, tuple[BlockCache, ...]]:
    """Run one token through every block. `write` stores its keys and values in a column, one of `visible_BS`."""
    x_BD = embed({"embedding": weights.embedding}, config, tokens_B)
    blocks = []
    for layers, spectra, cached in zip(weights.blocks, weights.spectra, cached_blocks, strict=True):
        states: list[SCAState | KeysValues] = []
        for (_, name), state in zip(config.layers, cached, strict=True):
            if isinstance(state, KeysValues):
                x_BD, state = _attention_step(layers[name], config, x_BD, positions_B, visible_BS, state, write)
            else:
                x_BD, state = sca_step(layers[name], config, spectra[name], x_BD, positions_B, state)
            states.append(state)
        blocks.append(tuple(states))
    return x_BD, tuple(blocks)


def _attention_step(
    layer: Params,
    config: ModelConfig,
    x_BD: Array,
    positions_B: Array,
    visible_BS: Array,
    cached: KeysValues,
    write: Callable[[KeysValues, Array, Array], KeysValues],
) -> tuple[Array, KeysValues]:
    """`model.layers.attention.attention` for one query per row: [B, D] to [B, D], and the next cache."""
    q_BNH, k_BGH, v_BGH = project(layer, config, x_BD, positions_B)
    batch, groups, head_dim = k_BGH.shape
    if batch == 1:
        # XLA on CPU fuses the write of a single row into the product that reads it, and then copies the whole cache. It
        # does not fuse a loop of unknown length (here 1), and writes in place inside it.
        cached = jax.lax.fori_loop(0, jnp.sum(positions_B >= 0), lambda _, cached: write(cached, k_BGH, v_BGH), cached)
    else:
        cached = write(cached, k_BGH, v_BGH)
    q_BGRH = q_BNH.reshape(batch, groups, -1, head_dim)
    scores = jnp.einsum("bgrh,bghs->bgrs", q_BGRH, cached.keys_BGHS, preferred_element_type=jnp.float32)
    scores = jnp.where(visible_BS[:, None, None], scores * head_dim**-0.5, MASKED)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(x_BD.dtype)
    mixed_BD = jnp.einsum("bgrs,bgsh->bgrh", probabilities, cached.values_BGSH).reshape(x_BD.shape)
    return feed_forward(layer, config, x_BD + linear(mixed_BD, layer["out_proj"])), cached
