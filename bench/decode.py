"""Decoding at the published width: tokens/s at batch 1, 16 and 64, against recomputing the prefix for every token.

    python bench/decode.py [--blocks 8] [--tokens 8] [--dtype float32] [--rows 1 16 64]

Per batch: time per token near position 100 and near position 1,000 in a cache of 1,024 columns, and in a cache of 256
as a young completion has it. The naive form runs the whole prefix of one row through `forward` for each token; for
more rows its time is taken as that many rows one after another. Medians of five.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from model.decoding.cache import decode_step, decode_weights, prefill, share
from model.decoding.sampling import Sampling, draw
from model.loss import masked_logits
from model.nautile import forward, initialise, parameter_counts


def median_seconds(run, repeats=5):
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@partial(jax.jit, static_argnames=("config", "tokens"))
def several(weights, hidden_BD, cache, uniform_B, config, tokens):
    """`tokens` tokens in one loop, each drawn and fed, as the generator does."""

    def body(_, carry):
        hidden_BD, cache = carry
        logits_BV = masked_logits(hidden_BD, weights.embedding, config.vocabulary)
        return decode_step(weights, config, draw(logits_BV, uniform_B, Sampling(1)), cache)

    return jax.lax.fori_loop(0, tokens, body, (hidden_BD, cache))[0]


@partial(jax.jit, static_argnames="config")
def recomputed(params, tokens_BL, config):
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    hidden_BLD = forward(params, config, tokens_BL, jnp.ones_like(tokens_BL), positions_BL)
    return masked_logits(hidden_BLD[:, -1], params["embedding"], config.vocabulary)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    config = ModelConfig(vocabulary=100_281, blocks=options.blocks, compute_dtype=options.dtype, remat="none")
    millions = sum(parameter_counts(config).values()) / 1e6
    print(f"{millions:.0f}M parameters, {options.dtype}, {jax.devices()[0].device_kind}")
    params = jax.jit(initialise, static_argnums=0)(config, 0)
    weights = jax.jit(decode_weights, static_argnums=1)(params, config)
    prompt_BP = jnp.asarray(np.random.default_rng(0).integers(0, config.vocabulary, (1, 100)), jnp.int32)
    naive = {
        length: median_seconds(lambda length=length: recomputed(params, jnp.resize(prompt_BP, (1, length)), config), 3)
        for length in (100, 1000)
    }
    fill = jax.jit(partial(prefill, config=config), static_argnames="capacity")
    print("rows  position  cache   ms/token  tokens/s  times the naive form")
    for rows in options.rows:
        for position, capacity in ((100, 256), (100, 1024), (1000, 1024)):
            hidden_BD, cache = fill(params, tokens_BP=prompt_BP, lengths_B=jnp.asarray([100]), capacity=capacity)
            cache = share(cache, jnp.zeros(rows, jnp.int32))._replace(filled=jnp.asarray(position, jnp.int32))
            hidden_BD, uniform_B = jnp.repeat(hidden_BD, rows, axis=0), jnp.linspace(0, 0.99, rows)
            step = partial(several, weights, hidden_BD, cache, uniform_B, config, options.tokens)
            seconds = median_seconds(step) / options.tokens
            ratio = naive[position] * rows / seconds
            print(
                f"{rows:4d}  {position:8d}  {capacity:5d}  {seconds * 1e3:9.1f}  {rows / seconds:8.1f}  {ratio:10.0f}"
            )


if __name__ == "__main__":
    main()
