"""Sentence embeddings: MiniLM in this process, an endpoint over a real socket, and the cache that survives a kill."""

import math

import numpy as np
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.distill import EmbeddingConfig
from nautile.data.retrieval import embedders
from nautile.data.retrieval.embedders import MINILM_WIDTH, Encoder, MiniLM, VectorCache, encoder_for
from tests.support.servers.fake_embeddings import FakeEmbeddings

KEY = "sk-planted-embedding-0123456789"


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(embedders, "FIRST_PAUSE_S", 0.01)


def endpoint(server, cache=None, emit=lambda kind, **fields: None, **fields):
    config = {"kind": "openai", "model": "fake-embedding", "width": server.width, "url": server.url, "batch": 4}
    return encoder_for(EmbeddingConfig(**{**config, **fields}), cache, emit)


def test_vectors_have_length_one_and_do_not_depend_on_their_neighbours(encoder):
    texts = ["A cat sat.", "The economy of Chile rests on copper. " * 20, "", "A cat sat."]
    vectors = encoder.encode(texts)
    assert vectors.shape == (4, MINILM_WIDTH)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert (vectors[0] == vectors[3]).all()
    assert (vectors[1] == encoder.encode([texts[1]])[0]).all()
    assert encoder.encode([]).shape == (0, MINILM_WIDTH)


def test_similar_meanings_have_similar_vectors(encoder):
    cat, kitten, sum_ = encoder.encode(["The cat sleeps.", "A kitten is asleep.", "Two and two are four."])
    assert cat @ kitten > 0.6 > 0.3 > cat @ sum_


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(embedders, "WEIGHTS_FILE", ("no-such-package", "model.onnx"))
    with pytest.raises(ConfigError, match="no-such-package"):
        MiniLM().check()


class CountingEmbedder:
    """Records the texts that it embeds."""

    model, width = "counting", 4

    def __init__(self):
        self.embedded = []

    def check(self):
        pass

    def vectors(self, texts):
        self.embedded += texts
        return np.array([[len(text), 1, 2, 3] for text in texts], np.float32)


def test_cached_vectors_are_not_computed_again(tmp_path):
    first = CountingEmbedder()
    vectors = Encoder(first, tmp_path).encode(["one", "three", "one"])
    assert first.embedded == ["one", "three"]
    again = CountingEmbedder()
    assert (Encoder(again, tmp_path).encode(["three", "one", "five!"])[:2] == vectors[[1, 0]]).all()
    assert again.embedded == ["five!"]
    assert len(VectorCache(tmp_path, "counting", 4)) == 3


def test_another_model_or_width_has_vectors_of_its_own(tmp_path):
    Encoder(CountingEmbedder(), tmp_path).encode(["one"])
    assert len(VectorCache(tmp_path, "another", 4)) == len(VectorCache(tmp_path, "counting", 5)) == 0


@pytest.mark.parametrize("cut", [1, 36, 80])
def test_a_torn_or_damaged_row_is_computed_again_and_the_others_are_kept(tmp_path, cut):
    texts = [f"text {n}" for n in range(4)]
    Encoder(CountingEmbedder(), tmp_path).encode(texts)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert len(whole) == 4 * 36
    path.write_bytes(whole[:-cut])
    again = CountingEmbedder()
    Encoder(again, tmp_path).encode(texts)
    assert again.embedded == texts[-math.ceil(cut / 36) :]
    path.write_bytes(whole[:20] + b"\xff" + whole[21:])
    cache = VectorCache(tmp_path, "counting", 4)
    vectors = [cache.get(cache.digest(text)) for text in texts]
    assert (vectors[1] == [6, 1, 2, 3]).all()


def test_an_endpoint_gives_normalised_vectors_in_batches_and_each_text_is_paid_once(tmp_path):
    calls = []
    texts = [f"text number {n}" for n in range(10)]
    with FakeEmbeddings() as server:
        encoder = endpoint(server, tmp_path, lambda kind, **f: calls.append(f), dollars_per_million=2.0)
        vectors = encoder.encode([*texts, texts[0]])
        expected = np.array([server.vector(text) for text in texts], np.float32)
        np.testing.assert_allclose(vectors[:10], expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5)
        assert sorted(map(len, server.requests)) == [2, 4, 4]
        assert sum(call["dollars"] for call in calls) == pytest.approx(server.tokens * 2e-6)
        assert {(call["purpose"], call["status"]) for call in calls} == {("embedding", "ok")}
        assert (endpoint(server, tmp_path).encode(texts) == vectors[:10]).all()
        assert len(server.requests) == 3


def test_passing_faults_are_retried(short_pauses):
    faults = [429, 500, "cut", "invalid", "short", "nan", "shuffled"]
    calls = []
    with FakeEmbeddings(faults=iter(faults)) as server:
        encoder = endpoint(server, emit=lambda kind, **f: calls.append(f), attempts=7, concurrency=1)
        vectors = encoder.encode(["one", "two", "three"])
        plain = endpoint(server).encode(["one", "two", "three"])
    assert (vectors == plain).all(), "an answer in another order is sorted by its indices"
    assert len(server.requests) == 8
    assert [call["status"] for call in calls][-1] == "ok"
    assert [call["attempt"] for call in calls] == [1, 2, 3, 4, 5, 6, 7]


def test_what_the_operator_must_fix_is_reported_at_once(short_pauses, monkeypatch):
    monkeypatch.setenv("GOOD_KEY", KEY)
    monkeypatch.setenv("BAD_KEY", "sk-another-key-0123")
    with FakeEmbeddings(width=8, key=KEY) as server:
        endpoint(server, key_variable="GOOD_KEY").embedder.check()
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            endpoint(server, key_variable="NO_SUCH_KEY").embedder.check()
        requests = len(server.requests)
        with pytest.raises(ConfigError, match="Incorrect API key") as caught:
            endpoint(server, key_variable="BAD_KEY").embedder.check()
        assert "sk-another-key-0123" not in str(caught.value)
        with pytest.raises(ConfigError, match="vectors of 8 numbers, not 16"):
            endpoint(server, key_variable="GOOD_KEY", width=16).embedder.check()
        assert len(server.requests) == requests + 2
    with pytest.raises(ValueError, match="`url` must be an address"):
        EmbeddingConfig(kind="openai", model="m", url="ftp://x")
    with pytest.raises(Retryable, match="does not answer"):
        endpoint(server, attempts=2).encode(["one"])
    with FakeEmbeddings(faults=iter([503] * 9)) as down, pytest.raises(Retryable, match=r"fake-embedding.*503"):
        endpoint(down, attempts=2).encode(["one"])


def test_a_configuration_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="needs `url`"):
        EmbeddingConfig(kind="openai", model="m")
    with pytest.raises(ValueError, match="supports only"):
        EmbeddingConfig(width=512)
