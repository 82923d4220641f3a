"""Sampling of tokens from logits, row by row: temperature, then top-k, then top-p, then one uniform number.

A draw inverts the cumulative distribution at one uniform number per row and token. The number depends only on the
sample's key and the token's index, so a sample depends neither on its row nor on its batch. (A Gumbel draw takes V
random numbers per token: at V = 2,048 and 64 rows that was most of a decode step on CPU.)
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nautile.common.errors import ConfigError

HOTTEST = 1e6  # temperature: every token is as likely long before it; far above, so would be the masked ones
_BLOCK = 128  # probabilities per block in `_invert`


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Raises ConfigError naming the field that is out of range.

    thinking_budget: the number of tokens after which `think_end` is inserted, unless the model has ended its thinking.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    think_end: int | None = None
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"sampling.max_tokens must be 1 or more, not {self.max_tokens}")
        if not 0 <= self.temperature <= HOTTEST:
            raise ConfigError(f"sampling.temperature must be from 0 to {HOTTEST:g}, not {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k must be 0 (all) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p must be above 0 and at most 1, not {self.top_p}")
        if self.thinking_budget is not None and (self.think_end is None or self.thinking_budget < 0):
            raise ConfigError(
                f"sampling.thinking_budget {self.thinking_budget} must be 0 or more and go with sampling.think_end"
            )


def sample_keys(seeds: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Keys uint32 [samples, 2] from the integers that identify each sample, such as (step, prompt, sample)."""
    # A digest, because seeds that differ in one number must give unrelated streams.
    digests = (hashlib.sha256(",".join(str(int(part)) for part in seed).encode()).digest()[:8] for seed in seeds)
    return np.frombuffer(b"".join(digests), dtype="<u4").astype(np.uint32).reshape(len(seeds), 2)


def uniforms(keys_B2: Array, count: int) -> Array:
    """Uniform numbers in [0, 1), one per token of each sample [B, count]; the n-th does not depend on `count`."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.wrap_key_data(key), (count,)))(keys_B2)


def draw(logits_BV: Array, uniform_B: Array, sampling: Sampling) -> Array:
    """Sample a token id for every row [B], from its logits and one uniform number."""
    if sampling.temperature == 0:
        return _first_largest(logits_BV)
    if sampling.top_k == 0 and sampling.top_p == 1:
        top_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
        return _invert(jnp.exp((logits_BV - top_B1) / sampling.temperature), uniform_B)
    count = min(sampling.top_k or logits_BV.shape[1], logits_BV.shape[1])
    values_BN, ids_BN = jax.lax.top_k(logits_BV, count)
    probs_BN = jax.nn.softmax(values_BN / sampling.temperature, axis=-1)
    # A token is in the nucleus if the likelier ones sum to less than top_p; the likeliest always is.
    before_BN = jnp.cumsum(probs_BN, axis=-1) - probs_BN
    chosen_B = _invert(jnp.where(before_BN < sampling.top_p, probs_BN, 0).at[:, 0].set(probs_BN[:, 0]), uniform_B)
    return jnp.take_along_axis(ids_BN, chosen_B[:, None], axis=1)[:, 0]


def likeliest(logits: Array, count: int) -> tuple[Array, Array]:
    """The `count` largest logits of the last axis and their ids, largest first.

    Flattened to two dimensions: with more XLA on CPU sorts everything (80 ms instead of 1 at [4, 64, 2,176]).
    """
    values, ids = jax.lax.top_k(logits.reshape(-1, logits.shape[-1]), count)
    return values.reshape(*logits.shape[:-1], count), ids.reshape(*logits.shape[:-1], count)


def draw_each(logits_BV: Array, uniform_B: Array, temperature_B: Array, top_k_B: Array, top_p_B: Array) -> Array:
    """`draw` with a separate temperature, top-k and top-p for every row [B].

    The logits are sorted only if some row needs it: at V = 100,352 sorting is the largest cost of a draw.
    """
    greedy_B = temperature_B == 0
    likeliest_B = _first_largest(logits_BV)

    def sample_warm() -> Array:
        return jnp.where(greedy_B, likeliest_B, _draw_warm(logits_BV, uniform_B, temperature_B, top_k_B, top_p_B))

    return jax.lax.cond(jnp.all(greedy_B), lambda: likeliest_B, sample_warm)


def _draw_warm(logits_BV: Array, uniform_B: Array, temperature_B: Array, top_k_B: Array, top_p_B: Array) -> Array:
    """`draw_each` for rows with a temperature above 0; the ids of the other rows are meaningless."""
    greedy_B = temperature_B == 0
    cut_B = ~greedy_B & ((top_k_B > 0) | (top_p_B < 1))
    # Relative to the largest logit, so that exp cannot overflow.
    top_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
    divisor_B1 = jnp.where(greedy_B, 1, temperature_B)[:, None]
    untruncated_B = _invert(jnp.exp(top_BV / divisor_B1), uniform_B)

    def truncated() -> Array:
        values_BV, ids_BV = jax.lax.top_k(logits_BV, logits_BV.shape[1])
        # Sorted by logit: top-k is a condition on the rank, top-p on the sum of the likelier tokens.
        rank_V = jnp.arange(logits_BV.shape[1])
        within_BV = (top_k_B[:, None] == 0) | (rank_V < top_k_B[:, None])
        probs_BV = jax.nn.softmax(jnp.where(within_BV, values_BV / divisor_B1, -jnp.inf), axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
        nucleus_BV = jnp.where(before_BV < top_p_B[:, None], probs_BV, 0).at[:, 0].set(probs_BV[:, 0])
        return jnp.take_along_axis(ids_BV, _invert(nucleus_BV, uniform_B)[:, None], axis=1)[:, 0]

    return jax.lax.cond(jnp.any(cut_B), lambda: jnp.where(cut_B, truncated(), untruncated_B), lambda: untruncated_B)


@jax.jit
def only_allowed(logits_BV: Array, allowed_BW: Array) -> Array:
    """Set logits to -inf where bit v % 32 of word v // 32 (uint32 [B, W]) is 0; every row needs at least one 1."""
    bits_BWN = (allowed_BW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits_BV = bits_BWN.reshape(allowed_BW.shape[0], -1)[:, : logits_BV.shape[1]]
    missing = logits_BV.shape[1] - bits_BV.shape[1]
    return jnp.where(jnp.pad(bits_BV, ((0, 0), (0, missing))) == 1, logits_BV, -jnp.inf)


def _first_largest(logits_BV: Array) -> Array:
    """`argmax` of each row [B], the first of equal logits.

    XLA on CPU computes `argmax` number by number: 0.30 ms for a row of 100,352, and 0.06 this way.
    """
    top_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    last = logits_BV.shape[-1] - 1  # the result for a row of NaN, which has no largest logit
    return jnp.min(jnp.where(logits_BV == top_B1, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)


def _invert(probs_BV: Array, uniform_B: Array) -> Array:
    """The index at which the cumulative sum of unnormalised probabilities passes uniform · total.

    First finds the block of `_BLOCK` columns, then the column inside it.
    """
    batch, size = probs_BV.shape
    blocks_BNC = jnp.pad(probs_BV, ((0, 0), (0, -size % _BLOCK))).reshape(batch, -1, _BLOCK)
    sums_BN = jnp.sum(blocks_BNC, axis=-1)
    block_B, remainder_B = _passes(sums_BN, uniform_B * jnp.sum(sums_BN, axis=-1))
    block_BC = jnp.take_along_axis(blocks_BNC, block_B[:, None, None], axis=1)[:, 0]
    return block_B * _BLOCK + _passes(block_BC, remainder_B)[0]


def _passes(probs_BN: Array, target_B: Array) -> tuple[Array, Array]:
    """The first index whose cumulative sum exceeds the target, and the target minus the sum before that index.

    If rounding leaves no such index, it is that of the largest probability, never one of probability 0.
    """
    cumulative_BN = jnp.cumsum(probs_BN, axis=-1)
    above_BN = cumulative_BN > target_B[:, None]
    first_B = jnp.where(jnp.any(above_BN, -1), jnp.argmax(above_BN, -1), jnp.argmax(probs_BN, -1)).astype(jnp.int32)
    before_BN = cumulative_BN - probs_BN
    remainder_B = target_B - jnp.take_along_axis(before_BN, first_B[:, None], axis=1)[:, 0]
    # Rounding may make it negative; then a leading probability of 0 would already exceed it.
    return first_B, jnp.maximum(remainder_B, 0)
