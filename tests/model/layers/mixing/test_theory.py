"""The paper's §2.2.1 and §2.2.2 in numbers: on a finite cyclic group its inversion is exact, to 1e-12 in float64.

Tokens are elements of Z_n^d, frequencies its dual group, and the mean over all of them replaces the integral
(`bench.studies.theory_plot`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.studies.theory_plot import (
    characteristic,
    distinct_tokens,
    dual_group,
    expected_error,
    gradient,
    readout,
    retrieval_error,
)
from nautile.model.layers.mixing.chunked import Operands
from nautile.model.layers.mixing.operator import mix

EXACT = 1e-12


@pytest.fixture(params=[(7, 1, 5), (8, 2, 20), (5, 3, 60)], ids=["Z7", "Z8^2", "Z5^3"])
def prefix(request):
    """Frequencies, pairwise distinct tokens and weights that sum to one."""
    side, dimensions, count = request.param
    rng = np.random.default_rng(side)
    tokens_TD = distinct_tokens(rng, count, side, dimensions)
    return dual_group(side, dimensions), tokens_TD, rng.dirichlet(np.ones(count))


def waves(theta_FD, tokens_TD):
    """e^{i⟨θ, h_j⟩} for every token [T, F]."""
    return np.exp(1j * tokens_TD @ theta_FD.T)


def test_theorem_1_every_token_is_retrieved(prefix):
    theta, tokens, _ = prefix
    count = len(tokens)
    summary = gradient(theta, tokens, np.full(count, 1 / count))
    for token, wave in zip(tokens, waves(theta, tokens), strict=True):
        assert np.abs(readout(summary, 1j * count * wave) - token).max() < EXACT


def test_theorem_1_needs_distinct_tokens():
    """A token that occurs twice is read twice: the readout is by value, not by position."""
    theta, tokens = dual_group(9, 1), np.asarray([[3], [-2], [3]])
    summary = gradient(theta, tokens, np.full(3, 1 / 3))
    assert np.abs(readout(summary, 3j * waves(theta, tokens)[0]) - 2 * tokens[0]).max() < EXACT


def test_corollary_3_weighted_tokens_and_their_weights(prefix):
    """The paper's query for part 1, e^{i⟨θ,h_j⟩}/i, gives -p_j h_j: conj(1/i) = i, and i·i = -1. With i it is right."""
    theta, tokens, p = prefix
    summary, phi = gradient(theta, tokens, p), characteristic(theta, tokens, p)
    for j, wave in enumerate(waves(theta, tokens)):
        assert np.abs(readout(summary, 1j * wave) - p[j] * tokens[j]).max() < EXACT
        assert np.abs(readout(summary, wave / 1j) + p[j] * tokens[j]).max() < EXACT
        assert abs(readout(phi, wave) - p[j]) < EXACT


def test_corollary_3_the_gradient_determines_the_characteristic_function(prefix):
    """φ(θ) = 1 + ∫ S(τ)·dτ along the straight path from 0, by Gauss's rule; then weights and support follow from S."""
    theta, tokens, p = prefix
    nodes, steps = np.polynomial.legendre.leggauss(80)
    nodes, steps = (nodes + 1) / 2, steps / 2
    along = np.stack([gradient(theta * node, tokens, p) for node in nodes])
    phi = 1 + np.einsum("s,sfd,fd->f", steps, along, theta)
    assert np.abs(phi - characteristic(theta, tokens, p)).max() < 1e-11
    side = round(2 * np.pi / theta[theta > 0].min())
    places = np.stack(np.meshgrid(*[np.arange(side) - side // 2] * tokens.shape[1], indexing="ij"), -1)
    places = places.reshape(-1, tokens.shape[1])
    weights = np.asarray([readout(phi, wave) for wave in waves(theta, places)])
    support = np.flatnonzero(np.abs(weights) > 1e-9)
    assert {tuple(place) for place in places[support]} == {tuple(token) for token in tokens}
    by_place = {tuple(token): weight for token, weight in zip(tokens, p, strict=True)}
    assert max(abs(weights[i] - by_place[tuple(places[i])]) for i in support) < 1e-11


@pytest.mark.parametrize("kind", ["softmax", "signed"])
def test_corollary_4_any_combination_is_a_readout(prefix, kind):
    theta, tokens, _ = prefix
    count = len(tokens)
    rng = np.random.default_rng(1)
    if kind == "softmax":
        scores = tokens @ rng.normal(size=tokens.shape[1])
        alpha = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    else:
        alpha = rng.normal(size=count)
    summary = gradient(theta, tokens, np.full(count, 1 / count))
    query = alpha @ (1j * count * waves(theta, tokens))
    assert np.abs(readout(summary, query) - alpha @ tokens).max() < EXACT * count


def test_remark_why_the_gradient(prefix):
    """One query reads p_j off φ and the vector p_j h_j off ∇φ. And values that are not the address, as the layer has
    them (the key outside the phase, ψ of it inside): φ is the same for any values, so no readout of it tells them."""
    theta, tokens, p = prefix
    wave = waves(theta, tokens)[2]
    phi, summary = characteristic(theta, tokens, p), gradient(theta, tokens, p)
    assert readout(phi, wave).shape == ()
    assert abs(readout(phi, wave) - p[2]) < EXACT
    assert np.abs(readout(summary, wave) - 1j * p[2] * tokens[2]).max() < EXACT
    values = np.random.default_rng(4).normal(size=tokens.shape)
    carried = waves(theta, tokens).T @ (p[:, None] * values)
    assert np.abs(readout(carried, wave) - p[2] * values[2]).max() < EXACT


@pytest.mark.slow
def test_the_operator_retrieves_exactly_when_its_grid_is_a_dual_group():
    """`mix` with M = n points θ = 2πκ, and keys whose softsign is r/n: then its phases are the group's, and the query
    e^{iθ r_j/n} gives α_j k_j / Z, decay and all. (The value is k, the address its softsign: the two may differ.)"""
    n = 17
    element = np.random.default_rng(0).permutation(n) - n // 2
    sign = element / n
    keys = (sign / (1 - np.abs(sign))).reshape(1, n, 1, 1)
    gates = np.random.default_rng(1).uniform(0.5, 2, (1, n, 1))
    theta = (2 * np.pi * np.arange(n)).reshape(1, 1, n)
    alpha = gates[0, :, 0] * np.exp(-0.1 * np.arange(n - 1, -1, -1))
    index = 4
    query = np.broadcast_to(np.exp(1j * sign[index] * theta), (1, n, 1, 1, n))
    operands = (keys, gates, np.asarray([0.1]), np.ones(1), theta, np.full((1, 1, n), 1 / n), query.real, query.imag)
    expected = alpha[index] * keys[0, index, 0, 0] / alpha.sum()
    with jax.enable_x64(True):
        re, im, _ = mix(Operands(*map(jnp.asarray, operands)), form="reference")
        assert abs(complex(re[0, -1, 0, 0], im[0, -1, 0, 0]) - expected) < EXACT
    re, im, _ = mix(Operands(*(jnp.asarray(operand, jnp.float32) for operand in operands)))
    assert abs(complex(re[0, -1, 0, 0], im[0, -1, 0, 0]) - expected) < 1e-6


@pytest.mark.parametrize("points", [2, 32, 512])
def test_retrieval_degrades_as_points_are_left_out(points):
    """Root mean square over 200 draws, within 15 % of √((t-1)/M · (N-M)/(N-1)); the sum over all points is exact."""
    measured = retrieval_error(np.random.default_rng(points), 16, points)
    assert abs(measured / expected_error(16, points) - 1) < 0.15


def test_retrieval_with_all_points_is_exact():
    assert expected_error(16, 1024) == 0
    assert retrieval_error(np.random.default_rng(0), 16, 1024) < EXACT
