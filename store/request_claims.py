"""Claims on requests to endpoints: of hosts that share only a remote, one sends a request and the others wait for it.

    <url>/claims/<model>/<digest>.<n>     {"machine", "host", "process"}: who sends it; empty once it was given back
    <url>/claims/alive/<process>.json     {"at"}: rewritten, with the time by its clock, while the process asks

A claim is created only if it does not exist, before the request is sent, and stays when the reply has arrived: replies
are uploaded a minute later at most, and who finds the claim fetches them until the reply is there. The next number is
tried if a claim was given back, because the request has failed, or if its process has shown no life for five minutes,
and at once after a process of the same machine: there, locks of the kernel do the same
(data/endpoints/reply_cache.py), so that the other process does not send the request any more.
"""

import json
import logging
import queue
import threading
import uuid
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import parse_json
from nautile.common.text import as_file_name
from nautile.store.lease import EXPIRES_S, RENEW_S, clock
from nautile.store.manifest import host
from nautile.store.mirror import MirroredStore

logger = logging.getLogger(__name__)

FOLDER = "claims"
LOOK_EVERY_S = 10.0  # how often a claim of another host is looked at again, and its replies are fetched
LARGEST_CLAIM = 2**12  # bytes
GIVEN_BACK = b""


class RequestClaims:
    """The claims of this machine on requests to `model`. Safe to use from several threads.

    `acquire` raises `ConfigError` or `Retryable` if the remote cannot be used: a request that may be another's is not
    sent.
    """

    def __init__(self, store: MirroredStore, model: str) -> None:
        self._store, self._model = store, model
        self._folder = f"{FOLDER}/{as_file_name(model)}"
        # Not the machine alone: what a process that was killed has claimed is not sent by the next one, which may ask
        # for other things, and would keep the claim alive.
        self._process = uuid.uuid4().hex
        claim = {"machine": store.machine, "host": host(), "process": self._process}
        self._content = json.dumps(claim).encode()
        # Of the requests that are under way, by digest: the name of the claim, and when one of another host was seen.
        self._names: dict[str, str] = {}
        self._looked_at: dict[str, float] = {}
        self._pulled_at = -LOOK_EVERY_S
        self._lives: dict[str, tuple[Any, float, float]] = {}  # process -> (content, since when, when it was read)
        self._lock = threading.Lock()
        self._to_give_back: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def acquire(self, digest: str) -> bool:
        """Claim a request; False while another host has claimed it. The caller holds the request's lock."""
        if digest in self._names:
            return True
        if clock() - self._looked_at.get(digest, -LOOK_EVERY_S) < LOOK_EVERY_S:
            return False
        self._live()
        number = 1
        while True:
            name = f"{self._folder}/{digest}.{number}"
            if self._store.remote.create(name, self._content):
                break
            data = self._store.remote.read(name, LARGEST_CLAIM)
            claim = parse_json(data or b"null")
            claim = claim if isinstance(claim, dict) else {}
            machine, process = claim.get("machine"), claim.get("process")
            if process == self._process:  # by a request whose response was lost
                break
            if machine not in (None, self._store.machine) and self._is_alive(str(process or machine)):
                self._looked_at[digest] = clock()
                self._pull()
                return False
            number += 1
        self._names[digest] = name
        return True

    def release(self, digest: str, *, answered: bool) -> None:
        """End a claim. Without a reply it is given back to other hosts, which is done later, in a thread."""
        self._looked_at.pop(digest, None)
        name = self._names.pop(digest, None)
        if name is not None and not answered:
            self._to_give_back.put(name)

    def _live(self) -> None:
        """Show that this process is alive: now, if it is the first claim, and from then on in a thread."""
        with self._lock:
            if self._thread is None:
                self._beat()
                self._thread = threading.Thread(target=self._keep_alive, name="request-claims", daemon=True)
                self._thread.start()

    def _beat(self) -> None:
        name = f"{FOLDER}/alive/{self._process}.json"
        self._store.remote.write(name, json.dumps({"at": clock()}).encode())

    def _keep_alive(self) -> None:
        due = clock() + RENEW_S
        while True:
            try:
                name = self._to_give_back.get(timeout=max(0.0, due - clock()))
            except queue.Empty:
                name = ""
            try:
                if name:
                    self._store.remote.write(name, GIVEN_BACK)
                if clock() >= due:
                    due = clock() + RENEW_S
                    self._beat()
            except (ConfigError, Retryable) as error:
                logger.warning("claims on requests cannot be renewed: %s", error)

    def _is_alive(self, process: str) -> bool:
        """Whether the object of a process has changed within the time after which a lease expires, by our clock."""
        with self._lock:
            known, since, read_at = self._lives.get(process, (None, clock(), -LOOK_EVERY_S))
            if clock() - read_at >= LOOK_EVERY_S:
                newest = self._store.remote.read(f"{FOLDER}/alive/{process}.json", LARGEST_CLAIM)
                since, read_at = since if newest == known else clock(), clock()
                self._lives[process] = newest, since, read_at
            return clock() - since <= EXPIRES_S

    def _pull(self) -> None:
        with self._lock:
            if clock() - self._pulled_at >= LOOK_EVERY_S:
                self._pulled_at = clock()
                self._store.pull_replies([self._model])
