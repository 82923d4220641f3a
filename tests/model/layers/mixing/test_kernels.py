"""The Pallas kernels, run as plain JAX: values and gradients against float64, at the tolerances of `test_operator`.

`tests/model/capacity/test_topology.py` compiles them for the devices themselves.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.model.layers.mixing.chunked import MixState, Operands, timeline
from nautile.model.layers.mixing.kernels import gpu, tpu
from nautile.model.layers.mixing.kernels.dispatch import run
from nautile.model.layers.mixing.operator import mix
from tests.model.layers.mixing.cases import documents, draw, exact, largest_error, value_and_gradients

DEVICES = ("tpu", "gpu")


@functools.cache
def kernel(device):
    def form(operands, segments, state):
        times = None if segments is None else timeline(segments)
        return run(device, operands, times, MixState(*state), chunk=16, interpret=True)

    return form


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "length", "heads", "queries", "head_dim", "samples"),
    [
        (2, 1, 2, 1, 16, 2),  # one query head for two memory heads
        (2, 33, 2, 1, 16, 2),  # two chunks and one
        (1, 20, 4, 4, 64, 2),  # the published head: the TPU kernel takes two heads at a time, in two groups here
        (1, 20, 3, 3, 16, 1),
    ],
)
def test_kernels_equal_the_reference(device, rows, length, heads, queries, head_dim, samples):
    """Over documents and padding from an initial state, and over one document."""
    case = draw(rows, length, heads, head_dim, samples, queries)
    segments = documents(rows, length) if rows > 1 else None
    error, where = largest_error(value_and_gradients(kernel(device), case, segments), exact(case, segments))
    assert error < 4e-6, where


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_with_bfloat16(device):
    case, segments = draw(heads=2, queries=1, head_dim=16), documents(2, 33)
    case["operands"] = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in case["operands"]]
    case["cotangents"][:2] = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in case["cotangents"][:2]]
    expected = exact(case, segments)
    outs, gradients = value_and_gradients(kernel(device), case, segments, operands_dtype=jnp.bfloat16)
    assert largest_error((outs, gradients), expected)[0] < 1e-2
    for ours, theirs in zip([*outs[2:], *gradients[8:]], [*expected[0][2:], *expected[1][8:]], strict=True):
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 4e-6


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_with_scores_of_plus_and_minus_sixty(device):
    case = draw(2, 33, heads=2, queries=1, head_dim=16)
    scores = np.random.default_rng(3).choice([-60.0, 0.0, 60.0], case["operands"][1].shape)
    scores[:, :, 1] = -60
    case["operands"][1] = np.logaddexp(0, scores)
    case["operands"][2] = np.asarray([3.0, 0.0])
    case["state"] = MixState(*(np.zeros_like(part) for part in case["state"]))
    segments = documents(2, 33)
    error, where = largest_error(value_and_gradients(kernel(device), case, segments), exact(case, segments))
    assert error < 1e-5, where


def test_on_other_devices_the_fused_form_is_the_chunked_form():
    """On a CPU, where neither kernel runs; and on a GPU for sizes that Triton does not support."""
    case = draw(1, 9)
    operands = Operands(*(jnp.asarray(array, jnp.float32) for array in case["operands"]))
    both = [jax.jit(functools.partial(mix, form=form))(operands) for form in ("fused", "chunked")]
    for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert gpu.fits(64, 2)
    assert gpu.fits(16, 1)
    assert not gpu.fits(8, 2)
    assert not gpu.fits(64, 3)
    assert [tpu.chunk_for(chunk) for chunk in (1, 16, 40, 128)] == [16, 16, 32, 128]
