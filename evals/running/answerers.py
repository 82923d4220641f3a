"""Models under test: a checkpoint, by batched generation, or any chat endpoint of the pool."""

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import sha256_of
from nautile.configs.evaluation import EvaluateConfig
from nautile.configs.model import ModelConfig, TokenizerConfig
from nautile.data.chat_template import ParsedReply, encode_prompt, parse_completion, parse_text
from nautile.data.endpoints.chat_types import UNPAID, ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from nautile.model.layers.common import Params


logger = logging.getLogger(__name__)
SHORTEST_BUCKET = 256  # below this, a second compilation costs more than the padding


@dataclass(frozen=True)
class Answer:
    """A model's answer. Token counts and latency (seconds; of the batch for a checkpoint) are None if unknown."""

    reply: ParsedReply
    output: str
    truncated: bool
    tokens_in: int | None = None
    tokens_out: int | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class SkippedQuestion:
    """A question that the model could not be asked, with the reason. It is not scored, but counted and shown."""

    reason: str
    tokens_in: int | None = None


class Answerer(Protocol):
    """Protocol of a model under test. `name` is written into every row; `batch`: questions per call."""

    name: str
    batch: int

    def answer(self, prompts: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> list[Answer | SkippedQuestion]:
        """Return one answer per prompt, in order, which depends only on prompt and seed, if the model allows.

        Raises `Retryable` when a question gets no reply, because that is not a wrong answer.
        """
        ...


class CheckpointAnswerer:
    """Generates answers from the model in a folder through a runtime (`model.runtimes.load`); greedy at temperature 0.

    Raises `ConfigError` for an unreadable folder, a tokenizer other than `tokenizer`, or one too large for the model.
    """

    def __init__(
        self, folder: Path, config: EvaluateConfig, tokenizer: TokenizerConfig | None = None, runtime: str = "jax"
    ) -> None:
        from nautile.model.decoding.sampling import Sampling
        from nautile.model.runtimes.load import load_runtime

        loaded = load_runtime(runtime, folder)
        refuse_other_tokenizer(folder, loaded.config, loaded.tokenizer, tokenizer)
        self.name, self._model = loaded.name, loaded.config
        self._tokenizer = tokenizer_for(loaded.tokenizer)
        sampling = Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            stop_ids=(self._tokenizer.im_end, self._tokenizer.end_of_text),
        )
        if config.prompt_length >= self._model.context:
            raise ConfigError(
                f"evaluate.prompt_length is {config.prompt_length}, which leaves no room for an answer in the model's "
                f"context of {self._model.context}"
            )
        # One compiled sampler per prompt length, so that short prompts are not padded to the longest.
        from nautile.model.decoding.cache import length_buckets

        self._generators = {}
        for length in length_buckets(config.prompt_length, SHORTEST_BUCKET):
            limited = replace(sampling, max_tokens=min(config.max_tokens, self._model.context - length))
            self._generators[length] = loaded.sampler(limited, config.batch, length)
        self.batch = config.batch

    def answer(self, prompts: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> list[Answer | SkippedQuestion]:
        ids = [encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        answers: list[Answer | SkippedQuestion] = [SkippedQuestion("too_long", len(prompt)) for prompt in ids]
        previous = 0
        for length, generator in self._generators.items():
            members = [i for i, prompt in enumerate(ids) if previous < len(prompt) <= length]
            previous = length
            if not members:
                continue
            start = time.monotonic()
            completions = generator([ids[i] for i in members], [seeds[i] for i in members])
            seconds = time.monotonic() - start
            for i, completion in zip(members, completions, strict=True):
                tokens = [int(token) for token in completion.ids]
                answers[i] = Answer(
                    reply=parse_completion(self._tokenizer, tokens),
                    output=self._tokenizer.decode(tokens),
                    truncated=bool(completion.truncated),
                    tokens_in=len(ids[i]),
                    tokens_out=len(tokens),
                    latency_s=seconds,
                )
        return answers


class EndpointAnswerer:
    """Gets answers from a chat endpoint of the pool, zero-shot: the prompt is the only message. No reply is paid twice.

    Raises `ConfigError` if the endpoint does not exist, refuses its key, or the budget is spent.
    """

    def __init__(self, pool: EndpointPool, endpoint: str, config: EvaluateConfig) -> None:
        self._pool, self._endpoint, self._config = pool, endpoint, config
        self.batch = config.batch
        self.name = f"endpoint {pool.config(endpoint).model}"

    def answer(self, prompts: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> list[Answer | SkippedQuestion]:
        requests = [
            ChatRequest(
                endpoint=self._endpoint,
                messages=({"role": "user", "content": prompt},),
                max_tokens=self._config.max_tokens,
                temperature=self._config.temperature,
                # 31 bits, which every vendor takes as a seed.
                seed=int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:4], "big") >> 1,
                purpose="evaluate",
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        # Replies that an earlier attempt has paid for come from the pool's cache.
        results = self._pool.ask(requests)
        # A question that the endpoint refuses (too long, for example), or to which it fails while it answers others, or
        # with its key in the reply, is skipped; other failures may be temporary. All replies of the batch are in the
        # cache by now, so the next attempt asks only for those that are missing.
        failures = [
            result
            for result in results
            if isinstance(result, ChatFailure) and result.reason not in ("refused", "leaked_key") and not result.own
        ]
        for failure in failures:
            if failure.reason == "misconfigured" or failure.reason in UNPAID:
                raise ConfigError(f"endpoint {self._endpoint!r}: {failure.message}")
        if failures:
            raise Retryable(
                f"endpoint {self._endpoint!r}: {len(failures)} of {len(results)} questions got no reply "
                f"({failures[0].reason}: {failures[0].message}); answers so far are kept: run it again to resume"
            )
        return [
            SkippedQuestion("refused" if result.reason == "refused" else "unanswered")
            if isinstance(result, ChatFailure)
            else _from_chat(result)
            for result in results
        ]


def _from_chat(reply: ChatReply) -> Answer:
    parsed = parse_text(reply.text)
    truncated = reply.finish == "length"
    # A reply that was cut before its first word was still in its reasoning, which the endpoint keeps apart.
    finished_thinking = parsed.finished_thinking and bool(reply.text or not truncated)
    return Answer(
        reply=ParsedReply(parsed.reasoning, parsed.answer, finished_thinking, parsed.finished and not truncated),
        output=reply.text,
        truncated=truncated,
        tokens_in=reply.tokens_in,
        tokens_out=reply.tokens_out,
        latency_s=reply.latency_s,
    )


def load_checkpoint(
    folder: Path, expected: TokenizerConfig | None
) -> tuple["Params", ModelConfig, TokenizerConfig, str]:
    """Load a checkpoint: weights, model, tokenizer, and a name derived from the weights' digest.

    Raises `ConfigError` for an unreadable checkpoint, and as `refuse_other_tokenizer`.
    """
    from nautile.model.weights.files import WEIGHTS, load_weights

    params, model, tokenizer = load_weights(folder)
    refuse_other_tokenizer(folder, model, tokenizer, expected)
    return params, model, tokenizer, f"checkpoint {sha256_of(folder / WEIGHTS)[:12]}"


def refuse_other_tokenizer(
    folder: Path, model: ModelConfig, tokenizer: TokenizerConfig, expected: TokenizerConfig | None
) -> None:
    """Raise `ConfigError` for a tokenizer other than `expected` (None: any), or too large for the model in `folder`."""
    # One that the configuration's run trains can only be compared by its size.
    if expected and (tokenizer.ranks != expected.ranks or (expected.train is None and tokenizer != expected)):
        own = f"{tokenizer.ranks} {'trained ' if tokenizer.trained else ''}ranks"
        raise ConfigError(
            f"{folder}: the checkpoint has a tokenizer of {own}, the configuration's has {expected.ranks}; evaluate it "
            "with its own tokenizer"
        )
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(
            f"{folder}: config.json pairs a tokenizer of {tokenizer.vocabulary} ids with a model of "
            f"{model.vocabulary} rows; the checkpoint belongs to another tokenizer"
        )
