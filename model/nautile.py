"""The hybrid stack (paper §2.3): tied embeddings and `blocks` times the SCA and Transformer layers of `pattern`.

flax NNX modules define the parameters and their initial values; the forward pass is a pure function of a nested plain
dict, with one `lax.scan` over the blocks. Parameters of the blocks are stacked on a leading axis [blocks, ...]:
`params["blocks"]["sca_0"]["in_proj"]` is [blocks, D, C].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.model.layers.attention import Attention, attention
from nautile.model.layers.common import Params, compute_dtype, parameters_of
from nautile.model.layers.sca import SCA, SCAState, sca
from nautile.model.sharding import everywhere, split_rows

# The published table is small so that tied logits start near zero: the residual stream ends at a root mean square
# below 1, so logits have a standard deviation below 0.02·√D (0.64 at D = 1024) and the loss starts near ln V.
EMBEDDING_DEVIATION = 0.02


class Block(nnx.Module):
    """The layers of one block, by the names of `config.layers`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        # Residual branches: an SCA layer has one, a Transformer layer two.
        depth = config.blocks * (len(config.pattern) + config.pattern.count("A"))
        for letter, name in config.layers:
            setattr(self, name, (SCA if letter == "S" else Attention)(config, depth, rngs))


class PrefixStates(NamedTuple):
    """The state of every layer after U prefixes of up to P tokens, stacked over blocks: what rows continue from.

    layers: in the order of the pattern, `SCAState` [blocks, U, ...] or keys and values [blocks, U, P, kv heads, H].
    """

    layers: tuple[Any, ...]
    hidden_1UD: Array  # after the last block, of the last token


class Embedding(nnx.Module):
    """The embedding table, tied to the head; rows that only pad the vocabulary are zero."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        table_VD = jax.random.normal(rngs.params(), (config.padded_vocabulary, config.width)) * EMBEDDING_DEVIATION
        used_V1 = jnp.arange(config.padded_vocabulary)[:, None] < config.vocabulary
        self.embedding = nnx.Param(jnp.where(used_V1, table_VD, 0))


def initialise(config: ModelConfig, seed: int) -> Params:
    """Initial float32 parameters: a pure function of config and seed. Jit it with out_shardings to shard them."""
    return _initialise(config, jax.random.key(seed))


# Jitted as a whole: the first call of a process, operation by operation, takes a second.
@partial(jax.jit, static_argnums=0)
def _initialise(config: ModelConfig, key: Array) -> Params:
    table_key, blocks_key = jax.random.split(key)
    keys = jax.random.split(blocks_key, config.blocks)
    # A key for each block; `vmap` stacks their parameters on the axis that `forward` scans over.
    blocks = jax.vmap(lambda key: parameters_of(Block(config, nnx.Rngs(params=key))))(keys)
    return {**parameters_of(Embedding(config, nnx.Rngs(params=table_key))), "blocks": blocks}


def shapes(config: ModelConfig) -> Params:
    """The shape and type of every parameter, without allocating any."""
    return jax.eval_shape(lambda: initialise(config, 0))


def forward(params: Params, config: ModelConfig, tokens_BL: Array, segments_BL: Array, positions_BL: Array) -> Array:
    """Run the stack over whole rows: the residual stream after the last block [B, L, D], in the compute type.

    There is no norm before the tied head.

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


def run_prefixes(params: Params, config: ModelConfig, tokens_UP: Array, lengths_U: Array) -> PrefixStates:
    """Run U right-aligned prefixes of `lengths_U` >= 1 tokens; `continue_from` continues them."""
    segments_UP, positions_UP = _right_aligned(tokens_UP.shape[1], lengths_U)
    x_UPD, blocks = embed(params, config, tokens_UP), params["blocks"]
    hidden_UPD, states = run_blocks(blocks, config, x_UPD, segments_UP, positions_UP, with_states=True)
    return PrefixStates(states, hidden_UPD[None, :, -1])


def continue_from(
    params: Params,
    config: ModelConfig,
    prefixes: PrefixStates,
    lengths_U: Array,
    prefix_B: Array,
    tokens_BT: Array,
    segments_BT: Array,
) -> Array:
    """The residual stream [B, 1+T, D] of rows that continue prefixes: row b continues prefix `prefix_B[b]`.

    Column 0 is the prefix's last token; the row's own T tokens follow (segment 1: text, 0: padding). The values are
    those of `forward` on the whole text, differentiable in the parameters and in the prefixes.
    """
    # P, of the keys; without attention layers nothing has prefix columns.
    columns = next(
        (state[0].shape[2] for kind, state in zip(config.pattern, prefixes.layers, strict=True) if kind == "A"), 0
    )
    segments_UP, _ = _right_aligned(columns, lengths_U)
    positions_BT = lengths_U[prefix_B][:, None] + jnp.arange(tokens_BT.shape[1])
    x_BTD, context = embed(params, config, tokens_BT), (prefixes, segments_UP, prefix_B)
    hidden_BTD, _ = run_blocks(params["blocks"], config, x_BTD, segments_BT, positions_BT, context)
    # The first token of a row is predicted from the last hidden state of its prefix, which is column 0 here.
    last_BD = split_rows(everywhere(prefixes.hidden_1UD[0])[prefix_B])
    return jnp.concatenate([last_BD[:, None], hidden_BTD], axis=1)


def _right_aligned(length: int, lengths_U: Array) -> tuple[Array, Array]:
    """Segments (1: text, 0: padding on the left) and positions of right-aligned rows: [U, length] each."""
    offset_UP = jnp.arange(length) - (length - lengths_U[:, None])
    return (offset_UP >= 0).astype(jnp.int32), jnp.maximum(offset_UP, 0)


def run_blocks(
    blocks: Params,
    config: ModelConfig,
    x_BLD: Array,
    segments_BL: Array,
    positions_BL: Array,
    context: tuple[PrefixStates, Array, Array] | None = None,
    with_states: bool = False,
) -> tuple[Array, Any]:
    """Run the residual stream [B, L, D] through the blocks, whose parameters have a leading axis [blocks, ...].

    context: prefixes, their segments [U, P], and for each row the index of the prefix that it continues.
    with_states: also return the states of the layers, as `PrefixStates.layers`; else None.
    """

    def for_each_row(state_U: Array) -> Array:
        assert context is not None
        return split_rows(everywhere(state_U)[context[2]])

    def mixing_layer(layer: Params, x_BLD: Array, initial: SCAState | None) -> tuple[Array, SCAState | None]:
        state = None if initial is None else jax.tree.map(for_each_row, initial)
        x_BLD, state = sca(layer, config, split_rows(x_BLD), segments_BL, positions_BL, state)
        return x_BLD, state if with_states else None

    def attention_layer(layer: Params, x_BLD: Array, prefix: Any) -> tuple[Array, Any]:
        prefix = None if prefix is None else jax.tree.map(for_each_row, prefix)
        x_BLD, keys_values = attention(layer, config, split_rows(x_BLD), segments_BL, positions_BL, prefix)
        return x_BLD, keys_values if with_states else None

    mixing_layer, attention_layer = remat_layer(mixing_layer, config), remat_layer(attention_layer, config)

    def block(x_BLD: Array, stacked: tuple[Params, Any]) -> tuple[Array, Any]:
        layers, prefix_states = stacked
        states = []
        for index, (letter, name) in enumerate(config.layers):
            before = None if prefix_states is None else prefix_states[index]
            if letter == "S":
                x_BLD, state = mixing_layer(layers[name], x_BLD, before)
            else:
                prefix = None if before is None or context is None else (*before, context[1])
                x_BLD, state = attention_layer(layers[name], x_BLD, prefix)
            states.append(state)
        return split_rows(x_BLD), tuple(states) if with_states else None

    # "block" saves only the input of each block and recomputes everything else in the backward pass.
    if config.remat == "block":
        block = jax.checkpoint(block, prevent_cse=False)
    # "none" saves every activation. Unrolled, each stays where it was computed; a loop would copy it into a stack of
    # all blocks and back (a fifth of a small model's step on CPU).
    unroll = config.blocks if config.remat == "none" else 1
    prefix_states = None if context is None else context[0].layers
    return jax.lax.scan(block, x_BLD, (blocks, prefix_states), unroll=unroll)


def embed(params: Params, config: ModelConfig, tokens: Array) -> Array:
    """Look up token ids in the embedding table: [...] to [..., D], in the compute type."""
    return jnp.take(params["embedding"], tokens, axis=0).astype(compute_dtype(config))


def remat_layer(layer: Callable, config: ModelConfig) -> Callable:
    """Apply `config.remat` to a layer: "layer" saves its input alone, "dots" also its products with the weights."""
    if config.remat == "layer":
        return jax.checkpoint(layer, prevent_cse=False)
    if config.remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return layer
