"""A lease of a key at the remote, so that of several machines without a shared disk one at a time makes a key.

    <url>/leases/<key>/<fence>.json     {"holder", "host", "machine", "state": "held" or "released", "renewed": a count}

A machine acquires the lease by creating the object with the next fence number, on the condition that it does not exist:
of several machines one succeeds. The holder rewrites the object regularly. If it has not changed for five minutes, by
the clock of the waiting machine, the lease has expired: the holder has died or lost its connection. The holder of the
greatest fence holds the lease, so a holder that returns sees that it was replaced, and stops. Clocks of different
machines are never compared.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import read_json, write_json
from store.locks import KeyLock
from store.manifest import host
from store.remote import Remote

logger = logging.getLogger(__name__)

EXPIRES_S = 300.0  # long enough that no ordinary outage of the remote ends the work of its holder
RENEW_S = 30.0
POLL_S = 2.0
LARGEST_LEASE = 2**16  # bytes


class Lease:
    """The lease of `key`. The caller holds the key's lock, so one process of a machine at a time uses it.

    Methods that access the remote raise `ConfigError` or `Retryable`.
    """

    def __init__(self, remote: Remote, root: Path, key: str) -> None:
        self.fence = 0
        self._remote, self._folder = remote, f"leases/{key}"
        self._state: dict[str, Any] = {"holder": uuid.uuid4().hex, "host": host(), "machine": machine_id(root)}
        self._renewed_at = 0.0
        self._taken_by = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait: Callable[[float], object], on_wait: Callable[[str], object]) -> None:
        """Acquire the lease, waiting until its holder has released it or it has expired; then renew it in a thread.

        `on_wait(host)` is called once if the lease is held; `wait(seconds)` between two polls, and an exception from it
        ends the waiting.
        """
        # When the lease was last seen to change, by our own monotonic clock: other clocks are not compared.
        last_lease, unchanged_since, announced = None, time.monotonic(), False
        while True:
            fence, state = self._newest()
            if (fence, state) != last_lease:
                last_lease, unchanged_since = (fence, state), time.monotonic()
            # We hold the lock of the key, so another process of this machine that held the lease has ended.
            own = state.get("machine") == self._state["machine"]
            expired = time.monotonic() - unchanged_since > EXPIRES_S
            free = fence == 0 or own or state.get("state") == "released" or expired
            # Several may find it free, and the object of the next number is created by one of them.
            if free and self._create(fence + 1):
                break
            if not announced:
                on_wait(str(state.get("host", "another host")))
                announced = True
            wait(POLL_S)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `Retryable` if the lease is lost. It makes no request itself: the renewing thread does."""
        if self._taken_by:
            raise Retryable(f"the lease of this key was taken over by {self._taken_by}")
        if time.monotonic() - self._renewed_at > EXPIRES_S - RENEW_S:
            raise Retryable(f"the lease of this key could not be renewed at {self._remote.url} and expires")

    def release(self) -> None:
        """Release the lease and remove the objects of earlier holders; an unreachable remote is only logged."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self.fence == 0 or self._taken_by:
            return
        try:
            # Our own object stays: the next holder continues its number, so no number is used twice.
            self._write("released")
            names = [name for name in self._remote.names(self._folder) if _fence_of(name) < self.fence]
            self._remote.delete(f"{self._folder}/{name}" for name in names)
        except (ConfigError, Retryable) as error:
            logger.warning("the lease cannot be released; it will expire: %s", error)

    def _newest(self) -> tuple[int, dict[str, Any]]:
        """The greatest fence (0: none) and its state."""
        fence = max(map(_fence_of, self._remote.names(self._folder)), default=0)
        state = self._remote.read_json(self._name(fence), LARGEST_LEASE) if fence else None
        return fence, state if isinstance(state, dict) else {}

    def _create(self, fence: int) -> bool:
        """Create the object of `fence`; False if another machine has created it."""
        request_time = time.monotonic()
        content = json.dumps({**self._state, "state": "held", "renewed": 0}).encode()
        if not self._remote.create(self._name(fence), content):
            # We may have created it by a request whose response was lost.
            state = self._remote.read_json(self._name(fence), LARGEST_LEASE)
            if not isinstance(state, dict) or state.get("holder") != self._state["holder"]:
                return False
        # Counted from before the request, as the others count, who may have seen the object at once.
        self.fence, self._renewed_at = fence, request_time
        return True

    def _write(self, state: str) -> None:
        """Rewrite the object with a new count. The renewal counts from before the request, which may take long."""
        request_time = time.monotonic()
        self._state["renewed"] = self._state.get("renewed", 0) + 1
        self._remote.write(self._name(self.fence), json.dumps({**self._state, "state": state}).encode())
        self._renewed_at = request_time

    def _renew(self) -> None:
        """Body of the thread: renew the lease until it is released or another machine has taken it over."""
        while not self._stop.wait(RENEW_S):
            try:
                fence, state = self._newest()
                # Looked up before each renewal, or a holder that was cut off would go on beside its successor.
                if fence > self.fence:
                    self._taken_by = str(state.get("host", "another host"))
                    return
                self._write("held")
            except (ConfigError, Retryable) as error:
                logger.warning("the lease of a key cannot be renewed: %s", error)

    def _name(self, fence: int) -> str:
        return f"{self._folder}/{fence:08d}.json"


def machine_id(root: Path) -> str:
    """The id of a store folder on this machine, created on first use: containers may share host names and paths."""
    path = root / "machine.json"
    if not isinstance(record := read_json(path), dict):
        # The first steps of a new folder start at the same time. All must get one id: a lease with another would look
        # like that of a foreign machine, and after a crash this one would wait until it expires.
        with KeyLock(root / "locks" / "machine.lock"):
            if not isinstance(record := read_json(path), dict):
                record = {"id": uuid.uuid4().hex}
                write_json(path, record)
    return str(record["id"])


def _fence_of(name: str) -> int:
    number = name.removesuffix(".json")
    return int(number) if number.isdecimal() else 0
