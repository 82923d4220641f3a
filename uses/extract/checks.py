"""Check extracted documents: valid JSON, valid by the schema, and marked strings occur in the text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
from jsonschema.protocols import Validator

from nautile.common.text import first_line
from nautile.data.json_schema import SPAN, Schema, parse_document, pointer_to, violation, with_spans

Reason = Literal["no_text", "too_long", "cut", "failed", "not_json", "schema", "span"]
REASONS: dict[Reason, str] = {
    "no_text": "the row has no text",
    "too_long": "text and reply do not fit into the context",
    "cut": "the reply reached its limit of tokens before its end",
    "failed": "the grammar exceeded its limits during decoding",
    "not_json": "the reply is not JSON",
    "schema": "the document is not valid by the schema",
    "span": "a string that must occur in the text does not",
}


@dataclass(frozen=True)
class Span:
    """A string of a document that occurs in the text: characters [start, end) of its first occurrence, and how many
    occurrences (`places`) it has."""

    path: str  # JSON pointer in the document
    start: int
    end: int
    places: int


@dataclass(frozen=True)
class Extraction:
    """The result of a reply. `document`: its JSON text as the model wrote it; None if it was refused for `reason`."""

    document: str | None
    spans: tuple[Span, ...] = ()
    reason: Reason | None = None
    detail: str = ""


class ReplyChecker:
    """Checks replies against one schema, which `validator` implements.

    `spans`: "all" treats every string, except enumerations and constants, as if the schema marked it with `x-span`.
    """

    def __init__(self, validator: Validator, schema: Schema, spans: Literal["marked", "all"]) -> None:
        self._validator = validator
        marked = schema if spans == "marked" else with_spans(schema)
        # A validator whose keyword `x-span` reports an "error" for each string that it applies to, with its path.
        marker_class = jsonschema.validators.extend(type(validator), {SPAN: _mark})
        self._marker = marker_class(marked, format_checker=validator.format_checker)

    def check(self, text: str, reply: str) -> Extraction:
        """Check a complete reply to `text`."""
        try:
            value = parse_document(reply)
        except (ValueError, RecursionError) as error:
            return Extraction(None, reason="not_json", detail=first_line(error)[:200])
        # The JSON parser accepts deeper documents than jsonschema, which follows a recursive schema by recursion.
        try:
            return self._check_value(text, reply, value)
        except RecursionError:
            return Extraction(None, reason="schema", detail="/: is nested too deep to be checked")

    def _check_value(self, text: str, reply: str, value: Any) -> Extraction:
        """Check the parsed reply by the schema, and its marked strings against the text."""
        if (detail := violation(self._validator, value)) is not None:
            return Extraction(None, reason="schema", detail=detail)
        # Every marked string must occur in the text; an empty one has no span.
        spans = []
        # A set, because several branches of the schema may mark the same string.
        for path, words in sorted(
            {(pointer_to(mark), mark.instance) for mark in _marks(self._marker.iter_errors(value))}
        ):
            if words not in text:
                return Extraction(None, reason="span", detail=f"{path}: {words[:200]!r}")
            if words:
                start = text.index(words)
                spans.append(Span(path, start, start + len(words), text.count(words)))
        return Extraction(reply, tuple(spans))


def _mark(
    validator: Validator, keyword: Any, instance: Any, schema: Schema
) -> Iterator[jsonschema.exceptions.ValidationError]:
    if keyword is True and isinstance(instance, str):
        yield jsonschema.ValidationError(SPAN)


def _marks(errors: Any) -> Iterator[jsonschema.exceptions.ValidationError]:
    """The marks among validation errors, including those inside `anyOf` and the like."""
    for error in errors:
        if error.validator == SPAN:
            yield error
        yield from _marks(error.context or ())
