"""Cross-entropy over the tied head without ever holding whole logits: rows go in chunks of `chunk` columns.

Two forms. `token_logprobs` gives every token's log-probability and entropy and is differentiable in any cotangent:
its backward pass computes a chunk's logits again. `weighted_loss` needs one scalar, so its forward pass under
differentiation has the gradients of a chunk at hand and keeps them (three matrix products a chunk in place of four).
Rows of the table that only pad the vocabulary are masked out.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from configs.model import ModelConfig
from model.layers.common import Params
from model.nautile import forward

_MASKED = -1e30


class LossSums(NamedTuple):
    """Sums over the weighted targets, in nats. Divide `loss` by `weight` for the mean; `loss` includes the z-loss."""

    loss: Array
    weight: Array
    row_loss_B: Array
    row_weight_B: Array


def token_logprobs(
    params: Params,
    config: ModelConfig,
    hidden_BLD: Array,
    targets_BL: Array,
    chunk: int = 128,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """log p(target) and the entropy of the whole distribution at every position, in nats, float32 [B, L]."""
    return _token_logprobs(params["embedding"], hidden_BLD, targets_BL, config.vocabulary, chunk, temperature)


def weighted_loss(
    params: Params, config: ModelConfig, batch: dict[str, Array], chunk: int = 128, z_loss: float = 0.0
) -> LossSums:
    """Σ w·(-log p(target)) + z_loss·Σ w·(log Z)² over a batch of `tokens, targets, segments, positions, weights`.

    The row sums hold the cross-entropy alone. Only `loss` is meant to be differentiated.
    """
    hidden_BLD = forward(params, config, batch["tokens"], batch["segments"], batch["positions"])
    weights_BL = batch["weights"].astype(jnp.float32)
    loss, row_loss_B = _cross_entropy(
        params["embedding"], hidden_BLD, batch["targets"], weights_BL, config.vocabulary, chunk, z_loss
    )
    row_weight_B = jnp.sum(weights_BL, axis=1)
    return LossSums(loss, jnp.sum(row_weight_B), row_loss_B, row_weight_B)


def masked_logits(hidden: Array, table_VD: Array, vocabulary: int) -> Array:
    """hidden · tableᵀ in float32 [..., padded V], with the padding rows at -1e30."""
    logits = jnp.einsum("...d,vd->...v", hidden, table_VD.astype(hidden.dtype), preferred_element_type=jnp.float32)
    if vocabulary == table_VD.shape[0]:
        return logits
    return jnp.where(jnp.arange(table_VD.shape[0]) < vocabulary, logits, _MASKED)


def _chunks(array_BL: Array, chunk: int) -> Array:
    """[B, L, ...] to [N, B, C, ...], the last chunk padded with zeros."""
    batch, length = array_BL.shape[:2]
    missing = -length % chunk
    array_BL = jnp.pad(array_BL, ((0, 0), (0, missing)) + ((0, 0),) * (array_BL.ndim - 2))
    return jnp.swapaxes(array_BL.reshape(batch, -1, chunk, *array_BL.shape[2:]), 0, 1)


def _joined(array_NBC: Array, length: int) -> Array:
    array_BNC = jnp.swapaxes(array_NBC, 0, 1)
    return array_BNC.reshape(array_BNC.shape[0], -1, *array_BNC.shape[3:])[:, :length]


def _onehot(targets: Array, size: int) -> Array:
    return (targets[..., None] == jnp.arange(size)).astype(jnp.float32)


def _table_gradient(sum_DV: Array, slope_BCV: Array, hidden_BCD: Array) -> Array:
    """Adds a chunk's part of the table's gradient, in float32; transposed, for then the narrow operand comes first."""
    slope_BCV = slope_BCV.astype(hidden_BCD.dtype)
    return sum_DV + jnp.einsum("bcd,bcv->dv", hidden_BCD, slope_BCV, preferred_element_type=jnp.float32)


def _hidden_gradient(slope_BCV: Array, table_VD: Array, hidden_BCD: Array) -> Array:
    dtype = hidden_BCD.dtype
    return jnp.einsum("bcv,vd->bcd", slope_BCV.astype(dtype), table_VD.astype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _token_logprobs(
    table_VD: Array, hidden_BLD: Array, targets_BL: Array, vocabulary: int, chunk: int, temperature: float
) -> tuple[Array, Array]:
    return _token_logprobs_forward(table_VD, hidden_BLD, targets_BL, vocabulary, chunk, temperature)[0]


def _token_logprobs_forward(
    table_VD: Array, hidden_BLD: Array, targets_BL: Array, vocabulary: int, chunk: int, temperature: float
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    length = hidden_BLD.shape[1]
    chunk = min(chunk, length)

    def body(_: None, part: tuple[Array, Array]) -> tuple[None, tuple[Array, Array, Array]]:
        hidden_BCD, targets_BC = part
        logits_BCV = masked_logits(hidden_BCD, table_VD, vocabulary) / temperature
        total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        mean_BC = jnp.sum(jnp.exp(logits_BCV - total_BC[..., None]) * logits_BCV, axis=-1)
        return None, (chosen_BC - total_BC, total_BC - mean_BC, total_BC)

    _, parts = jax.lax.scan(body, None, (_chunks(hidden_BLD, chunk), _chunks(targets_BL, chunk)))
    logprobs_BL, entropy_BL, total_BL = (_joined(part, length) for part in parts)
    return (logprobs_BL, entropy_BL), (table_VD, hidden_BLD, targets_BL, total_BL, entropy_BL)


def _token_logprobs_backward(
    vocabulary: int, chunk: int, temperature: float, kept: tuple[Array, ...], slopes: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    table_VD, hidden_BLD, targets_BL, total_BL, entropy_BL = kept
    length = hidden_BLD.shape[1]
    chunk = min(chunk, length)

    def body(sum_DV: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        hidden_BCD, targets_BC, total_BC, entropy_BC, slope_BC, entropy_slope_BC = part
        log_BCV = masked_logits(hidden_BCD, table_VD, vocabulary) / temperature - total_BC[..., None]
        share_BCV = jnp.exp(log_BCV)
        slope_BCV = slope_BC[..., None] * (_onehot(targets_BC, table_VD.shape[0]) - share_BCV)
        # dH/dz = -p (log p + H); a masked row has p = 0 and log p = -1e30, whose product is 0.
        slope_BCV -= entropy_slope_BC[..., None] * share_BCV * (log_BCV + entropy_BC[..., None])
        slope_BCV /= temperature
        return _table_gradient(sum_DV, slope_BCV, hidden_BCD), _hidden_gradient(slope_BCV, table_VD, hidden_BCD)

    parts = tuple(_chunks(part, chunk) for part in (hidden_BLD, targets_BL, total_BL, entropy_BL, *slopes))
    sum_DV, slope_NBCD = jax.lax.scan(body, jnp.zeros(table_VD.shape[::-1], jnp.float32), parts)
    return sum_DV.T.astype(table_VD.dtype), _joined(slope_NBCD, length), None


_token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _cross_entropy(
    table_VD: Array,
    hidden_BLD: Array,
    targets_BL: Array,
    weights_BL: Array,
    vocabulary: int,
    chunk: int,
    z_loss: float,
) -> tuple[Array, Array]:
    """The scalar to differentiate, and the cross-entropy of each row (not differentiated)."""
    chunk = min(chunk, hidden_BLD.shape[1])

    def body(_: None, part: tuple[Array, ...]) -> tuple[None, tuple[Array, Array]]:
        hidden_BCD, targets_BC, weights_BC = part
        logits_BCV = masked_logits(hidden_BCD, table_VD, vocabulary)
        return None, _chunk_losses(logits_BCV, targets_BC, weights_BC, z_loss)[:2]

    parts = tuple(_chunks(part, chunk) for part in (hidden_BLD, targets_BL, weights_BL))
    _, (losses_N, rows_NB) = jax.lax.scan(body, None, parts)
    return jnp.sum(losses_N), jnp.sum(rows_NB, axis=0)


def _chunk_losses(logits_BCV: Array, targets_BC: Array, weights_BC: Array, z_loss: float) -> tuple[Array, Array, Array]:
    total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
    rows_B = jnp.sum(weights_BC * (total_BC - chosen_BC), axis=1)
    return jnp.sum(rows_B) + z_loss * jnp.sum(weights_BC * total_BC**2), rows_B, total_BC


def _cross_entropy_forward(
    table_VD: Array,
    hidden_BLD: Array,
    targets_BL: Array,
    weights_BL: Array,
    vocabulary: int,
    chunk: int,
    z_loss: float,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    length = hidden_BLD.shape[1]
    chunk = min(chunk, length)

    def body(sum_DV: Array, part: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array, Array]]:
        hidden_BCD, targets_BC, weights_BC = part
        logits_BCV = masked_logits(hidden_BCD, table_VD, vocabulary)
        loss, rows_B, total_BC = _chunk_losses(logits_BCV, targets_BC, weights_BC, z_loss)
        share_BCV = jnp.exp(logits_BCV - total_BC[..., None])
        pull_BC1 = (weights_BC * (1 + 2 * z_loss * total_BC))[..., None]
        slope_BCV = pull_BC1 * share_BCV - weights_BC[..., None] * _onehot(targets_BC, table_VD.shape[0])
        sum_DV = _table_gradient(sum_DV, slope_BCV, hidden_BCD)
        return sum_DV, (loss, rows_B, _hidden_gradient(slope_BCV, table_VD, hidden_BCD))

    parts = tuple(_chunks(part, chunk) for part in (hidden_BLD, targets_BL, weights_BL))
    sum_DV, (losses_N, rows_NB, slope_NBCD) = jax.lax.scan(body, jnp.zeros(table_VD.shape[::-1], jnp.float32), parts)
    return (jnp.sum(losses_N), jnp.sum(rows_NB, axis=0)), (sum_DV.T, _joined(slope_NBCD, length))


def _cross_entropy_backward(
    _vocabulary: int, _chunk: int, _z_loss: float, kept: tuple[Array, Array], slopes: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    slope, _ = slopes
    sum_VD, hidden_BLD = kept
    return slope * sum_VD, slope.astype(hidden_BLD.dtype) * hidden_BLD, None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
