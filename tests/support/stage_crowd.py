"""Programs for tests that need several real processes at one store: `python -m tests.support.stage_crowd TASK …`.

Each prints `ready` and waits for a line, so that a test can start all of them at once.
"""

import subprocess
import sys
from pathlib import Path

from store.artifacts import Store
from store.catalog import Catalog
from store.events import EventWriter
from tests.support.stage_store import filled, key_of

ROOT = Path(__file__).resolve().parents[2]


def start(task: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a program and wait until it is ready."""
    command = [sys.executable, "-m", "tests.support.stage_crowd", task, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def report(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def publish(store: Store, name: str, count: int, supersede: bool) -> None:
    """Publish the same `count` keys as the other processes; the contents name the one that did."""
    for index in range(count):
        key = key_of(f"crowd {index}")
        source = filled(store.root / "staging" / f"{name}-{index}", {"who.txt": name, "deep/what.txt": str(index)})
        options = {"config": {}, "inputs": {}, "facts": {}, "supersede": supersede}
        artifact = store.publish("tokens", key, source, stage="toy", version=1, **options)
        report(artifact.execution)


def write_and_ingest(store: Store, name: str, count: int, every: int) -> None:
    """Emit `count` metrics, ingesting into the catalog after each `every`, while other processes do the same."""
    emit = EventWriter(store.root / "events" / f"{name}.jsonl", name, stage="toy")
    for index in range(count):
        emit("metric", name="loss", step=index, value=index / 2)
        emit("metric", name="shared", step=index, value=float(index), source=name)
        if index % every == 0:
            Catalog(store).ingest()
        report(index)
    Catalog(store).ingest()


def main(task: str, root: str, *arguments: str) -> None:
    store = Store(root)
    store.prepare()
    report("ready")
    sys.stdin.readline()
    if task == "publish":
        name, count, supersede = arguments
        publish(store, name, int(count), supersede == "True")
    else:
        name, count, every = arguments
        write_and_ingest(store, name, int(count), int(every))


if __name__ == "__main__":
    main(*sys.argv[1:])
