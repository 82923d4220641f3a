"""Progress and metrics of plain functions: a callable `emit(kind, **fields)` is passed in, so that they know no store.

Kinds: `metric` (name, step, value), `sample` (index, fields of one rollout, trace or evaluated item), `call` (one
attempt at an endpoint) and `progress` (done, total, unit, note). `metric`, `sample` and `call` become catalog rows;
`progress` only moves the progress bar.

An `Emit` may have two more methods, which `emit_all` and `flush` use where they exist: `many(kind, rows)` writes
several events with one wait for the disk, `sync()` fsyncs everything written so far.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Emit(Protocol):
    """Takes one event. Must be safe to call from several threads and must not block on anything but a local file."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


def emit_all(emit: Emit, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Emit several events of one kind, in one write if `emit` can."""
    many = getattr(emit, "many", None)
    if rows and many is not None:
        many(kind, rows)
        return
    for row in rows:
        emit(kind, **row)


def flush(emit: Emit) -> None:
    """Fsync all emitted events. Call it before saving a checkpoint, so that a crash cannot keep the checkpoint but lose
    the metrics before it: a resumed run would not emit those again."""
    sync = getattr(emit, "sync", None)
    if sync is not None:
        sync()


def silent(kind: str, **fields: Any) -> None:
    """Drop the event: the `Emit` for notebooks and tests that look only at return values."""
