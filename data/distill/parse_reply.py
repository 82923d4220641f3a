"""Parse a teacher's reply into a document: JSON as requested, or one of the forms that models use instead.

The first form that gives an answer is taken: JSON objects anywhere in the text, the last one first (a model that thinks
aloud repeats the form before it fills it in), then JSON with common mistakes (a trailing comma, curly quotes, single
quotes), then a closed thought and what follows it, then headings. Nothing is made up: without an answer there is no
document, and neither is there for a reply that breaks off inside its object.
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
    """A teacher's reasoning and answer."""

    reasoning: str
    answer: str


def parse_reply(text: str) -> ParsedDocument | None:
    """The document in a reply; None if there is none, or a field is missing or is not text."""
    text = text[:MAX_CHARACTERS]
    if final := _CHANNEL.findall(text):
        text = final[-1]
    has_object = False
    for value in _objects(text):
        has_object = True
        if (document := _from_object(value)) is not None:
            return document
    if has_object or "{" in text:
        return None
    if _THOUGHT.search(text):
        reply = parse_text(text.replace("[THINK]", "<think>").replace("[/THINK]", "</think>"))
        return ParsedDocument(reply.reasoning, reply.answer) if reply.answer is not None else None
    return _under_headings(text)


def reason_without_document(text: str) -> Literal["empty", "truncated", "unparsable"]:
    """Why there is no document in a reply: it has no text, it breaks off inside an object, or it is of another form."""
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
    """The JSON objects of a text, the last first; if there are none, a repaired one, then one inside a JSON string."""
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
    at, tried = text.find("{"), 0
    while at >= 0 and tried < MAX_OBJECTS:
        tried += 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict):
                yield value
        at = text.find("{", end)


def _repaired(text: str) -> dict | None:
    """An object with one of the mistakes that are common and harmless; None if something else is wrong."""
    commas = re.sub(r",\s*(?=[}\]])", "", text)
    straight = commas.translate({0x201C: '"', 0x201D: '"'})
    for candidate in (commas, straight):
        try:
            value = json.loads(candidate, strict=False)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    if "'" not in text or len(text) > MAX_LITERAL:
        return None
    try:
        value = ast.literal_eval(text)  # a Python dict: literals only, nothing is executed
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return value if isinstance(value, dict) else None


def _from_object(value: dict) -> ParsedDocument | None:
    """The document in an object, or in the only field of it."""
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
        return str(value)
    return value if isinstance(value, str) else None


def _under_headings(text: str) -> ParsedDocument | None:
    """`Reasoning: … Answer: …`, each once and in this order."""
    headings = list(_HEADING.finditer(text))
    names = [(heading["name"] or heading["bare"]).lower() for heading in headings]
    if len(headings) != 2 or names[1] not in ("answer", "final answer") or names[0] in ("answer", "final answer"):
        return None
    reasoning, answer = text[headings[0].end() : headings[1].start()], text[headings[1].end() :]
    return ParsedDocument(reasoning.strip(), answer.strip())
