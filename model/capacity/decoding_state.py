"""The size of the decoding state of a sequence (paper §2.2.5: O(1) for SCA), from the shapes of the cache."""

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from model.decoding.cache import Cache, prefill
from model.nautile import shapes


def state_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of one sequence's state: `sca_sums` and `convolution_history` in total, `kv_per_token` for each token.

    Only shapes are computed.
    """

    def cache_of(capacity: int) -> Cache:
        tokens_BP, lengths_B = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        return jax.eval_shape(lambda params: prefill(params, config, tokens_BP, lengths_B, capacity)[1], shapes(config))

    def size(arrays: object) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))

    blocks = cache_of(1).blocks
    return {
        "sca_sums": size([state.mix for block in blocks for state in block.sca]),
        "convolution_history": size([state.history_BTC for block in blocks for state in block.sca]),
        "kv_per_token": size([(block.keys_BGHS, block.values_BGSH) for block in blocks]),
    }
