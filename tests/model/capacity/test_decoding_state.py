"""The bytes of a sequence's decoding state: those counted by hand for the published shape, and those of its arrays."""

import jax

from nautile.configs.load import load
from nautile.model.capacity.flops import state_bytes
from nautile.model.decoding.cache import KeysValues, empty_block
from nautile.model.layers.sca import SCAState


def test_the_published_model_keeps_these_bytes_of_a_sequence():
    """K = K' = 16, H = 64, M = 2 in 16 SCA layers; 4 heads of 64 for keys and values in 8 attention layers, 16 bits."""
    layers, inputs = 16, 16 * (64 + 1) + 16 * 64 * 2 * 2
    assert state_bytes(load("nautile_370m").model) == {
        "sca_sums": layers * 4 * (2 * 16 * 64 * 2 + 16),
        "convolution_history": layers * 2 * 3 * inputs,
        "kv_per_token": 8 * 2 * 2 * 4 * 64,
    }


def test_each_layer_keeps_what_its_kind_keeps():
    config = load("nautile_370m").model
    published, no_attention, four_layers = (
        state_bytes(config.model_copy(update={"pattern": pattern})) for pattern in ("SSA", "SS", "ASSA")
    )
    assert no_attention == {**published, "kv_per_token": 0}
    assert four_layers == {**published, "kv_per_token": 2 * published["kv_per_token"]}


def test_the_bytes_are_those_of_the_arrays():
    config = load("local").model.model_copy(update={"pattern": "ASSA", "compute_dtype": "float32"})
    layers = [layer for _ in range(config.blocks) for layer in empty_block(config, count=1, columns=1)]
    arrays = {
        "sca_sums": [layer.mix for layer in layers if isinstance(layer, SCAState)],
        "convolution_history": [layer.history_BTC for layer in layers if isinstance(layer, SCAState)],
        "kv_per_token": [layer for layer in layers if isinstance(layer, KeysValues)],
    }
    assert state_bytes(config) == {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(own)) for name, own in arrays.items()
    }
