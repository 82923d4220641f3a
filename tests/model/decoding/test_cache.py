"""Prefill and steps against the whole forward pass, for ragged prompts in one batch."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.model.decoding.cache import decode_step, decode_weights, prefill, repack
from nautile.model.decoding.slots import advance, empty_slots
from nautile.model.nautile import forward, initialise
from tests.model.conftest import tiny_config

LENGTHS = [1, 2, 5, 9]
STEPS = 7


def ragged(tokens, lengths, width):
    """Rows of `tokens` cut to `lengths`, right-aligned in `width` columns."""
    rows = np.zeros((len(lengths), width), np.int32)
    for row, length in enumerate(lengths):
        rows[row, width - length :] = tokens[row, :length]
    return jnp.asarray(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pattern": "S", "grid": "free", "decay": "window", "context": 24, "spectral_samples": 1},
        {"pattern": "A", "blocks": 1},
        {"pattern": "ASSA", "blocks": 1, "grid": "free", "integration": "free"},
    ],
    ids=lambda changes: changes.get("pattern", "SA"),
)
def test_prefill_and_steps_equal_forward(params, changes):
    """Prompts of 1 to 9 tokens (the convolution reaches back 3), and a ring of columns that grows and comes round."""
    config = tiny_config(**changes)
    if changes:
        params = jax.tree.map(lambda leaf: leaf * 1.5, initialise(config, 0))
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, (4, 9 + STEPS)).astype(np.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    expected = jax.jit(lambda: forward(params, config, jnp.asarray(tokens), jnp.ones_like(positions), positions))()

    weights = decode_weights(params, config)
    start = jax.jit(partial(prefill, config=config, capacity=12))
    step = jax.jit(partial(decode_step, config=config))
    hidden_BPD, cache = start(params, tokens_BP=ragged(tokens, LENGTHS, 9), lengths_B=jnp.asarray(LENGTHS))
    hidden_BD = hidden_BPD[:, -1]
    cache = repack(cache, jnp.arange(4), 9 + STEPS)
    rows = np.arange(4)
    for done in range(STEPS):
        last = np.asarray(LENGTHS) - 1 + done
        np.testing.assert_allclose(hidden_BD, expected[rows, last], atol=1e-4)
        hidden_BD, cache = step(weights, tokens_B=jnp.asarray(tokens[rows, last + 1]), cache=cache)
    assert cache.columns == (9 + STEPS if "A" in config.pattern else 1)


@pytest.mark.slow
def test_a_single_row_writes_into_its_cache_in_place(config):
    """XLA on CPU would copy all of it twice a token, in the product that reads it and in the result."""
    weights, slots = jax.eval_shape(lambda: (decode_weights(initialise(config, 0), config), empty_slots(config, 1)))
    occupied_B = jax.ShapeDtypeStruct((1,), bool)
    program = advance.lower(weights, slots, occupied_B, config, (), 0, 4).compile().as_text()
    for held in slots.blocks[0][-1]:  # keys and values
        shape = ",".join(map(str, held.shape))
        assert f"[{shape}]" in program
        assert not re.search(rf"\[{shape}\]\S* copy\(", program)


def test_a_prompt_over_the_cache_is_refused_with_the_numbers(config, params):
    with pytest.raises(ConfigError, match="a prompt of 9 tokens does not fit a cache of 8 columns"):
        prefill(params, config, jnp.zeros((1, 9), jnp.int32), jnp.asarray([9]), 8)


@pytest.mark.slow
def test_a_step_keeps_the_types_of_the_cache_in_bfloat16(params):
    """As a loop needs it: keys and values have the compute type, sums stay float32."""
    config = tiny_config(compute_dtype="bfloat16")

    def run(params):
        tokens_BP = jnp.zeros((2, 3), jnp.int32)
        hidden_BPD, cache = prefill(params, config, tokens_BP, jnp.asarray([3, 1]), 8)
        return (hidden_BPD[:, -1], cache), decode_step(decode_weights(params, config), config, tokens_BP[:, 0], cache)

    before, after = jax.eval_shape(run, params)
    same = jax.tree.map(lambda item, other: (item.shape, item.dtype) == (other.shape, other.dtype), before, after)
    assert jax.tree.all(same)
    cache = after[1]
    sca, attention = cache.blocks[0]
    assert attention.keys_BGHS.dtype == jnp.bfloat16
    assert sca.mix.re_BKHM.dtype == jnp.float32
