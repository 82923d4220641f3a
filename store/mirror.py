"""A store with a remote: an object store for the artifacts and event files of all machines, with a local folder.

    <url>/store.json                                    {"layout": 1}
    <url>/payload/<kind>/<key>/<execution>/<file>       written first
    <url>/manifests/<kind>/<key>/<execution>.json       written last: it publishes the artifact
    <url>/events/*.jsonl
    <url>/leases/<key>/<fence>.json                     which machine makes a key (store/lease.py)
    <url>/replies/<model>/*.jsonl                       paid replies
    <url>/claims/<model>/                               who sends which request (store/request_claims.py)
    <url>/staging/<key>/                                unfinished work (store/staging_mirror.py)
    <url>/hosts/<key>/                                  messages between several hosts that make a key together
    <url>/clock/now                                     written to learn the time by the remote's clock

An object store has no rename, so each version of an artifact has its own names: a manifest is created only if there is
none of its name, by the holder of the key's lease. Garbage collection replaces it by an empty object, or creates that
in place of a missing one, before it deletes the payload: who had stopped just before it created the manifest can then
not publish what has no files. The version with the greatest fence is the live one.

The local folder has the layout of any store. In an artifact's folder a marker file with the execution's id says where
its files are: `.mirrored`, at the remote too; `.absent`, only at the remote, from which they are fetched when they are
first needed. What the markers say is compared with the remote's listing at each refresh.
"""

import json
import logging
import math
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import (
    file_size,
    parse_json,
    read_json,
    sha256_of,
    sync_folder,
    write_json,
    write_text,
    writing,
)
from nautile.common.text import as_file_name
from nautile.store.artifacts import (
    Artifact,
    KeyLease,
    Store,
    VersionId,
    check_layout,
    damage_message,
    in_place,
)
from nautile.store.layout import EVENTS, REPLIES
from nautile.store.lease import Lease, Leases, machine_id
from nautile.store.manifest import (
    ABSENT,
    KEY,
    KIND,
    LARGEST_MANIFEST,
    MANIFEST,
    MIRRORED,
    checked_manifest,
    execution_after_takeover,
    read_manifest,
    trust_files,
    version_order,
    with_seal,
)
from nautile.store.remote import RECORD, ObjectTooLarge, Remote, record_remote, resolve_location
from nautile.store.staging_mirror import STOP_S, StagingMirror

logger = logging.getLogger(__name__)

REMOVED = b""  # the content of the manifest of a version that garbage collection has removed
# Held while events are uploaded: of two uploads of a file that grows, the earlier and shorter must not end last.
_sending_events = threading.Lock()
_MANIFEST_FILE = re.compile(rf"({KIND.pattern})/({KEY.pattern})/([^/]*)\.json")
_EVENT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.jsonl")


def open_store(location: str | Path | None = None) -> Store:
    """Open the store at a folder or URL; None means `$NAUTILE_STORE`, else `./.nautile`.

    A folder that is the local copy of a remote store is opened with its remote. Raises `ConfigError` for a location
    that cannot be a store, or that has another layout.
    """
    name = str(location if location is not None else os.environ.get("NAUTILE_STORE") or ".nautile")
    root, url = resolve_location(name)
    store = MirroredStore(root, url) if url else Store(root)
    store.check_layout()
    return store


class MirroredStore(Store):
    """A store whose artifacts and events are also at a URL.

    Every method is idempotent: called again after a crash, it does what remains to be done. Methods that access the
    remote raise `ConfigError` or `Retryable` with the URL.
    """

    def __init__(self, root: Path, url: str) -> None:
        super().__init__(root)
        self.url = url
        self.remote = Remote(url)
        self.leases = Leases(self.remote, self.root, self._fence_of)

    @cached_property
    def machine(self) -> str:
        """The id of the local folder on this machine."""
        return machine_id(self.root)

    def prepare(self) -> None:
        super().prepare()
        with writing(self.root):
            record_remote(self.root, self.remote.url)

    def refresh(self, *, events: bool = False, held: str | None = None) -> None:
        """Add the manifests that other machines have published, and remove artifacts that they removed.

        `events`: download their event files too. The files of an artifact are downloaded by `fetch`. Keys that a
        process of this machine is making are skipped until the next refresh; `held` is the key whose lock the caller
        holds.
        """
        self.prepare()
        self._check_remote_layout()
        # The local folder is read first: a version that another process adds between the two listings is then in the
        # second alone, and is not taken for one that was removed at the remote.
        local_versions = dict(self._local_versions())
        remote_versions = self._published_versions()
        new = [remote_versions[version] for version in sorted(remote_versions.keys() - local_versions.keys())]
        # Oldest first, so that versions that are already live are superseded in the order in which they were made.
        for manifest in sorted(filter(None, self.remote.map(self._remote_manifest, new)), key=version_order):
            self._add_without_files(manifest, held)
        # Versions that the remote no longer has: gc on another machine removed them, or somebody emptied the bucket.
        missing = [
            version
            for version in sorted(local_versions.keys() - remote_versions.keys())
            if any((local_versions[version] / name).exists() for name in (ABSENT, MIRRORED))
        ]
        # Asked for by name: a listing may be older than the manifest, or cut off.
        manifests = self.remote.map(lambda v: self.remote.read(_manifest_name(v), LARGEST_MANIFEST), missing)
        for version in (version for version, manifest in zip(missing, manifests, strict=True) if not manifest):
            folder = local_versions[version]
            # A version with local files stays: it may be the last copy. The next run that needs it sends it again.
            if (folder / ABSENT).exists():
                self.discard(folder)
            else:
                (folder / MIRRORED).unlink(missing_ok=True)
                logger.warning("%s no longer has %s/%s, which is here", self.remote.url, version.kind, version.key[:12])
        if events:
            self.pull_events()

    @contextmanager
    def lease(self, key: str, wait: Callable[[float], object], on_wait: Callable[[str], object]) -> Iterator[KeyLease]:
        with self.leases.held(key, wait, on_wait) as lease:
            yield KeyLease(lease.fence, lease.check)

    def _fence_of(self, key: str) -> int:
        """The greatest fence of the versions of a key that are known here; 0 if there is none."""
        manifests = [read_manifest(folder) for _, name, _, folder in self.folders() if name == key]
        return max((manifest["fence"] for manifest in manifests if manifest), default=0)

    @contextmanager
    def mirrored_staging(
        self, key: str, *, send: bool = True, check: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        folder = self.staging_files(key).folder

        def before_snapshot() -> None:
            self.push_events()
            # Another machine may be sending its own snapshots by now, and these would replace them.
            check()
            self.leases.confirm(key)

        mirror = StagingMirror(self.remote, folder, before_snapshot, fence=self.leases.fence(key))
        mirror.pull()
        if send:
            mirror.start()
        # Publishing moves the outputs and removes the folder, so a folder that is still there is unfinished work.
        published = False
        try:
            yield
            published = not folder.exists()
        except BaseException as error:
            mirror.patience_s = None if isinstance(error, Exception) else STOP_S
            raise
        finally:
            mirror.stop(published=published)

    def push(self, artifacts: Iterable[Artifact], *, again: bool = False, skip_held: bool = False) -> list[Artifact]:
        """Upload artifacts that the remote lacks, first the files, then the manifest; returns the uploaded ones.

        Files that an interrupted push has uploaded are not sent again; `again` sends every file in any case. Nothing is
        sent without the lease of the key: if another machine holds it, this raises `Retryable`, or with `skip_held`
        leaves the artifact out. Raises `ConfigError` for a damaged artifact, so that damage does not spread.
        """
        pushed = []
        for artifact in artifacts:
            if not self.has_files(artifact) or (self.is_mirrored(artifact) and not again):
                continue
            with self.leases.if_free(artifact.key) as lease:
                # What garbage collection has removed comes back only if a run needs it.
                if skip_held and self._is_removed(artifact.version_id):
                    continue
                if lease.fence:
                    self._send(artifact, lease, again)
                    pushed.append(artifact)
                    continue
            message = f"{artifact.id} is not sent to {self.remote.url}: {lease.holder_host} works on its key"
            if not skip_held:
                raise Retryable(message)
            logger.warning("%s", message)
        return pushed

    def push_all(self) -> list[Artifact]:
        """Upload all versions that the remote lacks, oldest first, and event and reply files; returns the versions.

        Left out, with a warning, is what another process or machine works on.
        """
        self.refresh()
        pushed = self.push(self.list(superseded=True), skip_held=True)
        self.push_events()
        self.push_replies()
        return pushed

    def push_events(self) -> int:
        """Upload each event file that is longer here than at the remote; returns how many."""
        paths = [path for path in sorted(self.events.glob("*.jsonl")) if _EVENT_FILE.fullmatch(path.name)]
        with _sending_events:
            return self._push_longer(EVENTS, paths)

    def push_replies(self) -> int:
        """Upload each file of paid replies that is longer here than at the remote; returns how many."""
        return self._push_longer(REPLIES, sorted(self.replies.glob("*/*.jsonl")))

    def pull_replies(self, models: Iterable[str]) -> None:
        """Download the paid replies of these models that other machines have uploaded.

        They go to a folder `pulled` beside this machine's own files, because only the latter are appended to and sent.
        """
        for model in map(as_file_name, models):
            folder = self.replies / model
            outdated = []
            for name, entry in self.remote.names(f"{REPLIES}/{model}").items():
                path = folder / "pulled" / name
                # A file of this machine is longer here than there, unless the folder was copied from another machine. A
                # name from the remote must not lead elsewhere.
                known = max(file_size(folder / name) or 0, file_size(path) or 0)
                if _EVENT_FILE.fullmatch(name) and known < entry.bytes:
                    outdated.append(name)

            def fetch(name: str, model: str = model, folder: Path = folder) -> None:
                self._download(f"{REPLIES}/{model}/{name}", folder / "pulled" / name)

            if outdated:
                (folder / "pulled").mkdir(parents=True, exist_ok=True)
                self.remote.map(fetch, outdated)

    def _push_longer(self, folder: str, paths: Iterable[Path]) -> int:
        """Upload the files of a folder of the store that are longer than at the remote; returns how many."""
        remote_sizes = {name: entry.bytes for name, entry in self.remote.names(folder).items()}
        # Event and reply files are only ever appended to, so their sizes say which has more.
        sizes = {path: path.stat().st_size for path in paths}
        names = {path: path.relative_to(self.root / folder).as_posix() for path in sizes}
        longer = [path for path, size in sizes.items() if size > remote_sizes.get(names[path], 0)]
        self.remote.map(lambda path: self.remote.put(path, f"{folder}/{names[path]}"), longer)
        return len(longer)

    def has_files(self, artifact: Artifact) -> bool:
        return not (artifact.folder / ABSENT).exists()

    def is_mirrored(self, artifact: Artifact) -> bool:
        """Whether the remote has `artifact`, by the marker files, without a request."""
        return (artifact.folder / ABSENT).exists() or (artifact.folder / MIRRORED).exists()

    def fetch(self, artifact: Artifact, *, without: str | None = None) -> None:
        """Download the files of `artifact`, each verified by its digest before it is renamed into place.

        Intact local files are kept, so this also repairs a damaged copy. `without`: files whose names start with it are
        not downloaded (`FileCache` reads them). Raises `ConfigError` if files at the remote are damaged, with
        their names, or if the disk is too small.
        """
        folder = artifact.folder
        files = {n: f for n, f in artifact.manifest["files"].items() if without is None or not n.startswith(without)}
        # A lock of its own: a step that makes the key again holds the key's lock for hours.
        lock = self.lock(f"fetch-{artifact.kind}-{artifact.key}")
        with lock, writing(self.root), in_place(artifact, "fetched") as check_place:
            for leftover in folder.rglob(".*.tmp"):  # of an interrupted download
                leftover.unlink()
            # Check before the download that the remote has the files and that they fit on the disk.
            missing = [name for name, entry in files.items() if not _is_intact(folder / name, entry)]
            if mismatches := self._remote_mismatches(artifact, missing):
                raise ConfigError(self._remote_damage_message(artifact, mismatches))
            needed, free = sum(files[name]["bytes"] for name in missing), shutil.disk_usage(self.root).free
            if needed > free:
                raise ConfigError(
                    f"{artifact.id} needs {needed} bytes in {self.root}, where {free} are free: make space"
                )
            for name in missing:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            prefix = payload_prefix(artifact.manifest)

            # Several at a time; an error ends the fetch, and the files that have arrived are kept for the next.
            def download(name: str) -> str | None:
                return self._download(f"{prefix}/{name}", folder / name, files[name]["sha256"], check_place)

            faults = self.remote.map(download, missing)
            if damaged := [f"{name} ({fault})" for name, fault in zip(missing, faults, strict=True) if fault]:
                raise ConfigError(self._remote_damage_message(artifact, damaged))
            for parent in {(folder / name).parent for name in missing}:
                sync_folder(parent)
            check_place()
            # All files are here: change the marker.
            if without is None and not self.has_files(artifact):
                (folder / ABSENT).rename(folder / MIRRORED)
                sync_folder(folder)
            if without is None:
                trust_files(self.root, folder, files)

    def verify(self, artifact: Artifact, *, remote: bool = True) -> list[str]:
        """Read every file and return the names of damaged ones: of the local copy and, with `remote`, at the remote.

        Files at the remote are streamed, not stored.
        """
        if read_manifest(artifact.folder) is None:
            return [MANIFEST]
        damaged = super().verify(artifact) if self.has_files(artifact) else []
        if remote and self.is_mirrored(artifact):
            damaged += self._verify_at_remote(artifact)
        return damaged

    def unusable_manifests(self) -> list[str]:
        """URLs of damaged manifests at the remote. Without a manifest no machine can use the artifact's files."""
        local_versions = dict(self._local_versions())
        unknown = {
            name: _version_of(name)
            for name, entry in self.remote.names("manifests").items()
            if entry.bytes and _version_of(name) not in local_versions
        }
        # Only manifests that are not here already are read: a copy that was added has been checked.
        unusable = [name for name, version in unknown.items() if version is None or self._remote_manifest(name) is None]
        return [f"{self.remote.url}/manifests/{name}" for name in unusable]

    def remove_from_remote(self, artifact: Artifact) -> None:
        """Remove a version from the remote, its manifest first, so that no machine sees an incomplete artifact."""
        # Without its manifest the version does not exist; what a crash leaves of the files is an unfinished upload. If
        # the server refuses to replace the manifest, this raises, and the files stay.
        self.remote.write(_manifest_name(artifact.version_id), REMOVED)
        self.remote.delete_folder(payload_prefix(artifact.manifest))

    def unfinished_uploads(self, older_than: float) -> dict[VersionId, tuple[int, list[str]]]:
        """Payload files at the remote without a manifest, if all of the version were written before `older_than`.

        `older_than`: seconds since 1970 by the remote's clock. Returns version -> (bytes, object names).
        """
        # The payload first: a version that is published between the two listings is then in both.
        payload = self.remote.names("payload")
        published = self._published_versions()
        uploads: dict[VersionId, tuple[int, list[str]]] = {}
        recent = set()
        for name, entry in payload.items():
            parts = name.split("/")
            version = VersionId(*parts[:3]) if len(parts) > 3 and KEY.fullmatch(parts[1]) else None
            if version is None or version in published:
                continue
            # One recent file is enough: an upload of a large artifact may take days, and its first files be old.
            if entry.written is None or entry.written >= older_than:
                recent.add(version)
            size, names = uploads.get(version, (0, []))
            uploads[version] = size + entry.bytes, [*names, f"payload/{name}"]
        return {version: upload for version, upload in uploads.items() if version not in recent}

    def end_upload(self, version: VersionId) -> bool:
        """Make sure that a version is never published, so that its files can be deleted; False if it is published."""
        name = _manifest_name(version)
        return self.remote.create(name, REMOVED) or self.remote.read(name, LARGEST_MANIFEST) == REMOVED

    def by_publication(self, artifacts: Iterable[Artifact]) -> list[Artifact]:
        """The artifacts in the order in which they were published, by the remote's clock, and not those of machines.

        What the remote does not have yet comes last.
        """
        objects = self.remote.names("manifests")
        written = {_version_of(name): entry.written for name, entry in objects.items() if entry.bytes}
        if any(time is None for time in written.values()):
            return super().by_publication(artifacts)  # a server that does not say when

        def at(artifact: Artifact) -> float:
            return written.get(artifact.version_id) or math.inf

        return sorted(super().by_publication(artifacts), key=at)

    def _published_versions(self) -> dict[VersionId, str]:
        """The versions that the remote lists, with the names of their manifests below `manifests/`."""
        objects = self.remote.names("manifests")
        return {version: name for name, entry in objects.items() if entry.bytes and (version := _version_of(name))}

    def _damage(self, artifact: Artifact) -> list[str]:
        if self.has_files(artifact):
            return super()._damage(artifact)
        return self._remote_mismatches(artifact, list(artifact.manifest["files"]))

    def _damage_message(self, artifact: Artifact, damaged: list[str]) -> str:
        message = super()._damage_message(artifact, damaged)
        return f"{message} (`nautile store fetch {artifact.id}` repairs a copy that was fetched)"

    def _remote_damage_message(self, artifact: Artifact, damaged: list[str]) -> str:
        return damage_message(f"{artifact.id} at {self.remote.url}", damaged, artifact.manifest["label"])

    def _send(self, artifact: Artifact, lease: Lease, again: bool) -> None:
        """Upload the files that the remote lacks, check their sizes there, then create the manifest."""
        with in_place(artifact, "sent") as check_place:
            # Damage here must not become the copy that others rely on.
            self.check(artifact)
            lease.confirm()
            if self._is_removed(artifact.version_id):
                self._give_new_id(artifact, lease.fence)
                raise Retryable(f"{artifact.id} was removed from {self.remote.url}; the next attempt sends it again")
            is_published = self._is_sent(artifact)
            prefix, files = payload_prefix(artifact.manifest), artifact.manifest["files"]
            remote_files = {} if again else self.remote.names(prefix)
            missing = [n for n in files if n not in remote_files or remote_files[n].bytes != files[n]["bytes"]]

            def put(name: str) -> None:
                lease.check()
                check_place()
                self.remote.put(artifact.folder / name, f"{prefix}/{name}")
                try:
                    check_place()
                except Retryable:
                    # It may be a file of the other version, which the next push would take for ours by its size.
                    self.remote.delete([f"{prefix}/{name}"])
                    raise

            self.remote.map(put, missing)
            # An upload that was cut off may leave a shorter object: nothing is published on trust.
            if mismatches := self._remote_mismatches(artifact, list(files)):
                raise Retryable(f"{self.remote.url} did not keep all of {artifact.id}: {mismatches[0]}")
            if not is_published:
                lease.confirm()
                name = _manifest_name(artifact.version_id)
                text = json.dumps(artifact.manifest, sort_keys=True, allow_nan=False).encode()
                # It may exist: created by a request of ours whose response was lost, damaged, or removed just now.
                if not self.remote.create(name, text) and not self._is_sent(artifact):
                    if self._is_removed(artifact.version_id):
                        raise Retryable(f"{artifact.id} was removed from {self.remote.url} while it was sent")
                    self.remote.write(name, text)
            # Last: after a crash before this the files are found at the remote, and only the manifest is sent again.
            check_place()
            write_text(artifact.folder / MIRRORED, artifact.execution)

    def _is_removed(self, version: VersionId) -> bool:
        """Whether garbage collection has removed this version from the remote."""
        return self.remote.read(_manifest_name(version), LARGEST_MANIFEST) == REMOVED

    def _give_new_id(self, artifact: Artifact, fence: int) -> None:
        """Give the local copies of an execution's artifacts another id: what was removed under an id stays removed."""
        execution = execution_after_takeover(artifact.execution, fence)
        for _, key, _, folder in self.folders():
            manifest = read_manifest(folder) if key == artifact.key else None
            if manifest is not None and manifest["execution"] == artifact.execution:
                (folder / MIRRORED).unlink(missing_ok=True)
                plain = {name: value for name, value in manifest.items() if name != "seal"}
                write_json(folder / MANIFEST, with_seal(plain | {"execution": execution, "fence": fence}))

    def _is_sent(self, artifact: Artifact) -> bool:
        """Whether the manifest of `artifact` is at the remote, intact; raises `ConfigError` if it is of other files."""
        name = _manifest_name(artifact.version_id)
        manifest = self._remote_manifest(name.removeprefix("manifests/"))
        if manifest is not None and manifest != artifact.manifest:
            raise ConfigError(
                f"{self.remote.url}/{name} has other files than {artifact.id} here, which was made by the same "
                f"execution on a copy of this machine: remove {artifact.folder}, and the run fetches those files"
            )
        return manifest is not None

    def _check_remote_layout(self) -> None:
        """Write `store.json` to a new remote; raise `ConfigError` if the remote has another layout."""
        content = self.description.read_bytes()
        raw = self.remote.read(self.description.name, 2**16)
        check_layout(self.remote.url, parse_json(content if raw is None else raw))
        if raw is None:
            self.remote.create(self.description.name, content)
        record = read_json(self.root / RECORD)
        if isinstance(record, dict) and "conditional" in record:
            return
        # Once for each local folder: whether the remote refuses to create what exists, on which the leases rely.
        is_conditional = not self.remote.create(self.description.name, content) and self.remote.is_conditional
        if not is_conditional:
            logger.warning(
                "%s does not refuse to create an object that exists: let only one machine at a time use this store",
                self.remote.url,
            )
        with writing(self.root):
            write_json(self.root / RECORD, {"url": self.remote.url, "conditional": is_conditional})

    def _local_versions(self, of: VersionId | None = None) -> Iterator[tuple[VersionId, Path]]:
        """The versions in the local folder, with their folders; `of`: only those of its kind and key.

        Marker files are read first: they are smaller than a manifest, and exist even if the manifest is damaged.
        """
        for kind, key, _, folder in self.folders(of.kind if of else None):
            if of is not None and key != of.key:
                continue
            execution = None
            # In this order: a fetch by another process renames the first marker to the second.
            for marker in (folder / ABSENT, folder / MIRRORED):
                with suppress(FileNotFoundError):
                    execution = execution or marker.read_text()[:64]
            if execution is None and (manifest := read_manifest(folder)) is not None:
                execution = manifest["execution"]
            if execution is not None:
                yield VersionId(kind, key, execution), folder

    def _remote_manifest(self, name: str) -> dict[str, Any] | None:
        """Read the manifest `name` at the remote; None, with a warning, if it is damaged or of another version."""
        try:
            raw = self.remote.read(f"manifests/{name}", LARGEST_MANIFEST)
        except ObjectTooLarge as error:
            raw = b""
            logger.warning("%s", error)
        if raw is None:
            return None  # removed since it was listed
        manifest = checked_manifest(parse_json(raw), f"{self.remote.url}/manifests/{name}")
        if manifest is None or VersionId(manifest["kind"], manifest["key"], manifest["execution"]) != _version_of(name):
            logger.warning("%s/manifests/%s is damaged and not used", self.remote.url, name)
            return None
        return manifest

    def _add_without_files(self, manifest: dict[str, Any], held: str | None) -> None:
        """Add a version without downloading its files; the newest version of a key becomes the live one."""
        version = VersionId(manifest["kind"], manifest["key"], manifest["execution"])
        lock = self.lock(version.key)
        if version.key != held and not lock.try_acquire():
            return  # a process of this machine is making the key; the next refresh adds this version
        try:
            if version in dict(self._local_versions(version)):
                return  # another process of this machine has added it
            with writing(self.root):
                # Built aside and renamed, as at a publication: no reader sees a folder without its manifest.
                source = self.staging_root / f".pull-{uuid.uuid4().hex}"
                source.mkdir(parents=True)
                write_json(source / MANIFEST, manifest)
                write_text(source / ABSENT, version.execution)
                self.add_version(source, manifest)
        finally:
            lock.release()

    def _remote_mismatches(self, artifact: Artifact, names: list[str]) -> list[str]:
        """The files of `names` that are missing at the remote or have another size there, by one listing."""
        objects, files = self.remote.names(payload_prefix(artifact.manifest)), artifact.manifest["files"]
        missing = [f"{name} (missing)" for name in sorted(names) if name not in objects]
        resized = [n for n in sorted(names) if n in objects and objects[n].bytes != files[n]["bytes"]]
        return missing + [f"{name} ({objects[name].bytes} bytes, not {files[name]['bytes']})" for name in resized]

    def _verify_at_remote(self, artifact: Artifact) -> list[str]:
        files = artifact.manifest["files"]
        mismatches = self._remote_mismatches(artifact, list(files))
        # Read all files that are there with the right size.
        names = [name for name in sorted(files) if not any(fault.startswith(f"{name} (") for fault in mismatches)]
        digests = self.remote.map(lambda name: self.remote.digest(f"{payload_prefix(artifact.manifest)}/{name}"), names)
        changed = [name for name, digest in zip(names, digests, strict=True) if digest != files[name]["sha256"]]
        name = _manifest_name(artifact.version_id)
        is_manifest_intact = self.remote.read_json(name, LARGEST_MANIFEST) == artifact.manifest
        faults = [] if is_manifest_intact else [f"{MANIFEST} (missing or changed)"]
        faults += [*mismatches, *(f"{name} (its digest differs)" for name in changed)]
        return [f"{fault} at the remote" for fault in faults]

    def _download(
        self, name: str, target: Path, sha256: str | None = None, check_place: Callable[[], object] = lambda: None
    ) -> str | None:
        """Download an object to `target` atomically; returns None, or what is wrong with it.

        `check_place` raises if the folder is not the one any more that the object is for.
        """
        temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            if not self.remote.get(name, temporary):
                return "missing"
            if sha256 is not None and sha256_of(temporary, sync=True) != sha256:
                return "its digest differs"
            # Once this has passed, the temporary file is in the right folder, and moves away with it.
            check_place()
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return None

    def pull_events(self) -> None:
        """Download each event file that is longer at the remote than here."""
        folder = self.events
        folder.mkdir(parents=True, exist_ok=True)
        outdated = []
        for name, entry in self.remote.names(EVENTS).items():
            path = folder / name
            if not _EVENT_FILE.fullmatch(name):
                logger.warning("%s/%s/%s is not an event file and is ignored", self.remote.url, EVENTS, name)
            elif not path.exists() or path.stat().st_size < entry.bytes:
                outdated.append(name)
        self.remote.map(lambda name: self._download(f"{EVENTS}/{name}", folder / name), outdated)
        if outdated:
            sync_folder(folder)


def _is_intact(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a local file has the size and digest of its entry in the manifest."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return bool(sha256_of(path) == entry["sha256"])


def payload_prefix(manifest: Mapping[str, Any]) -> str:
    """The prefix of the names of an artifact's files at the remote."""
    return f"payload/{manifest['kind']}/{manifest['key']}/{manifest['execution']}"


def _manifest_name(version: VersionId) -> str:
    return f"manifests/{version.kind}/{version.key}/{version.execution}.json"


def _version_of(name: str) -> VersionId | None:
    """Parse the version from an object name `kind/key/execution.json`; None for any other name."""
    match = _MANIFEST_FILE.fullmatch(name)
    return VersionId(*match.groups()) if match else None
