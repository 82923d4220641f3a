"""Cross-entropy over the tied head without ever holding whole logits: rows are processed in chunks of `chunk` columns.

There are two forms. `token_logprobs` returns the log-probability of every token and the entropy, and accepts any
cotangent: its backward pass recomputes the logits of each chunk. `weighted_loss` is a scalar, so under differentiation
its forward pass computes and saves a chunk's gradients while it has the logits: three matrix products per chunk instead
of four.

Rows of the table that only pad the vocabulary are masked out everywhere. Ids without a token (`ModelConfig.unused_ids`)
are masked out of `token_logprobs` and `next_logits`: sampling, evaluation and every loss after pretraining. The
pretraining loss, `weighted_loss`, is over all rows of the vocabulary, as in the author's code: there the model learns
that such ids do not occur.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from nautile.configs.model import LOSS_CHUNK, IdRanges, ModelConfig
from nautile.model.layers.common import MASKED, Params
from nautile.model.nautile import forward


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
    chunk: int = LOSS_CHUNK,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """log p(target) and the entropy of the distribution at every position, in nats: float32 [B, L] each."""
    return _token_logprobs(params["embedding"], hidden_BLD, targets_BL, config, chunk, temperature)


def weighted_loss(
    params: Params, config: ModelConfig, batch: dict[str, Array], chunk: int = LOSS_CHUNK, z_loss: float = 0.0
) -> LossSums:
    """Σ w·(-log p(target)) + z_loss·Σ w·(log Z)² over a batch of `tokens, targets, segments, positions, weights`.

    The distribution is over all rows of the vocabulary, whether a token has them or not. The row sums are cross-entropy
    without the z-loss. Only `loss` is differentiable.
    """
    hidden_BLD = forward(params, config, batch["tokens"], batch["segments"], batch["positions"])
    weights_BL = batch["weights"].astype(jnp.float32)
    inputs = _LossInputs(params["embedding"], hidden_BLD, batch["targets"], weights_BL)
    loss, row_loss_B = _cross_entropy(inputs, config.vocabulary, chunk, z_loss)
    row_weight_B = jnp.sum(weights_BL, axis=1)
    return LossSums(loss, jnp.sum(row_weight_B), row_loss_B, row_weight_B)


def next_logits(hidden: Array, table_VD: Array, config: ModelConfig) -> Array:
    """The logits of the next token, as it is sampled and scored: -1e30 also for ids that no token has."""
    return masked_logits(hidden, table_VD, config.vocabulary, config.unused_ids)


def masked_logits(hidden: Array, table_VD: Array, vocabulary: int, unused: IdRanges = ()) -> Array:
    """Logits hidden · tableᵀ, float32 [..., padded V], with -1e30 for `unused` and what pads the vocabulary."""
    logits = jnp.einsum("...d,vd->...v", hidden, table_VD.astype(hidden.dtype), preferred_element_type=jnp.float32)
    if vocabulary == table_VD.shape[0] and not unused:
        return logits
    ids_V = jnp.arange(table_VD.shape[0])
    is_used_V = ids_V < vocabulary
    for first, end in unused:
        is_used_V &= (ids_V < first) | (ids_V >= end)
    return jnp.where(is_used_V, logits, MASKED)


def chunks(array_BL: Array, chunk: int) -> Array:
    """Cut [B, L, ...] into chunks [N, B, C, ...] of C <= L columns, the last padded with zeros."""
    batch, length = array_BL.shape[:2]
    chunk = min(chunk, length)
    missing = -length % chunk
    array_BL = jnp.pad(array_BL, ((0, 0), (0, missing)) + ((0, 0),) * (array_BL.ndim - 2))
    return jnp.swapaxes(array_BL.reshape(batch, -1, chunk, *array_BL.shape[2:]), 0, 1)


def join_chunks(array_NBC: Array, length: int) -> Array:
    """Join chunks [N, B, C, ...] to [B, L, ...] without the padding: the inverse of `chunks`."""
    array_BNC = jnp.swapaxes(array_NBC, 0, 1)
    return array_BNC.reshape(array_BNC.shape[0], -1, *array_BNC.shape[3:])[:, :length]


def _onehot(targets: Array, size: int) -> Array:
    return (targets[..., None] == jnp.arange(size)).astype(jnp.float32)


def _table_gradient(d_logits_BCV: Array, hidden_BCD: Array) -> Array:
    """A chunk's gradient of the table, float32 [D, V]: transposed, so that the narrower operand comes first."""
    d_logits_BCV = d_logits_BCV.astype(hidden_BCD.dtype)
    if hidden_BCD.dtype == jnp.float32:
        return _sum_of_products(hidden_BCD, d_logits_BCV)
    # XLA on CPU joins the caller's transposition to this product, and has no such product of bfloat16 with a float32
    # result. It computes bfloat16 products in float32 anyway, so the cast costs nothing there.
    return jax.lax.platform_dependent(
        hidden_BCD,
        d_logits_BCV,
        cpu=lambda *operands: _sum_of_products(*(part.astype(jnp.float32) for part in operands)),
        default=_sum_of_products,
    )


def _sum_of_products(hidden_BCD: Array, d_logits_BCV: Array) -> Array:
    return jnp.einsum("bcd,bcv->dv", hidden_BCD, d_logits_BCV, preferred_element_type=jnp.float32)


def _sum_over_chunks(step: Callable[[Any], tuple[Array, Any]], chunks_N: Any) -> tuple[Array, Any]:
    """Run `step` on each chunk; sum its first results and stack the others.

    The sum starts from the first chunk's result, not from zeros: at the published size those are 411 MB to write and
    add.
    """
    # The first chunk is outside the loop, and its result is the loop's start.
    first, later_N = (jax.tree.map(lambda array_N, at=at: array_N[at], chunks_N) for at in (0, slice(1, None)))
    total, outputs = step(first)
    # A single chunk needs no scan.
    stacked_N = jax.tree.map(lambda part: part[None], outputs)
    if not jax.tree.leaves(later_N)[0].shape[0]:
        return total, stacked_N

    def body(total: Array, part: Any) -> tuple[Array, Any]:
        summand, outputs = step(part)
        return total + summand, outputs

    total, outputs_N = jax.lax.scan(body, total, later_N)
    return total, jax.tree.map(lambda *both: jnp.concatenate(both), stacked_N, outputs_N)


def _hidden_gradient(d_logits_BCV: Array, table_VD: Array, hidden_BCD: Array) -> Array:
    dtype = hidden_BCD.dtype
    return jnp.einsum("bcv,vd->bcd", d_logits_BCV.astype(dtype), table_VD.astype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _token_logprobs(
    table_VD: Array, hidden_BLD: Array, targets_BL: Array, config: ModelConfig, chunk: int, temperature: float
) -> tuple[Array, Array]:
    return _token_logprobs_forward(table_VD, hidden_BLD, targets_BL, config, chunk, temperature)[0]


def _token_logprobs_forward(
    table_VD: Array, hidden_BLD: Array, targets_BL: Array, config: ModelConfig, chunk: int, temperature: float
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    def body(_: None, part: tuple[Array, Array]) -> tuple[None, tuple[Array, Array, Array]]:
        hidden_BCD, targets_BC = part
        logits_BCV = next_logits(hidden_BCD, table_VD, config) / temperature
        total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
        chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
        # Entropy: log Z - Σ p z.
        mean_BC = jnp.sum(jnp.exp(logits_BCV - total_BC[..., None]) * logits_BCV, axis=-1)
        return None, (chosen_BC - total_BC, total_BC - mean_BC, total_BC)

    # Saved for the backward pass: log Z and the entropy of each token, not the logits.
    _, parts = jax.lax.scan(body, None, (chunks(hidden_BLD, chunk), chunks(targets_BL, chunk)))
    logprobs_BL, entropy_BL, total_BL = (join_chunks(part, hidden_BLD.shape[1]) for part in parts)
    return (logprobs_BL, entropy_BL), (table_VD, hidden_BLD, targets_BL, total_BL, entropy_BL)


def _token_logprobs_backward(
    config: ModelConfig, chunk: int, temperature: float, residuals: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    table_VD, hidden_BLD, targets_BL, total_BL, entropy_BL = residuals

    def gradients(part: tuple[Array, ...]) -> tuple[Array, Array]:
        hidden_BCD, targets_BC, total_BC, entropy_BC, d_logprob_BC, d_entropy_BC = part
        log_BCV = next_logits(hidden_BCD, table_VD, config) / temperature - total_BC[..., None]
        p_BCV = jnp.exp(log_BCV)
        # d log p(target)/dz = onehot - p.
        d_logits_BCV = d_logprob_BC[..., None] * (_onehot(targets_BC, table_VD.shape[0]) - p_BCV)
        # dH/dz = -p (log p + H); a masked row has p = 0 and log p = -1e30, whose product is 0.
        d_logits_BCV -= d_entropy_BC[..., None] * p_BCV * (log_BCV + entropy_BC[..., None])
        d_logits_BCV /= temperature
        return _table_gradient(d_logits_BCV, hidden_BCD), _hidden_gradient(d_logits_BCV, table_VD, hidden_BCD)

    parts = tuple(chunks(part, chunk) for part in (hidden_BLD, targets_BL, total_BL, entropy_BL, *cotangents))
    d_table_DV, d_hidden_NBCD = _sum_over_chunks(gradients, parts)
    return d_table_DV.T.astype(table_VD.dtype), join_chunks(d_hidden_NBCD, hidden_BLD.shape[1]), None


_token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward)


class _LossInputs(NamedTuple):
    table_VD: Array
    hidden_BLD: Array
    targets_BL: Array
    weights_BL: Array

    def chunks(self, chunk: int) -> tuple[Array, Array, Array]:
        """Hidden states, targets and weights, cut along L."""
        return chunks(self.hidden_BLD, chunk), chunks(self.targets_BL, chunk), chunks(self.weights_BL, chunk)


class _ChunkLoss(NamedTuple):
    loss: Array  # with the z-loss
    rows_B: Array  # cross-entropy
    logits_BCV: Array
    total_BC: Array  # log Z


def _chunk_loss(table_VD: Array, vocabulary: int, z_loss: float, part: tuple[Array, Array, Array]) -> _ChunkLoss:
    hidden_BCD, targets_BC, weights_BC = part
    logits_BCV = masked_logits(hidden_BCD, table_VD, vocabulary)
    total_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    chosen_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], axis=-1)[..., 0]
    rows_B = jnp.sum(weights_BC * (total_BC - chosen_BC), axis=1)
    loss = jnp.sum(rows_B) + z_loss * jnp.sum(weights_BC * total_BC**2)
    return _ChunkLoss(loss, rows_B, logits_BCV, total_BC)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _cross_entropy(inputs: _LossInputs, vocabulary: int, chunk: int, z_loss: float) -> tuple[Array, Array]:
    """The scalar to differentiate, and the cross-entropy of each row (not differentiated)."""

    def body(_: None, part: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
        result = _chunk_loss(inputs.table_VD, vocabulary, z_loss, part)
        return None, (result.loss, result.rows_B)

    _, (losses_N, rows_NB) = jax.lax.scan(body, None, inputs.chunks(chunk))
    return jnp.sum(losses_N), jnp.sum(rows_NB, axis=0)


def _cross_entropy_forward(
    inputs: _LossInputs, vocabulary: int, chunk: int, z_loss: float
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """`_cross_entropy`, and the gradients of its scalar with respect to the table and the hidden states."""
    table_VD = inputs.table_VD

    def gradients(part: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        hidden_BCD, targets_BC, weights_BC = part
        result = _chunk_loss(table_VD, vocabulary, z_loss, part)
        # d/dz of w (log Z - z_target) + z_loss w (log Z)² = w (1 + 2 z_loss log Z) p - w onehot.
        p_BCV = jnp.exp(result.logits_BCV - result.total_BC[..., None])
        factor_BC1 = (weights_BC * (1 + 2 * z_loss * result.total_BC))[..., None]
        d_logits_BCV = factor_BC1 * p_BCV - weights_BC[..., None] * _onehot(targets_BC, table_VD.shape[0])
        d_hidden_BCD = _hidden_gradient(d_logits_BCV, table_VD, hidden_BCD)
        return _table_gradient(d_logits_BCV, hidden_BCD), (result.loss, result.rows_B, d_hidden_BCD)

    d_table_DV, (losses_N, rows_NB, d_hidden_NBCD) = _sum_over_chunks(gradients, inputs.chunks(chunk))
    d_hidden_BLD = join_chunks(d_hidden_NBCD, inputs.hidden_BLD.shape[1])
    return (jnp.sum(losses_N), jnp.sum(rows_NB, axis=0)), (d_table_DV.T, d_hidden_BLD)


def _cross_entropy_backward(
    _vocabulary: int, _chunk: int, _z_loss: float, residuals: tuple[Array, Array], cotangents: tuple[Array, Array]
) -> tuple[_LossInputs]:
    # The gradients were computed in the forward pass; only the scale of the loss is applied here. Targets and weights
    # have no gradient.
    d_loss, _ = cotangents
    d_table_VD, d_hidden_BLD = residuals
    table = d_loss * d_table_VD
    hidden = d_loss.astype(d_hidden_BLD.dtype) * d_hidden_BLD
    return (_LossInputs._make((table, hidden, None, None)),)


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
