"""`nautile chat`: ask a checkpoint, and read its reasoning and its answer as they are written.

Each question is a conversation of its own, for the model is trained on single turns (paper §3.2).
"""

import codecs
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from common.errors import ConfigError
from common.text import visible
from data.chat_template import encode_prompt, parse_completion
from data.tokenizer import tokenizer_for
from model.decoding.generate import Completion, Generator
from model.decoding.sampling import Sampling
from model.weights.files import load_weights

Part = Literal["thinking", "answer"]


@dataclass(frozen=True)
class Manner:
    """How to reply. `max_tokens` None: three quarters of the context, as in the reinforcement stages."""

    max_tokens: int | None = None
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    thinking_budget: int | None = None
    seed: int = 0


@dataclass
class Answered:
    """A question and what came of it. `finished`: the model ended its turn by itself."""

    query: str
    thinking: str = ""
    answer: str | None = None
    tokens: int = 0
    finished: bool = False
    seconds: float = field(default=0.0, compare=False)


class Chat:
    """A checkpoint to talk to. Raises ConfigError where it cannot be read or `manner` does not fit its context."""

    def __init__(self, checkpoint: Path, manner: Manner) -> None:
        self._params, model, tokenizer = load_weights(checkpoint)
        self._tokenizer = tokenizer_for(tokenizer)
        limit = manner.max_tokens or model.context - model.context // 4
        self._stops = (self._tokenizer.im_end, self._tokenizer.end_of_text)
        sampling = Sampling(
            max_tokens=limit,
            temperature=manner.temperature,
            top_k=manner.top_k,
            top_p=manner.top_p,
            stop_ids=self._stops,
            think_end=self._tokenizer.think_end,
            thinking_budget=manner.thinking_budget,
        )
        if limit >= model.context:
            raise ConfigError(f"--max-tokens {limit} leaves no room for a question in a context of {model.context}")
        self._generator = Generator(model, sampling, rows=1, prompt_length=model.context - limit)
        self._seed, self._asked = manner.seed, 0

    def ask(self, query: str, answered: Answered) -> Iterator[tuple[Part, str]]:
        """Text as it comes, and to which part it belongs; `answered` is filled in at the end.

        Raises ConfigError for a question longer than the room that the context leaves for it.
        """
        prompt = encode_prompt(self._tokenizer, query)
        if len(prompt) > self._generator.prompt_length:
            raise ConfigError(
                f"the question takes {len(prompt)} tokens with its frame, and there is room for "
                f"{self._generator.prompt_length}: ask less, or lower --max-tokens"
            )
        self._asked += 1
        began, told = time.perf_counter(), 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        part: Part = "thinking"
        completion: Completion | None = None
        for completion in self._generator.stream(self._params, prompt, (self._seed, self._asked)):
            for one in completion.ids[told:].tolist():
                ends = one in self._stops or (part == "thinking" and one == self._tokenizer.think_end)
                written = b"" if ends else self._tokenizer.decode_bytes([one])
                if text := decoder.decode(written, final=ends):
                    yield part, text
                if ends:
                    part = "answer"
            told = len(completion.ids)
        if text := decoder.decode(b"", final=True):
            yield part, text
        reply = parse_completion(self._tokenizer, completion.ids.tolist())
        answered.thinking, answered.answer, answered.finished = reply.reasoning, reply.answer, reply.finished
        answered.tokens, answered.seconds = told, time.perf_counter() - began


def converse(chat: Chat, console: Console, show_thinking: bool) -> None:
    """Question after question from standard input, until it ends. Ctrl-C ends a reply, not the conversation."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - line editing for input()

        console.print("Each question stands alone. Ctrl-C stops a reply, Ctrl-D ends.", style="dim")
    while True:
        try:
            query = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if query:
            _reply(chat, query, console, show_thinking)


def _reply(chat: Chat, query: str, console: Console, show_thinking: bool) -> None:
    try:
        tell(chat, query, console, show_thinking)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except ConfigError as error:
        console.print(str(error), style="red", soft_wrap=True)


def tell(chat: Chat, query: str, console: Console, show_thinking: bool) -> None:
    """One reply, written as it comes: the reasoning dim, the answer plain, then what it took."""
    answered = Answered(query)
    last: Part | None = None
    for part, text in chat.ask(query, answered):
        if part == "thinking" and not show_thinking:
            continue
        if part != last:
            text = f"{'' if last is None else chr(10)}{text.lstrip()}"
        if not text:
            continue
        last = part
        console.print(Text(visible(text), style="dim" if part == "thinking" else ""), end="", soft_wrap=True)
    ended = "" if answered.finished else ", cut at --max-tokens"
    note = f"[{answered.tokens} tokens, {answered.tokens / answered.seconds:.1f}/s{ended}]"
    console.print(f"\n{note}" if console.is_terminal else "", style="dim")


def as_json(chat: Chat, query: str) -> dict[str, Any]:
    """The reply as data: query, thinking, answer (None if the thinking did not end), tokens, finished, seconds."""
    answered = Answered(query)
    for _ in chat.ask(query, answered):
        pass
    return asdict(answered)
