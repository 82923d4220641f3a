"""`nautile chat`: send questions to a checkpoint, and print its reasoning and answer while they are generated.

Each question starts a new conversation, because the model is trained on single turns (paper §3.2).
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

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import amount, visible
from nautile.data.chat_template import encode_prompt, parse_completion
from nautile.data.tokenizer import tokenizer_for
from nautile.flows.serve.token_stream import Part, StreamedText, TokenStream
from nautile.model.decoding.sampling import Sampling
from nautile.model.runtimes.load import load_runtime
from nautile.store.manifest import MANIFEST


@dataclass(frozen=True)
class ChatSettings:
    """Sampling settings. `max_tokens` None: three quarters of the context, as in the RL stages."""

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
    first_seconds: float = field(default=0.0, compare=False)  # until the first tokens: prefill and compilation
    first_tokens: int = 0

    def speed(self) -> str:
        """Decoding speed as text, without prefill; empty if all tokens arrived together, which gives no speed."""
        later, seconds = self.tokens - self.first_tokens, self.seconds - self.first_seconds
        return f", {amount(later / seconds)} tokens/s" if later > 0 and seconds > 0 else ""


class Chat:
    """A loaded checkpoint or export. Raises ConfigError if it cannot be read or the settings do not fit its context."""

    def __init__(self, folder: Path, settings: ChatSettings, runtime: str = "jax") -> None:
        loaded = load_runtime(runtime, folder)
        model = loaded.config
        self._tokenizer = tokenizer_for(loaded.tokenizer)
        # Reasoning is much longer than a question, and the RL stages sample with the same split.
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
        # One program is compiled for the whole conversation; shorter prompts are padded to its length.
        self._sampler = loaded.sampler(sampling, rows=1, prompt_length=model.context - limit)
        self._seed, self._questions = settings.seed, 0

    def ask(self, answer: ChatAnswer) -> Iterator[StreamedText]:
        """Generate the reply to `answer.query`: yield text as it is generated, and fill in `answer` at the end.

        Raises `ConfigError` if the question and `max_tokens` do not fit into the context.
        """
        prompt = encode_prompt(self._tokenizer, answer.query)
        if len(prompt) > self._sampler.prompt_length:
            raise ConfigError(
                f"the question is {len(prompt)} tokens long in the chat template, and there is room for "
                f"{self._sampler.prompt_length}: shorten it, or lower --max-tokens"
            )
        # The same question asked twice gets two replies, and `--seed` repeats the whole conversation.
        self._questions += 1
        started = time.perf_counter()
        ids: list[int] = []
        stream = TokenStream(self._tokenizer, chat=True)
        # The first stride includes the prefill, and the compilation with the first question.
        for completion in self._sampler.stream(prompt, (self._seed, self._questions)):
            new_ids = completion.ids[len(ids) :].tolist()  # a completion holds all tokens so far
            ids += new_ids
            if not answer.first_tokens:
                answer.first_tokens, answer.first_seconds = len(ids), time.perf_counter() - started
            yield stream.write(new_ids)
        yield stream.finish()
        # Read from the ids once more, by the same function as in training and evaluation.
        reply = parse_completion(self._tokenizer, ids)
        answer.thinking, answer.answer, answer.finished = reply.reasoning, reply.answer, reply.finished
        answer.tokens, answer.seconds = len(ids), time.perf_counter() - started


def heading(folder: Path, name: str) -> str:
    """The heading of a chat: the checkpoint's name, and for an artifact the step that made it and the time."""
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict):
        return name
    created = datetime.fromisoformat(manifest["created"]).astimezone()
    return f"{name}, made by {manifest['label']} on {created:%Y-%m-%d at %H:%M}"


_HELP = """Type a question; each is answered without the previous ones. Ctrl-C stops a reply.
/help  this text
/exit  end the chat, as Ctrl-D does"""


def converse(chat: Chat, console: Console, show_thinking: bool, name: str) -> None:
    """Answer questions from standard input until it ends. Ctrl-C stops a reply, not the chat.

    On a terminal `/help` and `/exit` are commands. `name`: the heading to print (`heading`).
    """
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - line editing for input()

        console.print(
            f"{name}. Each question is answered without the previous ones. Ctrl-C stops a reply, /exit ends the chat.",
            style="dim",
        )
    while True:
        try:
            query = input("> " if interactive else "").strip()
        except EOFError:
            return
        if not query:
            continue
        # From a pipe every line is a question, also one that begins with a slash.
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
    """Print a reply while it is generated: dim reasoning, plain answer, then the number of tokens and the speed."""
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
            # A model may write terminal escapes, and brackets that Rich would read as markup.
            console.print(Text(visible(text), style="dim" if part == "thinking" else ""), end="", soft_wrap=True)
    cut = "" if answer.finished else ", cut at --max-tokens"
    note = f"[{answer.tokens} tokens in {answer.seconds:.2f} s{answer.speed()}{cut}]"
    console.print(f"\n{note}" if console.is_terminal else "", style="dim")


def answer_as_json(chat: Chat, query: str) -> dict[str, Any]:
    """A reply as JSON data: query, thinking, answer (None if the thinking did not end), tokens, finished, seconds."""
    answer = ChatAnswer(query)
    for _ in chat.ask(answer):
        pass
    return {name: value for name, value in asdict(answer).items() if not name.startswith("first_")}
