"""Ids that no token has are never sampled, and no probability is lost to them, wherever tokens are sampled or scored.

The models here prefer such ids to all others: unmasked, the first token that is drawn would have one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.configs.model import TokenizerConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.constrained import Constraint
from nautile.model.decoding.engine import Engine
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.decoding.scoring import SharedPrefixScorer, continuation_logprobs
from nautile.model.decoding.slots import DecodeRequest
from nautile.model.loss import masked_logits, next_logits, token_logprobs, weighted_loss
from nautile.model.nautile import forward, initialise
from nautile.model.runtimes.load import load_runtime
from nautile.model.weights.files import load_weights, save_weights
from tests.model.conftest import packed_rows, tiny_config
from tests.model.decoding.test_engine import Client

TOKENIZER = TokenizerConfig(ranks=256)


def preferring_unused(model):
    """Parameters of a paired model whose last layer points at the ids without a token."""
    params = jax.tree.map(np.array, initialise(model, 0))
    rng = np.random.default_rng(0)
    for first, end in model.unused_ids:
        params["embedding"][first:end] = 20 * rng.normal(size=(end - first, model.width))
    return params


def padded(padding, tokenizer=TOKENIZER):
    return tiny_config(vocabulary=tokenizer.vocabulary + padding, blocks=1, context=128).with_tokenizer(tokenizer)


def has_unused(model, ids):
    return any(first <= number < end for number in ids for first, end in model.unused_ids)


def hidden_of(params, model, row_1L):
    columns_1L = jnp.arange(row_1L.shape[1])[None]
    return jax.jit(forward, static_argnums=1)(params, model, row_1L, jnp.ones_like(row_1L), columns_1L)


def logits_of(params, model, row_1L, of=next_logits, *more):
    return of(hidden_of(params, model, row_1L)[0], params["embedding"], *more)


def test_a_model_knows_its_unused_ids_only_from_a_tokenizer(tmp_path):
    """They are in no file: an old checkpoint has them too, and no key depends on them."""
    plain = tiny_config(vocabulary=300)
    model = plain.with_tokenizer(TOKENIZER)
    assert (plain.unused_ids, model.unused_ids) == ((), ((261, 300),))
    assert model.model_dump() == plain.model_dump()
    assert model.model_copy(update={"context": 32}).unused_ids == model.unused_ids
    assert model != plain  # so that programs of the two are not confused
    assert tiny_config(vocabulary=261).with_tokenizer(TOKENIZER) == tiny_config(vocabulary=261)
    save_weights(tmp_path, initialise(plain, 0), plain, TOKENIZER)
    assert load_weights(tmp_path)[1:] == (model, TOKENIZER)


def test_programs_of_a_model_without_them_are_as_before():
    model = tiny_config(vocabulary=TOKENIZER.vocabulary)
    shape = jax.ShapeDtypeStruct((2, model.width), jnp.float32)
    table = jax.ShapeDtypeStruct((model.padded_vocabulary, model.width), jnp.float32)
    texts = {
        str(jax.make_jaxpr(lambda x, table, m=m: next_logits(x, table, m))(shape, table))
        for m in (model, model.with_tokenizer(TOKENIZER))
    }
    assert texts == {str(jax.make_jaxpr(lambda x, table: masked_logits(x, table, model.vocabulary))(shape, table))}


@pytest.mark.slow
def test_sampler_and_learner_have_the_same_distribution():
    """Of one row without a token; at any temperature; the probabilities of the ids with a token sum to 1."""
    model, temperature = padded(1), 0.5
    params = preferring_unused(model)
    [completion] = Generator(model, Sampling(20, temperature=temperature), 1, 4)(params, [[1, 2, 3]], [(7,)])
    assert not has_unused(model, completion.ids)
    row = jnp.asarray([[1, 2, 3, *completion.ids.tolist()]])
    hidden_BLD = hidden_of(params, model, row)
    learned_BL, entropy_BL = token_logprobs(params, model, hidden_BLD[:, :-1], row[:, 1:], temperature=temperature)
    np.testing.assert_allclose(learned_BL[0, 2:], completion.logprobs, atol=1e-4)
    used_LV = jax.nn.softmax(logits_of(params, model, row, next_logits, model) / temperature)
    unused = [number for first, end in model.unused_ids for number in range(first, end)]
    assert not np.asarray(used_LV)[:, unused].any()
    assert np.all(np.asarray(entropy_BL) <= np.log(TOKENIZER.vocabulary) + 1e-4)


@pytest.mark.slow
def test_the_gradient_does_not_move_their_rows():
    model = padded(20)
    params, batch = preferring_unused(model), packed_rows(TOKENIZER.vocabulary, [[30], [12, 18]], 32)

    def loss(params):
        hidden_BLD = forward(params, model, batch["tokens"], batch["segments"], batch["positions"])
        logprobs_BL, entropy_BL = token_logprobs(params, model, hidden_BLD, batch["targets"])
        return jnp.sum((logprobs_BL + 0.1 * entropy_BL) * batch["weights"])

    gradient = jax.jit(jax.grad(loss))(params)["embedding"]
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[TOKENIZER.vocabulary :].any()
    assert np.asarray(gradient)[: TOKENIZER.vocabulary].any()


@pytest.mark.slow
def test_the_pretraining_loss_is_over_every_row():
    """As in the author's code: -log of the softmax over all rows of the vocabulary."""
    model = padded(20)
    params, batch = preferring_unused(model), packed_rows(TOKENIZER.vocabulary, [[9]], 16)
    own, plain = (weighted_loss(params, config, batch).loss for config in (model, tiny_config(**model.model_dump())))
    every_LV = jax.nn.log_softmax(logits_of(params, model, batch["tokens"][:, :8], masked_logits, model.vocabulary))
    expected = -sum(float(every_LV[index, batch["targets"][0, index]]) for index in range(8))
    np.testing.assert_allclose([own, plain], expected, rtol=1e-5)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]), top_k=st.sampled_from([0, 1, 40]),
    top_p=st.sampled_from([1.0, 0.9]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_no_sampling_draws_them(served, temperature, top_k, top_p, seed):
    model, client = served
    request = DecodeRequest((1, 2, 3), 8, (seed,), temperature, top_k, top_p, alternatives=20, score_prompt=True)
    [(ids, _, best, scores, _)] = client.fill([request])
    assert not has_unused(model, ids)
    for pairs in [*best, *scores.alternatives]:
        assert not has_unused(model, [number for number, _ in pairs])
        assert all(value > -1e4 for _, value in pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("padded")
    model = padded(124)
    save_weights(folder, preferring_unused(model), model, TOKENIZER)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    """The engine of `nautile serve` with a loaded checkpoint."""
    runtime, tokenizer = load_runtime("jax", folder), tokenizer_for(TOKENIZER)
    engine = Engine(runtime.slots((tokenizer.im_end,), tokenizer.think_end, 4), 8)
    client = Client(engine)
    engine.start(client.listen)
    yield runtime.config, client
    engine.close()


@pytest.mark.slow
def test_a_constrained_reply_is_of_tokens(served):
    """In the thinking, where every token is allowed, and in the answer."""
    model, client = served
    constraint = Constraint(tokenizer_for(TOKENIZER), {"type": "array", "items": {"type": "string"}, "maxItems": 2})
    request = DecodeRequest((1, 2), 60, (3,), thinking_budget=20, alternatives=20, constraint=constraint)
    [(ids, _, best, _, _)] = client.fill([request])
    assert not has_unused(model, ids)
    assert not any(has_unused(model, [number for number, _ in pairs]) for pairs in best)


@pytest.mark.slow
def test_the_scorers_of_an_evaluation_agree_with_the_sampler(folder):
    """One more row without a token does not change a score."""
    params, model, _ = load_weights(folder)
    row = jnp.asarray([[1, 2, 3, 40, 50]])
    every_LV = jax.nn.log_softmax(logits_of(params, model, row, next_logits, model))
    expected = float(every_LV[2, 40] + every_LV[3, 50])
    assert expected > -60
    [shared] = SharedPrefixScorer(params, model, 2).logprobs([1], [([2, 3], [[40, 50], [40]])])
    np.testing.assert_allclose(shared, [expected, float(every_LV[2, 40])], atol=1e-4)
    np.testing.assert_allclose(continuation_logprobs(params, model, [(row[0].tolist(), 3)], 1), expected, atol=1e-4)


@pytest.mark.slow
def test_the_published_vocabulary():
    """100,300 rows over a tokenizer with gaps between its special tokens; id 100,293 is among the likeliest."""
    tokenizer = TokenizerConfig()
    model = tiny_config(vocabulary=100_300, width=8, blocks=1, pattern="A", feed_forward=8, context=32)
    model = model.with_tokenizer(tokenizer)
    params = preferring_unused(model)
    completions = Generator(model, Sampling(8), 4, 4)(params, [[1, 2, 3]] * 4, [(seed,) for seed in range(4)])
    for completion in completions:
        tokenizer_for(tokenizer).decode(completion.ids)
