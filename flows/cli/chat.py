"""`nautile chat`: ask a checkpoint questions, and print its reasoning and answer as they are generated.

Each question is a conversation of its own, because the model is trained on single turns (paper §3.2).
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from common.errors import ConfigError
from common.files import read_json
from common.text import amount, visible
from data.chat_template import encode_prompt, parse_completion
from data.tokenizer import tokenizer_for
from flows.serve.token_stream import Part, StreamedText, TokenStream
from model.decoding.sampling import Sampling
from model.runtimes.load import load_runtime
from store.manifest import MANIFEST


@dataclass(frozen=True)
class ChatSettings:
    """How to sample. `max_tokens` None: three quarters of the context, as in the reinforcement stages."""

    max_tokens: int | None = None
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    thinking_budget: int | None = None
    seed: int = 0


@dataclass
class ChatAnswer:
    """A question and its reply. `finished`: the model ended its turn itself."""

    query: str
    thinking: str = ""
    answer: str | None = None
    tokens: int = 0
    finished: bool = False
    seconds: float = field(default=0.0, compare=False)
    first_seconds: float = field(default=0.0, compare=False)  # until the first tokens: the prompt, and compilation
    first_tokens: int = 0

    def speed(self) -> str:
        """Tokens a second once it writes; empty if all came at once, for that would be no speed."""
        later, seconds = self.tokens - self.first_tokens, self.seconds - self.first_seconds
        return f", {amount(later / seconds)} tokens/s" if later > 0 and seconds > 0 else ""


class Chat:
    """A loaded checkpoint or export. Raises ConfigError if it cannot be read or the settings do not fit its context."""

    def __init__(self, folder: Path, settings: ChatSettings, runtime: str = "jax") -> None:
        loaded = load_runtime(runtime, folder)
        model = loaded.config
        self._tokenizer = tokenizer_for(loaded.tokenizer)
        limit = settings.max_tokens or model.context - model.context // 4
        sampling = Sampling(
            max_tokens=limit,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            stop_ids=(self._tokenizer.im_end, self._tokenizer.end_of_text),
            think_end=self._tokenizer.think_end,
            thinking_budget=settings.thinking_budget,
        )
        if limit >= model.context:
            raise ConfigError(f"--max-tokens {limit} leaves no room for a question in a context of {model.context}")
        self._sampler = loaded.sampler(sampling, rows=1, prompt_length=model.context - limit)
        self._seed, self._questions = settings.seed, 0

    def ask(self, answer: ChatAnswer) -> Iterator[StreamedText]:
        """Generate the reply to `answer.query`: yield text as it comes, and fill in `answer` at the end.

        Raises ConfigError if the question is longer than the context leaves room for.
        """
        prompt = encode_prompt(self._tokenizer, answer.query)
        if len(prompt) > self._sampler.prompt_length:
            raise ConfigError(
                f"the question is {len(prompt)} tokens long in the chat template, and there is room for "
                f"{self._sampler.prompt_length}: shorten it, or lower --max-tokens"
            )
        self._questions += 1
        started = time.perf_counter()
        ids: list[int] = []
        stream = TokenStream(self._tokenizer, chat=True)
        for completion in self._sampler.stream(prompt, (self._seed, self._questions)):
            added = completion.ids[len(ids) :].tolist()
            ids += added
            if not answer.first_tokens:
                answer.first_tokens, answer.first_seconds = len(ids), time.perf_counter() - started
            yield stream.write(added)
        yield stream.finish()
        reply = parse_completion(self._tokenizer, ids)
        answer.thinking, answer.answer, answer.finished = reply.reasoning, reply.answer, reply.finished
        answer.tokens, answer.seconds = len(ids), time.perf_counter() - started


def heading(folder: Path, name: str) -> str:
    """What a conversation is held with: the checkpoint's name, and for an artifact its step and when it was made."""
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict):
        return name
    made = datetime.fromisoformat(manifest["created"]).astimezone()
    return f"{name}, made by {manifest['label']} on {made:%Y-%m-%d at %H:%M}"


_HELP = """Type a question; each stands alone, for the model knows no conversations. Ctrl-C stops a reply.
/help  this text
/exit  end the chat, as Ctrl-D does"""


def converse(chat: Chat, console: Console, show_thinking: bool, name: str) -> None:
    """Answer questions from standard input until it ends. Ctrl-C stops a reply, not the conversation.

    On a terminal `/help` and `/exit` are commands. `name`: what the checkpoint is called (`heading`).
    """
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - line editing for input()

        console.print(f"{name}. Each question stands alone. Ctrl-C stops a reply, /exit ends the chat.", style="dim")
    while True:
        try:
            query = input("> " if interactive else "").strip()
        except EOFError:
            return
        if not query:
            continue
        if interactive and query.startswith("/"):
            if query in ("/exit", "/quit"):
                return
            problem = "" if query == "/help" else f"no command {query}\n"
            console.print(f"{problem}{_HELP}", style="dim")
            continue
        try:
            stream_answer(chat, query, console, show_thinking)
        except KeyboardInterrupt:
            console.print("\n(stopped)", style="dim")
        except ConfigError as error:
            console.print(str(error), style="red", soft_wrap=True)


def stream_answer(chat: Chat, query: str, console: Console, show_thinking: bool) -> None:
    """Print one reply as it comes: the reasoning dim, the answer plain, then tokens and speed."""
    answer = ChatAnswer(query)
    previous: Part | None = None
    parts: tuple[Part, ...] = ("thinking", "answer") if show_thinking else ("answer",)
    for added in chat.ask(answer):
        for part in parts:
            if not (text := getattr(added, part)):
                continue
            if previous not in (None, part):
                text = f"\n{text}"
            previous = part
            console.print(Text(visible(text), style="dim" if part == "thinking" else ""), end="", soft_wrap=True)
    cut = "" if answer.finished else ", cut at --max-tokens"
    note = f"[{answer.tokens} tokens in {answer.seconds:.2f} s{answer.speed()}{cut}]"
    console.print(f"\n{note}" if console.is_terminal else "", style="dim")


def answer_as_json(chat: Chat, query: str) -> dict[str, Any]:
    """One reply as data: query, thinking, answer (None if the thinking did not end), tokens, finished, seconds."""
    answer = ChatAnswer(query)
    for _ in chat.ask(answer):
        pass
    return {name: value for name, value in asdict(answer).items() if not name.startswith("first_")}
