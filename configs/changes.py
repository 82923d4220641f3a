"""Differences between a run's configuration and its base, for the terminal, the dashboard and sweeps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nautile.common.text import amount, visible

MOST_SHOWN = 3  # changes in a one-line description
LONGEST = 24  # characters of a value in the description


@dataclass(frozen=True)
class Change:
    """A field whose value differs: its path as for `--set`, and both values as JSON data."""

    field: str
    before: Any
    after: Any


def read_changes(text: str | None) -> list[Change]:
    """The changes in a column `changes` of the catalog, which is a JSON list, or null."""
    return [Change(entry["field"], entry["before"], entry["after"]) for entry in json.loads(text or "[]")]


def describe_changes(changes: Sequence[Change], most: int | None = MOST_SHOWN) -> str:
    """Describe changes in one line, such as `steps 30 -> 3, seed 0 -> 1`; "" without changes. `most` None: all.

    Field names are shortened to the last parts of their path, as far as they stay unique among the changed fields.
    """
    shown = changes if most is None else changes[:most]
    names = short_names([change.field for change in changes])
    texts = [f"{names[change.field]} {_value(change.before)} -> {_value(change.after)}" for change in shown]
    more = [f"and {len(changes) - len(shown)} more"] if len(changes) > len(shown) else []
    return ", ".join(texts + more)


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """Path -> its shortest unique ending; the ending of a list's entry begins at the list's name."""
    paths = {field: field.split(".") for field in fields}
    names = {}
    for field, parts in paths.items():
        count = 1
        while count < len(parts) and (
            parts[-count].isdecimal()
            or any(other[-count:] == parts[-count:] for name, other in paths.items() if name != field)
        ):
            count += 1
        names[field] = ".".join(parts[-count:])
    return names


def differences(before: Any, after: Any, path: str = "") -> Iterator[Change]:
    """All differences between two nested JSON values. `path`: the path of the values themselves."""
    keys: Sequence[str | int] | None = None  # None: not compared entry by entry
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        keys = [*before, *(name for name in after if name not in before)]
        before, after = ({name: side.get(name) for name in keys} for side in (before, after))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        keys = range(len(before))
    if keys is None:
        if before != after:
            yield Change(path, before, after)
        return
    for key in keys:
        yield from differences(before[key], after[key], f"{path}.{key}" if path else str(key))


def _value(value: Any) -> str:
    """A value as short text."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and abs(value) >= 100_000:
        return amount(value)
    if isinstance(value, (list, Mapping)):
        return f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
    text = f"{value:g}" if isinstance(value, float) else visible(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
