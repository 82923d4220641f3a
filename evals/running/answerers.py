"""Models under test: our own checkpoint through batched generation, or any chat endpoint of the pool."""

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from common.errors import ConfigError, Retryable
from common.files import sha256_of
from configs.evaluation import EvaluateConfig
from configs.model import ModelConfig, TokenizerConfig
from data.chat_template import ParsedReply, encode_prompt, parse_completion, parse_text
from data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from data.endpoints.pool import EndpointPool
from data.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from model.layers.common import Params


logger = logging.getLogger(__name__)
SMALLEST_BUCKET = 256  # below it a second compilation costs more than the padding


@dataclass(frozen=True)
class Answer:
    """What a model said. Counts and latency (seconds, of the batch for a checkpoint) are None where not known."""

    reply: ParsedReply
    output: str
    truncated: bool
    tokens_in: int | None = None
    tokens_out: int | None = None
    latency_s: float | None = None


@dataclass(frozen=True)
class Unasked:
    """A question that the model cannot be asked, and why. It is left out of the score, counted and shown."""

    reason: str
    tokens_in: int | None = None


class Answerer(Protocol):
    """Any model. `name` says which and stands in every row; `batch`: how many questions to hand over at a time."""

    name: str
    batch: int

    def answer(self, prompts: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> list[Answer | Unasked]:
        """One answer per prompt, in order, each fixed by its prompt and seed alone (as far as the model allows).

        Raises `Retryable` when a question stays without any reply: that is nobody's wrong answer.
        """
        ...


class CheckpointAnswerer:
    """A `checkpoint` folder through `model.decoding.generate`, greedy at temperature 0.

    Raises `ConfigError` for an unreadable checkpoint, or a tokenizer other than `tokenizer` or too large for the model.
    """

    def __init__(self, folder: Path, config: EvaluateConfig, tokenizer: TokenizerConfig | None = None) -> None:
        from model.decoding.generate import Generator
        from model.decoding.sampling import Sampling

        self._params, self._model, found, self.name = load_checkpoint(folder, tokenizer)
        self._tokenizer = tokenizer_for(found)
        sampling = Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            stop_ids=(self._tokenizer.im_end, self._tokenizer.end_of_text),
        )
        if config.prompt_length >= self._model.context:
            raise ConfigError(
                f"evaluate.prompt_length is {config.prompt_length}, and leaves no room for an answer in the model's "
                f"context of {self._model.context}"
            )
        self._generators = {}
        for length in buckets(config.prompt_length):
            room = replace(sampling, max_tokens=min(config.max_tokens, self._model.context - length))
            self._generators[length] = Generator(self._model, room, config.batch, length)
        self.batch = config.batch

    def answer(self, prompts: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> list[Answer | Unasked]:
        ids = [encode_prompt(self._tokenizer, prompt) for prompt in prompts]
        answers: list[Answer | Unasked] = [Unasked("too_long", len(one)) for one in ids]
        floor = 0
        for length, generator in self._generators.items():
            members = [i for i, one in enumerate(ids) if floor < len(one) <= length]
            floor = length
            if not members:
                continue
            started = time.monotonic()
            completions = generator(self._params, [ids[i] for i in members], [seeds[i] for i in members])
            took = time.monotonic() - started
            for i, completion in zip(members, completions, strict=True):
                written = [int(one) for one in completion.ids]
                answers[i] = Answer(
                    reply=parse_completion(self._tokenizer, written),
                    output=self._tokenizer.decode(written),
                    truncated=bool(completion.truncated),
                    tokens_in=len(ids[i]),
                    tokens_out=len(written),
                    latency_s=took,
                )
        return answers


class EndpointAnswerer:
    """A chat endpoint of the pool, asked zero-shot with the prompt as its one message. No reply is asked for twice.

    Raises `ConfigError` when the endpoint does not exist, refuses its key, or the budget is spent.
    """

    def __init__(self, pool: EndpointPool, endpoint: str, config: EvaluateConfig) -> None:
        self._pool, self._endpoint, self._config = pool, endpoint, config
        self.batch = config.batch
        self.name = f"endpoint {pool.config(endpoint).model}"

    def answer(self, prompts: Sequence[str], seeds: Sequence[tuple[int, ...]]) -> list[Answer | Unasked]:
        requests = [
            ChatRequest(
                endpoint=self._endpoint,
                messages=({"role": "user", "content": prompt},),
                max_tokens=self._config.max_tokens,
                temperature=self._config.temperature,
                seed=int.from_bytes(hashlib.sha256(repr(seed).encode()).digest()[:4], "big") >> 1,
                purpose="evaluate",
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        outcomes = self._pool.ask(requests)
        # A question that the endpoint will not take (too long, say) is left out; any other failure may pass.
        failures = [one for one in outcomes if isinstance(one, ChatFailure) and one.reason != "refused"]
        for failure in failures:
            if failure.reason in ("misconfigured", "budget"):
                raise ConfigError(f"endpoint {self._endpoint!r}: {failure.message}")
        if failures:
            raise Retryable(
                f"endpoint {self._endpoint!r}: {len(failures)} of {len(outcomes)} questions got no reply "
                f"({failures[0].reason}: {failures[0].message}); what was answered is kept, run it again to go on"
            )
        return [Unasked("refused") if isinstance(one, ChatFailure) else _from_chat(one) for one in outcomes]


def buckets(longest: int) -> list[int]:
    """The prompt lengths to compile for: 256, 512, … and `longest`, so that short prompts pay for little padding."""
    lengths, length = [], SMALLEST_BUCKET
    while length < longest:
        lengths.append(length)
        length *= 2
    return [*lengths, longest]


def _from_chat(reply: ChatReply) -> Answer:
    parsed = parse_text(reply.text)
    cut = reply.finish == "length"
    return Answer(
        reply=ParsedReply(parsed.reasoning, parsed.answer, parsed.finished_thinking, parsed.finished and not cut),
        output=reply.text,
        truncated=cut,
        tokens_in=reply.tokens_in,
        tokens_out=reply.tokens_out,
        latency_s=reply.latency_s,
    )


def load_checkpoint(folder: Path, wanted: TokenizerConfig | None) -> tuple["Params", ModelConfig, TokenizerConfig, str]:
    """Weights, model, tokenizer, and a name that follows from the weights alone.

    Raises `ConfigError` for an unreadable checkpoint, or a tokenizer other than `wanted` or too large for the model.
    """
    from model.weights.files import WEIGHTS, load_weights

    params, model, tokenizer = load_weights(folder)
    if wanted is not None and tokenizer != wanted:
        raise ConfigError(
            f"{folder}: the checkpoint was made with a tokenizer of {tokenizer.ranks} ranks, the configuration's has "
            f"{wanted.ranks}; evaluate it with its own"
        )
    if tokenizer.vocabulary > model.vocabulary:
        raise ConfigError(
            f"{folder}: config.json pairs a tokenizer of {tokenizer.vocabulary} ids with a model of "
            f"{model.vocabulary} rows; the checkpoint belongs to another tokenizer"
        )
    return params, model, tokenizer, f"checkpoint {sha256_of(folder / WEIGHTS)[:12]}"
