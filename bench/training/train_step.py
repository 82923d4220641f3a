"""A whole training step at the published width: time and memory of this model and of plain forms of it.

    python bench/training/train_step.py [--blocks 2] [--repeats 5] [--remat dots] [--only NAME ...] [--json FILE]

Loss and every gradient of B2 L1024 D1024, vocabulary 100,352, 6 layers. "plain" is the straightforward form of the same
mathematics: the L x L matrix form of the mixing operator, logits of all positions at once, and unscanned blocks that
keep every activation; "plain, rematerialised" rematerialises each block, to need less memory. Other rows change one of
the three in ours. Ours runs as in a stage, with the settings of `tasks.engine.child_process.ALLOCATOR`; the plain forms
run with them and with the default allocator. Two processes alternate, and all forms are interleaved; medians, with
processor time because the machine may be shared.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, workers, write_results
from nautile.configs.model import ModelConfig
from nautile.model.capacity.flops import parameter_counts
from nautile.model.layers.common import Params
from nautile.model.loss import masked_logits, weighted_loss
from nautile.model.nautile import forward, initialise
from nautile.tasks.engine.child_process import ALLOCATOR

ROOT = Path(__file__).parents[2]
BATCH, LENGTH = 2, 1024
DEFAULT = ", allocator as it comes"
Loss = Callable[[Params, dict[str, jax.Array]], jax.Array]


def random_batch(vocabulary: int, rows: int = BATCH) -> dict[str, jax.Array]:
    """Full rows of random tokens, one document each."""
    tokens_BL = jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, (rows, LENGTH)), jnp.int32)
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
        # Each of the next three undoes one decision of ours, so that its share of the gain can be read off.
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
    """The worker: reads a name per line of standard input; prints seconds, processor seconds and GiB of temporaries."""
    params, batch = jax.jit(initialise, static_argnums=0)(config, 0), random_batch(config.vocabulary)
    compiled = {}
    for line in sys.stdin:
        name = line.strip()
        # Compiled at its first turn, in the same process as all others, and called once before it is timed.
        if name not in compiled:
            loss = jax.value_and_grad(alternatives(config)[name])
            compiled[name] = jax.jit(loss).lower(params, batch).compile()
            jax.block_until_ready(compiled[name](params, batch))
        wall, processor = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled[name](params, batch))
        gib = compiled[name].memory_analysis().temp_size_in_bytes / 2**30
        print(time.perf_counter() - wall, time.process_time() - processor, gib, flush=True)


def main() -> None:
    parser = argument_parser(__doc__, blocks=2, repeats=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--remat", default="dots", choices=["none", "block", "layer", "dots"], help="of ours")
    parser.add_argument("--only", nargs="+", help="names to run beside ours; all if none")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = ModelConfig(
        vocabulary=100_352, blocks=arguments.blocks, compute_dtype=arguments.dtype, remat=arguments.remat
    )
    if arguments.serve:
        serve(config)
        return
    device, results = jax.devices()[0].device_kind, []
    millions = sum(parameter_counts(config).values()) / 1e6
    print(f"{device}, {platform.machine()}: {3 * config.blocks} layers, {millions:.0f}M parameters, {arguments.dtype}")
    names = [name for name in alternatives(config) if not arguments.only or name in ("ours", *arguments.only)]
    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    figures: dict[str, list[list[float]]] = {name: [] for name in names}
    command = [sys.executable, __file__, "--serve", *sys.argv[1:]]
    with workers(command, {True: (plain, ROOT), False: (plain | ALLOCATOR, ROOT)}) as ask:
        for _ in range(arguments.repeats):
            for name in names:
                figures[name].append([float(value) for value in ask(name.endswith(DEFAULT), name).split()])
    medians = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in figures.items()
    }
    for name, (seconds, processor, gib) in medians.items():
        row = {"step": name, "seconds": round(seconds, 2), "processor_seconds": round(processor, 2)}
        row |= {"tokens_per_second": round(BATCH * LENGTH / seconds, 1), "temporaries_gib": round(gib, 2)}
        # By wall time and by processor time: on a shared machine only the second is comparable.
        for kind, value, ours_value in zip(("", "_processor"), (seconds, processor), medians["ours"], strict=False):
            row[f"times_ours{kind}"] = round(value / ours_value, 3)
        results.append(row)
        print("  ", row)
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
