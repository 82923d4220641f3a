"""Continuations scored after shared prefixes: the sums of the whole sequences, whatever is shared."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.model.decoding import scoring
from nautile.model.decoding.scoring import SharedPrefixScorer, continuation_logprobs
from nautile.model.nautile import initialise
from tests.model.conftest import tiny_config

ROWS = 3


def tokens(seed, count):
    return np.random.default_rng(seed).integers(0, 150, count).tolist()


BEGINNING = tokens(0, 14)


def whole(params, config, beginning, groups):
    """The same by running each sequence from its first token."""
    sequences = [
        ([*beginning, *context, *ids], len(beginning) + len(context))
        for context, continuations in groups
        for ids in continuations
    ]
    return continuation_logprobs(params, config, sequences, rows=4)


def assert_equal_sums(scorer, params, config, beginning, groups):
    sums = scorer.logprobs(beginning, groups)
    assert [len(part) for part in sums] == [len(continuations) for _, continuations in groups]
    np.testing.assert_allclose(np.concatenate(sums), whole(params, config, beginning, groups), atol=1e-4)


@pytest.fixture(scope="module")
def scorer(config, params):
    return SharedPrefixScorer(params, config, ROWS)


# Few lengths, because each combination of them is compiled: personas of 13 tokens and questions of up to 3.
questions = st.lists(st.integers(0, 4), min_size=1, max_size=4)
answers = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.lists(st.tuples(st.integers(0, 3), questions, answers), min_size=1, max_size=4))
def test_random_trees_have_the_sums_of_whole_sequences(config, params, scorer, tree):
    groups = [
        ([*tokens(persona, 13), *tokens(question, question % 4)], [tokens(ids, ids) for ids in continuations])
        for persona, asked, continuations in tree
        for question in asked
    ]
    assert_equal_sums(scorer, params, config, BEGINNING, groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"decay": "window", "pattern": "S", "spectral_samples": 1, "convolution": 1},
        {"pattern": "ASA", "grid": "free", "integration": "free", "qk_norm": False},
    ],
    ids=lambda changes: changes["pattern"],
)
def test_other_shapes(changes):
    """No attention, window decay, one sample and no convolution; two layers of plain queries and keys, free grids."""
    config = tiny_config(blocks=1, **changes)
    params = jax.jit(initialise, static_argnums=0)(config, 0)
    persona = tokens(1, 13)
    groups = [([*persona, 3], [[4, 5], [6]]), ([*persona, 7, 8], [[9, 10, 11]]), ([], [[1]])]
    assert_equal_sums(SharedPrefixScorer(params, config, ROWS), params, config, BEGINNING, groups)


@pytest.mark.slow
def test_with_no_beginning_the_contexts_are_the_start(config, params):
    scorer = SharedPrefixScorer(params, config, ROWS)
    assert_equal_sums(scorer, params, config, [], [(tokens(3, 13), [[1], [2, 3]])])
    with pytest.raises(ConfigError, match="continuation 0 of group 1 of 1 tokens, scored from 0, is empty"):
        scorer.logprobs([], [([1], [[1]]), ([], [[1]])])


def test_a_text_over_the_context_is_refused_before_anything_runs(config, scorer):
    with pytest.raises(ConfigError, match=r"of 65 tokens, scored from 14, .* over the model's context of 64"):
        scorer.logprobs(BEGINNING, [([], [[1], [1] * 51])])


@pytest.mark.slow
def test_a_beginning_is_run_once_and_a_persona_once_for_its_questions(config, params, monkeypatch):
    runs = []

    def counted(params, config, path, source_B, tokens_BT, lengths_B):
        runs.append(lengths_B[lengths_B > 0].tolist())
        return run(params, config, path, source_B, tokens_BT, lengths_B)

    run = scoring._run
    monkeypatch.setattr(scoring, "_run", counted)
    scorer = SharedPrefixScorer(params, config, ROWS)
    groups = [([*tokens(1, 13), question], [[1]]) for question in (2, 3)]
    scorer.logprobs(BEGINNING, groups)
    scorer.logprobs(BEGINNING, groups)
    assert runs == [[14], [13], [1, 1], [13], [1, 1]]
