"""A lease of a key at the remote, so that of several machines without a shared disk one at a time makes a key.

    <url>/leases/<key>/<fence>.json     {"holder", "host", "machine", "state": "held" or "released", "renewed": a count}

A machine acquires the lease by creating the object with the next fence number, on the condition that it does not exist:
of several machines one succeeds. The holder rewrites the object regularly. If it has not changed for five minutes, by
the clock of the waiting machine, the lease has expired: the holder has died or lost its connection. The holder of the
greatest fence holds the lease, so a holder that returns sees that it was replaced, and stops. Clocks of different
machines are never compared, and those that are read go on while their machine is suspended.

The objects of earlier holders stay. So the numbers have no gap, and the greatest is found by reading one after the
other from any number that a listing shows, however old that is.
"""

import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import folder_identity, parse_json, read_json, write_json
from nautile.store.layout import Layout
from nautile.store.locks import KeyLock
from nautile.store.manifest import host
from nautile.store.remote import Remote

logger = logging.getLogger(__name__)

EXPIRES_S = 300.0  # long enough that no ordinary outage of the remote ends the work of its holder
RENEW_S = 30.0
POLL_S = 2.0
RELEASE_S = 10.0  # how long the end of a step waits for a remote that does not answer
LARGEST_LEASE = 2**16  # bytes


def clock() -> float:
    """Seconds that also pass while this machine is suspended (Linux's CLOCK_MONOTONIC stops then)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Lease:
    """The lease of `key`. The caller holds the key's lock, so one process of a machine at a time uses it.

    `fence`: the number of this holder, 0 before it is acquired. `above`: the greatest number that artifacts of the key
    have; the next holder's is greater, even if the objects of the lease were deleted. Methods that access the remote
    raise `ConfigError` or `Retryable`.
    """

    def __init__(self, remote: Remote, root: Path, key: str, *, above: int = 0) -> None:
        self.fence = 0
        self.holder_host = ""  # the host that holds it, after `try_acquire` has failed
        self._remote, self._folder, self._above = remote, f"leases/{key}", above
        self._state: dict[str, Any] = {"holder": uuid.uuid4().hex, "host": host(), "machine": machine_id(root)}
        # When the lease was last seen to change, by our own clock: other clocks are not compared.
        self._last_seen: tuple[int, dict[str, Any]] = (0, {})
        self._unchanged_since = 0.0
        self._written: float | None = None  # when it was, by the server's clock
        self._renewed_at = 0.0
        self._taken_by = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait: Callable[[float], object], on_wait: Callable[[str], object]) -> None:
        """Acquire the lease, waiting until its holder has released it or it has expired; then renew it in a thread.

        `on_wait(host)` is called once if the lease is held; `wait(seconds)` between two polls, and an exception from it
        ends the waiting.
        """
        announced = False
        while not self.try_acquire():
            if not announced:
                on_wait(self.holder_host)
                announced = True
            wait(POLL_S)
        self.keep()

    def try_acquire(self, server_time: float | None = None) -> bool:
        """Acquire the lease if it `is_free`."""
        # Several may find it free, and the object of the next number is created by one of them.
        return self.is_free(server_time) and self._create(self._last_seen[0] + 1)

    def is_free(self, server_time: float | None = None) -> bool:
        """Whether nobody holds the lease, or it has not changed for as long as it is valid, since this object saw it.

        `server_time`: the time by the clock of the remote, if known. A lease that was last written long before that
        has expired, too.
        """
        seen_at = clock()
        fence, state = self._newest()
        if (fence, state) != self._last_seen:
            self._last_seen, self._unchanged_since = (fence, state), seen_at
        # We hold the lock of the key, so another process of this machine that held the lease has ended.
        own = state.get("machine") == self._state["machine"]
        expired = seen_at - self._unchanged_since > EXPIRES_S
        if server_time is not None and self._written is not None:
            expired = expired or server_time - self._written > 2 * EXPIRES_S
        self.holder_host = str(state.get("host", "another host"))
        return not state or own or state.get("state") == "released" or expired

    def keep(self) -> None:
        """Renew the lease in a thread until it is released."""
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `Retryable` if the lease is lost. It makes no request itself: the renewing thread does."""
        if self._taken_by:
            raise Retryable(f"the lease of this key was taken over by {self._taken_by}")
        if clock() - self._renewed_at > EXPIRES_S - RENEW_S:
            raise Retryable(f"the lease of this key could not be renewed at {self._remote.url} and expires")

    def confirm(self) -> None:
        """Raise `Retryable` if the lease is lost, by a request: before anything that other machines will rely on."""
        self.renew()
        self.check()

    def renew(self) -> None:
        """Renew the lease, unless another machine has taken it over."""
        # Looked up before each renewal, or a holder that was cut off would go on beside its successor.
        if (successor := self._read(self.fence + 1)) is not None:
            self._taken_by = str(successor.get("host", "another host"))
            return
        self._write("held")

    def release(self) -> None:
        """Release the lease; an unreachable remote is only logged."""
        self._stop.set()
        # In a thread, because Ctrl-C ends here, too: a remote that does not answer must not hold the process.
        thread = threading.Thread(target=self._give_back, name="lease-release", daemon=True)
        thread.start()
        thread.join(RELEASE_S)
        if thread.is_alive():
            logger.warning("the lease cannot be released; it will expire: %s does not answer", self._remote.url)

    def _give_back(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self.fence == 0 or self._taken_by:
            return
        try:
            # The object stays: the next holder continues its number, so no number is used twice.
            self._write("released")
        except (ConfigError, Retryable) as error:
            logger.warning("the lease cannot be released; it will expire: %s", error)

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """The greatest fence and its state, which is empty if there is no lease above `above`."""
        objects = self._remote.names(self._folder)
        fence = max(self._above, *map(_fence_of, objects), 0)
        state = self._read(fence) if fence else None
        # A listing may be older than the newest object.
        while (newer := self._read(fence + 1)) is not None:
            fence, state = fence + 1, newer
        written = objects.get(f"{fence:08d}.json")
        self._written = written.written if written else None
        return fence, state or {}

    def _read(self, fence: int) -> dict[str, Any] | None:
        """The state of a holder; None if there was none with this number. A damaged object counts as a held lease."""
        data = self._remote.read(self._name(fence), LARGEST_LEASE)
        if data is None:
            return None
        state = parse_json(data)
        return state if isinstance(state, dict) and state else {"state": "held"}

    def _create(self, fence: int) -> bool:
        """Create the object of `fence`; False if another machine has created it."""
        request_time = clock()
        content = json.dumps({**self._state, "state": "held", "renewed": 0}).encode()
        if not self._remote.create(self._name(fence), content):
            # We may have created it by a request whose response was lost.
            state = self._read(fence)
            if state is None or state.get("holder") != self._state["holder"]:
                return False
        # Counted from before the request, as the others count, who may have seen the object at once.
        self.fence, self._renewed_at = fence, request_time
        return True

    def _write(self, state: str) -> None:
        """Rewrite the object with a new count. The renewal counts from before the request, which may take long."""
        request_time = clock()
        self._state["renewed"] = self._state.get("renewed", 0) + 1
        self._remote.write(self._name(self.fence), json.dumps({**self._state, "state": state}).encode())
        self._renewed_at = request_time

    def _renew(self) -> None:
        """Body of the thread: renew the lease until it is released or another machine has taken it over."""
        while not self._stop.wait(RENEW_S) and not self._taken_by:
            try:
                self.renew()
            except (ConfigError, Retryable) as error:
                logger.warning("the lease of a key cannot be renewed: %s", error)

    def _name(self, fence: int) -> str:
        return f"{self._folder}/{fence:08d}.json"


class Leases:
    """The leases that a process holds for a store. `fence_of`: key -> the greatest fence of its artifacts."""

    def __init__(self, remote: Remote, root: Path, fence_of: Callable[[str], int]) -> None:
        self._remote, self._root, self._fence_of = remote, root, fence_of
        self._held: dict[str, Lease] = {}

    @contextmanager
    def held(self, key: str, wait: Callable[[float], object], on_wait: Callable[[str], object]) -> Iterator[Lease]:
        """Hold the lease of `key` during the block, after waiting for it (`Lease.acquire`). The caller has the lock."""
        lease = self.look(key)
        try:
            lease.acquire(wait, on_wait)
            self._held[key] = lease
            yield lease
        finally:
            self._held.pop(key, None)
            lease.release()

    @contextmanager
    def if_free(self, key: str, server_time: float | None = None) -> Iterator[Lease]:
        """Hold the lock and the lease of `key` during the block, if nobody else does.

        Else the lease has the fence 0, and `holder_host` says who does. One that this object holds already is yielded.
        `server_time`: see `Lease.is_free`.
        """
        if key in self._held:
            yield self._held[key]
            return
        lease = self.look(key)
        with KeyLock(Layout(self._root).locks / f"{key}.lock").if_free() as is_locked:
            if not is_locked:
                lease.holder_host = "another process of this machine"
            if not is_locked or not lease.try_acquire(server_time):
                yield lease
                return
            lease.keep()
            self._held[key] = lease
            try:
                yield lease
            finally:
                self._held.pop(key, None)
                lease.release()

    def confirm(self, key: str) -> None:
        """Raise `Retryable` if the lease of `key`, which this object has held, is lost (`Lease.confirm`)."""
        if key in self._held:
            self._held[key].confirm()

    def fence(self, key: str) -> int:
        """The fence of the lease of `key`, if this object holds it; else 0."""
        return self._held[key].fence if key in self._held else 0

    def look(self, key: str) -> Lease:
        """The lease of `key`, which is not acquired."""
        return Lease(self._remote, self._root, key, above=self._fence_of(key))


def machine_id(root: Path) -> str:
    """The id of a store folder on this machine: containers may share host names and paths.

    A folder that was copied to another machine, or within this one, has another id: of two machines with one id, each
    would take the other's lease for its own.
    """
    path = Layout(root).machine_path
    if not isinstance(record := read_json(path), dict):
        # The first steps of a new folder start at the same time. All must get one id: a lease with another would look
        # like that of a foreign machine, and after a crash this one would wait until it expires.
        with KeyLock(Layout(root).locks / "machine.lock"):
            if not isinstance(record := read_json(path), dict):
                record = {"id": uuid.uuid4().hex}
                write_json(path, record)
    return hashlib.sha256(f"{record.get('id')} {folder_identity(root)}".encode()).hexdigest()[:32]


def _fence_of(name: str) -> int:
    number = name.removesuffix(".json")
    return int(number) if number.isdecimal() and len(number) <= 12 else 0
