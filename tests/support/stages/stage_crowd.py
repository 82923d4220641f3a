"""Several real processes at one store: each says when it is ready, does its work when told, and reports word by word.

They are forked off a server that has the imports behind it, so that a process costs milliseconds.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from tests.support.samples.stage_store import filled, key_of

ROOT = Path(__file__).resolve().parents[3]
Report = Callable[[object], None]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "tests.support.stages.stage_crowd"])


class CrowdProcess:
    """A process that calls `work(store, *arguments, report)` after `go`."""

    def __init__(self, work: Callable[..., None], root: Path, *arguments: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_main, args=(theirs, work, root, arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def go(self) -> None:
        self._pipe.send("go")

    def next_report(self) -> Any:
        return self._pipe.recv()

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def join(self) -> list[Any]:
        """The remaining reports of a process that ends well."""
        reports = []
        try:
            while True:
                reports.append(self._pipe.recv())
        except EOFError:
            self._process.join()
        assert self._process.exitcode == 0
        return reports


def _main(pipe: Any, work: Callable[..., None], root: Path, arguments: tuple[Any, ...]) -> None:
    store = Store(root)
    store.prepare()
    pipe.send("ready")
    pipe.recv()
    work(store, *arguments, pipe.send)


def publish(store: Store, name: str, count: int, supersede: bool, report: Report) -> None:
    """Publish the same `count` keys as the other processes; the contents name the one that did."""
    for index in range(count):
        key = key_of(f"crowd {index}")
        source = filled(store.root / "staging" / f"{name}-{index}", {"who.txt": name, "deep/what.txt": str(index)})
        options = {"config": {}, "inputs": {}, "facts": {}, "supersede": supersede}
        artifact = store.publish("tokens", key, source, stage="toy", version=1, **options)
        report(artifact.execution)


def write_and_ingest(store: Store, name: str, count: int, every: int, report: Report) -> None:
    """Emit `count` metrics, ingesting into the catalog after each `every`, while other processes do the same."""
    emit = EventWriter(store.root / "events" / f"{name}.jsonl", name, stage="toy")
    for index in range(count):
        emit("metric", name="loss", step=index, value=index / 2)
        emit("metric", name="shared", step=index, value=float(index), source=name)
        if index % every == 0:
            Catalog(store).ingest()
        report(index)
    Catalog(store).ingest()
