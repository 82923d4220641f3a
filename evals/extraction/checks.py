"""Check extracted documents: valid JSON, valid by the schema, and marked strings occur in the text."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
from jsonschema.protocols import Validator

from common.text import first_line
from data.json_schema import SPAN, Schema, with_spans

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
            value = json.loads(reply, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            return Extraction(None, reason="not_json", detail=first_line(error)[:200])
        # The JSON parser accepts deeper documents than jsonschema, which follows a recursive schema by recursion.
        try:
            return self._check_value(text, reply, value)
        except RecursionError:
            return Extraction(None, reason="schema", detail="/: is nested too deep to be checked")

    def _check_value(self, text: str, reply: str, value: Any) -> Extraction:
        """Check the parsed reply by the schema, and its marked strings against the text."""
        violation = jsonschema.exceptions.best_match(self._validator.iter_errors(value))
        if violation is not None:
            detail = f"{_pointer(violation) or '/'}: {violation.message[:200]}"
            return Extraction(None, reason="schema", detail=detail)
        # Every marked string must occur in the text; an empty one has no span.
        spans = []
        # A set, because several branches of the schema may mark the same string.
        for path, words in sorted(
            {(_pointer(mark), mark.instance) for mark in _marks(self._marker.iter_errors(value))}
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


def _pointer(error: jsonschema.exceptions.ValidationError) -> str:
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in error.absolute_path)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(members := dict(pairs)) < len(pairs):
        raise ValueError("an object has two members of the same name")
    return members
