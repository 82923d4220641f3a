"""A whole training step at the published width: time and memory of this model and of plain forms of it.

    python bench/training/train_step.py [--blocks 2] [--repeats 5] [--remat dots] [--only NAME] [--json FILE]

Loss and every gradient of B2 L1024 D1024, vocabulary 100,352, 6 layers. "plain" is the straightforward form of the same
mathematics: the L x L matrix form of the mixing operator, logits of all positions at once, and unscanned blocks that
keep every activation; "plain, rematerialised" rematerialises each block, to need less memory. Other rows change one of
the three in ours. Ours runs as in a stage, with the settings of `tasks.engine.child_process.ALLOCATOR`; the plain forms
run with them and with the default allocator. Two processes alternate, and all forms are interleaved; medians, with
processor time because the machine may be shared.

`products alone`: the matrix products that such a step needs, forward and for both gradients, with the shapes and
layouts of our layers, with nothing between them and nothing recomputed. The mixing operator has none.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, write_results
from configs.model import ModelConfig
from model.capacity.flops import peak_of, training_flops
from model.layers.attention import QUERY_BLOCK
from model.layers.common import Params, linear
from model.layers.sca import projection_width
from model.loss import masked_logits, weighted_loss
from model.nautile import forward, initialise, parameter_counts
from tasks.engine.child_process import ALLOCATOR

BATCH, LENGTH = 2, 1024
LOSS_CHUNK = 128
DEFAULT = ", allocator as it comes"
PRODUCTS = "products alone"
Loss = Callable[[Params, dict[str, jax.Array]], jax.Array]


def random_batch(vocabulary: int) -> dict[str, jax.Array]:
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


def products_alone(config: ModelConfig) -> Callable[[], None]:
    """A function that computes every matrix product of a step: of the layers, of attention, and of the head."""
    width, heads, head_dim, tokens = config.width, config.memory_heads, config.head_dim, BATCH * LENGTH
    expanded, shared = config.readout_expand * head_dim, config.kv_heads * config.attention_head_dim
    layers, transformers = (config.blocks * config.pattern.count(letter) for letter in "SA")
    sca = [(width, projection_width(config)), (width, 2 * head_dim * heads), (expanded * heads, width)]
    attention = [(width, width)] * 2 + [(width, shared)] * 2
    attention += [(width, 2 * config.feed_forward), (config.feed_forward, width)]
    # The count, the function, and the shapes of its two arguments.
    parts: list[tuple[int, Callable, tuple[int, ...], tuple[int, ...]]] = [
        *((layers, linear, (tokens, inputs), (inputs, outputs)) for inputs, outputs in sca),
        *((transformers, linear, (tokens, inputs), (inputs, outputs)) for inputs, outputs in attention),
        (layers, _einsum("tkf,kfn->tkn"), (tokens, heads, 2 * head_dim), (heads, 2 * head_dim, 2 * expanded)),
    ]
    groups, side = config.kv_heads, config.attention_head_dim
    share = config.attention_heads // groups
    # Causal attention in blocks of queries, each against the keys up to its end: the products that are really computed,
    # not the full square.
    for end in range(QUERY_BLOCK, LENGTH + 1, QUERY_BLOCK):
        queries, keys = (BATCH, QUERY_BLOCK, groups, share, side), (BATCH, end, groups, side)
        parts.append((transformers, _einsum("btgrh,bsgh->bgrts"), queries, keys))
        parts.append((transformers, _einsum("bgrts,bsgh->btgrh"), (BATCH, groups, share, QUERY_BLOCK, end), keys))
    rng, steps = np.random.default_rng(0), []
    for count, function, *shapes in parts:
        first, second = (jnp.asarray(rng.standard_normal(shape, np.float32), config.compute_dtype) for shape in shapes)
        slope = jnp.ones_like(function(first, second))
        steps.append((count, jax.jit(_with_gradients(function)), (first, second, slope)))
    # The head works on one chunk of positions at a time, as the loss does, so that whole logits are never held.
    hidden_TD = jnp.asarray(rng.standard_normal((BATCH * LOSS_CHUNK, width), np.float32), config.compute_dtype)
    table_VD = jnp.asarray(rng.standard_normal((config.padded_vocabulary, width), np.float32), config.compute_dtype)
    slope_TV = jnp.ones((BATCH * LOSS_CHUNK, config.padded_vocabulary), config.compute_dtype)
    steps.append((LENGTH // LOSS_CHUNK, jax.jit(_head_products), (hidden_TD, table_VD, slope_TV)))

    def run() -> None:
        for count, step, arguments in steps:
            for _ in range(count):
                jax.block_until_ready(step(*arguments))

    return run


def _einsum(letters: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return lambda first, second: jnp.einsum(letters, first, second)


def _with_gradients(function: Callable) -> Callable:
    def result_and_gradients(first: jax.Array, second: jax.Array, slope: jax.Array) -> tuple:
        result, pull = jax.vjp(function, first, second)
        return result, *pull(slope)

    return result_and_gradients


def _head_products(hidden_TD: jax.Array, table_VD: jax.Array, slope_TV: jax.Array) -> tuple:
    """Logits of a chunk, and its two gradients as `model.loss` computes them."""
    return (
        jnp.einsum("td,vd->tv", hidden_TD, table_VD),
        jnp.einsum("tv,vd->td", slope_TV, table_VD),
        jnp.einsum("td,tv->dv", hidden_TD, slope_TV),
    )


def serve(config: ModelConfig) -> None:
    """The worker: reads a name per line of standard input; prints seconds, processor seconds and GiB of temporaries."""
    params, batch = jax.jit(initialise, static_argnums=0)(config, 0), random_batch(config.vocabulary)
    calls: dict[str, tuple[Callable[[], object], float]] = {}
    for line in sys.stdin:
        name = line.strip()
        # Compiled at its first turn, in the same process as all others, and called once before it is timed.
        if name not in calls:
            if name == PRODUCTS:
                calls[name] = products_alone(config), 0.0
            else:
                compiled = jax.jit(jax.value_and_grad(alternatives(config)[name])).lower(params, batch).compile()
                gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
                calls[name] = partial(compiled, params, batch), gib
            jax.block_until_ready(calls[name][0]())
        wall, processor = time.perf_counter(), time.process_time()
        jax.block_until_ready(calls[name][0]())
        print(time.perf_counter() - wall, time.process_time() - processor, calls[name][1], flush=True)


def measure(names: list[str], repeats: int, ask: Callable[[str], tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Medians of seconds, processor seconds and GiB of temporaries of each name, interleaved."""
    by_name: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            by_name[name].append(ask(name))
    return {name: tuple(map(statistics.median, zip(*runs, strict=True))) for name, runs in by_name.items()}


def compare(names: list[str], repeats: int, arguments: list[str]) -> dict[str, tuple[float, ...]]:
    def worker(environment: dict[str, str]) -> subprocess.Popen:
        command = [sys.executable, __file__, "--serve", *arguments]
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    workers = {True: worker(plain), False: worker(plain | ALLOCATOR)}

    def ask(name: str) -> tuple[float, ...]:
        process = workers[name.endswith(DEFAULT)]
        print(name, file=process.stdin, flush=True)
        assert process.stdout is not None
        return tuple(map(float, process.stdout.readline().split()))

    try:
        return measure(names, repeats, ask)
    finally:
        for process in workers.values():
            process.kill()
            process.wait()


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
    device = jax.devices()[0].device_kind
    millions = sum(parameter_counts(config).values()) / 1e6
    print(f"{device}, {platform.machine()}: {3 * config.blocks} layers, {millions:.0f}M parameters, {arguments.dtype}")
    all_names = [*alternatives(config), PRODUCTS]
    names = [name for name in all_names if not arguments.only or name in ("ours", *arguments.only)]
    shape = ["--blocks", str(arguments.blocks), "--dtype", arguments.dtype, "--remat", arguments.remat]
    results = []
    medians = compare(names, arguments.repeats, shape)
    for name, (seconds, processor, gib) in medians.items():
        row = {"step": name, "seconds": round(seconds, 2), "processor_seconds": round(processor, 2)}
        row |= {"tokens_per_second": round(BATCH * LENGTH / seconds, 1), "temporaries_gib": round(gib, 2)}
        # By wall time and by processor time: on a shared machine only the second is comparable.
        for kind, value, ours_value in zip(("", "_processor"), (seconds, processor), medians["ours"], strict=False):
            row[f"times_ours{kind}"] = round(value / ours_value, 3)
        if peak := peak_of(device):
            row["mfu"] = round(training_flops(config, LENGTH) * BATCH * LENGTH / seconds / peak, 3)
        results.append(row)
        print("  ", row)
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
