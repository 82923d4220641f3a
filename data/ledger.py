"""Replies that survive a kill -9, and the events that tell what was asked: written before a reply is handed out.

Replies are JSON lines, appended and fsynced in groups: whatever arrives while one group is being written makes up the
next, so the disk sets the size of a group and never the pace of the requests. A torn last line is passed over.
"""

import asyncio
import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.emit import Emit
from configs.section import ConfigError
from data.calls import ChatReply, as_row, from_row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """One thing to write: perhaps a reply, perhaps an event, and who waits for it."""

    row: dict[str, Any] | None
    event: dict[str, Any] | None
    done: asyncio.Future


class Ledger:
    """The replies of an endpoint pool in one file. `spent`: dollars of all replies in it, earlier processes' too.

    Only offsets are held in memory. To be used from one event loop; raises `ConfigError` if the file cannot be opened.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        self.path, self._emit = path, emit
        self.spent = 0.0
        self._offsets: dict[bytes, int] = {}
        self._pending: list[_Entry] = []
        self._writing: asyncio.Task | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"replies cannot be kept in {path} ({error.strerror}); choose another folder") from None
        self._end = self._load()

    def __len__(self) -> int:
        return len(self._offsets)

    def reply(self, digest: str) -> ChatReply | None:
        """The remembered reply to the request of this digest."""
        offset = self._offsets.get(bytes.fromhex(digest))
        return None if offset is None else from_row(json.loads(self._line(offset)))

    async def record(
        self, event: dict[str, Any] | None, reply: ChatReply | None = None, cost: float | None = None
    ) -> None:
        """Keep a reply and report an event; both are on disk when this returns. Raises `OSError` on a full disk."""
        row = None if reply is None else as_row(replace(reply, cached=False), cost)
        entry = _Entry(row, event, asyncio.get_running_loop().create_future())
        self._pending.append(entry)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_pending())
        await asyncio.shield(entry.done)

    def close(self) -> None:
        """Close the file; nothing may be recorded any more."""
        os.close(self._file)

    async def _write_pending(self) -> None:
        while self._pending:
            group, self._pending = self._pending, []
            try:
                placed = await asyncio.to_thread(self._write, group)
            except BaseException as error:
                for entry in group:
                    if not entry.done.cancelled():
                        entry.done.set_exception(error if isinstance(error, Exception) else OSError("interrupted"))
                        entry.done.exception()  # whoever waited may have gone: then nobody needs to hear of it
                if not isinstance(error, Exception):
                    raise
                continue
            for digest, offset, cost in placed:
                self._offsets[digest] = offset
                self.spent += cost
            for entry in group:
                if not entry.done.cancelled():
                    entry.done.set_result(None)

    def _write(self, group: list[_Entry]) -> list[tuple[bytes, int, float]]:
        placed = []
        for entry in group:
            if entry.row is not None:
                line = (json.dumps(entry.row, ensure_ascii=True) + "\n").encode()
                placed.append((bytes.fromhex(entry.row["digest"]), self._end, entry.row["dollars"] or 0.0))
                self._append(line)
        if placed:
            os.fsync(self._file)
        for entry in group:
            if entry.event is not None:
                self._emit("call", **entry.event)
        return placed

    def _append(self, line: bytes) -> None:
        while line:
            written = os.write(self._file, line)
            self._end += written
            line = line[written:]

    def _load(self) -> int:
        """Index the lines that are there; returns where the next one begins."""
        offset = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            for line in file:
                try:
                    row = json.loads(line)
                    self._offsets[bytes.fromhex(row["digest"])] = offset
                    self.spent += row["dollars"] or 0.0
                except (ValueError, TypeError, KeyError):
                    log.warning("%s: a torn line of %d bytes is passed over", self.path, len(line))
                offset += len(line)
                torn = not line.endswith(b"\n")
        if offset and torn:
            os.write(self._file, b"\n")
            offset += 1
        return offset

    def _line(self, offset: int) -> bytes:
        line = b""
        while b"\n" not in line:
            piece = os.pread(self._file, 65536, offset + len(line))
            if not piece:
                raise OSError(f"{self.path}: the reply at byte {offset} is gone")
            line += piece
        return line[: line.index(b"\n")]
