"""Attention against the plain softmax over a dense mask, with values and gradients, in one block and in several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.model.layers import attention


@pytest.mark.parametrize(
    ("attend", "block"), [(attention.attend, 256), (attention.attend, 4), (attention.attend_fused, 256)]
)
def test_values_and_gradients_are_those_of_the_dense_form(attend, block, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, 11, 4, 8))
    k, v = (jax.random.normal(key, (2, 11, 2, 8)) for key in keys[1:3])
    slope = jax.random.normal(keys[3], q.shape)
    segments = jnp.asarray([[1] * 5 + [2] * 6, [1] * 7 + [0] * 4])

    def dense(q, k, v):
        k, v = (jnp.repeat(part, 2, axis=2) for part in (k, v))
        mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tri(11, dtype=bool)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(8)
        shares = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", shares, v)

    @jax.jit
    def run(slope):
        results = []
        for form in (lambda *parts: attend(*parts, segments), dense):
            out, back = jax.vjp(form, q, k, v)
            results.append((out, *back(slope)))
        return results

    for item, other in zip(*run(slope), strict=True):
        np.testing.assert_allclose(item, other, atol=2e-5)
