"""The size of the decoding state of a sequence (paper §2.2.5: O(1) for SCA), from the shapes of the cache."""

import jax
import jax.numpy as jnp

from nautile.configs.model import ModelConfig
from nautile.model.decoding.cache import Cache, KeysValues, prefill
from nautile.model.nautile import shapes


def state_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of one sequence's state: `sca_sums` and `convolution_history` in total, `kv_per_token` for each token.

    Only shapes are computed.
    """

    def cache_of(capacity: int) -> Cache:
        tokens_BP, lengths_B = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        return jax.eval_shape(lambda params: prefill(params, config, tokens_BP, lengths_B, capacity)[1], shapes(config))

    def size(arrays: object) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))

    layers = [layer for block in cache_of(1).blocks for layer in block]
    states = [layer for layer in layers if not isinstance(layer, KeysValues)]
    return {
        "sca_sums": size([state.mix for state in states]),
        "convolution_history": size([state.history_BTC for state in states]),
        "kv_per_token": size([layer for layer in layers if isinstance(layer, KeysValues)]),
    }
