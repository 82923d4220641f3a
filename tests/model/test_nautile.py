"""The stack: its size, its start, and that nothing flows where it must not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.model import ModelConfig
from configs.section import ConfigError
from model.loss import weighted_loss
from model.nautile import forward, initialise, logical_axes, parameter_counts, shapes
from tests.model.conftest import packed_rows, tiny_config


@pytest.fixture(scope="module")
def batch(config):
    return packed_rows(config.vocabulary, [[9, 7], [5, 1, 6]], 20)


def hidden(params, config, batch):
    return forward(params, config, batch["tokens"], batch["segments"], batch["positions"])


def test_the_published_model_has_exactly_its_parameters():
    counts = parameter_counts(ModelConfig(vocabulary=100_300))
    assert sum(counts.values()) == 371_901_088
    assert counts["embedding"] == 100_300 * 1024
    assert counts["sca.in_proj"] == 16 * 1024 * 5136
    assert counts["sca.conv"] == 16 * 5136 * 4
    assert counts["sca.readout"] == 16 * 16 * 128 * 384
    assert counts["attention.ff_in"] == 8 * 1024 * 5460


def test_counts_are_of_the_parameters_that_exist(config):
    leaves = jax.tree.leaves(shapes(config))
    padding = (config.padded_vocabulary - config.vocabulary) * config.width
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) == sum(parameter_counts(config).values()) + padding
    assert all(leaf.dtype == jnp.float32 for leaf in leaves)


def test_every_axis_has_a_name(config):
    names = logical_axes(config)
    checked = jax.tree.map(lambda leaf, axes: len(axes) == leaf.ndim, shapes(config), names)
    assert all(jax.tree.leaves(checked))
    assert names["blocks"]["sca_1"]["in_proj"] == ("blocks", "width", "inner")


def test_initialisation_is_a_function_of_the_seed(config):
    first, again, other = (initialise(config, seed) for seed in (3, 3, 4))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), first, again))
    assert not jnp.array_equal(first["embedding"], other["embedding"])
    in_proj = first["blocks"]["sca_0"]["in_proj"]
    assert not jnp.array_equal(in_proj[0], in_proj[1])
    assert jnp.all(first["embedding"][config.vocabulary :] == 0)


@pytest.mark.parametrize(("width", "blocks"), [(32, 2), (128, 3), (256, 8)])
def test_the_loss_starts_near_the_logarithm_of_the_vocabulary(width, blocks):
    config = tiny_config(width=width, blocks=blocks, vocabulary=500, feed_forward=2 * width)
    batch = packed_rows(500, [[64]] * 4, 64)
    sums = jax.jit(lambda params: weighted_loss(params, config, batch))(initialise(config, 0))
    assert abs(float(sums.loss / sums.weight) - np.log(500)) < 0.15


def test_causality_by_gradients(config, params, batch):
    """No embedding of a later column has any influence on an earlier one, and every earlier one of the document has."""

    def at(column):
        def read(added):
            moved = {**params, "embedding": params["embedding"]}
            return jnp.sum(jnp.sin(_from_vectors(moved, config, batch, added)[0, column]))

        return read

    zero = jnp.zeros((*batch["tokens"].shape, config.width))
    reach = jnp.abs(jax.jit(jax.grad(at(6)))(zero)).sum(-1)
    assert np.all(np.asarray(reach[0, 7:]) == 0)
    assert np.all(np.asarray(reach[0, :7]) > 0)
    assert np.all(np.asarray(reach[1]) == 0)


def test_segments_are_isolated_by_gradients(config, params, batch):
    """The second document of a row does not see the first: not through SCA, the convolution, or attention."""
    zero = jnp.zeros((*batch["tokens"].shape, config.width))

    def read(added):
        return jnp.sum(jnp.sin(_from_vectors(params, config, batch, added)[0, 9:16]))

    reach = jnp.abs(jax.jit(jax.grad(read))(zero)).sum(-1)
    assert np.all(np.asarray(reach[0, :9]) == 0)
    assert np.all(np.asarray(reach[0, 9:16]) > 0)
    assert np.all(np.asarray(reach[0, 16:]) == 0)


def test_a_packed_document_reads_as_it_does_alone(config, params, batch):
    packed = hidden(params, config, batch)[1, 6:12]
    alone = {name: array[1:2, 6:12] for name, array in batch.items()}
    alone["segments"] = jnp.ones_like(alone["segments"])
    np.testing.assert_allclose(packed, hidden(params, config, alone)[0], atol=2e-5)


def test_long_rows_attend_in_blocks_of_queries(params, monkeypatch):
    config = tiny_config()
    batch = packed_rows(config.vocabulary, [[9, 7], [5, 1, 6]], 20)
    whole = hidden(params, config, batch)
    monkeypatch.setattr("model.attention.QUERY_BLOCK", 8)
    np.testing.assert_allclose(hidden(params, config, batch), whole, atol=1e-5)


@pytest.mark.parametrize("remat", ["block", "dots"])
def test_rematerialisation_changes_no_gradient(config, params, batch, remat):
    def gradient(config):
        return jax.jit(jax.grad(lambda params: weighted_loss(params, config, batch).loss))(params)

    kept, remade = gradient(config), gradient(config.model_copy(update={"remat": remat}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4), kept, remade)


def test_bfloat16_stays_near_float32(config, params, batch):
    half = hidden(params, config.model_copy(update={"compute_dtype": "bfloat16"}), batch)
    assert half.dtype == jnp.bfloat16
    full = hidden(params, config, batch)
    real = np.asarray(batch["segments"]) > 0
    error = np.asarray(half.astype(jnp.float32) - full)[real]
    assert np.sqrt(np.mean(error**2)) < 0.03 * float(jnp.std(full))


def test_a_stack_without_sca_is_a_transformer():
    config = tiny_config(sca_per_block=0)
    batch = packed_rows(config.vocabulary, [[9, 7]], 16)
    params = initialise(config, 0)
    assert set(params["blocks"]) == {"attention"}
    assert hidden(params, config, batch).shape == (1, 16, config.width)


def test_rows_of_different_shapes_are_refused(config, params, batch):
    with pytest.raises(ConfigError, match=r"tokens \(2, 20\), segments \(2, 19\)"):
        forward(params, config, batch["tokens"], batch["segments"][:, :-1], batch["positions"])


def test_golden_train_steps():
    """Three steps of plain gradient descent from a seed: the losses as they were when this was written."""
    config = tiny_config(remat="block")
    batch = packed_rows(config.vocabulary, [[20, 12], [32]], 32, seed=5)

    @jax.jit
    def step(params):
        def loss(params):
            sums = weighted_loss(params, config, batch)
            return sums.loss / sums.weight

        value, slopes = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda leaf, slope: leaf - 0.3 * slope, params, slopes)

    params, losses = initialise(config, 7), []
    for _ in range(3):
        value, params = step(params)
        losses.append(float(value))
    np.testing.assert_allclose(losses, GOLDEN, atol=2e-3)


GOLDEN = [0.0, 0.0, 0.0]


def _from_vectors(params, config, batch, added):
    """`forward` with something added to the embedded tokens, so that gradients tell who reads whom."""
    table = jnp.concatenate([params["embedding"][batch["tokens"]] + added]).reshape(-1, config.width)
    indices = jnp.arange(table.shape[0]).reshape(batch["tokens"].shape)
    return forward({**params, "embedding": table}, config, indices, batch["segments"], batch["positions"])
