"""Decoding at the published width: tokens/s at batch 1, 16 and 64, against recomputing the prefix for every token.

    python bench/decoding/decode.py [--blocks 8] [--tokens 8] [--dtype float32] [--rows 1 16 64]

Per batch: time per token near positions 100 and 1,000 in a cache of 1,024 columns, and near position 100 in a cache of
256, as early in a completion. The naive form runs the whole prefix of one row through `forward` for each token; its
time for several rows is the time of one row multiplied by their number. Medians of five.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, median_seconds
from nautile.configs.model import ModelConfig
from nautile.model.capacity.flops import parameter_counts
from nautile.model.decoding.cache import decode_step, decode_weights, prefill, repack
from nautile.model.decoding.sampling import Sampling, draw
from nautile.model.loss import masked_logits
from nautile.model.nautile import forward, initialise


def seconds(run, repeats=5):
    return median_seconds(lambda: jax.block_until_ready(run()), repeats)


@partial(jax.jit, static_argnames=("config", "tokens"))
def decode_tokens(weights, hidden_BD, cache, uniform_B, config, tokens):
    """Decode `tokens` tokens in one loop, each drawn and fed back, as the generator does."""

    def body(_, carry):
        hidden_BD, cache = carry
        logits_BV = masked_logits(hidden_BD, weights.embedding, config.vocabulary)
        return decode_step(weights, config, draw(logits_BV, uniform_B, Sampling(1)), cache)

    return jax.lax.fori_loop(0, tokens, body, (hidden_BD, cache))[0]


@partial(jax.jit, static_argnames="config")
def recompute_prefix(params, tokens_BL, config):
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    hidden_BLD = forward(params, config, tokens_BL, jnp.ones_like(tokens_BL), positions_BL)
    return masked_logits(hidden_BLD[:, -1], params["embedding"], config.vocabulary)


def main():
    arguments = argument_parser(__doc__, blocks=8, tokens=8, dtype="float32", rows=[1, 16, 64]).parse_args()
    config = ModelConfig(vocabulary=100_281, blocks=arguments.blocks, compute_dtype=arguments.dtype, remat="none")
    millions = sum(parameter_counts(config).values()) / 1e6
    print(f"{millions:.0f}M parameters, {arguments.dtype}, {jax.devices()[0].device_kind}")
    params = jax.jit(initialise, static_argnums=0)(config, 0)
    weights = decode_weights(params, config)
    prompt_BP = jnp.asarray(np.random.default_rng(0).integers(0, config.vocabulary, (1, 100)), jnp.int32)
    # One row is enough: the naive form does nothing for a second row that it could share.
    naive = {
        length: seconds(lambda length=length: recompute_prefix(params, jnp.resize(prompt_BP, (1, length)), config), 3)
        for length in (100, 1000)
    }
    fill = jax.jit(partial(prefill, config=config), static_argnames="capacity")
    print("rows  position  cache   ms/token  tokens/s  times the naive form")
    for rows in arguments.rows:
        for position, capacity in ((100, 256), (100, 1024), (1000, 1024)):
            hidden_BPD, cache = fill(params, tokens_BP=prompt_BP, lengths_B=jnp.asarray([100]), capacity=capacity)
            cache = repack(cache, jnp.zeros(rows, jnp.int32), capacity)
            # The cache claims to be filled further than it is: time depends on the position, not on what stands there.
            cache = cache._replace(filled=cache.filled + position - 100)
            hidden_BD, uniform_B = jnp.repeat(hidden_BPD[:, -1], rows, axis=0), jnp.linspace(0, 0.99, rows)
            step = partial(decode_tokens, weights, hidden_BD, cache, uniform_B, config, arguments.tokens)
            token_seconds = seconds(step) / arguments.tokens
            ratio = naive[position] * rows / token_seconds
            speeds = f"{token_seconds * 1e3:9.1f}  {rows / token_seconds:8.1f}  {ratio:10.0f}"
            print(f"{rows:4d}  {position:8d}  {capacity:5d}  {speeds}")


if __name__ == "__main__":
    main()
