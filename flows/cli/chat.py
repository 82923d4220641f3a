"""`nautile chat`: send questions to a checkpoint, and print its reasoning and answer while they are generated."""

import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from nautile.common.errors import ConfigError
from nautile.common.files import read_json
from nautile.common.text import visible
from nautile.flows.chat import Chat, ChatAnswer
from nautile.flows.serve.token_stream import Part
from nautile.store.manifest import MANIFEST


def heading(folder: Path, name: str) -> str:
    """The heading of a chat: the checkpoint's name, and for an artifact the step and run that made it, and the time."""
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict):
        return name
    created = datetime.fromisoformat(manifest["created"]).astimezone()
    if manifest["stage"] == "snapshot":
        by = f"saved after {manifest['facts']['steps']} steps of an unfinished pretraining"
    else:
        by = f"made by {manifest['label']}" + (f" of run {manifest['run'][:8]}" if manifest.get("run") else "")
    return f"{name}, {by} on {created:%Y-%m-%d at %H:%M}"


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
