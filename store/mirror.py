"""A store with a remote: an object store that holds its artifacts and event files for every machine.

    <url>/store.json                                    {"format": 1}
    <url>/payload/<kind>/<key>/<execution>/<file>       first
    <url>/manifests/<kind>/<key>/<execution>.json       last: with it the artifact is there, whole
    <url>/events/*.jsonl
    <url>/leases/<key>/<fence>.json                     which machine makes a key (store/lease.py)
    <url>/replies/<model>/*.jsonl                       paid replies
    <url>/staging/<key>/                                its work so far (store/staging_mirror.py)
    <url>/hosts/<key>/                                  what several hosts that make it tell each other

An object store has no rename, so each version of an artifact has names of its own: nothing is ever overwritten, and the
newest version of a key is the live one. On this machine the artifacts lie as in any store; two small files beside a
manifest hold the execution's id: `.mirrored` if the remote has that version too, `.absent` if the remote alone has the
files, which are fetched when they are first needed.
"""

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import parse_json, sha256_of, sync_folder, write_json, write_text, writing
from common.text import as_file_name
from store.artifacts import Artifact, Store, VersionId, damage_message
from store.lease import Lease, machine_id
from store.manifest import (
    ABSENT,
    KEY,
    KIND,
    LARGEST_MANIFEST,
    MANIFEST,
    MIRRORED,
    checked_manifest,
    creation_order,
    read_manifest,
)
from store.remote import Remote, record_remote, resolve_location
from store.staging_mirror import StagingMirror
from store.verify import trust_files

logger = logging.getLogger(__name__)

FORMAT = 1
_MANIFEST_FILE = re.compile(rf"({KIND.pattern})/({KEY.pattern})/([^/]*)\.json")
_EVENT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.jsonl")


def open_store(location: str | Path | None = None) -> Store:
    """The store at a folder or URL; None means `$NAUTILE_STORE`, else `./.nautile`. Raises `ConfigError`.

    A folder that is the local copy of a remote store is opened as such.
    """
    name = str(location if location is not None else os.environ.get("NAUTILE_STORE") or ".nautile")
    root, url = resolve_location(name)
    return MirroredStore(root, url) if url else Store(root)


class MirroredStore(Store):
    """A store whose artifacts and events are also at a URL. Every method may be called again after a crash, and then
    does what is left to do. Methods that reach the remote raise `ConfigError` or `Retryable` naming the URL."""

    def __init__(self, root: Path, url: str) -> None:
        super().__init__(root)
        self.url = url
        self.remote = Remote(url)

    @cached_property
    def machine(self) -> str:
        """An id of this machine's folder."""
        return machine_id(self.root)

    def prepare(self) -> None:
        super().prepare()
        with writing(self.root):
            record_remote(self.root, self.remote.url)

    def refresh(self, *, events: bool = False, held: str | None = None) -> None:
        """Learn what other machines have published, with `events` their event files too, and forget what they removed.

        Only manifests are read; the files of an artifact come with `fetch`. What is being made here, by whoever holds
        its key's lock, is left for the next time, unless the caller holds the lock, of the key `held`.
        """
        self.prepare()
        self._check_format()
        at_remote = {version: name for name in self.remote.names("manifests") if (version := _version_of(name))}
        local = dict(self._local_versions())
        new = [at_remote[version] for version in at_remote.keys() - local.keys()]
        for manifest in sorted(filter(None, self.remote.map(self._remote_manifest, new)), key=creation_order):
            self._add_without_files(manifest, held)
        for version in local.keys() - at_remote.keys():
            if (local[version] / ABSENT).exists():
                self.discard(local[version])
        if events:
            self.pull_events()

    @contextmanager
    def lease(
        self, key: str, wait: Callable[[float], object], on_wait: Callable[[str], object]
    ) -> Iterator[Callable[[], None]]:
        lease = Lease(self.remote, self.root, key)
        try:
            lease.acquire(wait, on_wait)
            yield lease.check
        finally:
            lease.release()

    @contextmanager
    def mirrored_staging(self, key: str, *, send: bool = True) -> Iterator[None]:
        folder = self.root / "staging" / key
        mirror = StagingMirror(self.remote, folder, self.push_events)
        mirror.pull()
        if send:
            mirror.start()
        published = False
        try:
            yield
            published = not folder.exists()
        finally:
            mirror.stop(published=published)

    def push(self, artifacts: Iterable[Artifact], *, again: bool = False) -> list[Artifact]:
        """Send artifacts that the remote lacks: their files, then their manifests. Returns those that were sent.

        Files that an interrupted push has sent are not sent twice; `again` sends every file, whatever is there. Raises
        `ConfigError` for a damaged artifact, so that damage does not spread.
        """
        sent = []
        for artifact in artifacts:
            if self.has_files(artifact) and (again or not self.is_mirrored(artifact)):
                self._send(artifact, again)
                sent.append(artifact)
        return sent

    def push_all(self) -> list[Artifact]:
        """Send every version that the remote lacks, oldest first, and the event files. Returns what was sent."""
        self.refresh()
        sent = self.push(self.list(superseded=True))
        self.push_events()
        self.push_replies()
        return sent

    def push_events(self) -> int:
        """Send each event file that is longer here than at the remote; returns how many."""
        paths = [path for path in sorted((self.root / "events").glob("*.jsonl")) if _EVENT_FILE.fullmatch(path.name)]
        return self._push_grown("events", paths)

    def push_replies(self) -> int:
        """Send each file of paid replies that is longer here than at the remote; returns how many."""
        return self._push_grown("replies", sorted((self.root / "replies").glob("*/*.jsonl")))

    def pull_replies(self, models: Iterable[str]) -> None:
        """Fetch the paid replies of these models that other machines have sent.

        They lie beside this machine's own, which alone are continued and sent.
        """
        for model in map(as_file_name, models):
            folder = self.root / "replies" / model
            wanted = []
            for name, entry in self.remote.names(f"replies/{model}").items():
                path = folder / "pulled" / name
                is_own = (folder / name).exists() or not _EVENT_FILE.fullmatch(name)
                if not is_own and (not path.exists() or path.stat().st_size < entry.bytes):
                    wanted.append(name)

            def fetch(name: str, model: str = model, folder: Path = folder) -> None:
                self._download(f"replies/{model}/{name}", folder / "pulled" / name)

            if wanted:
                (folder / "pulled").mkdir(parents=True, exist_ok=True)
                self.remote.map(fetch, wanted)

    def _push_grown(self, folder: str, paths: Iterable[Path]) -> int:
        """Send those of the files, somewhere in a folder of the store, that are longer than at the remote."""
        at_remote = {name: entry.bytes for name, entry in self.remote.names(folder).items()}
        sizes = {path: path.stat().st_size for path in paths}
        names = {path: path.relative_to(self.root / folder).as_posix() for path in sizes}
        grown = [path for path, size in sizes.items() if size > at_remote.get(names[path], 0)]
        self.remote.map(lambda path: self.remote.put(path, f"{folder}/{names[path]}"), grown)
        return len(grown)

    def has_files(self, artifact: Artifact) -> bool:
        return not (artifact.folder / ABSENT).exists()

    def is_mirrored(self, artifact: Artifact) -> bool:
        """Whether this machine knows the remote to have `artifact`, without a request."""
        return (artifact.folder / ABSENT).exists() or (artifact.folder / MIRRORED).exists()

    def fetch(self, artifact: Artifact, *, without: str | None = None) -> None:
        """Bring the files of `artifact` to this machine, each verified by its digest before it gets its name.

        Files that are here and whole are kept, so this also repairs a damaged copy. `without`: names that begin so stay
        at the remote, for `store.file_cache`. Raises `ConfigError` naming the files if the remote's are damaged, or if
        the disk is too small.
        """
        folder = artifact.folder
        files = {n: f for n, f in artifact.manifest["files"].items() if without is None or not n.startswith(without)}
        with self.lock(f"fetch-{artifact.kind}-{artifact.key}"), writing(self.root):
            if read_manifest(folder) != artifact.manifest:
                raise Retryable(f"artifact {artifact.id} was moved by another run while it was fetched")
            for leftover in folder.rglob(".*.tmp"):
                leftover.unlink()
            wanted = [name for name, entry in files.items() if not _is_whole(folder / name, entry)]
            if misfits := self._misfits_at_remote(artifact, wanted):
                raise ConfigError(self._remote_damage_message(artifact, misfits))
            needed, free = sum(files[name]["bytes"] for name in wanted), shutil.disk_usage(self.root).free
            if needed > free:
                raise ConfigError(
                    f"{artifact.id} needs {needed} bytes in {self.root}, where {free} are free: make space"
                )
            for name in wanted:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            prefix = payload_prefix(artifact.manifest)
            faults = self.remote.map(
                lambda name: self._download(f"{prefix}/{name}", folder / name, files[name]["sha256"]), wanted
            )
            if damaged := [f"{name} ({fault})" for name, fault in zip(wanted, faults, strict=True) if fault]:
                raise ConfigError(self._remote_damage_message(artifact, damaged))
            for parent in {(folder / name).parent for name in wanted}:
                sync_folder(parent)
            if without is None and not self.has_files(artifact):
                (folder / ABSENT).rename(folder / MIRRORED)
                sync_folder(folder)
            if without is None:
                trust_files(self.root, folder, files)

    def verify(self, artifact: Artifact, *, remote: bool = True) -> list[str]:
        """The damaged files by name: those of this machine's copy and, with `remote`, those at the remote, where every
        byte is read and nothing kept."""
        if read_manifest(artifact.folder) is None:
            return [MANIFEST]
        damaged = super().verify(artifact) if self.has_files(artifact) else []
        if remote and self.is_mirrored(artifact):
            damaged += self._verify_at_remote(artifact)
        return damaged

    def unusable_manifests(self) -> list[str]:
        """Names at the remote that should be manifests of artifacts and are damaged. No machine sees their files."""
        known = dict(self._local_versions())
        unknown = {name: _version_of(name) for name in self.remote.names("manifests") if _version_of(name) not in known}
        unusable = [name for name, version in unknown.items() if version is None or self._remote_manifest(name) is None]
        return [f"{self.remote.url}/manifests/{name}" for name in unusable]

    def remove_from_remote(self, artifact: Artifact) -> None:
        """Remove a version from the remote: its manifest first, so that nobody sees half of it."""
        self.remote.delete([_manifest_name(artifact)])
        self.remote.delete_folder(payload_prefix(artifact.manifest))

    def unfinished_uploads(self, older_than: float) -> dict[str, tuple[int, list[str]]]:
        """Files at the remote without a manifest, all written before `older_than` (seconds since 1970).

        The version's folder (`kind/key/execution`) -> bytes, and the names of its objects.
        """
        published = {version for name in self.remote.names("manifests") if (version := _version_of(name))}
        uploads: dict[str, tuple[int, list[str]]] = {}
        recent = set()
        for name, entry in self.remote.names("payload").items():
            parts = name.split("/")
            if len(parts) < 4 or VersionId(*parts[:3]) in published:
                continue
            folder = "/".join(parts[:3])
            if entry.written is None or entry.written >= older_than:
                recent.add(folder)
            size, names = uploads.get(folder, (0, []))
            uploads[folder] = size + entry.bytes, [*names, f"payload/{name}"]
        return {folder: upload for folder, upload in uploads.items() if folder not in recent}

    def _damage(self, artifact: Artifact) -> list[str]:
        if self.has_files(artifact):
            return super()._damage(artifact)
        return self._misfits_at_remote(artifact, list(artifact.manifest["files"]))

    def _damage_message(self, artifact: Artifact, damaged: list[str]) -> str:
        message = super()._damage_message(artifact, damaged)
        return f"{message} (`nautile store fetch {artifact.id}` repairs a copy that was fetched)"

    def _remote_damage_message(self, artifact: Artifact, damaged: list[str]) -> str:
        return damage_message(f"{artifact.id} at {self.remote.url}", damaged, artifact.manifest["label"])

    def _send(self, artifact: Artifact, again: bool) -> None:
        self.check(artifact)
        prefix, files = payload_prefix(artifact.manifest), artifact.manifest["files"]
        sent = {} if again else self.remote.names(prefix)
        missing = [name for name in files if name not in sent or sent[name].bytes != files[name]["bytes"]]
        self.remote.map(lambda name: self.remote.put(artifact.folder / name, f"{prefix}/{name}"), missing)
        if misfits := self._misfits_at_remote(artifact, list(files)):
            raise Retryable(f"{self.remote.url} did not keep all of {artifact.id}: {misfits[0]}")
        text = json.dumps(artifact.manifest, sort_keys=True, allow_nan=False)
        self.remote.write(_manifest_name(artifact), text.encode())
        write_text(artifact.folder / MIRRORED, artifact.execution)

    def _check_format(self) -> None:
        """Write `store.json` to a new remote; raise `ConfigError` if the remote is of another format."""
        raw = self.remote.read("store.json", 2**16)
        if raw is None:
            self.remote.write("store.json", json.dumps({"format": FORMAT}).encode())
            return
        description = parse_json(raw)
        if not isinstance(description, dict) or description.get("format") != FORMAT:
            raise ConfigError(
                f"{self.remote.url}/store.json: not a store of format {FORMAT}; was it written by a newer nautile?"
            )

    def _local_versions(self) -> Iterator[tuple[VersionId, Path]]:
        """The versions that this machine knows, with their folders. The small files are read first: they are cheaper
        than a manifest, and are there while the manifest is damaged."""
        for kind, key, _, folder in self.folders():
            markers = (path for path in (folder / ABSENT, folder / MIRRORED) if path.is_file())
            execution = next((path.read_text()[:64] for path in markers), None)
            if execution is None and (manifest := read_manifest(folder)) is not None:
                execution = manifest["execution"]
            if execution is not None:
                yield VersionId(kind, key, execution), folder

    def _remote_manifest(self, name: str) -> dict[str, Any] | None:
        """The manifest at `name`; None, logged, if it is damaged or not the one that belongs there."""
        try:
            raw = self.remote.read(f"manifests/{name}", LARGEST_MANIFEST)
        except ConfigError as error:
            if "bytes" not in str(error):
                raise
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
        """Add a version whose files stay at the remote for now; the newest version of a key is the live one."""
        version = VersionId(manifest["kind"], manifest["key"], manifest["execution"])
        lock = self.lock(version.key)
        if version.key != held and not lock.try_acquire():
            return  # it is being made here at this moment; the next refresh sees both
        try:
            if version in dict(self._local_versions()):
                return  # another process of this machine was quicker
            with writing(self.root):
                source = self.root / "staging" / f".pull-{uuid.uuid4().hex}"
                source.mkdir(parents=True)
                write_json(source / MANIFEST, manifest)
                write_text(source / ABSENT, version.execution)
                self.add_version(source, manifest)
        finally:
            lock.release()

    def _misfits_at_remote(self, artifact: Artifact, names: list[str]) -> list[str]:
        """Those of the files `names` that the remote lacks or has in another size, by one listing."""
        objects, files = self.remote.names(payload_prefix(artifact.manifest)), artifact.manifest["files"]
        missing = [f"{name} (missing)" for name in sorted(names) if name not in objects]
        resized = [n for n in sorted(names) if n in objects and objects[n].bytes != files[n]["bytes"]]
        return missing + [f"{name} ({objects[name].bytes} bytes, not {files[name]['bytes']})" for name in resized]

    def _verify_at_remote(self, artifact: Artifact) -> list[str]:
        files = artifact.manifest["files"]
        misfits = self._misfits_at_remote(artifact, list(files))
        others = [name for name in sorted(files) if not any(fault.startswith(f"{name} (") for fault in misfits)]
        digests = self.remote.map(
            lambda name: self.remote.digest(f"{payload_prefix(artifact.manifest)}/{name}"), others
        )
        changed = [name for name, digest in zip(others, digests, strict=True) if digest != files[name]["sha256"]]
        intact = self.remote.read_json(_manifest_name(artifact), LARGEST_MANIFEST) == artifact.manifest
        faults = [] if intact else [f"{MANIFEST} (missing or changed)"]
        faults += [*misfits, *(f"{name} (its digest differs)" for name in changed)]
        return [f"{fault} at the remote" for fault in faults]

    def _download(self, name: str, target: Path, sha256: str | None = None) -> str | None:
        """Fetch an object into `target`; what is wrong with it, None if nothing is."""
        temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            if not self.remote.get(name, temporary):
                return "missing"
            if sha256 is not None and sha256_of(temporary, sync=True) != sha256:
                return "its digest differs"
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return None

    def pull_events(self) -> None:
        """Fetch each event file that is longer at the remote than here."""
        folder = self.root / "events"
        folder.mkdir(parents=True, exist_ok=True)
        wanted = []
        for name, entry in self.remote.names("events").items():
            path = folder / name
            if not _EVENT_FILE.fullmatch(name):
                logger.warning("%s/events/%s is no event file of this project and is ignored", self.remote.url, name)
            elif not path.exists() or path.stat().st_size < entry.bytes:
                wanted.append(name)
        self.remote.map(lambda name: self._download(f"events/{name}", folder / name), wanted)
        if wanted:
            sync_folder(folder)


def _is_whole(path: Path, entry: dict[str, Any]) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return sha256_of(path) == entry["sha256"]


def payload_prefix(manifest: Mapping[str, Any]) -> str:
    """What the names of an artifact's files at the remote begin with."""
    return f"payload/{manifest['kind']}/{manifest['key']}/{manifest['execution']}"


def _manifest_name(artifact: Artifact) -> str:
    return f"manifests/{artifact.kind}/{artifact.key}/{artifact.execution}.json"


def _version_of(name: str) -> VersionId | None:
    """The version that `kind/key/execution.json` names; None for any other object."""
    match = _MANIFEST_FILE.fullmatch(name)
    return VersionId(*match.groups()) if match else None
