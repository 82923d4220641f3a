"""A whole training step at the published width: this model against a plain one, and what each holds while it computes.

    python bench/training/train_step.py [--blocks 2] [--repeats 5] [--dtype float32] [--remat dots] [--json FILE]

Loss and every gradient of B2 L1024 D1024, vocabulary 100,352, 6 layers. The plain one is the same mathematics as one
writes it first: the L x L matrix form of the mixing operator, whole logits, blocks one after the other with every
activation kept; and so once more with each block rematerialised, to need less memory. Between them, each of the three
alone is put back in ours. Ours runs as a stage does, with the settings of `tasks.engine.child_process.ALLOCATOR`; the
plain ones run both so and with the allocator as it comes. Two processes take turns, a round through all at a time;
medians.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from measure import options, write_results

from configs.model import ModelConfig
from model.capacity.flops import peak_of, training_flops
from model.layers.common import Params
from model.loss import masked_logits, weighted_loss
from model.nautile import forward, initialise, parameter_counts
from tasks.engine.child_process import ALLOCATOR

BATCH, LENGTH = 2, 1024
DEFAULT = ", allocator as it comes"
Loss = Callable[[Params, dict[str, jax.Array]], jax.Array]


def rows(vocabulary: int) -> dict[str, jax.Array]:
    """Two full rows of random tokens, one document each."""
    rng = np.random.default_rng(0)
    tokens_BL = jnp.asarray(rng.integers(0, vocabulary, (BATCH, LENGTH)), jnp.int32)
    return {
        "tokens": tokens_BL,
        "targets": jnp.roll(tokens_BL, -1, axis=1),
        "segments": jnp.ones_like(tokens_BL),
        "positions": jnp.broadcast_to(jnp.arange(LENGTH), tokens_BL.shape),
        "weights": jnp.ones(tokens_BL.shape, jnp.float32),
    }


def chunked_loss(config: ModelConfig) -> Loss:
    return lambda params, batch: weighted_loss(params, config, batch).loss


def whole_logits(config: ModelConfig) -> Loss:
    def loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        hidden_BLD = forward(params, config, batch["tokens"], batch["segments"], batch["positions"])
        logprobs_BLV = jax.nn.log_softmax(masked_logits(hidden_BLD, params["embedding"], config.vocabulary))
        return -jnp.sum(jnp.take_along_axis(logprobs_BLV, batch["targets"][..., None], axis=-1))

    return loss


def alternatives(config: ModelConfig) -> dict[str, Loss]:
    matrix, unscanned, block = {"mixing": "reference"}, {"remat": "none"}, {"remat": "block"}
    plain = whole_logits(config.model_copy(update=matrix | unscanned))
    rematerialised = whole_logits(config.model_copy(update=matrix | block))
    return {
        "ours": chunked_loss(config),
        "ours, whole logits": whole_logits(config),
        "ours, unscanned": chunked_loss(config.model_copy(update=unscanned)),
        "ours, matrix form": chunked_loss(config.model_copy(update=matrix)),
        "plain": plain,
        "plain, rematerialised": rematerialised,
        "plain" + DEFAULT: plain,
        "plain, rematerialised" + DEFAULT: rematerialised,
    }


def serve(config: ModelConfig) -> None:
    """The worker: a name on each line of standard input, `seconds GiB` on each line of standard output."""
    params, batch = jax.jit(initialise, static_argnums=0)(config, 0), rows(config.vocabulary)
    compiled = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in compiled:
            compiled[name] = jax.jit(jax.value_and_grad(alternatives(config)[name])).lower(params, batch).compile()
            jax.block_until_ready(compiled[name](params, batch))
        start = time.perf_counter()
        jax.block_until_ready(compiled[name](params, batch))
        took = time.perf_counter() - start
        print(took, compiled[name].memory_analysis().temp_size_in_bytes / 2**30, flush=True)


def measure(names: list[str], repeats: int, ask: Callable[[str], tuple[float, float]]) -> dict[str, tuple]:
    """Median seconds and GiB of temporaries of each, the rounds interleaved."""
    by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            by_name[name].append(ask(name))
    return {name: (statistics.median(took for took, _ in pairs), pairs[0][1]) for name, pairs in by_name.items()}


def compare(names: list[str], repeats: int, arguments: list[str]) -> dict[str, tuple]:
    def worker(environment: dict[str, str]) -> subprocess.Popen:
        command = [sys.executable, __file__, "--serve", *arguments]
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    workers = {True: worker(plain), False: worker(plain | ALLOCATOR)}

    def ask(name: str) -> tuple[float, float]:
        asked = workers[name.endswith(DEFAULT)]
        print(name, file=asked.stdin, flush=True)
        took, gib = asked.stdout.readline().split()
        return float(took), float(gib)

    try:
        return measure(names, repeats, ask)
    finally:
        for process in workers.values():
            process.kill()
            process.wait()


def main() -> None:
    parser = options(__doc__, blocks=2, repeats=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--remat", default="dots", choices=["none", "block", "layer", "dots"], help="of ours")
    parser.add_argument("--only", nargs="+", help="names to run beside ours; all if none")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    config = ModelConfig(vocabulary=100_352, blocks=asked.blocks, compute_dtype=asked.dtype, remat=asked.remat)
    if asked.serve:
        serve(config)
        return
    device = jax.devices()[0].device_kind
    millions = sum(parameter_counts(config).values()) / 1e6
    print(f"{device}, {platform.machine()}: {3 * config.blocks} layers, {millions:.0f}M parameters, {asked.dtype}")
    names = [name for name in alternatives(config) if not asked.only or name in ("ours", *asked.only)]
    shape = ["--blocks", str(asked.blocks), "--dtype", asked.dtype, "--remat", asked.remat]
    results = []
    medians = compare(names, asked.repeats, shape)
    for name, (seconds, gib) in medians.items():
        row = {"step": name, "seconds": round(seconds, 2), "tokens_per_second": round(BATCH * LENGTH / seconds, 1)}
        row |= {"temporaries_gib": round(gib, 2), "times_ours": round(seconds / medians["ours"][0], 2)}
        if peak := peak_of(device):
            row["mfu"] = round(training_flops(config, LENGTH) * BATCH * LENGTH / seconds / peak, 3)
        results.append(row)
        print("  ", row)
    write_results(results, asked.json)


if __name__ == "__main__":
    main()
