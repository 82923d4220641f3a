"""Features of the frozen model and the linear head on them."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from nautile.common.errors import ConfigError
from nautile.data.label_set import Head, load_head, save_head
from nautile.model.decoding.scoring import pooled_states
from nautile.model.nautile import forward
from nautile.uses.labelled.predictor import fit_head


@pytest.mark.slow
def test_features_are_the_states_of_the_texts_whatever_shares_their_batch(config, params):
    texts = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16]]
    tokens = jnp.array([texts[0]])
    hidden = np.asarray(forward(params, config, tokens, jnp.ones_like(tokens), jnp.arange(3)[None]))[0]
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(axis=0))):
        features = pooled_states(params, config, texts, 2, pooling)
        np.testing.assert_allclose(features[0], expected, atol=1e-5)
        np.testing.assert_allclose(pooled_states(params, config, texts[::-1], 2, pooling)[::-1], features, atol=1e-5)
    with pytest.raises(ConfigError, match="text 2 has 0 tokens"):
        pooled_states(params, config, [[1], []], 2)


@pytest.mark.parametrize("labels", [2, 3])
def test_a_head_gives_the_probabilities_of_the_regression_on_standardised_features(labels):
    rng = np.random.default_rng(0)
    targets = np.arange(60) % labels
    features = (rng.normal(size=(60, 5)) + targets[:, None]).astype(np.float32) * [1, 10, 0.1, 3, 5] + 7
    head = fit_head(features, targets, labels)
    scaled = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-6)
    expected = LogisticRegression(max_iter=1000).fit(scaled, targets).predict_log_proba(scaled)
    logits = head.logits(features)
    np.testing.assert_allclose(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), expected, atol=1e-4)
    with pytest.raises(ValueError, match="rows of 1 labels"):
        fit_head(features, np.zeros(60, int), labels)


def test_a_head_of_another_model_is_refused(tmp_path):
    path = tmp_path / "head.safetensors"
    head = Head(np.arange(6, dtype=np.float32).reshape(3, 2), np.ones(2, np.float32))
    save_head(path, head)
    np.testing.assert_array_equal(load_head(path, 3, 2).weight_DC, head.weight_DC)
    for width, labels in ((4, 2), (3, 3)):
        with pytest.raises(ConfigError, match="model and labels need"):
            load_head(path, width, labels)
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read as the head"):
        load_head(path, 3, 2)


def rare_rows(seed, count=2000):
    """Features of two overlapping classes of 95 and 5 percent, and their classes."""
    rng = np.random.default_rng(seed)
    targets = (rng.random(count) < 0.05).astype(int)
    return rng.normal(size=(count, 6)) + 0.7 * targets[:, None], targets


def test_weights_raise_the_recall_of_a_rare_class_by_what_they_say():
    features, targets = rare_rows(0)
    asked, truth = rare_rows(1)

    def recall(targets, weights):
        logits = fit_head(features, targets, 2, weights).logits(asked)
        given = logits[:, 1] > 0 if targets.ndim == 2 else logits.argmax(axis=1) == 1
        return given[truth == 1].mean()

    for shape in (targets, np.stack([targets == 0, targets == 1], axis=1)):  # one label of two, or each by itself
        plain, some, balanced = (recall(shape, weights) for weights in (None, [1.0, 5.0], "balanced"))
        assert plain < 0.2 < 0.7 < balanced
        assert plain < some < balanced


def test_labels_that_all_rows_have_or_none_are_their_share():
    features, _ = rare_rows(0, 50)
    has = np.stack([np.ones(50, bool), np.zeros(50, bool), features[:, 0] > 0], axis=1)
    shares = 1 / (1 + np.exp(-fit_head(features, has, 3).logits(features)))
    np.testing.assert_allclose(shares[:, :2], [[51 / 52, 1 / 52]] * 50, rtol=1e-5)
    assert ((shares[:, 2] > 0.5) == has[:, 2]).mean() > 0.9
