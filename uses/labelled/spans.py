"""Named entities of a text: read them from a list of spans or from BIO tags, write them as the target JSON."""

import json
from collections.abc import Sequence
from typing import Any

from nautile.common.errors import ConfigError

Entity = tuple[str, str]  # its text, a substring of the row's text, and its label


def entity_row(text: str, value: Any, where: str) -> list[Entity]:
    """Parse `value`, a list (or its JSON) of {text, label} or {start, end, label}, with positions in characters.

    Raises `ConfigError`, beginning with `where`, for another value, and for a span that the text does not contain.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: the entities are not JSON") from None
    if not isinstance(value, list):
        raise ConfigError(f"{where}: the entities must be a list of {{text, label}}")
    entities = []
    for number, entity in enumerate(value, 1):
        part = f"{where}, entity {number}"
        if not isinstance(entity, dict) or not isinstance(entity.get("label"), str) or not entity["label"]:
            raise ConfigError(f"{part}: must have a `label`, and a `text` or `start` and `end`")
        start, end, words = entity.get("start"), entity.get("end"), entity.get("text")
        if type(start) is int and type(end) is int:
            if not 0 <= start < end <= len(text) or (words is not None and text[start:end] != words):
                raise ConfigError(f"{part}: characters {start} to {end} of the text are not {words!r}")
            words = text[start:end]
        if not isinstance(words, str) or not words or words not in text:
            raise ConfigError(f"{part}: its text {words!r} does not occur in the row's text")
        entities.append((words, entity["label"]))
    return entities


def spans_of_tags(
    tokens: Sequence[Any], tags: Sequence[Any], names: Sequence[str], where: str
) -> tuple[str, list[Entity]]:
    """Join `tokens` by spaces and convert BIO `tags` (names, or indexes into `names`) to entities.

    As in CoNLL's scorer, an I tag of another type than the preceding tag begins an entity. Raises `ConfigError`.
    """
    if not isinstance(tags, list) or len(tokens) != len(tags) or not all(isinstance(t, str) for t in tokens):
        raise ConfigError(f"{where}: needs as many tags as tokens, and tokens that are texts")
    spans: list[tuple[int, int, str]] = []
    previous = "O"
    for i, value in enumerate(tags):
        if isinstance(value, int) and not 0 <= value < len(names):
            raise ConfigError(f"{where}: tag {value} has no name; give them all in order as `label_names`")
        tag = names[value] if isinstance(value, int) else str(value)
        prefix, _, kind = tag.partition("-")
        if tag != "O" and (prefix not in ("B", "I") or not kind):
            raise ConfigError(f"{where}: tag {tag!r} is neither O, B-TYPE nor I-TYPE")
        if prefix == "I" and previous.partition("-")[2] == kind:
            spans[-1] = (spans[-1][0], i + 1, kind)
        elif tag != "O":
            spans.append((i, i + 1, kind))
        previous = tag
    text = " ".join(tokens)
    if not text.strip():
        raise ConfigError(f"{where}: has no tokens")
    return text, [(" ".join(tokens[start:end]), kind) for start, end, kind in spans]


def entity_json(entities: Sequence[Entity]) -> str:
    """The target reply: a JSON list of {text, label} in the given order."""
    return json.dumps([{"text": words, "label": label} for words, label in entities], ensure_ascii=False)
