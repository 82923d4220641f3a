"""The parent's own event file: what became of each attempt, as events of kind `run`. One file a process and store."""

import os
import threading
import uuid
from pathlib import Path
from typing import Any

from store.artifacts import Store
from store.events import EventWriter

_journals: dict[tuple[Path, int], "Journal"] = {}
_lock = threading.Lock()


class Journal:
    """Writes run rows; an event's id is the row's, and the newest event of a row is the row."""

    def __init__(self, path: Path) -> None:
        self._write = EventWriter(path, execution="")

    def run(self, row: dict[str, Any]) -> None:
        """Take the row of an attempt as it stands now."""
        self._write("run", **row)


def journal(store: Store) -> Journal:
    """This process's journal in `store`; a forked process gets one of its own, and so does a store made anew."""
    place = (store.root, os.getpid())
    with _lock:
        found = _journals.get(place)
        if found is None or not found._write.path.exists():
            path = store.root / "events" / f"runs-{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
            found = _journals[place] = Journal(path)
        return found
