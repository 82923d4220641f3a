"""Event files: metrics, samples, endpoint calls and states of a process, one JSON object per line.

Each process writes its own file, and the catalog is built from all of them. A line is written by one system call, so a
killed process loses no event that `EventWriter` has accepted. Events of kind `call` are fsynced too, because the cost
of a paid reply cannot be measured again. The ids of metrics and samples are derived from what they measure, so a stage
that resumes and repeats a step yields one row.
"""

import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nautile.common.files import is_full_or_read_only, make_folder, parse_json, read_json, sync_folder, write_json
from nautile.configs.base import fingerprint
from nautile.store.manifest import DEEPEST, LARGEST_EVENT, nests_too_deep

logger = logging.getLogger(__name__)

LIVE_EVERY_S = 0.3
LARGEST_FILE = 256 * 10**6  # bytes; then a new file begins, because a mirror sends a changed file whole
NAMED_BY_FIELD = ("run", "plan", "note")  # kinds whose field `id` is the row's id: a later event replaces the row
_LIVE_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("done", "total"), (int, float, type(None))),
    **dict.fromkeys(("unit", "note"), (str, type(None))),
    "metrics": dict,
}
READ_LIMIT = 8 * 2**20  # bytes read at a time


class EventWriter:
    """Writes the events of a process, as its `common.events.Emit`. Safe to call from several threads.

    When `path` has reached `LARGEST_FILE`, `<stem>.2.jsonl` follows, and so on. `live`: a small JSON file with the
    newest progress and metric values, for displays; it is replaced at most every 0.3 s. Raises `ValueError` for an
    event without its required fields, and `OSError` if the disk is full.
    """

    def __init__(self, path: Path, execution: str, *, stage: str = "", live: Path | None = None) -> None:
        self.path = path
        self.execution = execution
        self.stage = stage
        self._live_path = live
        self._live: dict[str, Any] = {"metrics": {}, "samples": 0, "calls": 0}
        self._live_at = -math.inf
        self._lock = threading.Lock()
        self._writer = uuid.uuid4().hex
        self._count = 0
        self._last_us = 0
        self._part = 1
        make_folder(path.parent)
        # A resumed attempt goes on in the newest part: the older ones may be at the remote already.
        while (path.parent / self._file_name(self._part + 1)).exists():
            self._part += 1
        self._descriptor: int | None = self._open_part()

    def _file_name(self, part: int) -> str:
        return self.path.name if part == 1 else f"{self.path.stem}.{part}{self.path.suffix}"

    def _open_part(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self.path.with_name(self._file_name(self._part)), flags, 0o666)
        self._size = os.fstat(descriptor).st_size
        if not self._size:
            sync_folder(self.path.parent)  # the file may be new, and without its entry there its events would be lost
        # A last line without a newline is incomplete, because of a crash.
        self._torn = self._size > 0 and os.pread(descriptor, 1, self._size - 1) != b"\n"
        return descriptor

    def __call__(self, kind: str, **fields: Any) -> None:
        """Write an event: metric, sample, call, run, plan or note; `progress` only updates the live file."""
        if kind == "progress":
            with self._lock:
                self._live.update(fields)
                self._update_live(now=fields.get("done") is not None and fields.get("done") == fields.get("total"))
            return
        if kind == "metric" and fields.get("value", 0) is None:
            return  # not measured: no row
        self.many(kind, [fields])

    def many(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write several events of one kind; calls are synced to disk by one fsync before this returns."""
        # Before the first write: a bad row is refused together with all others of its call.
        identities = [self._identity(kind, fields) for fields in rows]
        with self._lock:
            if self._descriptor is None:
                raise ValueError(f"{self.path}: the event file is closed")
            for fields, identity in zip(rows, identities, strict=True):
                self._append(kind, fields, identity)
        if kind == "call":
            self.sync()  # outside the lock, so that threads of several endpoints can wait for the disk together

    def _append(self, kind: str, fields: Mapping[str, Any], identity: list[Any] | None) -> None:
        """Write one event as a line. The caller holds the lock."""
        self._count += 1
        # Strictly increasing within a writer, so that of two events with the same id the newer one is known.
        self._last_us = max(self._last_us + 1, time.time_ns() // 1000)
        # What is measured again has the same id; every call has a new one.
        event = {
            "id": fingerprint(identity)[:32] if identity else f"{self._writer}-{self._count}",
            "kind": kind,
            "execution": self.execution,
            "stage": self.stage,
            "time": self._last_us,
            "fields": fields,
        }
        if kind in NAMED_BY_FIELD:
            event["id"] = str(fields["id"])
        line = to_json(event).encode() + b"\n"
        if len(line) > LARGEST_EVENT:
            stage = self.stage or "a stage"
            raise ValueError(f"an event {kind!r} of {stage} has {len(line)} bytes, over {LARGEST_EVENT}")
        # A line is never split over two files.
        if self._size + len(line) > LARGEST_FILE and self._size:
            self._begin_next_part()
        assert self._descriptor is not None
        # If only a part of the line is written (the disk is full), the next event begins a new line.
        unwritten = b"\n" + line if self._torn else line
        while unwritten:
            self._torn = True
            written = os.write(self._descriptor, unwritten)
            self._size += written
            unwritten = unwritten[written:]
        self._torn = False
        if kind == "metric":
            self._live["metrics"][str(fields["name"])] = float(fields["value"])
        elif kind in ("sample", "call"):
            self._live[f"{kind}s"] += 1
        self._update_live(now=False)

    def _begin_next_part(self) -> None:
        assert self._descriptor is not None
        os.fsync(self._descriptor)
        self._part += 1
        # Opened before the other is closed: if that fails, the present file stays in use.
        previous, self._descriptor = self._descriptor, self._open_part()
        os.close(previous)

    def sync(self) -> None:
        """Wait until every event written so far is on disk."""
        with self._lock:
            # A duplicate is synced without the lock: other threads write meanwhile, or even close the file.
            descriptor = None if self._descriptor is None else os.dup(self._descriptor)
        if descriptor is not None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Write the last live values, fsync and close the file. Later events raise `ValueError`."""
        with self._lock:
            if self._descriptor is not None:
                self._update_live(now=True)
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = None

    def _identity(self, kind: str, fields: Mapping[str, Any]) -> list[Any] | None:
        """The values that identify what an event measures; None for calls, which are all separate rows."""
        try:
            if kind == "metric":
                float(fields["value"])
                source = "" if fields.get("source") is None else fields["source"]
                return [self.execution, kind, str(fields["name"]), int(fields["step"]), source]
            if kind == "sample":
                group = "" if fields.get("set") is None else str(fields["set"])
                return [self.execution, kind, group, int(fields["index"])]
            if kind in NAMED_BY_FIELD:
                return [fields["id"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"event {kind!r} of {self.stage or 'a stage'}: {error!r} in {sorted(fields)}") from None
        if kind != "call":
            raise ValueError(f"event of unknown kind {kind!r}: use metric, sample, call, progress, run, plan or note")
        return None

    def _update_live(self, *, now: bool) -> None:
        moment = time.monotonic()
        if self._live_path is None or not (now or moment - self._live_at >= LIVE_EVERY_S):
            return
        self._live_at = moment
        try:
            write_json(self._live_path, json.loads(to_json(self._live)), durable=False)
        except OSError as error:
            if not is_full_or_read_only(error):
                raise
            logger.warning("%s: live progress cannot be written (%s)", self._live_path, error.strerror)


def read_live(path: Path) -> dict[str, Any]:
    """Read the newest progress and metric values of a child process; empty if it has not written any.

    `done` and `total` are numbers, `unit` and `note` texts, `metrics` numbers by name; anything else there is left out.
    """
    live = read_json(path)
    if not isinstance(live, dict):
        return {}
    live = {name: value for name, value in live.items() if isinstance(value, _LIVE_TYPES.get(name, object))}
    if "metrics" in live:
        live["metrics"] = {name: value for name, value in live["metrics"].items() if isinstance(value, (int, float))}
    return live


def read_events(path: Path, offset: int = 0, limit: int = READ_LIMIT) -> tuple[list[dict[str, Any]], int]:
    """Read about `limit` bytes of events from byte `offset` on; returns them and the offset to continue from.

    Which lines are left for later or skipped: `read_lines` and `parse_event`.
    """
    lines, end = read_lines(path, offset, limit)
    return [event for line in lines if (event := parse_event(line, path)) is not None], end


def read_lines(path: Path, offset: int = 0, limit: int = READ_LIMIT) -> tuple[list[bytes], int]:
    """Read about `limit` bytes of lines from byte `offset` on; returns them and the offset to continue from.

    A last line without a newline is left for the next call, because it may still be being written. A line that is
    longer than a block is skipped block by block, with a warning.
    """
    with path.open("rb") as file:
        file.seek(offset)
        block = bytearray(file.read(limit))
        while block and b"\n" not in block[-limit:] and len(block) <= LARGEST_EVENT and (more := file.read(limit)):
            block += more  # the line is longer than `limit`
    if len(block) > LARGEST_EVENT and b"\n" not in block:
        logger.warning("%s: a line of over %d bytes at byte %d is skipped", path, LARGEST_EVENT, offset)
        return [], offset + len(block)
    # Up to the last line feed; the rest is read again by the next call.
    complete_lines = bytes(block[: block.rfind(b"\n") + 1])
    return complete_lines.splitlines(), offset + len(complete_lines)


def parse_event(line: bytes, path: str | Path) -> dict[str, Any] | None:
    """Parse a line of the event file `path`; None, with a warning, if it is not a valid event.

    That is one that is incomplete after a crash, nested too deep, or over 32 MiB. An empty line is none either.
    """
    event = _parse(line) if len(line) <= LARGEST_EVENT else None
    if event is None and line.strip():
        logger.warning("%s: a torn line (or one too long or too deep) of %d bytes is skipped", path, len(line))
    return event


def to_json(value: Any) -> str:
    """Serialise as one line of strict JSON. Arrays of numpy and JAX become lists, scalars numbers, NaN "nan"."""
    try:
        return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(with_finite(value), separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """Convert a value that `json` does not support into plain data."""
    for name in ("tolist", "model_dump"):
        if hasattr(value, name):
            return getattr(value, name)()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"an event cannot hold a {type(value).__name__}")


def with_finite(value: Any) -> Any:
    """`value` as plain JSON data, with NaN and infinities as the strings "nan", "inf", "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(name): with_finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_finite(item) for item in value]
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return with_finite(_plain(value))


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is not a valid event."""
    event = parse_json(line)
    if not isinstance(event, dict) or not isinstance(event.get("fields"), dict):
        return None
    # Brackets are counted first, which is cheap: only a line with many of them can nest deep.
    deep = line.count(b"[") + line.count(b"{") > DEEPEST and nests_too_deep(event)
    complete = {"id", "execution", "time"} <= event.keys() and isinstance(event.get("kind"), str)
    return event if complete and not deep else None
