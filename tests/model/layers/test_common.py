"""The shared parts against plain numpy, and the hand-written gradient of a product against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nautile.model.layers.common import causal_convolution, linear, normals, rms_norm, rope_angles, rotate


@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_the_products_gradients_are_autodiffs(shape):
    """Wide and narrow weights have their gradient computed in different orders."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 5, shape[0]))
    weight_IO = jax.random.normal(keys[1], shape)
    slope = jax.random.normal(keys[2], (2, 5, shape[1]))
    out, back = jax.vjp(linear, x, weight_IO)
    plain, plain_back = jax.vjp(lambda x, weight: x @ weight, x, weight_IO)
    np.testing.assert_allclose(out, plain, rtol=1e-6)
    for item, other in zip(back(slope), plain_back(slope), strict=True):
        np.testing.assert_allclose(item, other, rtol=1e-4, atol=1e-5)


def test_the_convolution_stays_inside_a_document():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 9, 3)).astype(np.float32)
    taps = rng.normal(size=(4, 3)).astype(np.float32)
    segments = np.array([[1, 1, 2, 2, 2, 2, 2, 0, 0]])
    out = causal_convolution(jnp.asarray(x), jnp.asarray(taps), jnp.asarray(segments))
    for column in range(7):
        same = [back for back in range(4) if column - back >= 0 and segments[0, column - back] == segments[0, column]]
        expected = sum(x[0, column - back] * taps[3 - back] for back in same)
        np.testing.assert_allclose(out[0, column], expected, rtol=1e-5)


def test_a_rotation_keeps_lengths_and_depends_on_distance_alone():
    q, k = (jax.random.normal(jax.random.key(seed), (1, 1, 2, 8)) for seed in (0, 1))

    def product(first, second):
        turned = [rotate(x, rope_angles(jnp.array([[at]]), 8, 10_000.0)) for x, at in ((q, first), (k, second))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), rel=1e-2)
    turned = rotate(q, rope_angles(jnp.array([[900]]), 8, 10_000.0))
    np.testing.assert_allclose(jnp.linalg.norm(turned), jnp.linalg.norm(q), rtol=1e-5)


def test_a_norm_is_float32_inside():
    x = jnp.asarray([[3e4, -4e4, 0.0, 0.0]], jnp.bfloat16)
    normed = rms_norm(x, None, 1e-6)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_allclose(normed.astype(jnp.float32), [[1.2, -1.6, 0, 0]], rtol=1e-2)


def test_one_draw_gives_independent_standard_normals():
    drawn = normals(nnx.Rngs(params=jax.random.key(0)), {"wide": (50, 40), "narrow": (30, 10)})
    assert drawn["wide"].shape == (50, 40)
    assert float(drawn["wide"].std()) == pytest.approx(1, abs=0.05)
    assert abs(np.corrcoef(drawn["wide"].ravel()[:300], drawn["narrow"].ravel())[0, 1]) < 0.2
