"""The chunked loss against whole logits: values, every gradient, masks, chunks that do not divide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.model.loss import token_logprobs, weighted_loss
from tests.model.conftest import packed_rows

# Two roundings to 8 bits, of the logits' gradient and of the result: half a unit in the last place is 2**-9 each.
BFLOAT16 = 2 * 2**-9


@pytest.fixture(scope="module")
def rows(config):
    rng = np.random.default_rng(2)
    hidden_BLD, slopes = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 11, config.width), (2, 2, 11)))
    return hidden_BLD, rng.integers(0, config.vocabulary, (2, 11)).astype(np.int32), slopes


def whole(table_VD, hidden_BLD, targets_BL, vocabulary, temperature):
    """The naive form: whole logits over the rows in use."""
    logits_BLV = jnp.einsum("bld,vd->blv", hidden_BLD, table_VD[:vocabulary]) / temperature
    log_BLV = jax.nn.log_softmax(logits_BLV)
    chosen_BL = jnp.take_along_axis(log_BLV, targets_BL[..., None], -1)[..., 0]
    return chosen_BL, -jnp.sum(jnp.exp(log_BLV) * log_BLV, -1)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "temperature"), [(4, 1.0), (11, 0.7), (128, 1.3)])
def test_logprobs_and_entropy_with_gradients(config, params, rows, chunk, temperature):
    hidden_BLD, targets_BL, slopes = rows

    def scalar(form, table_VD, hidden_BLD):
        logprobs_BL, entropy_BL = form(table_VD, hidden_BLD)
        return jnp.sum(logprobs_BL * slopes[0]) + jnp.sum(entropy_BL * slopes[1]), (logprobs_BL, entropy_BL)

    def chunked(table_VD, hidden_BLD):
        return token_logprobs({"embedding": table_VD}, config, hidden_BLD, targets_BL, chunk, temperature)

    def naive(table_VD, hidden_BLD):
        return whole(table_VD, hidden_BLD, targets_BL, config.vocabulary, temperature)

    results = [
        jax.jit(jax.value_and_grad(lambda t, h, form=form: scalar(form, t, h), argnums=(0, 1), has_aux=True))(
            params["embedding"], hidden_BLD
        )
        for form in (chunked, naive)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *results)
    assert np.all(np.asarray(results[0][1][0])[config.vocabulary :] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [4, 128])
@pytest.mark.parametrize("form", ["token_logprobs", "weighted_loss"])
def test_gradients_in_bfloat16_are_those_of_float32_within_its_rounding(config, params, rows, form, chunk, monkeypatch):
    """In several chunks and in one, whose gradient of the table XLA on CPU refused to compute once transposed."""
    hidden_BLD, targets_BL, slopes = rows
    batch = {name: targets_BL for name in ("tokens", "segments", "positions", "targets")}
    batch["weights"] = np.abs(slopes[0])
    monkeypatch.setattr("nautile.model.loss.forward", lambda params, *_: params["hidden"])

    def scalar(table_VD, hidden_BLD):
        both = {"embedding": table_VD, "hidden": hidden_BLD}
        if form == "weighted_loss":
            return weighted_loss(both, config, batch, chunk=chunk).loss
        logprobs_BL, entropy_BL = token_logprobs(both, config, hidden_BLD, targets_BL, chunk)
        return jnp.sum(logprobs_BL * slopes[0]) + jnp.sum(entropy_BL * slopes[1])

    gradients = jax.jit(jax.grad(scalar, argnums=(0, 1)))
    # The same operands in both types, so that the difference is the rounding of the products alone.
    table_VD, narrow_BLD = params["embedding"].astype(jnp.bfloat16), jnp.asarray(hidden_BLD, jnp.bfloat16)
    ours = gradients(table_VD.astype(jnp.float32), narrow_BLD)
    exact = gradients(table_VD.astype(jnp.float32), narrow_BLD.astype(jnp.float32))
    for got, want in zip(ours, exact, strict=True):
        got, want = (np.asarray(part, np.float64) for part in (got, want))
        assert np.linalg.norm(got - want) < BFLOAT16 * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_weighted_loss_with_gradients(config, params, rows, z_loss, monkeypatch):
    """Hidden states in place of the stack, whose own gradients other tests check."""
    hidden_BLD, targets_BL, slopes = rows
    batch = {name: targets_BL for name in ("tokens", "segments", "positions", "targets")}
    batch["weights"] = np.abs(slopes[0])
    monkeypatch.setattr("nautile.model.loss.forward", lambda params, *_: params["hidden"])

    def chunked(table_VD, hidden_BLD):
        sums = weighted_loss({"embedding": table_VD, "hidden": hidden_BLD}, config, batch, chunk=4, z_loss=z_loss)
        return sums.loss * 0.3, sums

    def naive(table_VD, hidden_BLD):
        logits_BLV = jnp.einsum("bld,vd->blv", hidden_BLD, table_VD[: config.vocabulary])
        total_BL = jax.nn.logsumexp(logits_BLV, -1)
        chosen_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], -1)[..., 0]
        losses_BL = batch["weights"] * (total_BL - chosen_BL)
        return 0.3 * (jnp.sum(losses_BL) + z_loss * jnp.sum(batch["weights"] * total_BL**2)), losses_BL

    arguments = params["embedding"], hidden_BLD
    (value, sums), ours = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(*arguments)
    (expected, losses_BL), theirs = jax.jit(jax.value_and_grad(naive, (0, 1), has_aux=True))(*arguments)
    losses_BL = np.asarray(losses_BL)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(sums.row_loss_B, losses_BL.sum(1), rtol=1e-5)
    np.testing.assert_allclose(sums.row_weight_B, batch["weights"].sum(1), rtol=1e-6)
    np.testing.assert_allclose(sums.weight, batch["weights"].sum(), rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)


@pytest.mark.slow
def test_whole_logits_never_exist(config, params):
    """No array of the traced computation holds logits of more than a chunk of columns."""
    batch = packed_rows(config.vocabulary, [[64]] * 4, 64)
    traced = jax.make_jaxpr(jax.grad(lambda params: weighted_loss(params, config, batch, chunk=8).loss))(params)
    shapes = [v.aval.shape for equation in _equations(traced.jaxpr) for v in equation.outvars]
    held = [int(np.prod(shape[:-1])) for shape in shapes if shape[-1:] == (config.padded_vocabulary,)]
    assert max(held) == 4 * 8


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from _equations(inner)
