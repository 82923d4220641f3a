"""The Transformer layer (paper §2.3): grouped-query attention with RoPE and QK norm, then a SwiGLU feed-forward.

Attention stays inside a document: a query sees the keys of its own segment up to itself. Long rows are processed in
blocks of queries, each against the keys up to its end only: the score matrix is never whole, and most of the half above
the diagonal is not computed.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nautile.configs.model import ModelConfig
from nautile.model.layers.common import MASKED, Params, linear, matrix, normals, rms_norm, rope_angles, rotate

QUERY_BLOCK = 256


class Attention(nnx.Module):
    """The parameters of one layer. `depth`, the number of residual branches in the stack, scales initial outputs."""

    def __init__(self, config: ModelConfig, depth: int, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.feed_forward
        kv_width = config.kv_heads * config.attention_head_dim
        normal = normals(
            rngs,
            {
                "q_proj": (width, width),
                "k_proj": (width, kv_width),
                "v_proj": (width, kv_width),
                "out_proj": (width, width),
                "ff_in": (width, 2 * hidden),
                "ff_out": (hidden, width),
            },
        )
        self.norm1 = nnx.Param(jnp.ones(width))
        self.q_proj = matrix(normal["q_proj"])
        self.k_proj = matrix(normal["k_proj"])
        self.v_proj = matrix(normal["v_proj"])
        self.out_proj = matrix(normal["out_proj"], scale=depth**-0.5)
        self.norm2 = nnx.Param(jnp.ones(width))
        self.ff_in = matrix(normal["ff_in"])
        self.ff_in_bias = nnx.Param(jnp.zeros(2 * hidden))
        self.ff_out = matrix(normal["ff_out"], scale=depth**-0.5)
        self.ff_out_bias = nnx.Param(jnp.zeros(width))


def attention(
    params: Params,
    config: ModelConfig,
    x_BLD: Array,
    segments_BL: Array,
    positions_BL: Array,
    prefix: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """Run the layer over whole rows: [B, L, D] to [B, L, D], and its keys and values [B, L, G, H] for a cache.

    `prefix`: keys, values and segments [B, P, ...] of the columns before the row, to which it also attends.
    """
    q, k, v = project(params, config, x_BLD, positions_BL)
    context: tuple[Array, ...] = (k, v, segments_BL)
    if prefix is not None:
        context = tuple(jnp.concatenate(parts, axis=1) for parts in zip(prefix, context, strict=True))
    mixed_BLD = (attend_fused if config.attention == "fused" else attend)(q, *context).reshape(x_BLD.shape)
    return feed_forward(params, config, x_BLD + linear(mixed_BLD, params["out_proj"])), (k, v)


def project(params: Params, config: ModelConfig, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Project to queries [..., heads, H], keys and values [..., kv heads, H], with RoPE and unweighted QK norm."""
    head_dim = config.attention_head_dim
    normed = rms_norm(x, params["norm1"], config.norm_epsilon)
    q, k, v = (
        linear(normed, params[name]).reshape(*x.shape[:-1], -1, head_dim) for name in ("q_proj", "k_proj", "v_proj")
    )
    angles = rope_angles(positions, head_dim, config.rope_base)
    q, k = rotate(q, angles), rotate(k, angles)
    if config.qk_norm:
        q, k = rms_norm(q, None, config.norm_epsilon), rms_norm(k, None, config.norm_epsilon)
    return q, k, v


def attend(q_BLNH: Array, k_BSGH: Array, v_BSGH: Array, segments_BS: Array) -> Array:
    """Causal attention within segments, [B, L, heads, H]; softmax in float32. Keys and values [B, S, kv heads, H].

    The queries are the last L of the S columns, whose segments are `segments_BS`.
    """
    length = q_BLNH.shape[1]
    prefix = k_BSGH.shape[1] - length  # columns before the first query
    query_segments_BL = segments_BS[:, prefix:]
    if length <= QUERY_BLOCK:
        return _attend_block(q_BLNH, k_BSGH, v_BSGH, query_segments_BL, segments_BS, prefix, by_query=False)
    # The backward pass recomputes each block's scores, so they are never all in memory.
    block = jax.checkpoint(_attend_block, static_argnums=(5, 6))
    outs = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        keys = prefix + end  # none of the block's queries sees a later key
        outs.append(
            block(
                q_BLNH[:, start:end], k_BSGH[:, :keys], v_BSGH[:, :keys], query_segments_BL[:, start:end],
                segments_BS[:, :keys], prefix + start, True,
            )
        )  # fmt: skip
    return jnp.concatenate(outs, axis=1)


def attend_fused(q_BLNH: Array, k_BSGH: Array, v_BSGH: Array, segments_BS: Array) -> Array:
    """`attend` by JAX's own function: on a GPU in 16 bits by cuDNN's kernel, elsewhere with all scores in memory."""
    length, columns = q_BLNH.shape[1], jnp.arange(k_BSGH.shape[1])
    rows = columns[-length:]
    visible_BLS = (segments_BS[:, -length:, None] == segments_BS[:, None, :]) & (rows[:, None] >= columns)
    by_kernel = jax.default_backend() == "gpu" and q_BLNH.dtype.itemsize == 2
    return jax.nn.dot_product_attention(
        q_BLNH, k_BSGH, v_BSGH, mask=visible_BLS[:, None], implementation="cudnn" if by_kernel else "xla"
    )


def _attend_block(
    q_BTNH: Array, k_BSGH: Array, v_BSGH: Array, segments_BT: Array, segments_BS: Array, start: int, by_query: bool
) -> Array:
    """Attention of T queries, the first in column `start`, to S keys, the first in column 0.

    by_query: keep the heads that share a key adjacent in the scores, in the order of the product with the keys; in the
    other order XLA on CPU transposes the scores one number at a time. The order also changes in which gradients are
    summed: short rows keep the other one, so that their results do not change.
    """
    batch, count, heads, head_dim = q_BTNH.shape
    groups = k_BSGH.shape[2]
    rows, columns = start + jnp.arange(count), jnp.arange(k_BSGH.shape[1])
    visible_BTS = (segments_BT[:, :, None] == segments_BS[:, None, :]) & (rows[:, None] >= columns)
    q_BTGRH = q_BTNH.reshape(batch, count, groups, heads // groups, head_dim)
    # R: query heads of a group, which share its keys.
    order, head_axes = ("bgtrs", (1, 3)) if by_query else ("bgrts", (1, 2))
    scores = jnp.einsum(f"btgrh,bsgh->{order}", q_BTGRH, k_BSGH, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.expand_dims(visible_BTS, head_axes), scores * head_dim**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSGH.dtype)
    return jnp.einsum(f"{order},bsgh->btgrh", weights, v_BSGH).reshape(q_BTNH.shape)


def feed_forward(params: Params, config: ModelConfig, x: Array) -> Array:
    """The SwiGLU residual branch: value · silu(gate), with biases. The gate is the second half of the columns."""
    normed = rms_norm(x, params["norm2"], config.norm_epsilon)
    value, gate = jnp.split(linear(normed, params["ff_in"]) + params["ff_in_bias"].astype(x.dtype), 2, axis=-1)
    return x + linear(value * jax.nn.silu(gate), params["ff_out"]) + params["ff_out_bias"].astype(x.dtype)
