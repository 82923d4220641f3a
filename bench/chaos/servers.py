"""Servers for a chaos run of the default configuration: an S3 server on a small disk, and a teacher that counts.

Both are real servers on loopback sockets. The S3 server is moto in a separate process. Each object is a file on a
tmpfs, so its disk can really be full. A proxy between it and the run can drop every connection.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import s3fs

from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.servers.object_store import CREDENTIALS, CuttingProxy

BUCKET = "chaos"
START_S = 30.0
PRICES = (2.0, 6.0)  # dollars a million tokens, in and out


class MirrorServer:
    """The S3 server, its disk and the proxy. `folder`: where its disk is mounted."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.process: subprocess.Popen[bytes] | None = None
        self.proxy: CuttingProxy | None = None

    def start(self) -> None:
        """Start the server with an empty bucket. Raises `SystemExit` if it does not answer."""
        # moto keeps small objects in memory; with a buffer of one byte each is a temporary file, so the disk can be
        # full.
        environment = os.environ | {"TMPDIR": str(self.folder), "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "1"}
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with (self.folder.parent / "s3.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        address = f"http://127.0.0.1:{self.port}"
        until = time.monotonic() + START_S
        while True:
            try:
                self._files().mkdir(BUCKET)
                break
            except Exception as error:
                if time.monotonic() > until or self.process.poll() is not None:
                    raise SystemExit(f"the S3 server does not start on port {self.port}: {error}") from None
                time.sleep(0.5)
        self.proxy = CuttingProxy(address, sys.maxsize)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which a process reaches the server through the proxy."""
        assert self.proxy
        return CREDENTIALS | {"AWS_ENDPOINT_URL": self.proxy.address}

    def greatest_fence(self, key: str) -> int:
        """The highest fence of a key's lease, 0 if it was never taken; read past the proxy."""
        files, folder = self._files(), f"{BUCKET}/runs/leases/{key}"
        names = files.ls(folder, detail=False, refresh=True) if files.exists(folder) else []
        return max((int(Path(name).stem) for name in names), default=0)

    def _files(self) -> s3fs.S3FileSystem:
        return s3fs.S3FileSystem(
            endpoint_url=f"http://127.0.0.1:{self.port}", key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret=CREDENTIALS["AWS_SECRET_ACCESS_KEY"], skip_instance_cache=True, use_listings_cache=False,
        )  # fmt: skip

    def cut_after(self, byte_count: int, seconds: float) -> None:
        """Drop every connection once `byte_count` bytes have passed, and accept them again after `seconds`."""
        assert self.proxy
        self.proxy.left = byte_count
        threading.Timer(seconds, self.proxy.restore).start()

    def hang(self, seconds: float) -> None:
        """Suspend the server for `seconds`."""
        assert self.process
        server = psutil.Process(self.process.pid)
        server.suspend()
        threading.Timer(seconds, server.resume).start()

    def close(self) -> None:
        if self.proxy:
            self.proxy.close()
        if self.process:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()


class CountingTeacher(FakeOpenAI):
    """A teacher that logs each of its answers and faults to `log`, so that a restarted one continues the count."""

    def __init__(self, log: Path, port: int) -> None:
        super().__init__(faults=self._next_fault, port=port, per_million=PRICES)
        self.log = log
        self.coming: deque[str] = deque()
        self._hung = 0
        self.answered_ever = sum(self.totals()["answers"].values())

    def _next_fault(self, arrival: int) -> str | None:
        try:
            fault = self.coming.popleft()
        except IndexError:
            return None
        self._write({"fault": fault})
        self._hung += fault == "hang"
        return fault

    def _count(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        super()._count(body, answer)
        self.answered_ever += 1
        usage = answer["usage"]
        # By digest of the whole body, so that a request that is repeated after a kill counts as the same.
        request = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        self._write({"request": request, "tokens": [usage["prompt_tokens"], usage["completion_tokens"]]})

    def _write(self, row: dict[str, Any]) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and will still be answered."""
        return self._at_once - self._hung

    def totals(self) -> dict[str, Any]:
        """Totals of the whole log: answers by request, faults by kind, and the cost of the answers in dollars."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        rows = [json.loads(line) for line in lines]
        answers = [row for row in rows if "request" in row]
        tokens = [sum(row["tokens"][side] for row in answers) for side in (0, 1)]
        return {
            "answers": Counter(row["request"] for row in answers),
            "faults": Counter(row["fault"] for row in rows if "fault" in row),
            "dollars": sum(count * price for count, price in zip(tokens, PRICES, strict=True)) / 1e6,
        }
