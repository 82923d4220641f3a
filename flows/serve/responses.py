"""From a request to orders, and from what the engine tells to answers: what both kinds of answer share.

Log-probabilities are those of the untruncated distribution at temperature 1.
"""

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from data.chat_template import encode_prompt
from data.tokenizer import Tokenizer
from flows.serve.protocol import ApiError, ChatRequest, CompletionRequest
from flows.serve.token_stream import Part, Writer, Written, bytes_of
from model.decoding.requests import Chunk, DecodeRequest, PromptScores

Top = tuple[int, float]


@dataclass
class Choice:
    """One of the answers to a request: what was ordered, and what came of it so far."""

    order: DecodeRequest
    writer: Writer
    prompt_text: str = ""
    scored: PromptScores | None = None
    thinking: str = ""
    answer: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[Top]] = field(default_factory=list)
    finish: str | None = None

    def take(self, event: Chunk | PromptScores) -> Written:
        """What an event adds. `finish` is set by the last one, or by a stop string."""
        if isinstance(event, PromptScores):
            self.scored = event
            self.finish = None if self.order.max_tokens else "length"
            return Written()
        told = self.writer.write(event.ids)
        self.ids += event.ids[: told.taken]
        self.logprobs += event.logprobs[: told.taken]
        self.tops += event.alternatives[: told.taken]
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
    def orders(self) -> list[DecodeRequest]:
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
    def chunk(self, index: int, event: Chunk | PromptScores, told: Written, first: int) -> dict[str, Any] | None:
        """What `event` brought choice `index`, whose ids before `first` were told of; None: nothing to tell yet."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""

    def _orders(self, max_tokens: int | None, least: int, scored: bool, tops: int) -> list[DecodeRequest]:
        """`n` orders a prompt: sample j has the seed (seed, j + 1), as the first question of `nautile chat` has."""
        asked = self._request
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        orders = []
        for prompt in self._prompts:
            for sample in range(asked.n or 1):
                orders.append(
                    DecodeRequest(
                        prompt=tuple(prompt),
                        max_tokens=least if max_tokens is None else max_tokens,
                        seed=(seed, sample + 1),
                        temperature=1.0 if asked.temperature is None else asked.temperature,
                        top_k=asked.top_k or 0,
                        top_p=1.0 if asked.top_p is None else asked.top_p,
                        thinking_budget=asked.thinking_budget,
                        score_prompt=scored,
                        alternatives=tops,
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


class ChatReply(Reply):
    """An answer to a question, its reasoning beside it."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, context: int) -> None:
        prompt = encode_prompt(tokenizer, request.query)
        asked = request.max_tokens or request.max_completion_tokens
        check_room([prompt], asked, 1, context, tokenizer.vocabulary, "messages")
        super().__init__(request, tokenizer, [prompt])
        for order in self._orders(asked, context - len(prompt), False, request.top_logprobs or 0):
            self.choices.append(Choice(order, Writer(tokenizer, request.stops, turn=True)))

    def usage(self) -> dict[str, Any]:
        thought = sum(choice.writer.parts.count("thinking") for choice in self.choices)
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": thought}}

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant"}, None, None) for index in range(len(self.choices))]

    def chunk(self, index: int, event: Chunk | PromptScores, told: Written, first: int) -> dict[str, Any] | None:
        choice = self.choices[index]
        delta = {name: text for name, text in (("reasoning_content", told.thinking), ("content", told.answer)) if text}
        told_of = self._logprobs(choice, first)
        if not (delta or choice.finish or told_of):
            return None
        return self._chunk(index, delta, told_of, choice.finish)

    def whole(self) -> dict[str, Any]:
        answers = []
        for index, choice in enumerate(self.choices):
            content = choice.answer if choice.writer.part == "answer" else None
            message = {"role": "assistant", "content": content, "reasoning_content": choice.thinking, "refusal": None}
            answers.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice, 0),
                    "finish_reason": choice.finish,
                }
            )
        return self.body(answers, self.kind, self.usage())

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self.body([choice], self.chunk_kind, None)

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        """Of the answer's tokens under `content`, and of the thinking's under `reasoning_content`."""
        if not self._request.logprobs:
            return None
        told: dict[Part, list[dict[str, Any]]] = {"answer": [], "thinking": []}
        tops = choice.tops or [[] for _ in choice.ids]
        for place in range(first, len(choice.ids)):
            if (part := choice.writer.parts[place]) is not None:
                best = [self._token(*top) for top in tops[place]]
                told[part].append({**self._token(choice.ids[place], choice.logprobs[place]), "top_logprobs": best})
        return {"content": told["answer"], "refusal": None, "reasoning_content": told["thinking"]}

    def _token(self, one: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(one), "logprob": logprob, "bytes": list(bytes_of(self._tokenizer, one))}


DEFAULT_TOKENS = 16  # OpenAI's


class CompletionReply(Reply):
    """Plain text going on. Markers such as `<|think_end|>` stand in it by name; the id that ended it does not."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, context: int) -> None:
        prompts = [tokenizer.encode(one) if isinstance(one, str) else list(one) for one in request.prompts]
        check_room(prompts, request.max_tokens, DEFAULT_TOKENS, context, tokenizer.vocabulary, "prompt")
        super().__init__(request, tokenizer, prompts)
        self._echo = bool(request.echo)
        scored = self._echo and request.logprobs is not None
        # With nothing to write and nothing to score there would be nothing to order; the scores are left out then.
        for order in self._orders(
            request.max_tokens, DEFAULT_TOKENS, scored or request.max_tokens == 0, request.logprobs or 0
        ):
            text = _text_of(tokenizer, order.prompt) if self._echo else ""
            self.choices.append(Choice(order, Writer(tokenizer, request.stops), text))

    def opening(self) -> list[dict[str, Any]]:
        if not self._echo or self._request.logprobs is not None:  # with scores it comes as these do
            return []
        return [self._chunk(i, one.prompt_text, None, None) for i, one in enumerate(self.choices)]

    def chunk(self, index: int, event: Chunk | PromptScores, told: Written, first: int) -> dict[str, Any] | None:
        choice, text, told_of = self.choices[index], told.answer, None
        if self._request.logprobs is not None:
            echoed = len(choice.order.prompt) if choice.scored else 0
            if isinstance(event, PromptScores):
                text, echoed = choice.prompt_text + text, 0
            told_of = self._logprobs(choice, echoed + first)
        if not (text or choice.finish or (told_of and told_of["tokens"])):
            return None
        return self._chunk(index, text, told_of, choice.finish)

    def whole(self) -> dict[str, Any]:
        answers = []
        for index, choice in enumerate(self.choices):
            told_of = None if self._request.logprobs is None else self._logprobs(choice, 0)
            answers.append(
                {
                    "index": index,
                    "text": choice.prompt_text + choice.answer,
                    "logprobs": told_of,
                    "finish_reason": choice.finish,
                }
            )
        return self.body(answers, self.kind, self.usage())

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self.body([choice], self.chunk_kind, None)

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any]:
        """Four lists side by side, of the tokens from `first` on: an echoed prompt's, whose very first has no
        log-probability, and those written, the id that ended it included, for harnesses count on one a token."""
        rows = self._rows(choice)
        offsets = self._offsets([one for one, _, _ in rows])[first:]
        rows = rows[first:]
        return {
            "tokens": [self._text(one) for one, _, _ in rows],
            "token_logprobs": [logprob for _, logprob, _ in rows],
            "top_logprobs": [self._best(*row) for row in rows] if self._request.logprobs else None,
            "text_offset": offsets,
        }

    def _rows(self, choice: Choice) -> list[tuple[int, float | None, list[Top]]]:
        """Id, log-probability and alternatives of every token there is."""
        rows: list[tuple[int, float | None, list[Top]]] = []
        if scored := choice.scored:
            best = scored.alternatives or [[] for _ in scored.logprobs]
            rows = [
                (choice.order.prompt[0], None, []),
                *zip(choice.order.prompt[1:], scored.logprobs, best, strict=True),
            ]
        best = choice.tops or [[] for _ in choice.ids]
        return [*rows, *zip(choice.ids, choice.logprobs, best, strict=True)]

    def _offsets(self, ids: Sequence[int]) -> list[int]:
        """At which character of the text each token begins: those that share a character, where it does."""
        decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
        for one in ids:
            offsets.append(length)
            length += len(decoder.decode(bytes_of(self._tokenizer, one)))
        return offsets

    def _best(self, one: int, logprob: float | None, tops: list[Top]) -> dict[str, float] | None:
        """The likeliest tokens, and the one at hand."""
        if logprob is None:
            return None
        return {**{self._text(other): value for other, value in tops}, self._text(one): logprob}


def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(bytes_of(tokenizer, one) for one in ids).decode("utf-8", "replace")
