"""Write how attempts went to the store's event files, from which the catalog is built."""

import os
import threading
import uuid
from pathlib import Path
from typing import Any

from store.artifacts import Store
from store.events import EventWriter

_writers: dict[tuple[Path, int], EventWriter] = {}
_lock = threading.Lock()


def write_attempt_row(store: Store, row: dict[str, Any]) -> None:
    """Write the row of an attempt as it now stands; the newest event with a row's `id` is what the catalog shows."""
    # One file per process (a forked one gets its own), and a new one where the store was deleted and created again.
    with _lock:
        writer = _writers.get((store.root, os.getpid()))
        if writer is None or not writer.path.exists():
            path = store.root / "events" / f"runs-{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
            writer = _writers[store.root, os.getpid()] = EventWriter(path, execution="")
    writer("run", **row)
