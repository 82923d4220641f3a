"""The Transformer layer (paper §2.3): grouped-query attention with RoPE and QK norm, then a SwiGLU feed-forward.

Attention stays inside a document: a query sees the keys of its own segment up to itself. Long rows are processed in
blocks of queries, each against the keys up to its end only: the score matrix is never whole, and most of the half above
the diagonal is not computed.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.model import ModelConfig
from model.layers.common import Params, linear, matrix, normals, rms_norm, rope_angles, rotate

QUERY_BLOCK = 256
_MASKED = -1e30


class Attention(nnx.Module):
    """The parameters of one layer. `depth` is the number of residual branches in the stack: it scales the outputs."""

    def __init__(self, config: ModelConfig, depth: int, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.feed_forward
        shared = config.kv_heads * config.attention_head_dim
        drawn = normals(
            rngs,
            {
                "q_proj": (width, width),
                "k_proj": (width, shared),
                "v_proj": (width, shared),
                "out_proj": (width, width),
                "ff_in": (width, 2 * hidden),
                "ff_out": (hidden, width),
            },
        )
        self.norm1 = nnx.Param(jnp.ones(width))
        self.q_proj = matrix(drawn["q_proj"])
        self.k_proj = matrix(drawn["k_proj"])
        self.v_proj = matrix(drawn["v_proj"])
        self.out_proj = matrix(drawn["out_proj"], scale=depth**-0.5)
        self.norm2 = nnx.Param(jnp.ones(width))
        self.ff_in = matrix(drawn["ff_in"])
        self.ff_in_bias = nnx.Param(jnp.zeros(2 * hidden))
        self.ff_out = matrix(drawn["ff_out"], scale=depth**-0.5)
        self.ff_out_bias = nnx.Param(jnp.zeros(width))


def attention(
    params: Params,
    config: ModelConfig,
    x_BLD: Array,
    segments_BL: Array,
    positions_BL: Array,
    before: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """One residual layer over whole rows: [B, L, D] to [B, L, D], and its keys and values [B, L, G, H] for a cache.

    `before`: keys, values and segments [B, P, ...] of columns before the row, which its queries see too.
    """
    q, k, v = project(params, config, x_BLD, positions_BL)
    seen = (k, v, segments_BL)
    if before is not None:
        seen = tuple(jnp.concatenate([early, own], axis=1) for early, own in zip(before, seen, strict=True))
    mixed_BLD = attend(q, *seen).reshape(x_BLD.shape)
    return feed_forward(params, config, x_BLD + linear(mixed_BLD, params["out_proj"])), (k, v)


def project(params: Params, config: ModelConfig, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Queries [..., heads, H], keys and values [..., kv heads, H]; RoPE and QK norm (no weights) applied."""
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


def attend(q_BLNH: Array, k_BSGH: Array, v_BSGH: Array, from_BS: Array) -> Array:
    """Causal attention within segments; softmax in float32. Shapes [B, L, heads, H] and [B, S, kv heads, H].

    The queries are the last L of the S columns, whose segments are `from_BS`.
    """
    length = q_BLNH.shape[1]
    before = k_BSGH.shape[1] - length
    to_BL = from_BS[:, before:]
    if length <= QUERY_BLOCK:
        return _attend_block(q_BLNH, k_BSGH, v_BSGH, to_BL, from_BS, before, by_query=False)
    block = jax.checkpoint(_attend_block, static_argnums=(5, 6))
    outs = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        last = before + end
        outs.append(
            block(
                q_BLNH[:, start:end], k_BSGH[:, :last], v_BSGH[:, :last], to_BL[:, start:end], from_BS[:, :last],
                before + start, True,
            )
        )  # fmt: skip
    return jnp.concatenate(outs, axis=1)


def _attend_block(
    q_BTNH: Array, k_BSGH: Array, v_BSGH: Array, to_BT: Array, from_BS: Array, start: int, by_query: bool
) -> Array:
    """Attention of queries whose first column is `start`, against keys whose first column is 0.

    by_query: the heads that share a key stand beside each other in the scores, as the product with the keys leaves
    them, where else XLA on CPU transposes the scores, number by number. Gradients sum in another order, so short rows
    stay as they were.
    """
    batch, count, heads, head_dim = q_BTNH.shape
    groups = k_BSGH.shape[2]
    rows, columns = start + jnp.arange(count), jnp.arange(k_BSGH.shape[1])
    seen_BTS = (to_BT[:, :, None] == from_BS[:, None, :]) & (rows[:, None] >= columns)
    q_BTGRH = q_BTNH.reshape(batch, count, groups, heads // groups, head_dim)
    order, others = ("bgtrs", (1, 3)) if by_query else ("bgrts", (1, 2))
    scores = jnp.einsum(f"btgrh,bsgh->{order}", q_BTGRH, k_BSGH, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.expand_dims(seen_BTS, others), scores * head_dim**-0.5, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSGH.dtype)
    return jnp.einsum(f"{order},bsgh->btgrh", weights, v_BSGH).reshape(q_BTNH.shape)


def feed_forward(params: Params, config: ModelConfig, x: Array) -> Array:
    """The second residual branch: value · silu(gate), with biases (the gate is the second half)."""
    normed = rms_norm(x, params["norm2"], config.norm_epsilon)
    value, gate = jnp.split(linear(normed, params["ff_in"]) + params["ff_in_bias"].astype(x.dtype), 2, axis=-1)
    return x + linear(value * jax.nn.silu(gate), params["ff_out"]) + params["ff_out_bias"].astype(x.dtype)
