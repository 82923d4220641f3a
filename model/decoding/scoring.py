"""Summed log-probabilities of continuations, in batches.

Sequences are padded on the right to their length bucket, so that short texts are not padded to the longest; each
(rows, length) compiles once per process.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.model.decoding.buckets import length_buckets
from nautile.model.layers.common import Params
from nautile.model.loss import token_logprobs
from nautile.model.nautile import forward


def continuation_logprobs(
    params: Params, config: ModelConfig, sequences: Sequence[tuple[Sequence[int], int]], rows: int
) -> np.ndarray:
    """Σ log p(ids[i] | ids[:i]) over i ≥ first, in nats, for each of `sequences` = (ids, first); float64 [N], in order.

    Raises `ConfigError` for a sequence over the model's context, or one whose `first` is not among 1 … len(ids).
    """
    for index, (ids, first) in enumerate(sequences):
        refuse_unscorable(f"sequence {index}", len(ids), first, config)
    sums_N = np.zeros(len(sequences))
    floor = 0
    for length in length_buckets(config.context):
        # The sequences of this bucket, similar lengths together.
        members = sorted(
            (i for i, (ids, _) in enumerate(sequences) if floor < len(ids) <= length),
            key=lambda i: len(sequences[i][0]),
        )
        floor = length  # the lengths of the next bucket are above this
        for start in range(0, len(members), rows):
            batch = members[start : start + rows]
            tokens_BL = np.zeros((rows, length), np.int32)
            firsts_B, lengths_B = np.ones(rows, np.int32), np.ones(rows, np.int32)
            for row, i in enumerate(batch):
                ids, firsts_B[row] = sequences[i]
                tokens_BL[row, : len(ids)] = ids
                lengths_B[row] = len(ids)
            sums_N[batch] = np.asarray(_sums(params, config, tokens_BL, firsts_B, lengths_B))[: len(batch)]
    return sums_N


def refuse_unscorable(name: str, length: int, first: int, config: ModelConfig) -> None:
    """Raise `ConfigError` for a sequence over the context, or one with nothing before its first scored token."""
    if not 1 <= first <= length <= config.context:
        raise ConfigError(
            f"score: {name} of {length} tokens, scored from {first}, is empty or over the model's context of "
            f"{config.context} tokens"
        )


@partial(jax.jit, static_argnames="config")
def _sums(params: Params, config: ModelConfig, tokens_BL: Array, firsts_B: Array, lengths_B: Array) -> Array:
    column_L = jnp.arange(tokens_BL.shape[1])
    positions_BL = jnp.broadcast_to(column_L, tokens_BL.shape)
    segments_BL = (column_L < lengths_B[:, None]).astype(jnp.int32)
    hidden_BLD = forward(params, config, tokens_BL, segments_BL, positions_BL)
    logprobs_BL, _ = token_logprobs(params, config, hidden_BLD, jnp.roll(tokens_BL, -1, axis=1))
    # Column i predicts token i + 1.
    scored_BL = (column_L >= firsts_B[:, None] - 1) & (column_L < lengths_B[:, None] - 1)
    return jnp.sum(jnp.where(scored_BL, logprobs_BL, 0.0), axis=1)
