"""The artifacts and event files of a store at its remote, and what of them is here.

    <url>/store.json                                    {"format": 1}
    <url>/payload/<kind>/<key>/<execution>/<file>       first
    <url>/manifests/<kind>/<key>/<execution>.json       last: from then on the artifact is there, whole
    <url>/events/*.jsonl

An object store has no rename, so each making (execution) has names of its own: nothing is ever overwritten, and the
newest making of a key is the live one. Here, two small files beside a manifest hold the making's id: `.mirrored` says
that the remote has it too, `.absent` that the remote alone has the files. Those come when they are first needed.
"""

import json
import logging
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, Retryable
from common.files import parsed, sha256_of, sync_folder, write_json, write_text, writing
from store import manifest as manifests
from store.manifest import ABSENT, LARGEST_MANIFEST, MIRRORED
from store.remote import Remote, record
from store.verify import trust_files

if TYPE_CHECKING:
    from store.artifacts import Artifact, Store


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


FORMAT = 1

Making = tuple[str, str, str]  # kind, key, execution


class Mirror:
    """The remote of one store. Every method may be called again after any crash and does what is left to do."""

    def __init__(self, store: "Store", remote: Remote) -> None:
        self.store = store
        self.remote = remote

    def refresh(self, *, events: bool = False) -> None:
        """Learn of what others have published, with `events` of their event files too, and forget what is gone there.

        Raises `ConfigError` or `Retryable` naming the URL if the remote cannot be used.
        """
        record(self.store.root, self.remote.url)
        self._agree_on_format()
        there = {making: name for name in self.remote.names("manifests") if (making := _making(name))}
        here = dict(self._here())
        new = [there[making] for making in there.keys() - here.keys()]
        for manifest in sorted(
            filter(None, self.remote.together(self._manifest, new)), key=lambda m: (m["created"], m["execution"])
        ):
            self._place(manifest)
        for making in here.keys() - there.keys():
            if (here[making] / ABSENT).exists():
                self.store.discard(here[making])
        if events:
            pull_events(self.remote, self.store.root / "events")

    def push(self, artifacts: Iterable["Artifact"], *, again: bool = False) -> list["Artifact"]:
        """Send what the remote lacks: files, then the manifest. Returns what was sent.

        What an earlier try has sent already is not sent twice; `again` sends every file, whatever is there.
        Raises `ConfigError` for a damaged artifact, whose bytes are not spread, and as `refresh` does.
        """
        sent = []
        for artifact in artifacts:
            if not (is_absent(artifact.folder) or (self.has(artifact) and not again)):
                self._send(artifact, again)
                sent.append(artifact)
        return sent

    def push_all(self) -> list["Artifact"]:
        """Send every making that the remote lacks, oldest first, and the event files. Returns what was sent."""
        self.refresh()
        sent = self.push(self.store.list(superseded=True))
        self.push_events()
        return sent

    def push_events(self) -> int:
        """Send the event files that have grown; returns how many."""
        return push_events(self.remote, self.store.root / "events")

    def fetch(self, artifact: "Artifact") -> None:
        """Bring the files of `artifact` here, each verified by its digest before it takes its name.

        Those that are here and whole are left, so this also mends a damaged copy. Raises `ConfigError` naming the
        files if the remote's are damaged or the disk is too small, `Retryable` if the remote cannot be reached.
        """
        root, folder, files = self.store.root, artifact.folder, artifact.manifest["files"]
        with self.store.lock(f"fetch-{artifact.kind}-{artifact.key}"), writing(root):
            if manifests.read_manifest(folder) != artifact.manifest:
                raise Retryable(f"artifact {artifact.id} was moved by another run while it was fetched")
            for rest in folder.rglob(".*.tmp"):
                rest.unlink()
            wanted = [name for name, told in files.items() if not _is_whole(folder / name, told)]
            if short := self._unfit(artifact, wanted):
                self._refuse(artifact, short)
            needed, free = sum(files[name]["bytes"] for name in wanted), shutil.disk_usage(root).free
            if needed > free:
                raise ConfigError(f"{artifact.id} needs {needed} bytes in {root}, where {free} are free: make space")
            for name in wanted:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            told = self.remote.together(lambda name: self._fetch_file(artifact, name), wanted)
            if damaged := [words for words in told if words]:
                self._refuse(artifact, damaged)
            for parent in {(folder / name).parent for name in wanted}:
                sync_folder(parent)
            if is_absent(folder):
                (folder / ABSENT).rename(folder / MIRRORED)
                sync_folder(folder)
            trust_files(root, folder, files)

    def has(self, artifact: "Artifact") -> bool:
        """Whether this machine knows the remote to have `artifact`, without asking it."""
        return is_absent(artifact.folder) or (artifact.folder / MIRRORED).exists()

    def present(self, artifact: "Artifact") -> list[str]:
        """The files of `artifact` that the remote lacks or has in another size, by one listing."""
        return self._unfit(artifact, list(artifact.manifest["files"]))

    def verify(self, artifact: "Artifact") -> list[str]:
        """The damaged files of `artifact` at the remote by name, every byte read there and nothing kept."""
        files = artifact.manifest["files"]
        unfit = self._unfit(artifact, list(files))
        rest = [name for name in sorted(files) if not any(words.startswith(f"{name} (") for words in unfit)]
        digests = self.remote.together(lambda name: self.remote.digest(f"{_payload(artifact)}/{name}"), rest)
        wrong = [n for n, digest in zip(rest, digests, strict=True) if digest != files[n]["sha256"]]
        raw = self.remote.read(_manifest_name(artifact), LARGEST_MANIFEST)
        text = (
            []
            if raw is not None and parsed(raw) == artifact.manifest
            else [f"{manifests.MANIFEST} (missing or changed)"]
        )
        return [f"{words} at the remote" for words in (*text, *unfit, *(f"{n} (its digest differs)" for n in wrong))]

    def unusable(self) -> list[str]:
        """Names at the remote that should be manifests of artifacts and are not sound. Their files reach no machine."""
        here = dict(self._here())
        names = {name: _making(name) for name in self.remote.names("manifests")}
        unknown = [name for name, making in names.items() if making is None or making not in here]
        return [
            f"{self.remote.url}/manifests/{name}" for name in unknown if not _making(name) or not self._manifest(name)
        ]

    def remove(self, artifact: "Artifact") -> None:
        """Remove a making from the remote: its manifest first, so that nobody finds half of it."""
        self.remote.delete([_manifest_name(artifact)])
        prefix = _payload(artifact)
        self.remote.delete([f"{prefix}/{name}" for name in self.remote.names(prefix)])

    def orphans(self, older_than: float) -> dict[str, tuple[int, list[str]]]:
        """Files without a manifest, all written before `older_than` (seconds since 1970): uploads that nobody ended.

        The making's folder -> bytes, and the names at the remote.
        """
        known = {making for name in self.remote.names("manifests") if (making := _making(name))}
        found: dict[str, tuple[int, list[str]]] = {}
        young = set()
        for name, thing in self.remote.names("payload").items():
            parts = name.split("/")
            if len(parts) < 4 or (parts[0], parts[1], parts[2]) in known:
                continue
            folder = "/".join(parts[:3])
            if thing.written is None or thing.written >= older_than:
                young.add(folder)
            size, names = found.get(folder, (0, []))
            found[folder] = size + thing.bytes, [*names, f"payload/{name}"]
        return {folder: rest for folder, rest in found.items() if folder not in young}

    def _send(self, artifact: "Artifact", again: bool) -> None:
        self.store.check(artifact)
        prefix, files = _payload(artifact), artifact.manifest["files"]
        before = {} if again else self.remote.names(prefix)
        missing = [name for name in files if name not in before or before[name].bytes != files[name]["bytes"]]
        self.remote.together(lambda name: self.remote.put(artifact.folder / name, f"{prefix}/{name}"), missing)
        if short := self._unfit(artifact, list(files)):
            raise Retryable(f"{self.remote.url} did not keep all of {artifact.id}: {short[0]}")
        text = json.dumps(artifact.manifest, sort_keys=True, allow_nan=False)
        self.remote.write(_manifest_name(artifact), text.encode())
        write_text(artifact.folder / MIRRORED, artifact.execution)

    def _agree_on_format(self) -> None:
        raw = self.remote.read("store.json", 2**16)
        if raw is None:
            self.remote.write("store.json", json.dumps({"format": FORMAT}).encode())
            return
        found = parsed(raw)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ConfigError(
                f"{self.remote.url}/store.json: not a store of format {FORMAT}: a newer nautile wrote it?"
            )

    def _here(self) -> Iterator[tuple[Making, Path]]:
        for kind, key, _, folder in self.store.folders():
            told = next((p.read_text()[:64] for p in (folder / ABSENT, folder / MIRRORED) if p.is_file()), None)
            if told is None and (manifest := manifests.read_manifest(folder)) is not None:
                told = manifest["execution"]
            if told is not None:
                yield (kind, key, told), folder

    def _manifest(self, name: str) -> dict[str, Any] | None:
        """The manifest at `name`; None, logged, if it is not sound or not the one that belongs there."""
        try:
            raw = self.remote.read(f"manifests/{name}", LARGEST_MANIFEST)
        except ConfigError as error:
            if "bytes" not in str(error):
                raise
            raw = b""
            logger.warning("%s", error)
        if raw is None:
            return None  # removed since it was listed
        manifest = manifests.sound(parsed(raw), f"{self.remote.url}/manifests/{name}")
        if manifest is None or (manifest["kind"], manifest["key"], manifest["execution"]) != _making(name):
            logger.warning("%s/manifests/%s is damaged and not used", self.remote.url, name)
            return None
        return manifest

    def _place(self, manifest: dict[str, Any]) -> None:
        """Put a making without its files beside those that are here, the newest of a key being the live one."""
        kind, key = manifest["kind"], manifest["key"]
        lock = self.store.lock(key)
        if not lock.try_acquire():
            return  # it is being made here at this moment; the next look finds both
        try:
            known = {one[2] for one, _ in self._here() if one[:2] == (kind, key)}
            if manifest["execution"] in known:
                return  # another process of this machine was quicker
            with writing(self.store.root):
                source = self.store.root / "staging" / f".pull-{uuid.uuid4().hex}"
                source.mkdir(parents=True)
                write_json(source / manifests.MANIFEST, manifest)
                write_text(source / ABSENT, manifest["execution"])
                self.store.shelve(source, kind, key, moment(manifest))
        finally:
            lock.release()

    def _unfit(self, artifact: "Artifact", names: list[str]) -> list[str]:
        there, files = self.remote.names(_payload(artifact)), artifact.manifest["files"]
        lost = [f"{name} (missing)" for name in sorted(names) if name not in there]
        short = [n for n in sorted(names) if n in there and there[n].bytes != files[n]["bytes"]]
        return lost + [f"{name} ({there[name].bytes} bytes, not {files[name]['bytes']})" for name in short]

    def _fetch_file(self, artifact: "Artifact", name: str) -> str | None:
        target = artifact.folder / name
        temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            if not self.remote.get(f"{_payload(artifact)}/{name}", temporary):
                return f"{name} (missing)"
            if sha256_of(temporary, sync=True) != artifact.manifest["files"][name]["sha256"]:
                return f"{name} (its digest differs)"
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return None

    def _refuse(self, artifact: "Artifact", damaged: list[str]) -> None:
        from store.artifacts import refusal

        raise ConfigError(refusal(f"{artifact.id} at {self.remote.url}", damaged, artifact.manifest["label"]))


def is_absent(folder: Path) -> bool:
    """True if the files of the artifact in `folder` are at the remote only."""
    return (folder / ABSENT).exists()


def _is_whole(path: Path, told: dict[str, Any]) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != told["bytes"]:
        return False
    return sha256_of(path) == told["sha256"]


def _payload(artifact: "Artifact") -> str:
    return f"payload/{artifact.kind}/{artifact.key}/{artifact.execution}"


def _manifest_name(artifact: "Artifact") -> str:
    return f"manifests/{artifact.kind}/{artifact.key}/{artifact.execution}.json"


def _making(name: str) -> Making | None:
    """What `kind/key/execution.json` names; None for anything else that lies there."""
    kind, _, rest = name.partition("/")
    key, _, last = rest.partition("/")
    execution = last.removesuffix(".json")
    sound = manifests.KIND.fullmatch(kind) and manifests.KEY.fullmatch(key) and execution != last and "/" not in last
    return (kind, key, execution) if sound else None


def moment(manifest: dict[str, Any]) -> tuple[datetime, str]:
    """What orders the makings of a key, the same on every machine."""
    return datetime.fromisoformat(manifest["created"]), manifest["execution"]
