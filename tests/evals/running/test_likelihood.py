"""The likelihood of options: right sums, the batch's independence, and rows that go on where they stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.evaluation import EvaluateConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.runner import PROMPT, CheckpointScorer, OptionLikelihoods, score_options, with_options
from nautile.evals.scoring.scores import likelihood
from nautile.model.decoding.cache import length_buckets
from nautile.model.decoding.scoring import continuation_logprobs
from nautile.model.loss import masked_logits
from nautile.model.nautile import forward
from nautile.model.weights.files import load_weights

CONFIG = EvaluateConfig(benchmarks=(), ways=("likelihood",), batch=4)


@pytest.fixture(scope="module")
def scorer(checkpoint):
    return CheckpointScorer(checkpoint, CONFIG)


@pytest.fixture
def items():
    options = ("knife", "a fork", "the spoon that lies there", "cup")
    return [
        BenchmarkItem(
            "arc_easy", n, str(n), f"{n}?", "choice", "ABCD"[n % 4], options=options, question="Which" + " is it" * n
        )
        for n in range(24)
    ]


def plain_logprob(params, model, ids, first):
    """The same by one unpadded sequence and no shared program."""

    @jax.jit
    def run(params, tokens):
        hidden = forward(params, model, tokens, jnp.ones_like(tokens), jnp.arange(len(ids))[None])
        return masked_logits(hidden, params["embedding"], model.vocabulary)[0]

    logits = np.asarray(run(params, jnp.asarray([ids], jnp.int32)), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return sum(logprobs[i - 1, ids[i]] for i in range(first, len(ids)))


@pytest.mark.slow
def test_sums_are_those_of_each_sequence_alone(checkpoint):
    params, model, _ = load_weights(checkpoint)
    draw = np.random.default_rng(0)
    sequences = [
        (draw.integers(0, 300, size).tolist(), first) for size, first in ((3, 1), (70, 60), (160, 5), (64, 64))
    ]
    result = continuation_logprobs(params, model, sequences, rows=3)
    expected = [plain_logprob(params, model, ids, first) for ids, first in sequences[:3]]
    np.testing.assert_allclose(result[:3], expected, rtol=2e-5, atol=2e-4)
    assert result[3] == 0, "the sum of nothing"
    assert length_buckets(160) == [64, 128, 160]


def test_a_sequence_over_the_context_is_refused(checkpoint):
    params, model, _ = load_weights(checkpoint)
    with pytest.raises(ConfigError, match="over the model's context of 160"):
        continuation_logprobs(params, model, [([1] * 161, 2)], rows=2)


@pytest.mark.slow
def test_options_are_weighed_after_the_bare_question(checkpoint, scorer, items):
    params, model, tokenizer_config = load_weights(checkpoint)
    tokenizer = tokenizer_for(tokenizer_config)
    [weighed] = scorer.weigh(items[3:4])
    asked = tokenizer.encode(PROMPT.format(question=items[3].question))
    whole = [([*asked, *tokenizer.encode(f" {option}")], len(asked)) for option in items[3].options]
    np.testing.assert_allclose(weighed.logprobs, continuation_logprobs(params, model, whole, rows=3), rtol=1e-4)
    assert weighed.lengths == tuple(map(len, items[3].options))
    assert weighed.tokens_in == len(asked)


@pytest.mark.slow
def test_a_choice_depends_on_its_question_alone(scorer, items):
    together = scorer.weigh(items[:9])
    alone = [scorer.weigh([item])[0] for item in items[:9]]
    for entry, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(entry.logprobs, other.logprobs, rtol=1e-5)


def test_the_longest_option_does_not_lose_for_its_length():
    weighed = OptionLikelihoods(logprobs=(-10.0, -40.0), lengths=(4, 25), tokens_in=3)
    assert (weighed.by_bytes, weighed.by_sum) == (1, 0)
    assert OptionLikelihoods((-1.0, -1.0), (2, 2), 1).by_bytes == 0


@pytest.mark.slow
def test_rows_are_scored_and_an_interrupted_file_ends_the_same(scorer, items, tmp_path):
    scorer.batch = 5
    rows = score_options(scorer, items, tmp_path / "likelihood.jsonl")
    whole = (tmp_path / "likelihood.jsonl").read_bytes()
    (tmp_path / "torn.jsonl").write_bytes(whole[: len(whole) // 2])
    assert score_options(scorer, items, tmp_path / "torn.jsonl") == rows
    assert (tmp_path / "torn.jsonl").read_bytes() == whole
    assert len((tmp_path / "latency.likelihood.jsonl").read_text().splitlines()) == len(items)
    result = likelihood(rows)["arc_easy"]
    asked = [row for row in rows if row["left_out"] is None]
    assert result["n"] == len(asked)
    assert result["accuracy"] == sum(row["parsed"] == row["expected"] for row in asked) / len(asked)
    assert result["accuracy_by_sum"] is not None
    assert result["chance"] == 0.25
    assert result["differs"][0].startswith("likelihood of each option per byte")


def test_a_question_that_does_not_fit_is_left_out_and_counted(scorer, items):
    long = BenchmarkItem("arc_easy", 0, "0", "?", "choice", "A", options=("a", "b"), question="shell " * 200)
    assert scorer.weigh([long, items[0]])[0] is None
    assert scorer.weigh([long, items[0]])[1] is not None


def test_only_questions_with_options_are_weighed(items):
    assert with_options([*items, BenchmarkItem("gsm8k", 0, "0", "?", "number", "1")]) == items
