"""What the batching engine is asked for, and what it tells: orders, their tickets, events, and why it takes no more."""

import time
from dataclasses import dataclass, field
from typing import Literal

Finish = Literal["stop", "length"]


class Busy(RuntimeError):
    """The queue is full; `retry_after` seconds from now there should be room."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting, and the queue holds no more; try again in {retry_after} s")
        self.retry_after = retry_after


class Stopped(RuntimeError):
    """The engine takes no more orders: it is being stopped, or it has failed."""


@dataclass(frozen=True)
class Order:
    """One sample to be made, or with `max_tokens` 0 a prompt to be scored alone.

    `seed` identifies the sample as for `model.decoding.generate`; `scored`: the prompt's log-probabilities are
    wanted; `tops`:
    how many alternatives to each token are.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    seed: tuple[int, ...] = (0,)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    thinking_budget: int | None = None
    scored: bool = False
    tops: int = 0


@dataclass(frozen=True)
class Scored:
    """log p of each prompt token after those before it (the first has none), and the likeliest (id, log p) there."""

    logprobs: list[float]
    tops: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Piece:
    """Tokens just written, a stop id the last if there is one; `finish` once there is no more to come."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    finish: Finish | None


@dataclass(frozen=True)
class Failed:
    """The engine broke down before the sample was done."""

    message: str


Event = Scored | Piece | Failed


@dataclass(eq=False)
class Ticket:
    """An order in the queue or in a slot."""

    order: Order
    cancelled: bool = False
    written: int = 0
    asked: float = field(default_factory=time.monotonic)
