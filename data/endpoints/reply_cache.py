"""The reply cache: paid replies of a model by request digest, shared by all runs, and the ledger events of attempts.

    <replies>/<model>/<host>-….jsonl          a shard: appended to by one process at a time, which holds its flock
    <replies>/<model>/pulled/*.jsonl          shards of other machines, fetched from the store's remote
    <replies>/<model>/batches/                batch jobs in progress
    <replies>/<model>/requests.lock           see `RequestLocks`

A reply is on disk before it is used. A line without a text is the maximum cost of an attempt whose reply was cut off,
late or unreadable, or a request that has failed for its own reason, to which the same execution gives one attempt.
Replies are JSON lines, appended and fsynced in groups: replies that arrive while one group is being written form the
next (group commit), so a slow disk makes larger groups, not slower requests. Opening a file of a million replies of
1 kB takes 3.3 s of a core and 45 MB (bench/corpus/endpoints.py ledger).
"""

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import struct
import uuid
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.events import Emit, emit_all
from nautile.common.file_locks import has_locks, try_flock, try_lock
from nautile.common.files import folder_identity, sync_folder
from nautile.common.keyed_log import KeyedLog
from nautile.common.text import as_file_name
from nautile.data.endpoints.budget import NO_USAGE, Usage
from nautile.data.endpoints.chat_types import ChatReply, reply_from_row, reply_to_row
from nautile.data.endpoints.reply_source import ReplySource

_FLOCK = "hhqqi4x"  # Linux's `struct flock`: type, whence, start, length, process

logger = logging.getLogger(__name__)

SHARDS, PULLED, BATCHES = "*.jsonl", "pulled", "batches"
SHARD_BYTES = 64 * 2**20  # size of a full shard; bounded, because a mirror sends a changed shard as a whole


class RequestLocks:
    """Locks on requests: if several processes need the same reply, one sends the request and the others wait.

    A lock covers one byte of a file, at an offset derived from the request's digest; the file stays empty. They are
    Linux open file description locks: the kernel releases them when the process dies, and two pools in one process
    exclude each other as well. Raises `OSError` if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, digest: str) -> bool:
        """Take the lock of a digest (hexadecimal); returns False if another process holds it. Reentrant.

        On a file system without locks it always succeeds; a request may then be paid for twice.
        """
        return try_lock(self.path, lambda: self._set(fcntl.F_WRLCK, digest))

    def release(self, digest: str) -> None:
        if has_locks(self.path.parent):
            self._set(fcntl.F_UNLCK, digest)

    def close(self) -> None:
        os.close(self._descriptor)

    def _set(self, kind: int, digest: str) -> None:
        start = int(digest[:16], 16) >> 2  # an offset has 63 bits
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, 1, 0))


# The beginning of a line as `reply_to_row` writes it: all that the index needs, without parsing the text.
_HEAD = re.compile(
    rb'\{"digest": "([0-9a-f]{64})", "endpoint": "([^"\\]*)", "dollars": ([0-9.e+-]+), "tokens": ([0-9]+), '
    rb'(?:"execution": "([^"\\]*)", )?(?:"limits": "((?:[^"\\]|\\.)*)", )?'
)


@dataclass(frozen=True)
class _Entry:
    """A pending line of the cache, a ledger event or both; the future `done` is set when they are on disk."""

    row: dict[str, Any] | None
    event: dict[str, Any] | None
    done: asyncio.Future


class DiskState:
    """Whether the last write succeeded, for all caches of a pool: `error` is that of a write that failed."""

    def __init__(self) -> None:
        self.error: OSError | None = None


class ReplyCache:
    """The replies of one model. To be used from one event loop. Raises `ConfigError` if the folder is not writable.

    `spent`: what the source's execution has paid for replies, by endpoint, in all its processes; `unknown`: the maximum
    cost of its attempts without a reply. `writer`: the task that writes what was recorded, if any. `limits`: those of
    the requests whose replies are here (`chat_types.limits_of`). `given_up`: digests of requests that have failed for
    their own reason in this execution. `disk`: shared by the caches of a pool.
    """

    def __init__(self, source: ReplySource, model: str, emit: Emit, disk: DiskState | None = None) -> None:
        self.folder, self._source, self._emit = source.folder / as_file_name(model), source, emit
        self.limits: set[str] = set()
        self.given_up: set[str] = set()
        self._disk = disk or DiskState()
        self.spent: dict[str, Usage] = defaultdict(lambda: NO_USAGE)
        self.unknown: dict[str, Usage] = defaultdict(lambda: NO_USAGE)
        self._pending: list[_Entry] = []
        self.writer: asyncio.Task[None] | None = None
        self._log = KeyedLog(self._index_line)
        # Who pays again on purpose waits for nobody's reply.
        self.claims = source.claims(model) if source.claims and not source.ask_again else None
        self._own_shards: dict[Path, int] = {}  # path -> the descriptor that holds its flock
        try:
            (self.folder / BATCHES).mkdir(parents=True, exist_ok=True)
            self.locks = RequestLocks(self.folder / "requests.lock")
            self._open_shard()
            sync_folder(self.folder.parent)  # the model's folder may be new
            self.refresh()
        except OSError as error:
            raise ConfigError(
                f"replies cannot be written to {self.folder} ({error.strerror}); choose another folder"
            ) from None

    def __len__(self) -> int:
        return len(self._log)

    @property
    def total(self) -> Usage:
        """What the execution has paid at all endpoints of this model."""
        return sum(self.spent.values(), NO_USAGE)

    def refresh(self) -> None:
        """Index the replies that other processes have written since the last call."""
        for path in chain(self.folder.glob(SHARDS), (self.folder / PULLED).glob(SHARDS)):
            if path not in self._own_shards:
                self._log.follow(path)

    def reply(self, digest: str) -> ChatReply | None:
        """The cached reply to the request with this digest; None if there is none."""
        line = self._log.get(bytes.fromhex(digest))
        if line is None:
            return None
        row = _row_of(line)
        # Of two digests with the same end only one is indexed. An earlier version kept errors as empty replies.
        if row["digest"] != digest or row["finish"] == "error":
            return None
        return replace(reply_from_row(row), reused=row["execution"] != self._source.execution)

    def check_writable(self) -> None:
        """Raise the `OSError` of the last write if it failed: what cannot be kept must not be paid for."""
        if self._disk.error is not None:
            raise self._disk.error

    def reset(self) -> None:
        """Forget a failed write: there may be room on the disk now."""
        self._disk.error = None

    async def give_up(self, digest: str, endpoint: str, reason: str, attempts: int) -> None:
        """Record that a request has failed for its own reason, in this execution."""
        self.given_up.add(digest)
        row = {
            "unknown": digest,
            "endpoint": endpoint,
            "dollars": 0.0,
            "tokens": 0,
            "execution": self._source.execution,
            "reason": reason,
            "attempts": attempts,
        }
        await self._append(row, None)

    async def record(
        self, event: dict[str, Any], reply: ChatReply | None = None, spent: Usage = NO_USAGE, limits: str = ""
    ) -> None:
        """Write a reply and emit a ledger event; both are on disk on return. Raises `OSError` on a full disk.

        Without a reply, `spent` is the maximum cost of the attempt. `limits`: of the request (`limits_of`).
        """
        row = None
        if reply is not None:
            row = reply_to_row(replace(reply, cached=False), spent, self._source.execution, limits)
        elif spent != NO_USAGE:
            row = {
                "unknown": event["digest"],
                "endpoint": event["endpoint"],
                "dollars": spent.dollars,
                "tokens": spent.tokens,
                "execution": self._source.execution,
                "reason": event["status"],
            }
        await self._append(row, event)

    async def _append(self, row: dict[str, Any] | None, event: dict[str, Any] | None) -> None:
        entry = _Entry(row, event, asyncio.get_running_loop().create_future())
        self._pending.append(entry)
        if self.writer is None or self.writer.done():
            self.writer = asyncio.create_task(self._write_pending())
        # The reply is paid for, so the cancellation of a request must not cancel the write.
        await asyncio.shield(entry.done)

    async def claim(self, digest: str) -> bool:
        """Claim a request among the hosts that share the replies; False while another one has claimed it."""
        return self.claims is None or await asyncio.to_thread(self.claims.acquire, digest)

    def close(self) -> None:
        self._log.close()
        self.locks.close()
        for descriptor in self._own_shards.values():
            os.close(descriptor)

    def _open_shard(self) -> None:
        """Choose the shard to append to: one of this host that no process writes to, or a new one."""
        prefix = re.sub(r"[^A-Za-z0-9.]+", "_", platform.node())[:64].lstrip(".") or "host"
        # Only shards that this host began in this folder: whether a lock also keeps other hosts out depends on the file
        # system, and of two copies of a folder that go on with one shard, the remote would keep the longer one.
        prefix += f"-{hashlib.sha256(folder_identity(self.folder).encode()).hexdigest()[:8]}"
        existing = [
            path for path in sorted(self.folder.glob(f"{prefix}-{SHARDS}")) if path.stat().st_size < SHARD_BYTES
        ]
        new_paths = (self.folder / f"{prefix}-{uuid.uuid4().hex[:12]}.jsonl" for _ in count())
        for path in chain(existing, new_paths):
            if path in self._own_shards:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            # On a file system without locks, every process takes a new shard.
            if not try_flock(descriptor, path) or (path in existing and not has_locks(self.folder)):
                os.close(descriptor)
                continue
            self._own_shards[path] = descriptor
            self._log.open(path)
            return

    async def _write_pending(self) -> None:
        """Write the pending entries in groups until there are none, and set their futures."""
        while self._pending:
            # What arrives from here on forms the next group, which is written when this one is on disk.
            group, self._pending = self._pending, []
            rows = [entry.row for entry in group if entry.row is not None]
            events = [entry.event for entry in group if entry.event is not None]
            try:
                if self._log.end >= SHARD_BYTES:
                    self._open_shard()
                positions = await asyncio.to_thread(self._write, rows, events)
            except BaseException as error:
                if isinstance(error, OSError):
                    self._disk.error = error
                for entry in group:
                    if not entry.done.cancelled():
                        entry.done.set_exception(error if isinstance(error, Exception) else OSError("interrupted"))
                        entry.done.exception()  # mark it as retrieved, in case nobody waits for it any more
                if not isinstance(error, Exception):
                    raise
                continue
            self._add(rows, positions)
            for entry in group:
                if not entry.done.cancelled():
                    entry.done.set_result(None)

    def _add(self, rows: list[dict[str, Any]], positions: list[int]) -> None:
        for row, position in zip(rows, positions, strict=True):
            amounts = self.unknown if "unknown" in row else self.spent
            amounts[row["endpoint"]] += Usage(row["dollars"], row["tokens"])
            if "digest" in row:
                self._log.add(bytes.fromhex(row["digest"]), position)
                self.limits.add(row.get("limits", ""))

    def _write(self, rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[int]:
        """Write replies, then emit events (in a thread). Returns the replies' positions in the log."""
        lines = [(json.dumps(row, ensure_ascii=True) + "\n").encode() for row in rows]
        positions = self._log.write(lines) if lines else []
        emit_all(self._emit, "call", events)
        return positions

    def _index_line(self, line: bytes) -> bytes | None:
        """The index key of a line, its digest; None if it is no usable reply. Adds up this execution's costs."""
        digest, endpoint, spent, execution, limits = _read_head(line)
        if execution == self._source.execution:
            amounts = self.unknown if digest is None else self.spent
            amounts[endpoint] += spent
            if digest is None and "attempts" in (row := json.loads(line)):
                self.given_up.add(row["unknown"])
        elif self._source.ask_again:
            return None
        if digest is not None:
            self.limits.add(limits)
        return digest


def _row_of(line: bytes) -> dict[str, Any]:
    """The row of a line. What is paid for stays readable: rows of earlier versions lack the fields set here."""
    row = json.loads(line)
    tokens = (row.get("tokens_in") or 0) + (row.get("tokens_out") or 0)
    return {"endpoint": "", "tokens": tokens, "execution": "", "limits": ""} | row | {"dollars": row["dollars"] or 0.0}


def _read_head(line: bytes) -> tuple[bytes | None, str, Usage, str, str]:
    """(digest, endpoint, cost, execution, limits) of a line; no reply: digest None. `ValueError` if damaged."""
    # The pattern checks only the head. A line torn inside its text could also end in `"}` of that text, but there the
    # quote is escaped by a backslash: such a line is parsed completely. So is one with zero bytes, which a crash of the
    # machine may leave in the middle of a write of several blocks.
    ends_whole = line.endswith(b'"}\n') and not line.endswith(b'\\"}\n') and b"\0" not in line
    if ends_whole and (head := _HEAD.match(line)):
        digest, endpoint, dollars, tokens, execution, limits = (part.decode() for part in head.groups(b""))
        limits = json.loads(f'"{limits}"') if "\\" in limits else limits
        return bytes.fromhex(digest), endpoint, Usage(float(dollars), int(tokens)), execution, limits
    try:
        row = _row_of(line)
        row_digest = None if "unknown" in row else bytes.fromhex(row["digest"])
        return row_digest, row["endpoint"], Usage(row["dollars"], row["tokens"]), row["execution"], row["limits"]
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"not a reply: {error}") from None
