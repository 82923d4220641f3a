"""How plain functions report: a callable `emit(kind, **fields)` handed to them, so that they know no store.

Kinds: `metric` (name, step, value), `sample` (index, fields of one rollout, trace or evaluated item), `call` (one
attempt at an endpoint) and `progress` (done, total, unit, note). `metric`, `sample` and `call` become catalog rows;
`progress` only moves the bar.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Emit(Protocol):
    """Takes one event. Must be safe to call from several threads and must not block on anything but a local file."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


def emit_all(emit: Emit, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Hand over several events: together, where the taker has a way (`many`) that waits for the disk only once."""
    many = getattr(emit, "many", None)
    if rows and many is not None:
        many(kind, rows)
        return
    for row in rows:
        emit(kind, **row)


def settle(emit: Emit) -> None:
    """Have all that was told on disk. To be called before a save after which it will not be told again: a power cut may
    else keep the save and lose the rows."""
    sync = getattr(emit, "sync", None)
    if sync is not None:
        sync()


def silent(kind: str, **fields: Any) -> None:
    """The `Emit` for notebooks and tests that look only at return values."""
