"""The reply cache: replies by request digest that survive a kill -9, and the ledger events of every attempt.

A reply is on disk before anybody uses it. Replies are JSON lines, appended and fsynced in groups: whatever arrives
while one group is being written forms the next, so the disk sets the size of a group and never the pace of requests.
Opening a file of a million replies of 1 kB takes 3.3 s of a core and 45 MB (bench/endpoints.py ledger).
"""

import asyncio
import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.events import Emit, emit_all
from common.keyed_log import KeyedLog
from data.endpoints.budget import NO_USAGE, Usage
from data.endpoints.chat_types import ChatReply, reply_from_row, reply_to_row

# The head of a line as `reply_to_row` writes it: all that has to be known of a reply when the file is opened.
_HEAD = re.compile(
    rb'\{"digest": "([0-9a-f]{64})", "endpoint": "([^"\\]*)", "dollars": ([0-9.e+-]+), "tokens": ([0-9]+), '
)


@dataclass(frozen=True)
class _Entry:
    """A reply, a ledger event or both, to be written; `done` is set when they are on disk."""

    row: dict[str, Any] | None
    event: dict[str, Any] | None
    done: asyncio.Future


class ReplyCache:
    """The replies of an endpoint pool in one file. `spent`: by endpoint, of all replies in it, earlier processes' too.

    To be used from one event loop. Raises `ConfigError` if the file cannot be opened.
    """

    def __init__(self, path: Path, emit: Emit) -> None:
        self.path, self._emit = path, emit
        self._pending: list[_Entry] = []
        self._writer: asyncio.Task | None = None
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])

        def index(line: bytes) -> bytes:
            digest, endpoint, dollars, tokens = _read_head(line)
            total = totals[endpoint]
            total[0] += dollars
            total[1] += tokens
            return digest

        self._log = KeyedLog(index)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log.open(path)
        except OSError as error:
            raise ConfigError(
                f"replies cannot be written to {path} ({error.strerror}); choose another folder"
            ) from None
        self.spent = {name: Usage(dollars, int(tokens)) for name, (dollars, tokens) in totals.items()}

    def __len__(self) -> int:
        return len(self._log)

    @property
    def total(self) -> Usage:
        """Usage of all replies."""
        return sum(self.spent.values(), NO_USAGE)

    def reply(self, digest: str) -> ChatReply | None:
        """The cached reply to the request of this digest."""
        line = self._log.get(bytes.fromhex(digest))
        if line is None:
            return None
        row = json.loads(line)
        return reply_from_row(row) if row["digest"] == digest else None

    async def record(
        self, event: dict[str, Any] | None, reply: ChatReply | None = None, spent: Usage = NO_USAGE
    ) -> None:
        """Write a reply and emit a ledger event; both are on disk on return. Raises `OSError` on a full disk."""
        row = None if reply is None else reply_to_row(replace(reply, cached=False), spent)
        entry = _Entry(row, event, asyncio.get_running_loop().create_future())
        self._pending.append(entry)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_pending())
        # A request that is cancelled must not cancel the write: its reply is paid for.
        await asyncio.shield(entry.done)

    def close(self) -> None:
        """Close the file; nothing may be recorded any more."""
        self._log.close()

    async def _write_pending(self) -> None:
        while self._pending:
            group, self._pending = self._pending, []
            rows = [entry.row for entry in group if entry.row is not None]
            events = [entry.event for entry in group if entry.event is not None]
            try:
                positions = await asyncio.to_thread(self._write, rows, events)
            except BaseException as error:
                for entry in group:
                    if not entry.done.cancelled():
                        entry.done.set_exception(error if isinstance(error, Exception) else OSError("interrupted"))
                        entry.done.exception()  # marks it as retrieved: the waiter may be gone
                if not isinstance(error, Exception):
                    raise
                continue
            for row, position in zip(rows, positions, strict=True):
                self._log.add(bytes.fromhex(row["digest"]), position)
                spent = Usage(row["dollars"], row["tokens"])
                self.spent[row["endpoint"]] = self.spent.get(row["endpoint"], NO_USAGE) + spent
            for entry in group:
                if not entry.done.cancelled():
                    entry.done.set_result(None)

    def _write(self, rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[int]:
        """In a thread: replies first, then events. Returns the replies' positions in the log."""
        lines = [(json.dumps(row, ensure_ascii=True) + "\n").encode() for row in rows]
        positions = self._log.write(lines) if lines else []
        emit_all(self._emit, "call", events)
        return positions


def _read_head(line: bytes) -> tuple[bytes, str, float, int]:
    """Digest, endpoint, dollars and tokens of a line. Raises `ValueError` if it is not a reply."""
    # A line that was torn inside a text may end in that text's own `"}`, but then with a backslash before the quote:
    # such a line is parsed as a whole.
    if (head := _HEAD.match(line)) and line.endswith(b'"}\n') and not line.endswith(b'\\"}\n'):
        digest, endpoint, dollars, tokens = head.groups()
        return bytes.fromhex(digest.decode()), endpoint.decode(), float(dollars), int(tokens)
    try:
        row = json.loads(line)
        tokens = row.get("tokens", (row.get("tokens_in") or 0) + (row.get("tokens_out") or 0))
        return bytes.fromhex(row["digest"]), row.get("endpoint", ""), row["dollars"] or 0.0, tokens
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"not a reply: {error}") from None
