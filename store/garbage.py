"""Garbage collection of the store: abandoned staging folders, superseded artifacts without dependants, leftovers.

A superseded artifact is kept as long as a kept artifact was made from it, so lineage never breaks. Live artifacts are
never garbage, even if damaged, except those that retention rules (configs/operation.py) retire, and folders without a
manifest, which nothing can use. What a run that has not ended plans to make or to read is kept whatever the rules say.
Unfinished work with checkpoints is kept whatever its age, until the operator names it; so are the paid replies of a
model.

What is removed is removed from the remote too, under the lease of its key: a machine that works on the key loses
nothing, and none begins meanwhile. Everything is asked again just before it is removed. The age of objects at the
remote is that by the remote's own clock.
"""

import json
import logging
import math
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json, writing
from nautile.common.text import as_file_name
from nautile.configs.operation import RetentionConfig
from nautile.store.artifacts import Artifact, Store, VersionId
from nautile.store.catalog import Catalog
from nautile.store.layout import CHECKPOINTS, EXECUTION, REPLIES, STAGING, StagingFiles
from nautile.store.locks import KeyLock
from nautile.store.manifest import KEY, LARGEST_MANIFEST, MANIFEST, host, read_manifest
from nautile.store.mirror import MirroredStore
from nautile.store.remote import RemoteObject
from nautile.store.request_claims import FOLDER as CLAIMS
from nautile.store.staging_mirror import StagingMirror

logger = logging.getLogger(__name__)

STALE_DAYS = 7.0
NAMED = "unfinished, and named"
DAY_S = 86400
ASK_AGAIN_S = 5.0  # what a collection of hours has learned about what is needed is asked again after so long
# The newest start of each run, unless it has ended. Starts on several machines are ordered by their clocks, so others
# of the same day count as well.
_OPEN_PLANS = """
SELECT run, state, host, steps, time FROM plans
QUALIFY state IN ('running', 'suspended') AND started > max(started) OVER (PARTITION BY run) - INTERVAL 1 DAY
"""
DOWNLOAD_S = 3600.0  # a download whose files have not changed for so long has ended: its requests time out in minutes

Published = tuple[str, str]  # (key, execution) of all artifacts that one execution published


@dataclass(frozen=True)
class Garbage:
    """A folder or file that can be removed, its size, and the reason."""

    path: Path  # of something that only the remote has: where it would be in the local folder
    bytes: int
    reason: str
    key: str | None = None  # the lock of this key must be free for the removal
    artifact: Artifact | None = None  # the artifact to remove at the remote as well
    changed: float | None = None  # of unfinished work: when it last changed, in seconds since 1970
    remote: tuple[str, ...] = ()  # names of the objects to remove at the remote
    upload: VersionId | None = None  # the version without a manifest that the objects belong to
    rules: RetentionConfig | None = None  # those by which the artifact is not needed


def find_garbage(
    store: Store,
    *,
    stale_days: float = STALE_DAYS,
    rules: RetentionConfig = RetentionConfig(),
    unfinished: Sequence[str] = (),
    replies: Sequence[str] = (),
) -> list[Garbage]:
    """Find everything that `collect` may remove.

    Unfinished work is garbage if it has been untouched for `stale_days` and holds no checkpoints. `unfinished`:
    prefixes of keys whose unfinished work is garbage in any case. `replies`: models whose paid replies are garbage.

    Raises `ConfigError` for a pin that matches no artifact, a prefix that matches no staging folder, or a model that
    has no replies or is being used by a run.
    """
    folders = [folder.name for folder in store.staging_root.glob("*") if KEY.fullmatch(folder.name)]
    for prefix in unfinished:
        if not prefix or not any(name.startswith(prefix) for name in folders):
            raise ConfigError(f"no unfinished work has a key that begins with {prefix!r}: see `nautile reconcile`")
    garbage = [*_staging(store, stale_days, tuple(unfinished)), *_artifacts(store, rules), *_digest_records(store)]
    for model in replies:
        garbage += _replies(store, model)
    if isinstance(store, MirroredStore):
        garbage += _at_remote(store, stale_days)
    return garbage


def collect(store: Store, garbage: list[Garbage]) -> list[Garbage]:
    """Remove `garbage`; returns what was removed.

    Skipped is what a run has locked, replaced, continued or begun to need since it was found, on this machine or
    another: to remove terabytes takes a while. What the remote refuses to delete is skipped with a warning.
    """
    removed: list[Garbage] = []
    if not garbage:
        return removed
    server_time = store.remote.server_time() if isinstance(store, MirroredStore) else None
    needed = _NeededVersions(store)
    with writing(store.root):
        for item in garbage:
            try:
                if _remove(store, item, server_time, needed):
                    removed.append(item)
            except (ConfigError, Retryable) as error:
                if not isinstance(store, MirroredStore):
                    raise
                logger.warning("%s is not removed: %s", item.path.relative_to(store.root), error)
    return removed


class _NeededVersions:
    """The versions that each set of rules keeps, asked again after `ASK_AGAIN_S`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: tuple[RetentionConfig, float, set[VersionId]] | None = None

    def __call__(self, rules: RetentionConfig) -> set[VersionId]:
        if self._known is None or self._known[0] != rules or time.monotonic() - self._known[1] > ASK_AGAIN_S:
            versions = needed_versions(self._store, self._store.list(superseded=True), rules)
            self._known = rules, time.monotonic(), versions
        return self._known[2]


def _remove(store: Store, item: Garbage, server_time: float | None, needed: _NeededVersions) -> bool:
    """Remove an item, and what the remote has of it; False if somebody uses it."""
    artifact = item.artifact
    # Before the lock of its key is taken, which would count as that of a run.
    if artifact is not None and item.rules is not None and artifact.version_id in needed(item.rules):
        return False
    with ExitStack() as stack:
        is_mirrored = isinstance(store, MirroredStore) and artifact is not None and store.is_mirrored(artifact)
        # Not waited for: what a run is working on is not garbage, and there will be another collection.
        if item.key and isinstance(store, MirroredStore) and (item.remote or is_mirrored or item.reason == NAMED):
            if not stack.enter_context(store.leases.if_free(item.key, server_time)).fence:
                return False
        elif item.key and not stack.enter_context(store.lock(item.key).if_free()):
            return False
        if not _is_unchanged(item):
            return False
        if isinstance(store, MirroredStore):
            # The listing by which it was found may have been cut off, or have become old.
            if item.upload is not None and not store.end_upload(item.upload):
                return False
            # At the remote first: what only the remote has comes back with the next refresh.
            if artifact is not None and is_mirrored:
                store.remove_from_remote(artifact)
            # Or the next machine that makes the key would fetch the work that the operator has given up.
            if item.reason == NAMED and item.key:
                StagingMirror(store.remote, item.path).remove()
            if item.remote:
                store.remote.delete(item.remote)
                return True
        if item.path.is_dir():
            store.discard(item.path)
        else:
            item.path.unlink(missing_ok=True)
        return True


def _is_unchanged(item: Garbage) -> bool:
    """Whether the folder still holds what was found in it. The caller holds the lock of its key."""
    if item.remote:
        return True  # the folder is only the name under which it is listed
    if item.changed is not None:
        return not item.path.exists() or _last_change(item.path) == item.changed
    # A run that made the key again has renamed the old version, and its folder now has the new one.
    manifest = read_manifest(item.path)
    execution = item.artifact.execution if item.artifact else None
    return manifest is None or manifest["execution"] == execution


def _at_remote(store: MirroredStore, stale_days: float) -> Iterator[Garbage]:
    """Interrupted uploads, and staging data that was not removed when its key was published.

    Of keys that nobody works on, and written over `stale_days` ago; if the remote does not say when, nothing.
    """
    server_time = store.remote.server_time() if math.isfinite(stale_days) else None
    if server_time is None:
        return
    older_than = server_time - DAY_S * stale_days
    for version, (size, objects) in store.unfinished_uploads(older_than).items():
        path = store.artifacts.joinpath(*version)
        if not _in_use(store, version.key, server_time):
            yield Garbage(path, size, "an interrupted upload", version.key, remote=tuple(objects), upload=version)
    old = server_time - DAY_S * max(stale_days, STALE_DAYS)
    claims = store.remote.names(CLAIMS).items()
    names = [f"{CLAIMS}/{name}" for name, entry in claims if entry.written is not None and entry.written < old]
    if names:
        yield Garbage(store.root / CLAIMS, 0, "claims on requests, answered long ago", remote=tuple(names))
    by_key: dict[str, dict[str, RemoteObject]] = defaultdict(dict)
    for name, entry in store.remote.names(STAGING).items():
        by_key[name.partition("/")[0]][f"{STAGING}/{name}"] = entry
    # Of keys with an artifact here. Work that no machine has finished may be all that is left of one.
    for key in sorted(by_key.keys() & {key for _, key, _, _ in store.folders()}):
        entries = by_key[key].values()
        is_old = all(entry.written is not None and entry.written < older_than for entry in entries)
        if is_old and not _in_use(store, key, server_time):
            size, path = sum(entry.bytes for entry in entries), store.staging_files(key).folder
            yield Garbage(path, size, "its outputs are published", key, remote=tuple(by_key[key]))


def _in_use(store: MirroredStore, key: str, server_time: float) -> bool:
    """Whether a process of this machine or another one works on the key."""
    return store.lock(key).held_elsewhere() or not store.leases.look(key).is_free(server_time)


def leftover_staging(store: Store) -> list[Garbage]:
    """The staging folders whose work is published or discarded; no artifact has to be read for them."""
    return list(_staging(store, math.inf, ()))


def unfinished_work(store: Store) -> Iterator[tuple[Garbage, bool]]:
    """The staging folders that have been untouched for `STALE_DAYS`, each with whether it `has_checkpoints`."""
    for item in _staging(store, STALE_DAYS, None):
        if item.reason.startswith("unfinished"):
            yield item, has_checkpoints(item.path)


def has_checkpoints(folder: Path) -> bool:
    """Whether a staging folder has checkpoints, which took days to make."""
    return any(path.is_dir() or path.stat().st_size for path in folder.rglob(f"{CHECKPOINTS}/*"))


def _staging(store: Store, stale_days: float, named: tuple[str, ...] | None) -> Iterator[Garbage]:
    """Staging folders that are published, untouched for `stale_days`, or named by a prefix of their key.

    `named` None: include untouched folders with checkpoints.
    """
    for folder in sorted(store.staging_root.glob("*")):
        if folder.name.startswith(".pull-"):
            # A download, of any size: no lock tells whether its process is alive.
            if time.time() - _last_change(folder) > DOWNLOAD_S:
                yield Garbage(folder, _size(folder), "left by an interrupted download")
        # `.trash-…`: a process was killed between a rename and the removal.
        elif not KEY.fullmatch(folder.name):
            yield Garbage(folder, _size(folder), "left by an interrupted removal")
        elif not store.lock(folder.name).held_elsewhere():
            changed = _last_change(folder)
            days = (time.time() - changed) / DAY_S
            if _is_published(store, folder):
                yield Garbage(folder, _size(folder), "its outputs are published", folder.name)
            elif named and folder.name.startswith(named):
                yield Garbage(folder, _size(folder), NAMED, folder.name)
            elif days > stale_days and (named is None or not has_checkpoints(folder)):
                reason = f"unfinished, untouched for {days:.0f} days"
                yield Garbage(folder, _size(folder), reason, folder.name, changed=changed)


def _replies(store: Store, model: str) -> list[Garbage]:
    """All paid replies of a model (data/endpoints/reply_cache.py), local and at the remote."""
    name = as_file_name(model)
    folder, remote = store.replies / name, tuple[str, ...]()
    if isinstance(store, MirroredStore):
        remote = tuple(f"{REPLIES}/{name}/{shard}" for shard in store.remote.names(f"{REPLIES}/{name}"))
    if not folder.is_dir() and not remote:
        raise ConfigError(f"{store.location} has no replies of a model {model!r}")
    # A run holds a lock on the file that it appends to (data/endpoints/reply_cache.py).
    if any(KeyLock(path).held_elsewhere() for path in folder.glob("*.jsonl")):
        raise ConfigError(f"a run is using {model!r} now: wait until it has ended")
    reason = f"paid replies of {model}, named"
    at_remote = [Garbage(folder, 0, f"{reason}, at the remote", remote=remote)] if remote else []
    return [Garbage(folder, _size(folder), reason), *at_remote]


def _is_published(store: Store, folder: Path) -> bool:
    """Whether the execution that worked in `folder` has published all its outputs."""
    record, done = read_json(StagingFiles(folder).execution), read_json(StagingFiles(folder).done)
    if not isinstance(record, dict) or not isinstance(done, dict):
        return False
    live = (store.read(*found) for found in store.folders(prefix=folder.name) if not found[2])
    published = {artifact.kind for artifact in live if artifact and artifact.execution == record.get("execution")}
    return published >= set(done.get("outputs", [""]))


def _artifacts(store: Store, rules: RetentionConfig) -> Iterator[Garbage]:
    """Artifact folders that are not needed, or that nothing can use."""
    artifacts = store.list(superseded=True)
    needed = needed_versions(store, artifacts, rules)
    by_folder = {artifact.folder: artifact for artifact in artifacts}
    for _, key, number, folder in store.folders():
        artifact = by_folder.get(folder)
        if artifact is None and not (folder / MANIFEST).exists():
            if folder.parent.is_symlink():  # another folder than the store's, of which nothing shows that it is ours
                continue
            yield Garbage(folder, _size(folder), "no manifest: not an artifact", key)
        elif artifact is None and number:
            yield Garbage(folder, _size(folder), "superseded, and its manifest is damaged", key)
        elif artifact is not None and artifact.version_id not in needed:
            size = _size(folder) if store.has_files(artifact) else artifact.bytes
            if number:
                reason = "superseded, and no live artifact was made from it"
            else:
                reason = f"retired by the rules, {(time.time() - _created(artifact)) / DAY_S:.0f} days old"
            yield Garbage(folder, size, reason, key, artifact, rules=rules)


def needed_versions(store: Store, artifacts: list[Artifact], rules: RetentionConfig) -> set[VersionId]:
    """The versions among `artifacts` that the rules or runs need, with everything that they were made from.

    All live ones if no rule retires any. Raises `ConfigError` for a pin that matches no artifact or several.
    """
    pinned = {store.get(name).version_id for name in rules.pins}
    live = [artifact for artifact in artifacts if not artifact.superseded]
    # By content: the record of unfinished work names its inputs by digest.
    digests = _inputs_in_use(store)
    in_use = {artifact.version_id for artifact in artifacts if artifact.manifest["digest"] in digests}
    if not rules.retires:
        return _with_inputs(artifacts, {artifact.version_id for artifact in live} | pinned | in_use)
    planned_keys, planned_inputs = _planned(store)
    # An execution is kept as a whole if any rule keeps one of its artifacts.
    oldest = None if rules.days is None else time.time() - DAY_S * rules.days
    newest = _newest_of_each_label(store.by_publication(live), rules.newest or 0) if rules.newest else set()
    kept_executions = {
        (artifact.key, artifact.execution)
        for artifact in live
        if artifact.kind in rules.kinds
        or (artifact.key, artifact.execution) in newest
        or (oldest is not None and _created(artifact) >= oldest)
        or artifact.version_id in pinned
        or artifact.key in planned_keys
        or artifact.full_id in planned_inputs
        # A run is making this key again.
        or store.lock(artifact.key).held_elsewhere()
    }
    kept_live = {artifact.version_id for artifact in live if (artifact.key, artifact.execution) in kept_executions}
    return _with_inputs(artifacts, kept_live | pinned | in_use)


def _inputs_in_use(store: Store) -> set[str]:
    """The digests of the inputs of unfinished work, on this machine and at the remote."""
    records = [read_json(path) for path in store.staging_root.glob(f"*/{EXECUTION}")]
    if isinstance(store, MirroredStore):
        remote = store.remote
        names = [name for name in remote.names(STAGING) if name.endswith(f"/{EXECUTION}")]
        records += remote.map(lambda name: remote.read_json(f"{STAGING}/{name}", LARGEST_MANIFEST), names)
    inputs = [record.get("inputs") for record in records if isinstance(record, dict)]
    return {str(digest) for named in inputs if isinstance(named, dict) for digest in named.values()}


def _planned(store: Store) -> tuple[set[str], set[str]]:
    """The keys of the steps of all runs that have not ended, and the full ids of what these steps read.

    A run that works, or waits for an approval, a slot or another machine. Not a run whose process is known to have
    been killed here, nor one that was suspended over `STALE_DAYS` ago and whose question is gone: it was cancelled, or
    was answered and has not begun since. What another machine does is not known, so its run counts until it records an
    end.
    """
    questions = [read_json(path) for path in store.questions.glob("*.json")]
    waiting = {question.get("run") for question in questions if isinstance(question, dict)}
    now = datetime.now(UTC).replace(tzinfo=None)
    if isinstance(store, MirroredStore):
        store.pull_events()
    catalog = Catalog(store)
    catalog.ingest()
    keys: set[str] = set()
    inputs: set[str] = set()
    for row in catalog.query(_OPEN_PLANS):
        lock = store.run_lock(row["run"])
        # With a remote, another machine may have the same host name: only the lock's file shows that the run was here.
        may_be_here = row["host"] == host() and (store.url is None or lock.path.exists())
        if row["state"] == "running" and may_be_here and not lock.held_elsewhere():
            continue
        is_old = now - row["time"] > timedelta(days=STALE_DAYS)
        if row["state"] == "suspended" and row["host"] == host() and row["run"] not in waiting and is_old:
            continue
        for step in json.loads(row["steps"] or "[]"):
            keys.add(str(step.get("key")))
            inputs.update(map(str, step.get("inputs", ())))
    return keys, inputs


def _with_inputs(artifacts: Iterable[Artifact], versions: set[VersionId]) -> set[VersionId]:
    """The versions, their direct and indirect inputs, and all other outputs of the same executions.

    The other outputs are needed because a step is reused only if all its outputs exist.
    """
    by_version = {artifact.version_id: artifact for artifact in artifacts}
    siblings: dict[Published, list[VersionId]] = defaultdict(list)
    for version in by_version:
        siblings[version.key, version.execution].append(version)
    pending = list(versions)
    needed: set[VersionId] = set()
    while pending:
        version = pending.pop()
        if version in needed:
            continue
        needed.add(version)
        pending += siblings[version.key, version.execution]
        if version in by_version:
            manifest = by_version[version].manifest
            for name, full_id in manifest["inputs"].items():
                kind, _, key = full_id.partition("/")
                pending.append(VersionId(kind, key, manifest["input_executions"][name]))
    return needed


def _newest_of_each_label(live: list[Artifact], count: int) -> set[Published]:
    """The `count` newest executions of each label. `live`: in the order of their publication."""
    by_label: dict[str, dict[Published, None]] = defaultdict(dict)
    for artifact in reversed(live):
        by_label[artifact.manifest["label"]].setdefault((artifact.key, artifact.execution))
    return {execution for executions in by_label.values() for execution in list(executions)[:count]}


def _digest_records(store: Store) -> Iterator[Garbage]:
    """Records of verified files (store/manifest.py) whose artifact no longer exists."""
    artifacts = {f"{kind}-{folder.name}" for kind, _, _, folder in store.folders()}
    for path in sorted(store.verified.glob("*.json")):
        if path.stem not in artifacts:
            yield Garbage(path, path.stat().st_size, "digests of files that no longer exist")


def _created(artifact: Artifact) -> float:
    """When an artifact was created, in seconds since 1970."""
    return datetime.fromisoformat(artifact.manifest["created"]).timestamp()


def _last_change(folder: Path) -> float:
    """When a folder or anything in it last changed, in seconds since 1970; now, if it is being removed."""
    return max((status.st_mtime for status in _statuses(folder)), default=time.time())


def _size(path: Path) -> int:
    return sum(status.st_size for status in _statuses(path) if not stat.S_ISDIR(status.st_mode))


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """The status of a file, or of a folder and of all in it, without what another process removes meanwhile.

    Of a link that of the link alone.
    """
    walk = () if path.is_symlink() else os.walk(path)
    contents = (Path(parent, name) for parent, folders, names in walk for name in (*folders, *names))
    for entry in (path, *contents):
        with suppress(FileNotFoundError):
            yield entry.lstat()
