"""The SCA layer around the operator: its spectrum at the start, and its one-token form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.configs.model import ModelConfig
from nautile.model.layers.sca import sca, sca_step, spectrum
from nautile.model.nautile import initialise
from tests.model.conftest import tiny_config


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_the_spectrum_at_the_start(samples):
    config = tiny_config(spectral_samples=samples, memory_heads=4)
    params = jax.tree.map(lambda leaf: leaf[0], initialise(config, 0)["blocks"]["sca_0"])
    decay_K, grid_KHM, weights_KHM = spectrum(params, config)
    np.testing.assert_allclose(decay_K, np.geomspace(0.001, 0.1, 4), rtol=1e-3)
    assert float(grid_KHM.min()) >= 0.001
    assert float(grid_KHM.max()) <= 3.0 + 1e-6
    assert np.all(np.diff(grid_KHM, axis=-1) > 0)
    if samples > 1:
        np.testing.assert_allclose(grid_KHM[..., -1], 3.0, rtol=1e-6)
    np.testing.assert_allclose(weights_KHM.sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_free_and_fixed_spectra_start_as_the_authors():
    """Only the fixed ones have no gradient."""

    @partial(jax.jit, static_argnums=1)
    def slopes(params, config):
        def total(params):
            spectral = spectrum(params, config)
            return jnp.sum(jnp.sin(spectral.grid_KHM)) + jnp.sum(jnp.sin(spectral.weights_KHM[..., 0])), spectral

        return jax.grad(total, has_aux=True)(params)

    spectra = {}
    for form in ("author", "free", "fixed"):
        config = tiny_config(blocks=1, **({} if form == "author" else {"grid": form, "integration": form}))
        layer = jax.tree.map(lambda leaf: leaf[0], initialise(config, 0)["blocks"]["sca_0"])
        slope, spectra[form] = slopes({name: layer[name] for name in ("theta", "integration", "decay")}, config)
        assert all(np.any(slope[name]) == (form != "fixed") for name in ("theta", "integration"))
    for spectral in spectra.values():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), spectral, spectra["author"])


@pytest.mark.parametrize("samples", [1, 2])
def test_free_parameters_are_the_spectrum(samples):
    """θ by memory head, ω by query head, of any size and sign: 2 query heads serve 4 memory heads."""
    config = tiny_config(spectral_samples=samples, grid="free", integration="free")
    rng = np.random.default_rng(0)
    theta, weights = (rng.normal(size=(heads, config.head_dim, samples)).astype(np.float32) for heads in (4, 2))
    _, grid_KHM, weights_KHM = spectrum({"theta": theta, "integration": weights, "decay": np.zeros(4)}, config)
    np.testing.assert_array_equal(grid_KHM, theta)
    np.testing.assert_array_equal(weights_KHM, weights[[0, 0, 1, 1]])


def test_the_published_columns():
    config = ModelConfig(vocabulary=100_300)
    shapes = jax.eval_shape(lambda: initialise(config, 0))["blocks"]["sca_0"]
    assert shapes["in_proj"].shape == (8, 1024, 64 * 16 + 16 + 2 * 16 * 64 * 2)
    assert shapes["gate_proj"].shape == (8, 1024, 2048)
    assert shapes["readout"].shape == (8, 16, 128, 384)
    assert shapes["out_proj"].shape == (8, 3072, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["relative", "window"])
def test_steps_continue_a_row(params, decay):
    """State after 1, 3 and 6 tokens (the convolution reaches back 3), then steps, against the whole row."""
    config = tiny_config(decay=decay, context=9)
    layer = jax.tree.map(lambda leaf: leaf[1], params["blocks"]["sca_0"])
    x_BLD = jax.random.normal(jax.random.key(3), (2, 9, config.width))
    ones_BL, positions_BL = jnp.ones((2, 9), jnp.int32), jnp.broadcast_to(jnp.arange(9), (2, 9))
    row = jax.jit(partial(sca, layer, config))
    whole_BLD, _ = row(x_BLD, ones_BL, positions_BL)
    step = jax.jit(partial(sca_step, layer, config, spectrum(layer, config)))
    for begun in (1, 3, 6):
        # Left padding: the document is the last columns of the row.
        shifted_BLD = jnp.roll(x_BLD, 9 - begun, axis=1)
        segments_BL = (jnp.arange(9) >= 9 - begun).astype(jnp.int32) * ones_BL
        _, state = row(shifted_BLD, segments_BL, jnp.maximum(positions_BL - (9 - begun), 0))
        for column in range(begun, 9):
            out_BD, state = step(x_BLD[:, column], positions_BL[:, column], state)
            np.testing.assert_allclose(out_BD, whole_BLD[:, column], atol=2e-5)
