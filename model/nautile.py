"""The hybrid stack (paper §2.3): tied embeddings and `blocks` times (SCA x `sca_per_block`, Transformer).

flax NNX modules define the parameters and their initial values; the forward pass is a pure function of a nested plain
dict, with one `lax.scan` over the blocks. Parameters of the blocks are stacked on a leading axis [blocks, ...]:
`params["blocks"]["sca_0"]["in_proj"]` is [blocks, D, C].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from common.errors import ConfigError
from configs.model import ModelConfig
from model.layers.attention import Attention, attention
from model.layers.common import Params, compute_dtype, pure
from model.layers.sca import SCA, SCAState, sca
from model.sharding import everywhere, split_rows

# The published table is small so that tied logits start near zero: the residual stream ends at a root mean square
# below 1, so logits have a standard deviation below 0.02·√D (0.64 at D = 1024) and the loss starts near ln V.
EMBEDDING_DEVIATION = 0.02


class Block(nnx.Module):
    """SCA layers `sca_0`, `sca_1`, … and the Transformer layer `attention`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        depth = config.blocks * (config.sca_per_block + 2)  # a Transformer layer has two residual branches
        for name in sca_names(config):
            setattr(self, name, SCA(config, depth, rngs))
        self.attention = Attention(config, depth, rngs)


class Beginnings(NamedTuple):
    """What rows continue from: of U texts of up to P tokens, the state after every layer, stacked over blocks."""

    sca: tuple[SCAState, ...]  # [blocks, U, ...] each
    keys: Array  # [blocks, U, P, kv heads, H]
    values: Array
    hidden_1UD: Array  # after the last block, of the last token


class Embedding(nnx.Module):
    """The embedding table, tied to the head; rows that only pad the vocabulary are zero."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        table_VD = jax.random.normal(rngs.params(), (config.padded_vocabulary, config.width)) * EMBEDDING_DEVIATION
        used_V1 = jnp.arange(config.padded_vocabulary)[:, None] < config.vocabulary
        self.embedding = nnx.Param(jnp.where(used_V1, table_VD, 0))


def sca_names(config: ModelConfig) -> list[str]:
    return [f"sca_{index}" for index in range(config.sca_per_block)]


def initialise(config: ModelConfig, seed: int) -> Params:
    """Fresh float32 parameters, a pure function of the config and the seed; jit it with out_shardings to shard them."""
    return _drawn(config, jax.random.key(seed))


# Compiled as a whole, because the first call of a process takes a second operation by operation.
@partial(jax.jit, static_argnums=0)
def _drawn(config: ModelConfig, key: Array) -> Params:
    table_key, blocks_key = jax.random.split(key)
    keys = jax.random.split(blocks_key, config.blocks)
    blocks = jax.vmap(lambda key: pure(Block(config, nnx.Rngs(params=key))))(keys)
    return {**pure(Embedding(config, nnx.Rngs(params=table_key))), "blocks": blocks}


def shapes(config: ModelConfig) -> Params:
    """The shape and type of every parameter, without allocating any."""
    return jax.eval_shape(lambda: initialise(config, 0))


def forward(params: Params, config: ModelConfig, tokens_BL: Array, segments_BL: Array, positions_BL: Array) -> Array:
    """The residual stream after the last block [B, L, D], in the compute type; there is no norm before the tied head.

    `segments_BL` numbers the documents of a row from 1 (0: padding); `positions_BL` counts from 0 in each document.
    Raises ConfigError where the shapes differ.
    """
    if tokens_BL.ndim != 2 or segments_BL.shape != tokens_BL.shape or positions_BL.shape != tokens_BL.shape:
        raise ConfigError(
            f"forward: tokens {tokens_BL.shape}, segments {segments_BL.shape} and positions {positions_BL.shape} must "
            "be one shape [batch, length]"
        )
    x_BLD = embed(params, config, tokens_BL)
    return run_blocks(params["blocks"], config, x_BLD, segments_BL, positions_BL)[0]


def begin(params: Params, config: ModelConfig, tokens_UP: Array, lengths_U: Array) -> Beginnings:
    """Run U right-aligned texts of `lengths_U` tokens, at least 1 each, for rows to continue from."""
    segments_UP, positions_UP = _right_aligned(tokens_UP.shape[1], lengths_U)
    x_UPD, blocks = embed(params, config, tokens_UP), params["blocks"]
    hidden_UPD, (sca_states, keys_values) = run_blocks(blocks, config, x_UPD, segments_UP, positions_UP, keep=True)
    return Beginnings(sca_states, *keys_values, hidden_UPD[None, :, -1])


def continue_from(
    params: Params,
    config: ModelConfig,
    beginnings: Beginnings,
    lengths_U: Array,
    source_B: Array,
    tokens_BT: Array,
    segments_BT: Array,
) -> Array:
    """The residual stream of rows that each continue a beginning: `source_B[b]`, of `lengths_U` tokens [B, 1+T, D].

    First that of the beginning's last token, then those of the row's own tokens; segment 1 is text and 0 padding. The
    result is that of `forward` on the whole text, and differentiable in the parameters and in the beginnings.
    """
    segments_UP, _ = _right_aligned(beginnings.keys.shape[2], lengths_U)
    positions_BT = lengths_U[source_B][:, None] + jnp.arange(tokens_BT.shape[1])
    x_BTD, earlier = embed(params, config, tokens_BT), (beginnings, segments_UP, source_B)
    hidden_BTD, _ = run_blocks(params["blocks"], config, x_BTD, segments_BT, positions_BT, earlier)
    return jnp.concatenate([split_rows(everywhere(beginnings.hidden_1UD[0])[source_B])[:, None], hidden_BTD], axis=1)


def _right_aligned(length: int, lengths_U: Array) -> tuple[Array, Array]:
    """Segments (1, and 0 for padding on the left) and positions of rows of `length` columns."""
    offset_UP = jnp.arange(length) - (length - lengths_U[:, None])
    return (offset_UP >= 0).astype(jnp.int32), jnp.maximum(offset_UP, 0)


def run_blocks(
    blocks: Params,
    config: ModelConfig,
    x_BLD: Array,
    segments_BL: Array,
    positions_BL: Array,
    earlier: tuple[Beginnings, Array, Array] | None = None,
    keep: bool = False,
) -> tuple[Array, Any]:
    """The residual stream [B, L, D] through the blocks; their parameters have a leading axis [blocks, ...].

    With `keep` also the SCA states and the keys and values of each block, stacked. `earlier`: beginnings, their
    segments [U, P], and for each row the index of the one that it continues.
    """

    def chosen(part: Array) -> Array:
        assert earlier is not None
        return split_rows(everywhere(part)[earlier[2]])

    def mixing_layer(layer: Params, x_BLD: Array, before: SCAState | None) -> tuple[Array, SCAState | None]:
        state = None if before is None else jax.tree.map(chosen, before)
        x_BLD, state = sca(layer, config, split_rows(x_BLD), segments_BL, positions_BL, state)
        return x_BLD, state if keep else None

    def attention_layer(layer: Params, x_BLD: Array, before: Any) -> tuple[Array, Any]:
        seen = None if before is None else jax.tree.map(chosen, before)
        x_BLD, held = attention(layer, config, split_rows(x_BLD), segments_BL, positions_BL, seen)
        return x_BLD, held if keep else None

    mixing_layer, attention_layer = remat_layer(mixing_layer, config), remat_layer(attention_layer, config)

    def block(x_BLD: Array, stacked: tuple[Params, Any]) -> tuple[Array, Any]:
        layers, before = stacked
        starts, seen = [None] * config.sca_per_block, None
        if before is not None and earlier is not None:
            starts, *keys_values = before
            seen = (*keys_values, earlier[1])
        states = []
        for name, start in zip(sca_names(config), starts, strict=True):
            x_BLD, state = mixing_layer(layers[name], x_BLD, start)
            states.append(state)
        x_BLD, held = attention_layer(layers["attention"], x_BLD, seen)
        return split_rows(x_BLD), (tuple(states), held) if keep else None

    # "block" keeps only the input of each block and recomputes the rest of it in the backward pass.
    if config.remat == "block":
        block = jax.checkpoint(block, prevent_cse=False)
    # With "none" every activation is kept: unrolled, each stays where it was computed, where a loop would copy it into
    # a stack of all blocks and back (a fifth of a small model's step on CPU).
    unroll = config.blocks if config.remat == "none" else 1
    before = None if earlier is None else earlier[0][:3]  # all but what follows the last block
    return jax.lax.scan(block, x_BLD, (blocks, before), unroll=unroll)


def embed(params: Params, config: ModelConfig, tokens: Array) -> Array:
    """Rows of the table in the compute type."""
    return jnp.take(params["embedding"], tokens, axis=0).astype(compute_dtype(config))


def remat_layer(layer: Callable, config: ModelConfig) -> Callable:
    """Apply `config.remat` to a layer: "layer" keeps its input alone, "dots" also its products with the weights."""
    if config.remat == "layer":
        return jax.checkpoint(layer, prevent_cse=False)
    if config.remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return layer


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Learned parameters by part; rows that only pad the vocabulary are not counted. The sum is the model's size."""
    tree = shapes(config)
    counts = {"embedding": config.vocabulary * config.width}
    for layer, leaves in tree["blocks"].items():
        for name, leaf in leaves.items():
            part = f"{layer.split('_')[0]}.{name}"
            counts[part] = counts.get(part, 0) + int(np.prod(leaf.shape))
    return counts
