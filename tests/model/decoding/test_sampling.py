"""Drawing tokens: exact truncation, right frequencies, no token of zero probability at any uniform number."""

import jax
import numpy as np
import pytest

from nautile.model.decoding.sampling import Sampling, draw, draw_each, sample_keys, uniforms

drawn = jax.jit(draw, static_argnums=2)


def shares_of(logits_V, sampling):
    """The naive distribution: temperature, top-k, top-p, one after the other, in numpy."""
    shares = np.exp((logits_V - logits_V.max()) / sampling.temperature)
    shares /= shares.sum()
    order = np.argsort(-shares)
    kept = order[: sampling.top_k or len(order)]
    inside = shares[kept] / shares[kept].sum()
    kept = kept[(np.cumsum(inside) - inside) < sampling.top_p]
    out = np.zeros_like(shares)
    out[kept] = shares[kept]
    return out / out.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1),
        Sampling(1, temperature=0.6),
        Sampling(1, top_k=7),
        Sampling(1, top_p=0.8),
        Sampling(1, temperature=1.4, top_k=40, top_p=0.7),
    ],
)
def test_an_even_grid_of_uniforms_gives_the_exact_distribution(sampling):
    """4,000 evenly spaced numbers give every token its share, to one grid step."""
    logits_V = np.random.default_rng(0).normal(size=300).astype(np.float32) * 2
    grid = (np.arange(4000, dtype=np.float32) + 0.5) / 4000
    ids = np.asarray(drawn(np.broadcast_to(logits_V, (4000, 300)), grid, sampling))
    counted = np.bincount(ids, minlength=300) / 4000
    expected = shares_of(logits_V, sampling)
    np.testing.assert_allclose(counted, expected, atol=1.5 / 4000)
    assert np.all(counted[expected == 0] == 0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_masked_tokens_are_never_drawn(uniform):
    """Not even at the ends, where rounding leaves the running sum."""
    logits_V = np.full(260, -1e30, np.float32)
    logits_V[[3, 140]] = [0.1, 0.2]
    assert int(drawn(logits_V[None], np.asarray([uniform], np.float32), Sampling(1))[0]) in (3, 140)


def test_temperature_zero_is_the_likeliest():
    logits_BV = np.random.default_rng(0).normal(size=(5, 50)).astype(np.float32)
    ids_B = drawn(logits_BV, np.full(5, 0.99, np.float32), Sampling(1, temperature=0))
    np.testing.assert_array_equal(ids_B, np.argmax(logits_BV, -1))


def test_keys_and_uniforms_belong_to_the_sample():
    keys = sample_keys([(1, 2, 3), (1, 2, 4), (12, 3), (1, 23), (1, 2, 3)])
    assert len({tuple(key) for key in keys}) == 4
    numbers, fewer = (np.asarray(jax.jit(uniforms, static_argnums=1)(keys, count)) for count in (50, 20))
    np.testing.assert_array_equal(numbers[0], numbers[4])
    np.testing.assert_array_equal(numbers[:, :20], fewer)
    assert 0.3 < numbers.mean() < 0.7


@pytest.mark.slow
def test_each_row_may_have_its_own_settings():
    """As `draw` with the same settings for all rows; also where no row needs sorted logits."""
    rng = np.random.default_rng(5)
    logits_BV, uniform_B = (rng.normal(size=(6, 300)) * 3).astype(np.float32), rng.uniform(size=6).astype(np.float32)
    rows = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 3, 1.0), (1.5, 0, 0.6), (1.0, 40, 0.9), (0.0, 5, 0.5)]
    kinds = (np.float32, np.int32, np.float32)
    settings = [np.asarray(part, kind) for part, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    each = jax.jit(draw_each)
    drawn_B = np.asarray(each(logits_BV, uniform_B, *settings))
    for row, (temperature, top_k, top_p) in enumerate(rows):
        alike_B = drawn(logits_BV, uniform_B, Sampling(1, temperature, top_k, top_p))
        assert drawn_B[row] == np.asarray(alike_B)[row]
    greedy_B = each(logits_BV, uniform_B, np.zeros(6, np.float32), *settings[1:])
    np.testing.assert_array_equal(greedy_B, np.argmax(logits_BV, axis=-1))
