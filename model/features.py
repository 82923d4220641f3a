"""Features of texts: hidden states of the frozen model, computed in batches of few shapes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.model.decoding.buckets import length_buckets
from nautile.model.layers.common import Params
from nautile.model.nautile import forward

Pooling = Literal["last", "mean"]


def pooled_states(
    params: Params,
    config: ModelConfig,
    texts: Sequence[Sequence[int]],
    rows: int,
    pooling: Pooling = "last",
    done: Callable[[int], None] = lambda _: None,
) -> np.ndarray:
    """The residual stream after the last block, at each text's last token or its mean over tokens: float32 [texts, D].

    rows: texts per batch. done: called with the number of texts finished. Raises `ConfigError` for a text without
    tokens or over the model's context.
    """
    for number, ids in enumerate(texts, 1):
        refuse_unreadable(number, len(ids), config)
    features_ND = np.zeros((len(texts), config.width), np.float32)
    # Texts of one length bucket share a compiled shape; the last batch of each is padded with empty rows.
    floor, finished = 0, 0
    for length in length_buckets(config.context):
        members = [i for i, ids in enumerate(texts) if floor < len(ids) <= length]
        floor = length
        for start in range(0, len(members), rows):
            batch = members[start : start + rows]
            tokens_BL, lengths_B = np.zeros((rows, length), np.int32), np.ones(rows, np.int32)
            for row, i in enumerate(batch):
                tokens_BL[row, : len(texts[i])], lengths_B[row] = texts[i], len(texts[i])
            features_ND[batch] = np.asarray(_pooled(params, config, tokens_BL, lengths_B, pooling))[: len(batch)]
            finished += len(batch)
            done(finished)
    return features_ND


def refuse_unreadable(number: int, tokens: int, config: ModelConfig) -> None:
    """Raise `ConfigError` for a text without tokens or over the model's context."""
    if not 0 < tokens <= config.context:
        raise ConfigError(f"text {number} has {tokens} tokens, and the model reads 1 to {config.context}")


@partial(jax.jit, static_argnames=("config", "pooling"))
def _pooled(params: Params, config: ModelConfig, tokens_BL: Array, lengths_B: Array, pooling: Pooling) -> Array:
    column_L = jnp.arange(tokens_BL.shape[1])
    inside_BL = column_L < lengths_B[:, None]
    positions_BL = jnp.broadcast_to(column_L, tokens_BL.shape)
    hidden_BLD = forward(params, config, tokens_BL, inside_BL.astype(jnp.int32), positions_BL).astype(jnp.float32)
    if pooling == "mean":
        return jnp.sum(jnp.where(inside_BL[..., None], hidden_BLD, 0.0), axis=1) / lengths_B[:, None]
    return jnp.take_along_axis(hidden_BLD, lengths_B[:, None, None] - 1, axis=1)[:, 0]
