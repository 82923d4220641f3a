"""What a run changed against its base configuration: computed here for the terminal, the dashboard and sweeps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.text import amount, visible
from configs.schema import RunConfig

MOST_SHOWN = 3  # changes in a line of text
LONGEST = 24  # characters of a value in it


@dataclass(frozen=True)
class Change:
    """A field whose value differs: its path, as `--set` takes it, and both values as JSON has them."""

    field: str
    before: Any
    after: Any


def changed_settings(base: RunConfig, config: RunConfig) -> list[Change]:
    """Every field in which `config` differs from `base`, in the order of the sections; the name is no setting.

    Lists of one length are compared entry by entry, others as a whole.
    """
    before, after = (settings.model_dump(mode="json", exclude={"name"}) for settings in (base, config))
    return list(differences(before, after))


def describe_changes(changes: Sequence[Change], most: int | None = MOST_SHOWN) -> str:
    """The changes in one line, as `steps 30 -> 3, seed 0 -> 1`; empty without any. `most`: None shows all.

    A field is named by the last parts of its path that no other changed field ends in.
    """
    shown = changes if most is None else changes[:most]
    names = short_names([change.field for change in changes])
    texts = [f"{names[change.field]} {_value(change.before)} -> {_value(change.after)}" for change in shown]
    more = [f"and {len(changes) - len(shown)} more"] if len(changes) > len(shown) else []
    return ", ".join(texts + more)


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """Path -> the fewest last parts of it that tell it from the other paths; an entry of a list has its list's name."""
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
    """Every value in which two nested settings differ, as JSON has them; `path` is where they stand."""
    places: Sequence[str | int] | None = None
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        places = [*before, *(name for name in after if name not in before)]
        before, after = ({name: side.get(name) for name in places} for side in (before, after))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        places = range(len(before))
    if places is None:
        if before != after:
            yield Change(path, before, after)
        return
    for place in places:
        yield from differences(before[place], after[place], f"{path}.{place}" if path else str(place))


def _value(value: Any) -> str:
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
