"""Baselines of text classification, fitted on the same rows as the model: majority, TF-IDF, MiniLM's vectors."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from nautile.data.retrieval.embedders import Encoder, MiniLM

MOST_STEPS = 1000
BASELINES = ("majority", "tfidf", "minilm")


class Baseline(Protocol):
    """A text classifier. `size`: bytes of its parameters and vocabulary."""

    size: int

    def fit(self, texts: Sequence[str], targets_N: np.ndarray, labels: int) -> None: ...

    def logits(self, texts: Sequence[str]) -> np.ndarray:
        """log p(label), float64 [texts, labels]"""
        ...


class Majority:
    """Predicts the shares of the labels in the training rows, independent of the text."""

    def fit(self, texts: Sequence[str], targets_N: np.ndarray, labels: int) -> None:
        counts_C = np.bincount(targets_N, minlength=labels)
        self._logits_C, self.size = np.log(counts_C / counts_C.sum()), 8 * labels

    def logits(self, texts: Sequence[str]) -> np.ndarray:
        return np.tile(self._logits_C, (len(texts), 1))


class Tfidf:
    """Logistic regression on TF-IDF of words and pairs of words."""

    def fit(self, texts: Sequence[str], targets_N: np.ndarray, labels: int) -> None:
        self._vectors: Any = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))
        self._regression = LogisticRegression(C=10.0, max_iter=MOST_STEPS)
        self._regression.fit(self._vectors.fit_transform(texts), targets_N)
        # Each word with its 4-byte number; weights and frequencies as they lie in memory.
        words = sum(len(word.encode()) + 4 for word in self._vectors.vocabulary_)
        self.size = words + self._vectors.idf_.nbytes + self._regression.coef_.nbytes

    def logits(self, texts: Sequence[str]) -> np.ndarray:
        return self._regression.predict_log_proba(self._vectors.transform(texts))


class SentenceVectors:
    """Logistic regression on MiniLM's sentence vectors. `cache`: a folder for the vectors, or None."""

    def __init__(self, cache: Path | None) -> None:
        self._model = MiniLM()
        self._encoder = Encoder(self._model, cache)

    def fit(self, texts: Sequence[str], targets_N: np.ndarray, labels: int) -> None:
        self._regression = LogisticRegression(C=10.0, max_iter=MOST_STEPS)
        self._regression.fit(self._encoder.encode(texts), targets_N)
        self.size = self._model.size + self._regression.coef_.nbytes

    def logits(self, texts: Sequence[str]) -> np.ndarray:
        return self._regression.predict_log_proba(self._encoder.encode(texts))


def baseline(name: str, cache: Path | None) -> Baseline:
    """The baseline called `name`, one of `BASELINES`."""
    makers: dict[str, Callable[[], Baseline]] = {
        "majority": Majority,
        "tfidf": Tfidf,
        "minilm": lambda: SentenceVectors(cache),
    }
    return makers[name]()
