"""Types of the batching engine: requests, their handles, the events it emits, and its errors when full or stopped."""

import time
from dataclasses import dataclass, field
from typing import Literal

from nautile.model.decoding.constrained import Constraint, ReplyMask

FinishReason = Literal["stop", "length"]


class QueueFull(RuntimeError):
    """The queue is full; retry after about `retry_after` seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting, and the queue holds no more; try again in {retry_after} s")
        self.retry_after = retry_after


class EngineStopped(RuntimeError):
    """The engine accepts no more requests: it is shutting down, or it has failed."""


@dataclass(frozen=True)
class DecodeRequest:
    """A request for one sample, or with `max_tokens` 0 for the scores of a prompt.

    seed: identifies the sample, as in `model.decoding.generate`.
    score_prompt: also return the log-probabilities of the prompt's tokens.
    alternatives: number of likeliest tokens to return at each position.
    constraint: grammar of the answer; log-probabilities are then those under its masks.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: tuple[int, ...] = (0,)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    thinking_budget: int | None = None
    score_prompt: bool = False
    alternatives: int = 0
    constraint: Constraint | None = None


@dataclass(frozen=True)
class PromptScores:
    """log p of each prompt token after the first, and the likeliest alternatives (id, log p) at its position."""

    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a sample, ending with the stop id if there is one; `finish` is set on the last chunk."""

    ids: list[int]
    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]
    finish: FinishReason | None


@dataclass(frozen=True)
class RequestFailed:
    """The engine failed or was stopped before the sample was complete, or the sample's constraint failed."""

    message: str


EngineEvent = PromptScores | Chunk | RequestFailed


@dataclass(eq=False)
class Handle:
    """A request in the queue or in a slot."""

    request: DecodeRequest
    cancelled: bool = False
    mask: ReplyMask | None = None  # of a request with a constraint, once it is in a slot
    submitted_at: float = field(default_factory=time.monotonic)
