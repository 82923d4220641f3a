"""Replies that survive a kill -9, and the events that tell what was asked: written before a reply is handed out.

Replies are JSON lines, appended and fsynced in groups: whatever arrives while one group is being written makes up the
next, so the disk sets the size of a group and never the pace of the requests. A torn last line is passed over. Opening
a file of a million replies of 1 kB takes 3.3 s of a core and 45 MB, against 5.6 s and 130 MB with every line parsed and
a dict of digests (bench/endpoints.py ledger).
"""

import asyncio
import json
import logging
import os
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.events import Emit, emit_all
from data.endpoints.budget import NO_USAGE, Usage
from data.endpoints.chat_types import ChatReply, reply_from_row, reply_to_row

log = logging.getLogger(__name__)

# The head of a line as `reply_to_row` writes it: all that must be known of it at the start.
_HEAD = re.compile(
    rb'\{"digest": "([0-9a-f]{64})", "endpoint": "([^"\\]*)", "dollars": ([0-9.e+-]+), "tokens": ([0-9]+), '
)


@dataclass(frozen=True)
class _Entry:
    """One thing to write: perhaps a reply, perhaps an event, and who waits for it."""

    row: dict[str, Any] | None
    event: dict[str, Any] | None
    done: asyncio.Future


class ReplyCache:
    """The replies of an endpoint pool in one file. `spent`: by endpoint, of all replies in it, earlier processes' too.

    Only offsets are held in memory. To be used from one event loop; raises `ConfigError` if the file cannot be opened.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        self.path, self._emit = path, emit
        self.spent: dict[str, Usage] = {}
        self._offsets = RepliesIndex()
        self._pending: list[_Entry] = []
        self._writing: asyncio.Task | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"replies cannot be kept in {path} ({error.strerror}); choose another folder") from None
        self._torn = False
        self._end = self._load()

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def total(self) -> Usage:
        """What all replies used up."""
        return sum(self.spent.values(), NO_USAGE)

    def reply(self, digest: str) -> ChatReply | None:
        """The remembered reply to the request of this digest."""
        offset = self._offsets.get(bytes.fromhex(digest))
        if offset is None:
            return None
        row = json.loads(self._line(offset))
        return reply_from_row(row) if row["digest"] == digest else None

    async def record(
        self, event: dict[str, Any] | None, reply: ChatReply | None = None, spent: Usage = NO_USAGE
    ) -> None:
        """Keep a reply and report an event; both are on disk when this returns. Raises `OSError` on a full disk."""
        row = None if reply is None else reply_to_row(replace(reply, cached=False), spent)
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
            for row, offset in placed:
                self._offsets[bytes.fromhex(row["digest"])] = offset
                spent = Usage(row["dollars"], row["tokens"])
                self.spent[row["endpoint"]] = self.spent.get(row["endpoint"], NO_USAGE) + spent
            for entry in group:
                if not entry.done.cancelled():
                    entry.done.set_result(None)

    def _write(self, group: list[_Entry]) -> list[tuple[dict[str, Any], int]]:
        if self._torn:
            self._end = os.fstat(self._file).st_size
            self._append(b"\n")
        placed, lines, end = [], [], self._end
        for entry in group:
            if entry.row is not None:
                lines.append((json.dumps(entry.row, ensure_ascii=True) + "\n").encode())
                placed.append((entry.row, end))
                end += len(lines[-1])
        if placed:
            self._append(b"".join(lines))
            os.fsync(self._file)
        emit_all(self._emit, "call", [entry.event for entry in group if entry.event is not None])
        return placed

    def _append(self, lines: bytes) -> None:
        self._torn = True  # until all of it is written: the disk may be full in the middle of a line
        while lines:
            written = os.write(self._file, lines)
            self._end += written
            lines = lines[written:]
        self._torn = False

    def _load(self) -> int:
        """Index the lines that are there; returns where the next one begins."""
        offset, torn = 0, False
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        with os.fdopen(os.dup(self._file), "rb", buffering=2**20) as file:
            file.seek(0)
            for line in file:
                try:
                    digest, endpoint, dollars, tokens = _head(line)
                except (ValueError, TypeError, LookupError, AttributeError):
                    log.warning("%s: a torn line of %d bytes is passed over", self.path, len(line))
                else:
                    self._offsets[bytes.fromhex(digest)] = offset
                    total = totals[endpoint]
                    total[0] += dollars
                    total[1] += tokens
                offset += len(line)
                torn = not line.endswith(b"\n")
        self.spent = {name: Usage(dollars, int(tokens)) for name, (dollars, tokens) in totals.items()}
        if torn:
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


def _head(line: bytes) -> tuple[str, str, float, int]:
    """Digest, endpoint, dollars and tokens of a line. What it raises for one that is none is caught in `_load`."""
    # Only a line that was cut within a text's own `"}` ends so with a backslash before it: that one is parsed whole.
    if (found := _HEAD.match(line)) and line.endswith(b'"}\n') and not line.endswith(b'\\"}\n'):
        digest, endpoint, dollars, tokens = found.groups()
        return digest.decode(), endpoint.decode(), float(dollars), int(tokens)
    row = json.loads(line)
    tokens = row.get("tokens", (row.get("tokens_in") or 0) + (row.get("tokens_out") or 0))
    bytes.fromhex(row["digest"])
    return row["digest"], row.get("endpoint", ""), row["dollars"] or 0.0, tokens


LEAST_MERGED = 2**16


class RepliesIndex:
    """Digest (bytes) -> byte offset. Of two offsets of one key the newer counts."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint64)
        self._offsets = np.empty(0, np.uint64)
        self._new: dict[int, int] = {}

    def __len__(self) -> int:
        self.merge()  # a key may be in both
        return len(self._keys)

    def __setitem__(self, digest: bytes, offset: int) -> None:
        self._new[_key(digest)] = offset
        if len(self._new) >= max(LEAST_MERGED, len(self._keys) // 8):
            self.merge()

    def get(self, digest: bytes) -> int | None:
        """The offset, None if there is none."""
        key = _key(digest)
        if key in self._new:
            return self._new[key]
        place = int(np.searchsorted(self._keys, np.uint64(key)))
        found = place < len(self._keys) and int(self._keys[place]) == key
        return int(self._offsets[place]) if found else None

    def merge(self) -> None:
        """Take the new keys into the arrays."""
        if not self._new:
            return
        keys = np.fromiter(self._new.keys(), np.uint64, len(self._new))
        offsets = np.fromiter(self._new.values(), np.uint64, len(self._new))
        order = np.argsort(keys)
        keys, offsets = keys[order], offsets[order]
        places = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), bool)
        inside = places < len(self._keys)
        known[inside] = self._keys[places[inside]] == keys[inside]
        self._offsets[places[known]] = offsets[known]
        self._keys = np.insert(self._keys, places[~known], keys[~known])
        self._offsets = np.insert(self._offsets, places[~known], offsets[~known])
        self._new = {}


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
