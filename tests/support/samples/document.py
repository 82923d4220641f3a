"""A page of documentation as what can be tried: the files that it shows, its commands, and the output below each.

A file is a code block after a line "`NAME`: …". A block of `console` has commands, lines that begin with `$ ` and go on
in lines that begin with `> `, each with its output below it, in which numbers may differ and `…` stands for anything,
also for several lines. A comment `<!-- not tried: WHY -->` above a block says why its commands are not run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_BLOCK = re.compile(
    r"(?:^`(?P<name>[\w./-]+)`[^\n]*:\n\n)?(?:^<!-- not tried: (?P<untried>[^\n]+) -->\n)?"
    r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_ID = re.compile(r"[a-z_]+/[0-9a-f]{12}\b")
_FREE = re.compile(rf"(?P<id>{_ID.pattern})|(?P<any>\s*…\s*)|(?P<number>-?\d[\d,]*(?:\.\d+)?)|(?P<space>\s+)")


@dataclass
class Command:
    """A command, and the lines of output that the page shows below it."""

    words: str
    untried: str | None = None  # why it is not run
    shown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ShownFile:
    """A file that the page shows whole."""

    name: str
    text: str


@dataclass(frozen=True)
class Settings:
    """Tables of a configuration, to be added to one."""

    text: str


@dataclass(frozen=True)
class Script:
    """A program in Python."""

    text: str


Item = Command | ShownFile | Settings | Script


def sections(page: str) -> dict[str, list[Item]]:
    """What each section of a page has, in order."""
    parts = _HEADING.split(page)
    return {title: list(_items(text)) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def _items(text: str) -> Iterator[Item]:
    for block in _BLOCK.finditer(text):
        if block["name"]:
            yield ShownFile(block["name"], block["text"])
        elif block["kind"] == "python":
            yield Script(block["text"])
        elif block["kind"] == "toml":
            yield Settings(block["text"])
        elif block["kind"] == "console":
            commands: list[Command] = []
            for line in block["text"].splitlines():
                if line.startswith("$ "):
                    commands.append(Command(line[2:], block["untried"]))
                elif line.startswith("> "):
                    commands[-1].words += f"\n{line[2:]}"
                else:
                    commands[-1].shown.append(line)
            yield from commands


def match_output(shown: list[str], output: str) -> dict[str, str] | None:
    """The ids of an output by those on the page; None if it is not of the form shown. Nothing shown: any will do."""
    if not shown:
        return {}
    ids: list[str] = []
    expected = "\n".join(" ".join(line.split()) for line in shown if line.strip())

    def free(match: re.Match[str]) -> str:
        if match["id"]:
            ids.append(match["id"])
            return rf"({match['id'].partition('/')[0]}/[0-9a-f]{{12}})"
        if match["any"]:
            return "(?s:.*)"
        return r"-?\d[\d,.]*" if match["number"] else r"\s+"

    pattern, end = "", 0
    for match in _FREE.finditer(expected):
        pattern += re.escape(expected[end : match.start()]) + free(match)
        end = match.end()
    matched = re.fullmatch(pattern + re.escape(expected[end:]), output.strip())
    return None if matched is None else dict(zip(ids, matched.groups(), strict=True))


def with_ids(command: str, ids: dict[str, str]) -> str:
    """The command with ids of this store in place of the page's. Raises `KeyError` for one that nothing has printed."""
    return _ID.sub(lambda match: ids[match.group()], command)
