"""The callback `emit(kind, **fields)` by which library functions report metrics and progress, independent of the store.

Kinds: `metric` (name, step, value), `sample` (index, fields of a rollout, trace or evaluated item), `call` (an attempt
at an endpoint) and `progress` (done, total, unit, note). `metric`, `sample` and `call` become rows of the catalog;
`progress` only updates the progress bar.

An `Emit` may have two further methods, which `emit_all` and `flush` use if they exist: `many(kind, rows)` writes
several events with one fsync, and `sync()` fsyncs everything written so far.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Emit(Protocol):
    """Accepts an event. It must be safe to call from several threads, and may block only on a local file."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


def emit_all(emit: Emit, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Emit several events of one kind, in one write if `emit` supports it."""
    many = getattr(emit, "many", None)
    if rows and many is not None:
        many(kind, rows)
        return
    for row in rows:
        emit(kind, **row)


def flush(emit: Emit) -> None:
    """Fsync all emitted events.

    Call it before a checkpoint is saved: if a crash lost metrics from before the checkpoint, a resumed run would not
    emit them again.
    """
    sync = getattr(emit, "sync", None)
    if sync is not None:
        sync()


def silent(kind: str, **fields: Any) -> None:
    """An `Emit` that discards all events, for notebooks and tests that only use return values."""
