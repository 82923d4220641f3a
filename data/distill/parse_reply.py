"""What a teacher wrote, out of its reply: JSON as asked, or one of the forms that models fall into instead.

Tried in turn, the first that gives an answer is taken: JSON objects anywhere in the text, the last one first (a model
that thinks aloud repeats the form before it fills it in), then mended ones (a trailing comma, curly quotes, single
quotes), then a closed thought and what follows it, then headings. Nothing is invented: without an answer there is no
draft, and a reply that breaks off inside its object is none.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data.chat_template import parse_text

LONGEST = 200_000  # characters of a reply that are looked at
MOST_OBJECTS = 64
_REASONING = ("reasoning", "synthetic_reasoning", "reasoning_trace", "rationale", "thinking", "thought", "thoughts")
_ANSWER = ("answer", "synthetic_answer", "final_answer", "response", "output")
_DECODER = json.JSONDecoder(strict=False)
_CHANNEL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?:<\|(?:end|return|call)\|>|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"</think>|<\|think_end\|>|\[/THINK\]")
_HEADING = re.compile(
    r"^[ \t>#*_]*(?P<name>reasoning(?: trace)?|thinking|thought process|final answer|answer)[ \t*_]*:[ \t*_]*"
    r"|^[ \t]*(?:#{1,6}[ \t]+|\*\*)(?P<bare>reasoning(?: trace)?|final answer|answer)[ \t*_]*$",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class ParsedDocument:
    """What a teacher wrote."""

    reasoning: str
    answer: str


def parse_reply(text: str) -> ParsedDocument | None:
    """The draft in a reply; None if there is none, or a field is missing or is no text."""
    text = text[:LONGEST]
    if final := _CHANNEL.findall(text):
        text = final[-1]
    has_object = False
    for value in _objects(text):
        has_object = True
        if (draft := _draft(value)) is not None:
            return draft
    if has_object or "{" in text:
        return None
    if _THOUGHT.search(text):
        reply = parse_text(text.replace("[THINK]", "<think>").replace("[/THINK]", "</think>"))
        return ParsedDocument(reply.reasoning, reply.answer) if reply.answer is not None else None
    return _under_headings(text)


def _objects(text: str) -> Iterator[dict]:
    """The JSON objects of a text, the last first; then those that only need mending; then one inside a string."""
    whole = list(_whole(text))
    yield from reversed(whole)
    if whole:
        return
    start, end = text.find("{"), text.rfind("}")
    if 0 <= start < end:
        yield from filter(None, map(_mended, (text[start : end + 1],)))
    if text.lstrip().startswith('"'):
        try:
            inner = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(inner, str):
            yield from reversed(list(_whole(inner)))


def _whole(text: str) -> Iterator[dict]:
    at, tried = text.find("{"), 0
    while at >= 0 and tried < MOST_OBJECTS:
        tried += 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict):
                yield value
        at = text.find("{", end)


def _mended(text: str) -> dict | None:
    """An object with one of the faults that are common and harmless; None if that is not what is wrong."""
    commas = re.sub(r",\s*(?=[}\]])", "", text)
    straight = commas.translate({0x201C: '"', 0x201D: '"'})
    for candidate in (commas, straight):
        try:
            value = json.loads(candidate, strict=False)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    if "'" not in text or len(text) > 50_000:
        return None
    try:
        value = ast.literal_eval(text)  # a Python dict: literals only, nothing is run
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _draft(value: dict) -> ParsedDocument | None:
    fields = {str(name).strip().lower().replace(" ", "_"): one for name, one in value.items()}
    answer = _text(next((fields[name] for name in _ANSWER if name in fields), None))
    if answer is None:
        inside = [one for one in value.values() if isinstance(one, dict)]
        return _draft(inside[0]) if len(inside) == 1 and len(value) == 1 else None
    given = next((fields[name] for name in _REASONING if name in fields), "")
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        given = "\n".join(given)  # steps
    reasoning = _text(given)
    return None if reasoning is None else ParsedDocument(reasoning.strip(), answer.strip())


def _text(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def _under_headings(text: str) -> ParsedDocument | None:
    """`Reasoning: … Answer: …`, each once and in this order."""
    found = list(_HEADING.finditer(text))
    names = [(match["name"] or match["bare"]).lower() for match in found]
    if len(found) != 2 or names[1] not in ("answer", "final answer") or names[0] in ("answer", "final answer"):
        return None
    reasoning, answer = text[found[0].end() : found[1].start()], text[found[1].end() :]
    return ParsedDocument(reasoning.strip(), answer.strip())
