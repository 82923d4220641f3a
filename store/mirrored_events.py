"""Event files at the remote. A file is written by one process and only ever grows, so the longer copy is the newer.

A copy may end in the midst of a line; readers leave such a line until it is whole (store/events.py), and the next copy
begins with the same bytes, so what a catalog has taken in stays taken in.
"""

import logging
import re
import uuid
from pathlib import Path

from store.durable import sync_folder
from store.remote import Remote

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.jsonl")


def push_events(remote: Remote, folder: Path) -> int:
    """Send each event file that is longer here than there; returns how many."""
    there = {name: thing.bytes for name, thing in remote.names("events").items()}
    here = {path.name: path for path in sorted(folder.glob("*.jsonl")) if _NAME.fullmatch(path.name)}
    grown = [path for name, path in here.items() if path.stat().st_size > there.get(name, 0)]
    remote.together(lambda path: remote.put(path, f"events/{path.name}"), grown)
    return len(grown)


def pull_events(remote: Remote, folder: Path) -> int:
    """Bring each event file that is longer there than here; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = []
    for name, thing in remote.names("events").items():
        if not _NAME.fullmatch(name):
            logger.warning("%s/events/%s is no event file of ours and is passed over", remote.url, name)
        elif not (folder / name).exists() or (folder / name).stat().st_size < thing.bytes:
            wanted.append(name)
    remote.together(lambda name: _pull(remote, folder, name), wanted)
    if wanted:
        sync_folder(folder)
    return len(wanted)


def _pull(remote: Remote, folder: Path, name: str) -> None:
    temporary = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        if remote.get(f"events/{name}", temporary):
            temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
