"""`nautile serve` in a process of its own, over a small random checkpoint."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jax
from openai import OpenAI

from nautile.configs.model import TokenizerConfig
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from tests.model.conftest import tiny_config
from tests.support.stages.toy_cli import ROOT, environment

TOKENIZER = TokenizerConfig(ranks=256)
CONTEXT = 128
MODEL = tiny_config(vocabulary=TOKENIZER.vocabulary, context=CONTEXT, blocks=1)
SLOTS, QUEUE = 4, 64
NAME = "tiny"


def save_checkpoint(folder: Path) -> Path:
    """Save random weights, scaled up so that greedy and sampled replies differ."""
    params = initialise(MODEL, 0)
    save_weights(folder, jax.tree.map(lambda leaf: leaf * 1.5, params), MODEL, TOKENIZER)
    return folder


@dataclass(frozen=True)
class Server:
    """A server that accepts requests."""

    process: subprocess.Popen[str]
    root: str

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])

    def client(self, key: str = "none", **more: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.root}/v1", api_key=key, max_retries=0, timeout=60, **more)

    def health(self) -> dict[str, Any]:
        return httpx.get(f"{self.root}/health", timeout=120).json()

    def wait_idle(self) -> dict[str, Any]:
        """Wait until no request is in a slot or in the queue."""
        deadline = time.monotonic() + 240
        while (state := self.health())["busy"] or state["waiting"]:
            assert time.monotonic() < deadline, state
            time.sleep(0.01)
        return state


@contextmanager
def serving(
    checkpoint: Path, store: Path, *options: object, port: int = 0, slots: int = SLOTS, queue: int = QUEUE, **env: str
) -> Iterator[Server]:
    """Start the server and wait until its programs are compiled; at the end it is killed if it still runs."""
    command = [
        sys.executable,
        "-m",
        "nautile.flows.cli.main",
        "serve",
        str(checkpoint),
        "--port",
        str(port),
        "--name",
        NAME,
    ]
    command += ["--slots", str(slots), "--queue", str(queue), *map(str, options)]
    log = (store.parent / f"{store.name}.log").open("a")
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(store, **env), text=True, stdout=subprocess.PIPE, stderr=log
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(rf"compiling {NAME}, to be served at (http://\S+)/v1", line)
        assert match, (line, Path(log.name).read_text())
        deadline = time.monotonic() + 280
        with httpx.Client(timeout=60) as client:  # reads the certificates once, 30 ms, not with each request
            while client.get(f"{match[1]}/ready").status_code != 200:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        line = process.stdout.readline()
        assert line.startswith(f"serving {NAME} at {match[1]}/v1"), line
        yield Server(process, match[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        log.close()


__all__ = ["CONTEXT", "MODEL", "NAME", "QUEUE", "SLOTS", "TOKENIZER", "Server", "save_checkpoint", "serving"]
