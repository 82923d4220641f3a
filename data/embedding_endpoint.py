"""Sentence vectors from an OpenAI-compatible endpoint: batches side by side, retried where that helps, paid for once.

Every attempt is a `call` event with its tokens and price, as those of the chat endpoints are. Vectors are normalised
here, for not every server does it.
"""

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import openai

from configs.distill import EmbeddingConfig
from configs.emit import Emit
from configs.endpoint import EndpointConfig
from configs.section import ConfigError, Retryable
from data.calls import CallError
from data.clients import CONNECT_S, broken, check_key, key_of, struck
from data.retry import backoff, reason_of, retry_after

NAME = "embedding"
LONGEST_MESSAGE = 300


class EmbeddingEndpoint:
    """See `data.embeddings.Embedder`."""

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
            message = " ".join(struck(error.message, self._keyed).split())[:LONGEST_MESSAGE]
            after = retry_after(error.response.headers)
            raise CallError(reason_of(error.status_code), message, str(error.status_code), after) from None
        except openai.APITimeoutError:
            raise CallError("timeout", f"{url} did not answer within {self._config.timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise broken(error.__cause__ or error, url) from None
        except httpx2.HTTPError as error:
            raise broken(error, url) from None
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
