"""The store: artifacts by content key, published whole by one rename, and the staging folders where they are made.

    <root>/artifacts/<kind>/<key>/        a live artifact: its files and manifest.json
    <root>/artifacts/<kind>/<key>.<n>/    one that a forced rerun replaced, kept with its lineage
    <root>/staging/<key>/                 work in progress; survives a crash, so a retry goes on from there
    <root>/events/*.jsonl  logs/  locks/  catalog.duckdb

With a remote (store/mirror.py) the root is a folder of this machine where the same things lie, artifacts without
their files until somebody asks for their `path`.

Two processes that publish one key are safe without any lock: a rename onto a folder that is not empty fails, so the
first wins and the second takes what it finds.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import not_writable, sync_folder, write_json, writing
from configs.base import fingerprint
from store import manifest as manifests
from store.locks import KeyLock
from store.manifest import stage_key
from store.mending import damaged_in, mend
from store.mirror import Mirror, is_absent, moment
from store.remote import Remote, place_of, record
from store.verify import damaged_files, trust_files

__all__ = ["Artifact", "Store", "refusal", "stage_key"]

REPLACED_S = 10.0  # between the two renames with which another process replaces an artifact there is none for a moment


@dataclass(frozen=True)
class Artifact:
    """One published folder. `superseded` is 0 for the live one, else the `n` of `<key>.<n>`."""

    kind: str
    key: str
    folder: Path
    manifest: dict[str, Any]
    superseded: int = 0
    mirror: Mirror | None = field(default=None, repr=False, compare=False)

    @property
    def path(self) -> Path:
        """Where its files lie; fetched and verified first if only the remote has them. Raises as `Mirror.fetch`."""
        if self.mirror is not None and is_absent(self.folder):
            self.mirror.fetch(self)
        return self.folder

    @property
    def id(self) -> str:
        """The short id, `kind/<12 digits>`, with `.n` on a superseded one."""
        return f"{self.kind}/{self.key[:12]}" + (f".{self.superseded}" if self.superseded else "")

    @property
    def full_id(self) -> str:
        """`kind/<64 digits>`: what keys are taken of."""
        return f"{self.kind}/{self.key}"

    @property
    def execution(self) -> str:
        return self.manifest["execution"]

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.manifest["files"].values())


class Store:
    """The artifacts under one root. Cheap to construct; nothing is created until something is written."""

    def __init__(self, root: str | Path | None = None) -> None:
        """`root` None: `$NAUTILE_STORE`, else `./.nautile`; see store/remote.py. Raises `ConfigError`."""
        self.root, self.url = place_of(str(root if root is not None else os.environ.get("NAUTILE_STORE") or ".nautile"))
        self.mirror = Mirror(self, Remote(self.url)) if self.url else None

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self.url or str(self.root)

    @property
    def catalog_path(self) -> Path:
        return self.root / "catalog.duckdb"

    def prepare(self) -> None:
        """Create the folders and try to write. Raises `ConfigError` if the store cannot be written."""
        try:
            for name in ("artifacts", "staging", "events", "logs", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            probe = self.root / "staging" / f".probe-{uuid.uuid4().hex[:8]}"
            probe.write_bytes(b"\0")
            probe.unlink(missing_ok=True)
            if self.url:
                record(self.root, self.url)
        except OSError as error:
            raise ConfigError(not_writable(self.root, error)) from error

    def refresh(self, *, events: bool = False) -> None:
        """With a remote: learn what other machines have published, with `events` of their event files too."""
        if self.mirror is not None:
            self.prepare()
            self.mirror.refresh(events=events)

    def find(self, kind: str, key: str, *, made_by: str | None = None) -> Artifact | None:
        """The live artifact, None if there is none.

        Raises `ConfigError` if its manifest is damaged, advising to run the stage `made_by` again.
        """
        folder = self._folder(kind, key)
        if not folder.is_dir():
            return None
        artifact = self.read(kind, key, 0, folder) or self.read(kind, key, 0, folder)  # replaced during the first look
        if artifact is None and not folder.is_dir():
            return None  # superseded between the two looks
        if artifact is None:
            raise ConfigError(refusal(f"{kind}/{key[:12]}", [manifests.MANIFEST], made_by))
        return artifact

    def get(self, artifact_id: str) -> Artifact:
        """The artifact that `kind/prefix`, `kind/prefix.n` or a bare key prefix means.

        Raises `ConfigError` if nothing, or more than one, is meant, or if its manifest is damaged.
        """
        kind, slash, rest = artifact_id.strip().rpartition("/")
        prefix, _, number = rest.partition(".")
        wanted = 0 if not number else int(number) if number.isdigit() else -1
        matches = [
            (found, key, n, folder)
            for found, key, n, folder in self.folders(kind if slash else None)
            if prefix and key.startswith(prefix) and n == wanted
        ]
        if not matches:
            raise ConfigError(f"no artifact {artifact_id!r} in {self.place}: `nautile artifacts` lists what there is")
        if len(matches) > 1:
            some = ", ".join(f"{found}/{folder.name[:16]}" for found, _, _, folder in matches[:4])
            raise ConfigError(
                f"artifact id {artifact_id!r} means more than one ({some}): give more digits, or the kind"
            )
        artifact = self.read(*matches[0])
        if artifact is None:
            found, _, _, folder = matches[0]
            raise ConfigError(refusal(f"{found}/{folder.name[:12]}", [manifests.MANIFEST], None))
        return artifact

    def folders(self, kind: str | None = None) -> list[tuple[str, str, int, Path]]:
        """(kind, key, n, folder) of all that lies under artifacts/, readable or not; n is 0 for the live ones."""
        found = []
        for parent in sorted((self.root / "artifacts").glob("*")):
            for folder in sorted(parent.iterdir()) if parent.is_dir() and kind in (None, parent.name) else ():
                key, dot, number = folder.name.partition(".")
                if manifests.KEY.fullmatch(key) and (number.isdigit() if dot else True):
                    found.append((parent.name, key, int(number) if dot else 0, folder))
        return found

    def staging(self, key: str) -> Path:
        """The folder in which `key` is made; created if need be. Hold `lock(key)` while working in it."""
        if not manifests.KEY.fullmatch(key):
            raise ValueError(f"not a key: {key!r}")
        folder = self.root / "staging" / key
        with writing(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def lock(self, key: str) -> KeyLock:
        """The lock of `key`, held by whoever makes it; it falls with the process that holds it."""
        return KeyLock(self.root / "locks" / f"{key}.lock")

    def run_lock(self, run: str) -> KeyLock:
        """Held by the process of run `run` as long as it lives; its file goes when the run ends by itself."""
        if not manifests.RUN.fullmatch(run):
            raise ValueError(f"not the id of a run: {run!r}")
        return KeyLock(self.root / "locks" / f"run-{run}.lock")

    def begun_runs(self) -> list[str]:
        """The runs that have a lock file: those at work, and those whose process was gone before it could clear up."""
        names = sorted(path.stem.removeprefix("run-") for path in (self.root / "locks").glob("run-*.lock"))
        return [name for name in names if manifests.RUN.fullmatch(name)]

    def publish(
        self,
        kind: str,
        key: str,
        source: Path,
        *,
        stage: str,
        version: int,
        config: dict[str, Any],
        inputs: Mapping[str, "str | Artifact"],
        facts: dict[str, Any],
        execution: str = "",
        outputs: tuple[str, ...] = (),
        run: str = "",
        label: str = "",
        supersede: bool = False,
    ) -> Artifact:
        """Move the folder `source` (on the store's file system) to `kind/key`, and return what now lies there.

        If `kind/key` is there already, it stays and `source` is dropped, unless `supersede`: then the old one becomes
        `<key>.<n>`. `outputs` are all the kinds this execution publishes. Raises `ConfigError` on an unknown input or
        a store that cannot be written, `ValueError` on a folder that cannot be an artifact.
        """
        folder = self._folder(kind, key)
        given = {name: self.get(a) if isinstance(a, str) else a for name, a in inputs.items()}
        with writing(self.root):
            files = manifests.describe_files(source)
            manifest = {
                "format": manifests.FORMAT,
                "kind": kind,
                "key": key,
                "stage": stage,
                "version": version,
                "config": config,
                "inputs": {name: artifact.full_id for name, artifact in given.items()},
                "input_executions": {name: artifact.execution for name, artifact in given.items()},
                "outputs": sorted(outputs or (kind,)),
                "files": files,
                "digest": fingerprint(files),
                "facts": facts,
                "commit": manifests.code_commit(),
                "created": manifests.now(),
                "execution": execution or uuid.uuid4().hex,
                "run": run,
                "label": label or stage,
                "host": manifests.host(),
            }
            write_json(source / manifests.MANIFEST, manifests.sealed(manifest))
            folder.parent.mkdir(parents=True, exist_ok=True)
            replaced, damaged = None, damaged_in(self.root, folder) if supersede else []
            while not _moved(source, folder):
                if not supersede:
                    self.discard(source)
                    break
                replaced = self._set_aside(folder)
            sync_folder(folder.parent)
            if replaced is not None:
                mend(replaced, folder, damaged)
        until = time.monotonic() + REPLACED_S
        while (artifact := self.find(kind, key, made_by=label or stage)) is None and time.monotonic() < until:
            time.sleep(0.01)
        if artifact is None:
            raise ConfigError(f"{kind}/{key[:12]} vanished from {self.root} while it was published")
        if artifact.execution == manifest["execution"]:
            trust_files(self.root, folder, files)
        return artifact

    def verify(self, artifact: Artifact, *, remote: bool = True) -> list[str]:
        """The damaged files by name (changed, missing, unexpected), every byte read. Empty: the artifact is whole.

        `remote`: those that the remote has too, where there is one. Raises `ConfigError` or `Retryable` if it fails.
        """
        if manifests.read_manifest(artifact.folder) is None:
            return [manifests.MANIFEST]
        here = is_absent(artifact.folder)
        damaged = [] if here else damaged_files(self.root, artifact.folder, artifact.manifest["files"], trust=False)
        if remote and self.mirror is not None and self.mirror.has(artifact):
            damaged += self.mirror.verify(artifact)
        return damaged

    def check(self, artifact: Artifact) -> None:
        """Raise `ConfigError`, with the way out, if the artifact is damaged. What was read once is not read again.

        Of one that only the remote has, names and sizes are looked at: its digests are, when it is fetched. Raises
        `Retryable` if another process put a new one in its place meanwhile, or if the remote cannot be reached.
        """
        if self.mirror is not None and is_absent(artifact.folder):
            damaged = self.mirror.present(artifact)
        else:
            damaged = damaged_files(self.root, artifact.folder, artifact.manifest["files"], trust=True)
        if not damaged:
            return
        there = manifests.read_manifest(artifact.folder)
        if there is None or there["execution"] == artifact.execution:
            mend = (
                "" if self.mirror is None else f" (`nautile store fetch {artifact.id}` mends a copy that was fetched)"
            )
            raise ConfigError(refusal(artifact.id, damaged, artifact.manifest["label"]) + mend)
        raise Retryable(f"artifact {artifact.id} was made anew by another run while it was read")

    def shelve(self, source: Path, kind: str, key: str, made: tuple[datetime, str]) -> None:
        """Move a making from elsewhere into its place: live if it is newer than the live one, else superseded."""
        folder = self._folder(kind, key)
        folder.parent.mkdir(parents=True, exist_ok=True)
        live = self.read(kind, key, 0, folder)
        older = live is not None and moment(live.manifest) > made
        while not _moved(source, self._free_name(folder) if older else folder):
            if not older:
                self._set_aside(folder)
        sync_folder(folder.parent)

    def discard(self, folder: Path) -> None:
        """Remove a folder so that a crash halfway leaves nothing under its name."""
        trash = self.root / "staging" / f".trash-{uuid.uuid4().hex}"
        trash.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def _folder(self, kind: str, key: str) -> Path:
        if not (manifests.KIND.fullmatch(kind) and manifests.KEY.fullmatch(key)):
            raise ValueError(f"not a kind and a key: {kind!r}, {key!r}")
        return self.root / "artifacts" / kind / key

    def read(self, kind: str, key: str, number: int, folder: Path) -> Artifact | None:
        """The artifact in one of `folders()`; None if its manifest is damaged, or is another artifact's."""
        manifest = manifests.read_manifest(folder)
        if manifest is None or (manifest["kind"], manifest["key"]) != (kind, key):
            return None
        return Artifact(kind, key, folder, manifest, number, self.mirror)

    def _free_name(self, folder: Path) -> Path:
        """The next `<key>.<n>`."""
        taken = [n for _, key, n, _ in self.folders(folder.parent.name) if key == folder.name]
        return folder.with_name(f"{folder.name}.{max(taken, default=0) + 1}")

    def _set_aside(self, folder: Path) -> Path | None:
        target = self._free_name(folder)
        try:
            folder.rename(target)
        except FileNotFoundError:
            return None  # somebody else set it aside
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return None
        return target

    def list(self, kind: str | None = None, *, superseded: bool = False) -> list[Artifact]:
        """The live artifacts (and with `superseded` the replaced ones) whose manifests can be read, oldest first."""
        found = [self.read(k, key, n, folder) for k, key, n, folder in self.folders(kind) if superseded or not n]
        return sorted((a for a in found if a), key=lambda a: (a.manifest["created"], a.id))


def refusal(artifact_id: str, damaged: list[str], stage: str | None) -> str:
    """The one message about a damaged artifact: which, what is wrong with it, and how to make it anew.

    The store does not know which file the configuration was read from: whoever does puts it in place of CONFIG.
    """
    name = stage or "STAGE"  # a manifest that cannot be read does not say which
    more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    return (
        f"artifact {artifact_id} is damaged: {', '.join(damaged[:3])}{more}. Make it anew with `nautile run CONFIG "
        f"--only {name} --force`, or with all that follows from it: `nautile run CONFIG --from {name} --force`"
    )


def _moved(source: Path, target: Path) -> bool:
    """Rename folder `source` to `target`; False if something is there."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True
