"""Parse a teacher's reply into a document: the requested JSON, or a form that models use instead.

What a model only thinks (`data.chat_template.parse_text`) is no part of its reply. In the rest, the forms are tried in
this order: JSON objects, the last one first (a model may repeat the format before it fills it in), with LaTeX and
common mistakes read as they were meant (`data.reply_objects`); a closed thought and the text after it; headings.
Nothing is invented: a reply without an answer, one that ends inside its object or its thoughts, and one that can be
read in two ways give no document.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nautile.data.chat_template import THINK_END, parse_text
from nautile.data.reply_objects import ReplyObject, reply_objects

MAX_CHARACTERS = 200_000  # of a reply; the rest is ignored
_REASONING = ("reasoning", "synthetic_reasoning", "reasoning_trace", "rationale", "thinking", "thought", "thoughts")
_ANSWER = ("answer", "synthetic_answer", "final_answer", "response", "output")
# The beginning of an object with one of these fields. Other braces are text: a set, LaTeX, code.
_ATTEMPT = re.compile(
    rf"\{{\s*[\"'“‘]?\s*(?:{'|'.join((*_REASONING, *_ANSWER)).replace('_', '[ _]')}|document)\s*[\"'”’]?\s*:",
    re.IGNORECASE,
)
# Both parts between tags of their names.
_TAGS = re.compile(
    r"\s*<(?:reasoning|thinking|thought)>(.*?)</(?:reasoning|thinking|thought)>\s*<answer>(.*?)</answer>\s*", re.DOTALL
)
_BLOCK_OF_YAML = re.compile(r"\s*[|>][+-]?\s*\n")  # "reasoning: |", whose text is indented
_WRAPPED = re.compile(r"<(answer|response)>(.*)</\1>", re.DOTALL)
# "**Reasoning:** because …" or a line of its own, "## Final answer".
_HEADING = re.compile(
    r"^[ \t>#*_]*(?P<name>reasoning(?: trace)?|thinking|thought process|final answer|answer)[ \t*_]*:[ \t*_]*"
    r"|^[ \t]*(?:#{1,6}[ \t]+|\*\*)(?P<bare>reasoning(?: trace)?|final answer|answer)[ \t*_]*$",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class ParsedDocument:
    reasoning: str
    answer: str


def parse_reply(text: str) -> ParsedDocument | None:
    """The document in a reply; None if there is none, or if a field is missing, no text or ambiguous."""
    document = read_reply(text)
    return document if isinstance(document, ParsedDocument) else None


def read_reply(text: str) -> ParsedDocument | Literal["empty", "truncated", "ambiguous", "unparsable"]:
    """The document in a reply, or why there is none.

    It is empty, it ends inside its thoughts or its JSON object, it can be read in two ways, or it has an unknown form.
    """
    text = text[:MAX_CHARACTERS].removeprefix("\ufeff").replace("\r\n", "\n")
    if not text.strip():
        return "empty"
    reply = parse_text(text)
    thought, final = reply.reasoning, reply.answer
    if (attempt := _ATTEMPT.search(thought)) and _is_open(thought[attempt.start() :]):
        thought, final = "", text  # the mark that ends a thought stands in a string of the object
    if final is None:
        return "truncated"
    objects = _objects(final)
    documents = [(item, document) for item in objects if (document := _from_object(item.value)) is not None]
    if documents:
        last, document = documents[-1]
        is_ambiguous = last.ambiguous or _is_one_of_several(final, documents)
        return "ambiguous" if is_ambiguous else document
    # It tried to write an object and failed. Its fields must not be taken for headings, and half an answer is none.
    if (objects and final.lstrip().startswith(("{", "```"))) or _ATTEMPT.search(final):
        return "truncated" if _is_open(final) else "unparsable"
    if thought or THINK_END.search(text):
        wrapped = _WRAPPED.fullmatch(final.strip())
        return ParsedDocument(thought, (wrapped[2] if wrapped else final).strip())
    if tags := _TAGS.fullmatch(final):
        return ParsedDocument(tags[1].strip(), tags[2].strip())
    return _under_headings(final) or ("truncated" if _is_open(final) else "unparsable")


def _objects(text: str) -> Sequence[ReplyObject]:
    """The JSON objects in a text; those inside it if it is one JSON string."""
    objects = reply_objects(text)
    if not any(_from_object(item.value) for item in objects) and text.lstrip().startswith('"'):
        try:
            inner = json.loads(text)
        except (ValueError, RecursionError):
            return objects
        if isinstance(inner, str):
            return reply_objects(inner)
    return objects


def _is_one_of_several(text: str, documents: Sequence[tuple[ReplyObject, ParsedDocument]]) -> bool:
    """Whether the last document follows another one with no word between them: a list, of which none is the answer."""
    if len(documents) < 2:
        return False
    (before, earlier), (last, document) = documents[-2:]
    between = text[before.end : last.begin].replace("json", "")
    is_filled_in = any(character.isalnum() for character in earlier.answer)
    return is_filled_in and earlier != document and not any(character.isalnum() for character in between)


def _is_open(text: str) -> bool:
    """Whether a text ends inside the object that begins with its first brace."""
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
                return False
    return depth > 0


def _from_object(value: dict) -> ParsedDocument | None:
    """The document in an object, or in the object that is its only field."""
    fields = _fields(value)
    if len(fields) < len(value):  # "Answer" and "answer"
        return None
    while (answer := _text(next((fields[name] for name in _ANSWER if name in fields), None))) is None:
        (inner,) = fields.values() if len(fields) == 1 else (None,)
        if not isinstance(inner, dict):
            return None
        fields = _fields(inner)
    reasoning = next((fields[name] for name in _REASONING if name in fields), "")
    if isinstance(reasoning, list) and all(isinstance(step, str) for step in reasoning):
        reasoning = "\n".join(reasoning)
    reasoning = _text(reasoning)
    return None if reasoning is None else ParsedDocument(reasoning.strip(), answer.strip())


def _fields(value: dict) -> dict[str, Any]:
    return {str(name).strip().lower().replace(" ", "_"): field for name, field in value.items()}


def _text(value: Any) -> str | None:
    # No float: those of JSON come as they were written, and those of a Python dict are rounded.
    if isinstance(value, int) and not isinstance(value, bool):
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
    if any(_BLOCK_OF_YAML.match(part) for part in (reasoning, answer)):
        return None
    return ParsedDocument(reasoning.strip(), answer.strip())
