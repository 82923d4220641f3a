"""The page of a web export in Chromium, asked what `nautile chat --temperature 0` is asked.

As a program: `python -m tests.support.pages.page_check CHECKPOINT [--bits N] QUESTION...` exports the checkpoint in a
folder, prints both replies to each question, and exits with 1 if any two differ.
"""

import argparse
import functools
import http.server
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nautile.flows.chat import Chat, ChatSettings
from nautile.flows.cli.chat import answer_as_json
from nautile.model.exports.web.folder import export_web
from nautile.model.runtimes.load import load_runtime
from tests.support.pages.browser import chromium, watch


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Python's own file server, as `nautile export` names it."""

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def opened_page(folder: Path) -> Iterator[tuple[Any, list[str]]]:
    """The page, ready for a question, and a list that collects what must not happen: errors and foreign requests."""
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as context:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        violations = watch(context)
        page = context.new_page()
        page.on("pageerror", lambda error: violations.append(str(error)))
        page.on("console", lambda message: violations.append(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        page.locator("#question:enabled").wait_for()
        yield page, violations
        server.shutdown()
    violations[:] = [line for line in violations if "favicon" not in line]


def page_reply(page: Any, question: str) -> dict[str, Any]:
    """The reply, as `answer_as_json` has that of the command, and the status line."""
    page.locator("#question").fill(question)
    page.locator("#ask").click()
    page.locator("body[data-finished]").wait_for()
    status = page.locator("#status").text_content()
    return {
        "thinking": page.locator("#thinking").text_content(),
        "answer": page.locator("#answer").text_content() or None,
        "finished": page.locator("body").get_attribute("data-finished") == "yes",
        "tokens": int(status.split()[0]),
        "status": status,
    }


def both_replies(checkpoint: Path, folder: Path, questions: list[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The replies of the command and of the page, where `folder` is the web export of `checkpoint`."""
    chat = Chat(load_runtime("jax", checkpoint), ChatSettings(temperature=0))
    commands = [answer_as_json(chat, question) for question in questions]
    with opened_page(folder) as (page, violations):
        pages = [page_reply(page, question) for question in questions]
    assert not violations, violations
    assert all("MiB" in reply["status"] for reply in pages)
    fields = ("thinking", "answer", "finished", "tokens")
    kept = [{name: reply[name] or None for name in fields} for reply in (*commands, *pages)]
    return list(zip(kept[: len(questions)], kept[len(questions) :], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--bits", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        export_web(asked.checkpoint, Path(scratch) / "page", asked.bits)
        pairs = both_replies(asked.checkpoint, Path(scratch) / "page", asked.questions)
    for question, (command, page) in zip(asked.questions, pairs, strict=True):
        sys.stdout.write(f"{question}\n  command: {command}\n  page:    {page}\n")
    same = sum(command == page for command, page in pairs)
    sys.stdout.write(f"{same} of {len(pairs)} replies are the same\n")
    sys.exit(same < len(pairs))


if __name__ == "__main__":
    main()
