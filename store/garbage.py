"""What the store no longer needs: staging that leads nowhere, replaced artifacts that nothing rests on, broken rests.

A replaced artifact stays as long as a live one, or another that stays, was made from it: lineage never breaks. Live
artifacts are never garbage, whatever their state, except a folder without any manifest, which nothing can use, and
what retention rules (configs/retention.py) let go. What goes, goes from the remote too.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.retention import RetentionConfig
from store import manifest as manifests
from store.artifacts import Artifact, Store
from store.durable import read_json, writing
from store.mirror import is_absent
from store.retention import age, closure, making, roots

STALE_DAYS = 7.0


@dataclass(frozen=True)
class Garbage:
    """A folder or file that can go, the space it takes, and why."""

    path: Path  # of what lies at the remote alone, where it would lie here
    bytes: int
    reason: str
    key: str | None = None  # its lock must be free for it to go
    artifact: Artifact | None = None  # one that the remote may have too
    remote: tuple[str, ...] = ()  # names at the remote


def find_garbage(
    store: Store, *, stale_days: float = STALE_DAYS, rules: RetentionConfig = RetentionConfig()
) -> list[Garbage]:
    """What `collect` would remove. Unfinished work counts once nobody has touched it for `stale_days`.

    Raises `ConfigError` for a pin that means no artifact.
    """
    return [*_staging(store, stale_days), *_artifacts(store, rules), *_memories(store), *_orphans(store, stale_days)]


def collect(store: Store, garbage: list[Garbage]) -> list[Garbage]:
    """Remove `garbage`; returns what went. What a run has begun to work on since it was found stays."""
    gone = []
    with writing(store.root):
        for item in garbage:
            lock = store.lock(item.key) if item.key else None
            if lock is not None and not lock.try_acquire():
                continue
            try:
                if store.mirror is not None and item.artifact is not None and store.mirror.has(item.artifact):
                    store.mirror.remove(item.artifact)
                if item.remote and store.mirror is not None:
                    store.mirror.remote.delete(item.remote)
                elif item.path.is_dir():
                    store.discard(item.path)
                else:
                    item.path.unlink(missing_ok=True)
            finally:
                if lock is not None:
                    lock.release()
            gone.append(item)
    return gone


def _staging(store: Store, stale_days: float) -> Iterator[Garbage]:
    for folder in sorted((store.root / "staging").glob("*")):
        if not manifests.KEY.fullmatch(folder.name):
            yield Garbage(folder, _size(folder), "left by a removal that was cut short")
        elif not store.lock(folder.name).held_elsewhere():
            days = (time.time() - _touched(folder)) / 86400
            if _is_published(store, folder):
                yield Garbage(folder, _size(folder), "what was made here is published", folder.name)
            elif days > stale_days:
                yield Garbage(folder, _size(folder), f"unfinished, untouched for {days:.0f} days", folder.name)


def _is_published(store: Store, folder: Path) -> bool:
    """True if the execution that worked in `folder` is the one whose artifacts are there, all of them."""
    record, done = read_json(folder / "execution.json"), read_json(folder / "done.json")
    if not isinstance(record, dict) or not isinstance(done, dict):
        return False
    found = {a.kind for a in store.list() if a.key == folder.name and a.execution == record.get("execution")}
    return found >= set(done.get("outputs", [""]))


def _artifacts(store: Store, rules: RetentionConfig) -> Iterator[Garbage]:
    artifacts = store.list(superseded=True)
    needed = closure(artifacts, roots(store, artifacts, rules))
    found = {artifact.folder: artifact for artifact in artifacts}
    for _, key, number, folder in store.folders():
        artifact = found.get(folder)
        if not (folder / manifests.NAME).exists():
            yield Garbage(folder, _size(folder), "no manifest: not an artifact", key)
        elif artifact is None and number:
            yield Garbage(folder, _size(folder), "superseded, and its manifest is damaged", key)
        elif artifact is not None and making(artifact) not in needed:
            size = artifact.bytes if is_absent(folder) else _size(folder)
            why = "superseded, and nothing that is live rests on it" if number else "retired by the rules, "
            yield Garbage(folder, size, why if number else why + age(artifact), key, artifact)


def _orphans(store: Store, stale_days: float) -> Iterator[Garbage]:
    if store.mirror is not None:
        for name, (size, names) in store.mirror.orphans(time.time() - 86400 * stale_days).items():
            yield Garbage(
                store.root / "artifacts" / name, size, "an upload that was cut short", None, None, tuple(names)
            )


def _memories(store: Store) -> Iterator[Garbage]:
    """Records of verified files whose artifact is gone."""
    there = {f"{kind}-{folder.name}" for kind, _, _, folder in store.folders()}
    for path in sorted((store.root / "verified").glob("*.json")):
        if path.stem not in there:
            yield Garbage(path, path.stat().st_size, "remembers files that are gone")


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def _touched(folder: Path) -> float:
    """When anything in `folder` was last written, seconds since 1970."""
    return max((path.lstat().st_mtime for path in (folder, *folder.rglob("*"))), default=0.0)
