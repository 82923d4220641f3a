"""Operations by formula, against XLA's count."""

import jax
import jax.numpy as jnp
import pytest

from nautile.configs.load import load
from nautile.model.capacity.flops import forward_flops, kernel_work
from nautile.model.layers.mixing.kernels.tile import (
    HeadParameters,
    SampleFolding,
    TileInputs,
    TileState,
    backward,
    forward,
)

CHUNK, HEAD_DIM, SAMPLES = 32, 64, 2
JOINED = HEAD_DIM * SAMPLES


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_work_of_a_mixing_kernel_is_that_of_its_tiles(direction):
    """One chunk of one head of the published model, lowered as plain JAX; XLA counts it before it is compiled."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    head = HeadParameters(array(1, 1), array(1, 1), array(1, JOINED), array(1, JOINED))
    queries, column = array(CHUNK, JOINED), array(CHUNK, 1)
    block = TileInputs(array(CHUNK, HEAD_DIM), column, queries, queries, column, column, column)
    state = TileState(array(1, JOINED), array(1, JOINED), array(1, 1))
    ones_HJ = jnp.repeat(jnp.eye(HEAD_DIM), SAMPLES, axis=1)
    fold = SampleFolding(lambda tile: tile @ ones_HJ, lambda tile: tile @ ones_HJ.T)
    readout = array(CHUNK, HEAD_DIM)
    if direction == "forward":
        lowered = jax.jit(lambda *all: forward(*all, fold)).lower(head, block, state)
    else:
        lowered = jax.jit(lambda *all: backward(*all, fold)).lower(head, block, state, readout, readout, state)
    model = load("nautile_370m").model
    work = kernel_work(model, CHUNK, CHUNK, direction)
    counted = lowered.cost_analysis()["flops"]
    assert (work.products + work.elementwise) / model.memory_heads == pytest.approx(counted, rel=0.03)


def test_short_sides_count_as_a_whole_side_of_the_matrix_unit():
    model = load("nautile_370m").model
    padded = kernel_work(model, CHUNK, 1, "forward", least_side=128)
    assert padded.products == 16 * 2 * 128 * JOINED * (2 + 3)
    assert padded[1:] == kernel_work(model, CHUNK, 1, "forward")[1:]


def test_operations_are_counted_by_the_layers_of_the_pattern():
    model = load("nautile_370m").model
    published, other = (
        forward_flops(model.model_copy(update={"pattern": pattern}), 1024) for pattern in ("SSA", "SAAA")
    )
    factors = {"sca": 0.5, "mixing": 0.5, "attention": 3, "feed_forward": 3, "head": 1}
    assert other == {part: factors[part] * flops for part, flops in published.items()}
