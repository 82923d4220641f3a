"""The hybrid stack (paper §2.3): tied embeddings and `blocks` times (SCA x `sca_per_block`, Transformer).

flax NNX modules say what the parameters are, how they start and what their axes are called; the step itself is a pure
function of a nested plain dict, with one `lax.scan` over the blocks. Parameters of the blocks are stacked on a leading
axis [blocks, ...]: `params["blocks"]["sca_0"]["in_proj"]` is [blocks, D, C].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from common.errors import ConfigError
from configs.model import ModelConfig
from model.layers.attention import Attention, attention
from model.layers.common import Params, axis_names, compute_dtype, parameter, pure
from model.layers.sca import SCA, sca
from model.sharding import split_rows

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


class Ends(nnx.Module):
    """What stands outside the blocks: the embedding table, tied to the head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        table_VD = jax.random.normal(rngs.params(), (config.padded_vocabulary, config.width)) * EMBEDDING_DEVIATION
        used_V1 = jnp.arange(config.padded_vocabulary)[:, None] < config.vocabulary
        self.embedding = parameter(jnp.where(used_V1, table_VD, 0), "vocabulary", "width")


def sca_names(config: ModelConfig) -> list[str]:
    return [f"sca_{index}" for index in range(config.sca_per_block)]


def initialise(config: ModelConfig, seed: int) -> Params:
    """Fresh float32 masters, a pure function of the config and the seed (jit it with out_shardings to shard)."""
    ends_key, blocks_key = jax.random.split(jax.random.key(seed))
    keys = jax.random.split(blocks_key, config.blocks)
    blocks = jax.vmap(lambda key: pure(Block(config, nnx.Rngs(params=key))))(keys)
    return {**pure(Ends(config, nnx.Rngs(params=ends_key))), "blocks": blocks}


def logical_axes(config: ModelConfig) -> Params:
    """The names of every parameter's axes, in the shape of `initialise`: blocks, vocabulary, width, inner, heads."""
    block = axis_names(lambda: Block(config, nnx.Rngs(params=0)))
    stacked = jax.tree.map(lambda names: ("blocks", *names), block, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return {**axis_names(lambda: Ends(config, nnx.Rngs(params=0))), "blocks": stacked}


def shapes(config: ModelConfig) -> Params:
    """The shape and type of every parameter, without making any."""
    return jax.eval_shape(lambda: initialise(config, 0))


def forward(params: Params, config: ModelConfig, tokens_BL: Array, segments_BL: Array, positions_BL: Array) -> Array:
    """The residual stream after the last block [B, L, D], in the compute type; there is no norm before the tied head.

    `segments_BL` numbers the documents of a row from 1 (0: padding); `positions_BL` counts from 0 in each document.
    Raises ConfigError where the shapes differ.
    """
    check_rows(tokens_BL, segments_BL, positions_BL)

    def mixed(layer: Params, x_BLD: Array) -> Array:
        return sca(layer, config, split_rows(x_BLD), segments_BL, positions_BL)[0]

    def attended(layer: Params, x_BLD: Array) -> Array:
        return attention(layer, config, split_rows(x_BLD), segments_BL, positions_BL)[0]

    mixed, attended = by_layer(mixed, config), by_layer(attended, config)

    def body(x_BLD: Array, block: Params) -> tuple[Array, None]:
        for name in sca_names(config):
            x_BLD = mixed(block[name], x_BLD)
        return split_rows(attended(block["attention"], x_BLD)), None

    # With "none" every activation is kept: unrolled, each stays where it was made, where a loop would copy it into a
    # stack of all blocks and back (a fifth of a small model's step on CPU).
    unroll = config.blocks if config.remat == "none" else 1
    start_BLD = embed(params, config, tokens_BL)
    x_BLD, _ = jax.lax.scan(by_block(body, config), start_BLD, params["blocks"], unroll=unroll)
    return x_BLD


def embed(params: Params, config: ModelConfig, tokens: Array) -> Array:
    """Rows of the table in the compute type."""
    return jnp.take(params["embedding"], tokens, axis=0).astype(compute_dtype(config))


def check_rows(tokens: Array, segments: Array, positions: Array) -> None:
    if tokens.ndim != 2 or segments.shape != tokens.shape or positions.shape != tokens.shape:
        raise ConfigError(
            f"forward: tokens {tokens.shape}, segments {segments.shape} and positions {positions.shape} must be one "
            "shape [batch, length]"
        )


def by_block(body: Callable, config: ModelConfig) -> Callable:
    """With `remat` "block" only the input of each block is kept, and all within it is computed again."""
    return jax.checkpoint(body, prevent_cse=False) if config.remat == "block" else body


def by_layer(layer: Callable, config: ModelConfig) -> Callable:
    """With "layer" each layer's input is kept, with "dots" also its products with the weights."""
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
