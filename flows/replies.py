"""From a request to orders, and from what the engine tells to answers: what both kinds of answer share.

Log-probabilities are those of the untruncated distribution at temperature 1.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.tokenizer import Tokenizer
from flows.protocol import ApiError, ChatRequest, CompletionRequest
from flows.writing import Writer, Written, bytes_of
from model.orders import Order, Piece, Scored

Top = tuple[int, float]


@dataclass
class Choice:
    """One of the answers to a request: what was ordered, and what came of it so far."""

    order: Order
    writer: Writer
    prompt_text: str = ""
    scored: Scored | None = None
    thinking: str = ""
    answer: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[Top]] = field(default_factory=list)
    finish: str | None = None

    def take(self, event: Piece | Scored) -> Written:
        """What an event adds. `finish` is set by the last one, or by a stop string."""
        if isinstance(event, Scored):
            self.scored = event
            self.finish = None if self.order.max_tokens else "length"
            return Written()
        told = self.writer.write(event.ids)
        self.ids += event.ids[: told.taken]
        self.logprobs += event.logprobs[: told.taken]
        self.tops += event.tops[: told.taken]
        if self.writer.stopped:
            self.finish = "stop"
        elif event.finish:
            self.finish = event.finish
            rest = self.writer.finish()
            told.thinking, told.answer = told.thinking + rest.thinking, told.answer + rest.answer
        self.thinking, self.answer = self.thinking + told.thinking, self.answer + told.answer
        return told


class Reply(ABC):
    """All choices of one request, and the bodies that tell of them."""

    kind = chunk_kind = prefix = ""

    def __init__(
        self, request: CompletionRequest | ChatRequest, tokenizer: Tokenizer, prompts: list[list[int]]
    ) -> None:
        self._request, self._tokenizer, self._prompts = request, tokenizer, prompts
        self._created = int(time.time())
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.choices: list[Choice] = []

    @property
    def orders(self) -> list[Order]:
        return [choice.order for choice in self.choices]

    @property
    def finished(self) -> bool:
        return all(choice.finish for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts and of what was written; an equal prompt asked for `n` times counts once."""
        read = sum(map(len, self._prompts))
        wrote = sum(len(choice.ids) for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}

    def body(self, choices: Sequence[dict[str, Any]], kind: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        named = {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}
        return {**named, "choices": list(choices), "usage": usage}

    def opening(self) -> list[dict[str, Any]]:
        """The chunks that begin a stream."""
        return []

    @abstractmethod
    def chunk(self, index: int, event: Piece | Scored, told: Written, first: int) -> dict[str, Any] | None:
        """What `event` brought choice `index`, whose ids before `first` were told of; None: nothing to tell yet."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""

    def _orders(self, max_tokens: int | None, least: int, scored: bool, tops: int) -> list[Order]:
        """`n` orders a prompt: sample j has the seed (seed, j + 1), as the first question of `nautile chat` has."""
        asked = self._request
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        orders = []
        for prompt in self._prompts:
            for sample in range(asked.n or 1):
                orders.append(
                    Order(
                        prompt=tuple(prompt),
                        max_tokens=least if max_tokens is None else max_tokens,
                        seed=(seed, sample + 1),
                        temperature=1.0 if asked.temperature is None else asked.temperature,
                        top_k=asked.top_k or 0,
                        top_p=1.0 if asked.top_p is None else asked.top_p,
                        thinking_budget=asked.thinking_budget,
                        scored=scored,
                        tops=tops,
                    )
                )
        return orders

    def _text(self, one: int) -> str:
        """A token as text; one that is no whole UTF-8 by its bytes, so that no two tokens read the same."""
        raw = bytes_of(self._tokenizer, one)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def check_room(
    prompts: list[list[int]], max_tokens: int | None, least: int, context: int, vocabulary: int, name: str
) -> None:
    """Refuse prompts that do not fit the model, naming the field at fault."""
    for place, prompt in enumerate(prompts):
        where = f"{name}[{place}]" if len(prompts) > 1 else name
        wanted = least if max_tokens is None else max_tokens
        if len(prompt) + min(wanted, 1) > context:
            raise ApiError(
                400,
                f"{where}: {len(prompt)} tokens, and the model's context is {context}",
                param=name,
                code="context_length_exceeded",
            )
        if len(prompt) + wanted > context:
            raise ApiError(
                400,
                f"max_tokens: {wanted} after the {len(prompt)} tokens of {where} pass the model's context of "
                f"{context}: ask for {context - len(prompt)} at most",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if max(prompt) >= vocabulary:
            raise ApiError(400, f"{where}: the id {max(prompt)} is not in a vocabulary of {vocabulary}", param=name)
