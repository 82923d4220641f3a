"""What the store no longer needs: staging that leads nowhere, replaced artifacts that nothing rests on, broken rests.

A replaced artifact stays as long as a live one, or another that stays, was made from it: lineage never breaks. Live
artifacts are never garbage, whatever their state, except a folder without any manifest, which nothing can use, and
what retention rules (configs/operation.py) let go. What goes, goes from the remote too.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from common.files import read_json, writing
from configs.operation import RetentionConfig
from store import manifest as manifests
from store.artifacts import Artifact, Store
from store.mirror import is_absent, moment

Making = tuple[str, str, str]  # kind, key, execution


def making(artifact: Artifact) -> Making:
    return artifact.kind, artifact.key, artifact.execution


def roots(store: Store, artifacts: list[Artifact], rules: RetentionConfig) -> set[Making]:
    """The makings that stay for their own sake. Raises `ConfigError` for a pin that names no artifact, or several."""
    pinned = {making(store.get(name)) for name in rules.pins}
    live = [artifact for artifact in artifacts if not artifact.superseded]
    if not rules.retires:
        return {making(artifact) for artifact in live} | pinned
    read = _being_read(store)
    oldest = None if rules.days is None else time.time() - 86400 * rules.days
    latest = _latest(live, rules.newest or 0)
    kept = {
        (artifact.key, artifact.execution)
        for artifact in live
        if artifact.kind in rules.kinds
        or (artifact.key, artifact.execution) in latest
        or (oldest is not None and _made(artifact) >= oldest)
        or making(artifact) in pinned
        or store.lock(artifact.key).held_elsewhere()
    }
    whole = {making(artifact) for artifact in live if (artifact.key, artifact.execution) in kept}
    return whole | pinned | {making(artifact) for artifact in artifacts if artifact.manifest["digest"] in read}


def closure(artifacts: Iterable[Artifact], kept: set[Making]) -> set[Making]:
    """`kept` and all that those were made from."""
    by_making = {making(artifact): artifact for artifact in artifacts}
    siblings = defaultdict(list)
    for one in by_making:
        siblings[one[1:]].append(one)
    open_ends = list(kept)
    needed: set[Making] = set()
    while open_ends:
        one = open_ends.pop()
        if one in needed:
            continue
        needed.add(one)
        # What one execution published is reused as a whole or not at all.
        open_ends += siblings[one[1:]]
        if one in by_making:
            manifest = by_making[one].manifest
            for name, full_id in manifest["inputs"].items():
                kind, _, key = full_id.partition("/")
                open_ends.append((kind, key, manifest["input_executions"][name]))
    return needed


def age(artifact: Artifact) -> str:
    return f"{(time.time() - _made(artifact)) / 86400:.0f} days old"


def _latest(live: list[Artifact], count: int) -> set[tuple[str, str]]:
    """(key, execution) of the `count` latest executions of each label."""
    by_label: dict[str, dict[tuple[str, str], tuple[datetime, str]]] = defaultdict(dict)
    for artifact in live:
        by_label[artifact.manifest["label"]][artifact.key, artifact.execution] = moment(artifact.manifest)
    ordered = [sorted(found, key=lambda one: found[one], reverse=True) for found in by_label.values()]
    return {one for found in ordered for one in found[:count]}


def _being_read(store: Store) -> set[str]:
    """Digests of the inputs of all unfinished work."""
    records = [read_json(path) for path in (store.root / "staging").glob("*/execution.json")]
    inputs = [record["inputs"] for record in records if isinstance(record, dict) and isinstance(record["inputs"], dict)]
    return {digest for given in inputs for digest in given.values()}


def _made(artifact: Artifact) -> float:
    return moment(artifact.manifest)[0].timestamp()


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
        if not (folder / manifests.MANIFEST).exists():
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
