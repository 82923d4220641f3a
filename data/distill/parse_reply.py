"""Parse a teacher's reply into a document: the requested JSON, or a form that models use instead.

The forms are tried in this order: JSON objects anywhere in the text, the last one first (a model that thinks aloud may
repeat the format before it fills it in); JSON with common mistakes (a trailing comma, curly quotes, single quotes); a
closed thought and the text after it; headings. Nothing is invented: a reply without an answer, or one that ends inside
its object, gives no document.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from data.chat_template import parse_text

MAX_CHARACTERS = 200_000  # of a reply; the rest is ignored
MAX_OBJECTS = 64
MAX_LITERAL = 50_000  # characters of a Python dict; its parser is slow
_REASONING = ("reasoning", "synthetic_reasoning", "reasoning_trace", "rationale", "thinking", "thought", "thoughts")
_ANSWER = ("answer", "synthetic_answer", "final_answer", "response", "output")
# Not strict: models write line breaks into their strings, which JSON forbids.
_DECODER = json.JSONDecoder(strict=False)
# The answer in the "harmony" format of gpt-oss, some servers of which pass on the channels as text.
_CHANNEL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?:<\|(?:end|return|call)\|>|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"</think>|<\|think_end\|>|\[/THINK\]")
# "**Reasoning:** because …" or a line of its own, "## Final answer".
_HEADING = re.compile(
    r"^[ \t>#*_]*(?P<name>reasoning(?: trace)?|thinking|thought process|final answer|answer)[ \t*_]*:[ \t*_]*"
    r"|^[ \t]*(?:#{1,6}[ \t]+|\*\*)(?P<bare>reasoning(?: trace)?|final answer|answer)[ \t*_]*$",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class ParsedDocument:
    """A teacher's reasoning and answer."""

    reasoning: str
    answer: str


def parse_reply(text: str) -> ParsedDocument | None:
    """The document in a reply; None if there is none, or if a field is missing or no text."""
    text = text[:MAX_CHARACTERS]
    if final := _CHANNEL.findall(text):
        text = final[-1]
    has_object = False
    for value in _objects(text):
        has_object = True
        if (document := _from_object(value)) is not None:
            return document
    # It tried to write an object and failed. Its fields must not be taken for headings, and half an answer is none.
    if has_object or "{" in text:
        return None
    if _THOUGHT.search(text):
        reply = parse_text(text.replace("[THINK]", "<think>").replace("[/THINK]", "</think>"))
        return ParsedDocument(reply.reasoning, reply.answer) if reply.answer is not None else None
    return _under_headings(text)


def reason_without_document(text: str) -> Literal["empty", "truncated", "unparsable"]:
    """Why a reply has no document: it is empty, it ends inside a JSON object, or it has an unknown form."""
    if not text.strip():
        return "empty"
    depth, in_string, escaped = 0, False, False
    for character in text[text.find("{") :] if "{" in text else "":
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        else:
            depth += (character in "{[") - (character in "}]")
            if depth == 0:  # the object is complete, whatever follows it
                return "unparsable"
    return "truncated" if depth > 0 else "unparsable"


def _objects(text: str) -> Iterator[dict]:
    """The JSON objects in a text, the last first; without any, a repaired one, then those inside a JSON string."""
    valid = list(_valid_objects(text))
    yield from reversed(valid)
    if valid:
        return
    start, end = text.find("{"), text.rfind("}")
    if 0 <= start < end and (repaired := _repaired(text[start : end + 1])):
        yield repaired
    if text.lstrip().startswith('"'):
        try:
            inner = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(inner, str):
            yield from reversed(list(_valid_objects(inner)))


def _valid_objects(text: str) -> Iterator[dict]:
    """The valid JSON objects in a text that are not inside another one; at most `MAX_OBJECTS` positions are tried."""
    start, attempts = text.find("{"), 0
    while start >= 0 and attempts < MAX_OBJECTS:
        attempts += 1
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            if isinstance(value, dict):
                yield value
        start = text.find("{", end)


def _repaired(text: str) -> dict | None:
    """Parse an object with a common and harmless mistake; None if something else is wrong."""
    without_commas = re.sub(r",\s*(?=[}\]])", "", text)
    with_straight_quotes = without_commas.translate({0x201C: '"', 0x201D: '"'})
    for candidate in (without_commas, with_straight_quotes):
        try:
            value = json.loads(candidate, strict=False)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    if "'" not in text or len(text) > MAX_LITERAL:
        return None
    try:
        value = ast.literal_eval(text)  # a Python dict; only literals are evaluated, no code
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _from_object(value: dict) -> ParsedDocument | None:
    """The document in an object, or in the object that is its only field."""
    fields = {str(name).strip().lower().replace(" ", "_"): field for name, field in value.items()}
    answer = _text(next((fields[name] for name in _ANSWER if name in fields), None))
    if answer is None:
        (inner,) = value.values() if len(value) == 1 else (None,)
        return _from_object(inner) if isinstance(inner, dict) else None
    reasoning = next((fields[name] for name in _REASONING if name in fields), "")
    if isinstance(reasoning, list) and all(isinstance(step, str) for step in reasoning):
        reasoning = "\n".join(reasoning)
    reasoning = _text(reasoning)
    return None if reasoning is None else ParsedDocument(reasoning.strip(), answer.strip())


def _text(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError:  # a Python literal "0xff…" of more than the 4,300 decimal digits that str() writes
            return None
    return value if isinstance(value, str) else None


def _under_headings(text: str) -> ParsedDocument | None:
    """The document in `Reasoning: … Answer: …`; each heading must occur once and in this order."""
    headings = list(_HEADING.finditer(text))
    names = [(heading["name"] or heading["bare"]).lower() for heading in headings]
    if len(headings) != 2 or names[1] not in ("answer", "final answer") or names[0] in ("answer", "final answer"):
        return None
    reasoning, answer = text[headings[0].end() : headings[1].start()], text[headings[1].end() :]
    return ParsedDocument(reasoning.strip(), answer.strip())
