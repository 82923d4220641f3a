"""Mixing operator: time and memory of every form with all gradients.

    python bench/training/mixing.py [--repeats 15] [--json FILE]

The alternatives are interleaved, so a noisy machine disturbs all alike; medians are printed. Sizes are the published
layer's: B2 L1024 K16 H64 M2, float32. Alternatives: the L x L matrix form; the cumsum form (decay measured to the end
of the row, so that it is a plain prefix sum; correct only while λ·L is small); and the chunked form of
`model.layers.mixing.operator`.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.measure import argument_parser, medians, print_rows, time_interleaved, write_results
from nautile.model.layers.mixing.chunked import MixState, Operands, divide, softsign
from nautile.model.layers.mixing.operator import empty_state, mix, reference

BATCH, LENGTH, HEADS, HEAD_DIM, SAMPLES = 2, 1024, 16, 64, 2


def inputs() -> tuple[list[jax.Array], list[jax.Array]]:
    """Random operands, and the cotangents of both readouts."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    keys, queries = (BATCH, LENGTH, HEADS, HEAD_DIM), (BATCH, LENGTH, HEADS, HEAD_DIM, SAMPLES)
    grid = (HEADS, HEAD_DIM, SAMPLES)
    decay = jnp.asarray(np.geomspace(0.001, 0.1, HEADS), jnp.float32)
    operands = [
        normal(*keys), jax.nn.softplus(normal(*keys[:3])), decay, normal(HEADS), normal(*grid), normal(*grid),
        normal(*queries), normal(*queries),
    ]  # fmt: skip
    return operands, [normal(*keys), normal(*keys)]


def encoded(keys: jax.Array, phase_scale: jax.Array, grid: jax.Array) -> tuple[jax.Array, jax.Array]:
    phase = softsign(phase_scale[:, None] * keys)[..., None] * grid
    return keys[..., None] * jnp.cos(phase), keys[..., None] * jnp.sin(phase)


def read_out(state: MixState, weights: jax.Array, q_re: jax.Array, q_im: jax.Array) -> tuple[jax.Array, jax.Array]:
    re, im = (divide(part, state.z_BK[..., None, None]) for part in state[:2])
    q_re, q_im = q_re * weights, q_im * weights
    root = HEAD_DIM**-0.5
    return root * jnp.sum(re * q_re + im * q_im, -1), root * jnp.sum(im * q_re - re * q_im, -1)


def cumsum(keys, gates, decay, phase_scale, grid, weights, q_re, q_im):
    gates = gates * jnp.exp(-decay * jnp.arange(keys.shape[1] - 1, -1, -1)[:, None])
    re, im = encoded(keys, phase_scale, grid)
    wide = gates[..., None, None]
    # The whole prefix state at every position, which is what makes this form simple and expensive in memory.
    state = MixState(jnp.cumsum(wide * re, 1), jnp.cumsum(wide * im, 1), jnp.cumsum(gates, 1))
    return read_out(state, weights, q_re, q_im)


def matrix(*operands):
    return reference(Operands(*operands), None, empty_state(operands[0].shape[0], HEADS, HEAD_DIM, SAMPLES))[:2]


def chunked(*operands):
    return mix(Operands(*operands))[:2]


FORMS: dict[str, Callable] = {"matrix": matrix, "cumsum": cumsum, "chunked": chunked}


def with_gradients(form: Callable) -> Callable:
    """A function of operands and cotangents: both readouts and the gradients of all eight operands."""

    def both(operands, cotangents):
        outs, back = jax.vjp(form, *operands)
        return outs, back(tuple(cotangents))

    return both


def compare(repeats: int) -> list[dict]:
    """Every alternative at the published layer's size."""
    arguments = inputs()
    steps = {name: jax.jit(with_gradients(form)).lower(*arguments).compile() for name, form in FORMS.items()}
    calls = {name: lambda step=step: jax.block_until_ready(step(*arguments)) for name, step in steps.items()}
    seconds = medians(time_interleaved(calls, repeats))
    return [
        {
            "form": name,
            "gradients_ms": round(1e3 * seconds[name], 1),
            "temporaries_mib": round(step.memory_analysis().temp_size_in_bytes / 2**20, 1),
            "ours_is_times_faster": round(seconds[name] / seconds["chunked"], 1),
        }
        for name, step in steps.items()
    ]


def main() -> None:
    arguments = argument_parser(__doc__, repeats=15).parse_args()
    results = {jax.devices()[0].device_kind: compare(arguments.repeats)}
    print_rows(results)
    write_results(results, arguments.json)


if __name__ == "__main__":
    main()
