"""The artifact store: artifacts by content key, published by one rename, and the staging folders of unfinished work.

`store.layout` names its folders and files.

`store.mirror.open_store` opens a store by its path or URL; for a URL it returns a `MirroredStore`, whose root is a
local folder with the same layout.

Two processes may publish the same key without a lock: a rename onto a folder that is not empty fails, so the first one
wins and the second one uses the artifact of the first.
"""

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import make_folder, not_writable, read_json, sync_folder, write_json, writing
from nautile.common.text import did_you_mean
from nautile.configs.base import fingerprint
from nautile.store.layout import Layout
from nautile.store.locks import KeyLock
from nautile.store.manifest import (
    ADDED,
    FORMAT,
    KEY,
    KIND,
    MANIFEST,
    RUN,
    code_commit,
    damaged_files,
    describe_files,
    host,
    now,
    read_manifest,
    recorded_execution,
    trust_files,
    version_order,
    with_seal,
)

LAYOUT = 1  # what folders and files are called, and what is in them; a store of another one is refused
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")  # of a superseded version, as `_free_name` writes it and the catalog holds it
_FOLDER = re.compile(rf"{KEY.pattern}(\.{_NUMBER.pattern})?")
REPLACED_S = 10.0  # how long to wait for an artifact that another process is replacing by two renames


class VersionId(NamedTuple):
    """The id of one version of an artifact: several executions may have made a key, of which the newest is live."""

    kind: str
    key: str
    execution: str


@dataclass(frozen=True)
class Artifact:
    """A published artifact. `superseded` is 0 for the live version, else the `n` of its folder `<key>.<n>`."""

    kind: str
    key: str
    folder: Path
    manifest: dict[str, Any]
    superseded: int
    store: "Store" = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The folder with its files, which are fetched and verified first if only the remote has them.

        Raises the errors of `Store.fetch`.
        """
        if not self.store.has_files(self):
            self.store.fetch(self)
        return self.folder

    @property
    def id(self) -> str:
        """The short id for users, `kind/<12 digits>`, with `.n` for a superseded version."""
        return short_id(self.kind, self.key, self.superseded)

    @property
    def full_id(self) -> str:
        """The full id `kind/<64 digits>`, as it is hashed into keys."""
        return f"{self.kind}/{self.key}"

    @property
    def execution(self) -> str:
        """The id of the execution that made it, which is that of no other version of its key."""
        execution: str = self.manifest["execution"]
        return execution

    @property
    def recorded_execution(self) -> str:
        """The id under which the catalog has the attempts, metrics, samples and calls of its execution."""
        return recorded_execution(self.execution)

    @property
    def version_id(self) -> VersionId:
        """The id that distinguishes it from other executions' artifacts of the same key."""
        return VersionId(self.kind, self.key, self.execution)

    @property
    def bytes(self) -> int:
        """The total size of its files."""
        return sum(file["bytes"] for file in self.manifest["files"].values())


class KeyLease(NamedTuple):
    """A lease that is held: its number, 0 in a store without a remote, and the check that it was not lost."""

    fence: int = 0
    check: Callable[[], None] = lambda: None


class Store(Layout):
    """A store in a local folder. Cheap to construct: nothing is created until something is written."""

    url: str | None = None  # URL of the remote; only a `MirroredStore` has one

    @property
    def location(self) -> str:
        """The URL of the store, or its folder, for messages."""
        return self.url or str(self.root)

    def prepare(self) -> None:
        """Create the store's folders and check that it is writable; raises `ConfigError` if it is not."""
        self.check_layout()
        try:
            if not self.description.exists():
                self.root.mkdir(parents=True, exist_ok=True)
                write_json(self.description, {"layout": LAYOUT})
            for folder in (self.artifacts, self.staging_root, self.events, self.logs, self.locks):
                folder.mkdir(parents=True, exist_ok=True)
            # A file is written and removed, because permissions alone do not tell: a disk may be full or read-only.
            probe = self.staging_root / f".probe-{uuid.uuid4().hex[:8]}"
            probe.write_bytes(b"\0")
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(not_writable(self.root, error)) from error

    def check_layout(self) -> None:
        """Raise `ConfigError` if the folder has artifacts in another layout than this version's."""
        # A folder with nothing but copied replies is a new store.
        if self.artifacts.is_dir():
            check_layout(str(self.root), read_json(self.description))

    def refresh(self, *, events: bool = False, held: str | None = None) -> None:
        """Synchronise with the remote; without a remote this does nothing. See `MirroredStore.refresh`."""

    def has_files(self, artifact: Artifact) -> bool:
        """Whether the files of `artifact` are on this machine."""
        return True

    def fetch(self, artifact: Artifact, *, without: str | None = None) -> None:
        """Download the missing or damaged files of `artifact` from the remote; see `MirroredStore.fetch`."""
        raise ConfigError(f"the store {self.root} has no remote: set NAUTILE_STORE to a URL (s3://bucket/prefix)")

    def find(self, kind: str, key: str, *, label: str | None = None) -> Artifact | None:
        """The live artifact of a key; None if there is none.

        Raises `ConfigError` if its manifest is damaged; `label` is the step that the message says to run again.
        """
        folder = self._folder(kind, key)
        if not folder.is_dir():
            return None
        # Read twice: another process may replace the artifact during the first read.
        artifact = self.read(kind, key, 0, folder) or self.read(kind, key, 0, folder)
        if artifact is None and folder.is_dir():  # without the folder it was superseded in the meantime
            raise ConfigError(damage_message(short_id(kind, key), [MANIFEST], label))
        return artifact

    def get(self, artifact_id: str) -> Artifact:
        """The artifact with the id `kind/prefix`, `kind/prefix.n` or `prefix`, the first digits of its key.

        Raises `ConfigError` if no artifact or several match, or if the manifest is damaged.
        """
        kind, slash, name = artifact_id.strip().rpartition("/")
        prefix, _, number = name.partition(".")
        superseded = 0 if not number else int(number) if _NUMBER.fullmatch(number) else -1
        folders = self.folders(kind if slash else None, prefix) if prefix else []
        matches = [match for match in folders if match[2] == superseded]
        if not matches:
            ids = {f"{kind}/{key[:12]}" for kind, key, *_ in self.folders()}
            kinds = {kind for kind, *_ in self.folders()}
            close = did_you_mean(kind, kinds) if slash and kind not in kinds else did_you_mean(artifact_id, ids)
            raise ConfigError(
                f"no artifact {artifact_id!r} in {self.location}{close}: `nautile artifacts` lists all artifacts"
            )
        if len(matches) > 1:
            # More digits than usual: with twelve they may look the same.
            candidates = ", ".join(f"{kind}/{folder.name[:16]}" for kind, _, _, folder in matches[:4])
            raise ConfigError(f"artifact id {artifact_id!r} is ambiguous ({candidates}): give more digits, or the kind")
        artifact = self.read(*matches[0])
        if artifact is None:
            kind, key, superseded, _ = matches[0]
            raise ConfigError(damage_message(short_id(kind, key, superseded), [MANIFEST], None))
        return artifact

    def folders(self, kind: str | None = None, prefix: str = "") -> list[tuple[str, str, int, Path]]:
        """(kind, key, n, folder) of the artifact folders, whether their manifests are readable or not; n is 0 if live.

        `prefix`: only those whose key begins with it.
        """
        found = [
            (kind, name, *name.partition(".")) for kind, name in self.folder_names(kind) if name.startswith(prefix)
        ]
        return [
            (kind, key, int(number) if number else 0, self.artifacts / kind / name)
            for kind, name, key, _, number in found
        ]

    def folder_names(self, kind: str | None = None) -> list[tuple[str, str]]:
        """(kind, name) of the artifact folders, in order: a name is a key, or `<key>.<n>` of a replaced version."""
        # Texts, because a reading command looks at each, and to make a path takes longer than to look at it.
        return [
            (parent, name)
            for parent in sorted(_names(self.artifacts))
            if kind in (None, parent)
            for name in sorted(_names(self.artifacts / parent))
            # Anything else in there, such as a copy that somebody has named by its date, is no artifact.
            if _FOLDER.fullmatch(name)
        ]

    def read(self, kind: str, key: str, number: int, folder: Path) -> Artifact | None:
        """Read the artifact in one of `folders()`; None if its manifest is damaged or belongs to another artifact."""
        # A folder that was copied or renamed by hand has a manifest that names another key.
        manifest = read_manifest(folder)
        if manifest is None or (manifest["kind"], manifest["key"]) != (kind, key):
            return None
        return Artifact(kind, key, folder, manifest, number, self)

    def versions(self, kind: str, key: str) -> Iterator[Artifact]:
        """The artifacts of a key with a readable manifest: the live one, and those that forced runs have replaced."""
        for folder in self.folders(kind):
            if folder[1] == key and (artifact := self.read(*folder)):
                yield artifact

    def staging(self, key: str) -> Path:
        """The staging folder of `key`, created if it does not exist. Hold `lock(key)` while working in it."""
        if not KEY.fullmatch(key):
            raise ValueError(f"not a key: {key!r}")
        folder = self.staging_files(key).folder
        with writing(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def lock(self, key: str) -> KeyLock:
        """The lock of `key` for the process that makes it; the kernel releases it when that process ends."""
        return KeyLock(self.locks / f"{key}.lock")

    @contextmanager
    def lease(self, key: str, wait: Callable[[float], object], on_wait: Callable[[str], object]) -> Iterator[KeyLease]:
        """Hold the lease of `key` against other machines during the block; the caller holds `lock(key)`.

        Its `check` is to be called regularly: it raises `Retryable` once another machine has taken the lease over.
        A store without a remote needs no lease. `wait` and `on_wait`: see `Lease.acquire`.
        """
        yield KeyLease()

    @contextmanager
    def mirrored_staging(
        self, key: str, *, send: bool = True, check: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Restore unfinished work of another machine from the remote, and `send` there what the block saves.

        The caller holds the lock and the lease of `key`; `check` raises `Retryable` once the lease is lost, and then
        nothing more is sent. Without a remote this does nothing.
        """
        yield

    def run_lock(self, run: str) -> KeyLock:
        """The lock that the process of a run holds as long as it lives. A run that ends normally removes the file."""
        if not RUN.fullmatch(run):
            raise ValueError(f"not the id of a run: {run!r}")
        return KeyLock(self.locks / f"run-{run}.lock")

    def begun_runs(self) -> list[str]:
        """Ids of the runs that have a lock file: running ones, and those whose process was killed."""
        names = sorted(path.stem.removeprefix("run-") for path in self.locks.glob("run-*.lock"))
        return [name for name in names if RUN.fullmatch(name)]

    def lost_runs(self) -> list[str]:
        """Ids of the runs whose process was killed: the lock file exists, but no process holds the lock."""
        return [run for run in self.begun_runs() if not self.run_lock(run).held_elsewhere()]

    def publish(
        self,
        kind: str,
        key: str,
        source: Path,
        *,
        stage: str,
        version: int,
        config: dict[str, Any],
        inputs: Mapping[str, str | Artifact],
        facts: dict[str, Any],
        execution: str = "",
        fence: int = 0,
        outputs: tuple[str, ...] = (),
        run: str = "",
        label: str = "",
        supersede: bool = False,
        digests: Mapping[str, str] | None = None,
    ) -> Artifact:
        """Publish the folder `source` as the artifact `kind/key` by one rename; returns the live artifact of the key.

        `source` must be on the store's file system. If the artifact exists, it stays and `source` is discarded; with
        `supersede` the old version is renamed to `<key>.<n>`. `fence`: of the lease that the caller holds. `outputs`:
        all kinds that this execution publishes.
        `digests`: sha256 by relative path of files that were hashed while they were written; these are fsynced but not
        read again (`verify` reads them all the same).

        Raises `ConfigError` for an unknown input or a store that cannot be written, `ValueError` for a folder that
        cannot be an artifact.
        """
        folder = self._folder(kind, key)
        # Inputs are looked up before anything is written: a wrong id is refused while nothing has changed.
        artifacts = {name: self.get(a) if isinstance(a, str) else a for name, a in inputs.items()}
        self.prepare()
        with writing(self.root):
            files = describe_files(source, digests)
            manifest = {
                "format": FORMAT,
                "kind": kind,
                "key": key,
                "stage": stage,
                "version": version,
                "config": config,
                # The keys of the inputs, and which version of each was read: a forced rerun may have replaced it since.
                "inputs": {name: artifact.full_id for name, artifact in artifacts.items()},
                "input_executions": {name: artifact.execution for name, artifact in artifacts.items()},
                # All kinds of this execution, so that reuse can tell a complete set from one that a kill cut short.
                "outputs": sorted(outputs or (kind,)),
                "files": files,
                "digest": fingerprint(files),
                "facts": facts,
                "commit": code_commit(),
                "created": now(),
                "execution": execution or uuid.uuid4().hex,
                "fence": fence,
                "run": run,
                "label": label or stage,
                "host": host(),
            }
            write_json(source / MANIFEST, with_seal(manifest))
            # Libraries create files that only their owner may read; those of a store have one mode, that of the umask.
            for name in files:
                shutil.copymode(source / MANIFEST, source / name)
            make_folder(folder.parent)
            # This is the publication. Everything in the folder is on disk by now, so after a power cut it is whole or
            # absent.
            while not _rename(source, folder):
                if not supersede:
                    self.discard(source)
                    break
                self._supersede(folder)
            sync_folder(folder.parent)
        # The rename is durable once its folder is synced. What is returned is the live artifact, whoever made it.
        # While another process replaces the artifact, the key has no folder for a moment.
        deadline = time.monotonic() + REPLACED_S
        while (artifact := self.find(kind, key, label=label or stage)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if artifact is None:
            raise ConfigError(f"{short_id(kind, key)} disappeared from {self.root} while it was published")
        # Another process's artifact is not trusted: its files were not hashed here.
        if artifact.execution == manifest["execution"]:
            trust_files(self.root, folder, files)
        return artifact

    def add_version(self, source: Path, manifest: Mapping[str, Any]) -> None:
        """Add a version that another machine published with `manifest`.

        It becomes the live one if it is the newest by `version_order`.
        """
        folder = self._folder(manifest["kind"], manifest["key"])
        make_folder(folder.parent)
        # Versions arrive in any order: one that is older than the live one goes straight to a number.
        live = self.read(manifest["kind"], manifest["key"], 0, folder)
        older = live is not None and version_order(live.manifest) > version_order(manifest)
        while not _rename(source, self._free_name(folder) if older else folder):
            if not older:
                self._supersede(folder)
        sync_folder(folder.parent)

    def verify(self, artifact: Artifact, *, remote: bool = True) -> list[str]:
        """Read every file and return the names of damaged ones (changed, missing, unexpected); empty if all are intact.

        `remote`: also check the copy at the remote, if there is one. Raises `ConfigError` or `Retryable` if that fails.
        """
        if read_manifest(artifact.folder) is None:
            return [MANIFEST]
        return damaged_files(self.root, artifact.folder, artifact.manifest["files"], trust=False)

    def check(self, artifact: Artifact) -> None:
        """Raise `ConfigError`, with the command that repairs it, if the artifact is damaged.

        Files that were hashed before (`damaged_files`) are not read again. If only the remote has the files, their
        names and sizes are compared; digests are checked when they are fetched. Raises `Retryable` if another process
        has replaced the artifact in the meantime, or if the remote cannot be reached.
        """
        # Damage is reported only for the version that was meant: during a forced rerun the folder changes under the
        # reader.
        if damaged := self._damage(artifact):
            current = read_manifest(artifact.folder)
            if current is not None and current["execution"] != artifact.execution:
                raise Retryable(f"artifact {artifact.id} was replaced by another run while it was read")
            raise ConfigError(self._damage_message(artifact, damaged))

    def discard(self, folder: Path) -> None:
        """Remove a folder atomically: it is renamed first, so that a crash never leaves half of it under its name.

        Of a link to a folder only the link.
        """
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
            return
        # In the store, so that the rename stays on one file system; `gc` removes what a crash leaves there.
        trash = self.staging_root / f".trash-{uuid.uuid4().hex}"
        trash.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def _damage(self, artifact: Artifact) -> list[str]:
        return damaged_files(self.root, artifact.folder, artifact.manifest["files"], trust=True)

    def _damage_message(self, artifact: Artifact, damaged: list[str]) -> str:
        return damage_message(artifact.id, damaged, artifact.manifest["label"])

    def _folder(self, kind: str, key: str) -> Path:
        if not (KIND.fullmatch(kind) and KEY.fullmatch(key)):
            raise ValueError(f"not a kind and a key: {kind!r}, {key!r}")
        return self.artifacts / kind / key

    def _free_name(self, folder: Path) -> Path:
        """The next free name `<key>.<n>` for a superseded version."""
        # Not the first gap: ids with a number stay those of one version, as long as a later one exists.
        numbers = [n for _, key, n, _ in self.folders(folder.parent.name) if key == folder.name]
        return folder.with_name(f"{folder.name}.{max(numbers, default=0) + 1}")

    def _supersede(self, folder: Path) -> None:
        """Rename a live folder to the next `<key>.<n>`.

        If another process did the same or took that name first, nothing changes, and the caller tries again.
        """
        with suppress(FileNotFoundError):
            _rename(folder, self._free_name(folder))

    def by_publication(self, artifacts: Iterable[Artifact]) -> list[Artifact]:
        """The artifacts in the order in which they were published; of several machines see `MirroredStore`."""
        return sorted(artifacts, key=lambda artifact: (artifact.manifest["created"], artifact.id))

    def list(self, kind: str | None = None, *, superseded: bool = False) -> list[Artifact]:
        """The live artifacts with a readable manifest, oldest first; with `superseded` also the replaced versions."""
        artifacts = [self.read(k, key, n, folder) for k, key, n, folder in self.folders(kind) if superseded or not n]
        return Store.by_publication(self, filter(None, artifacts))


def _names(folder: Path) -> list[str]:
    """The names in a folder; none if it is not there, or is no folder."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def check_layout(location: str, description: Any) -> None:
    """Raise `ConfigError` unless `description`, of a store, has this version's layout."""
    layout = description.get("layout") if isinstance(description, dict) else None
    if layout != LAYOUT:
        fault = "has no layout number in store.json" if layout is None else f"has layout {str(layout)[:20]}"
        raise ConfigError(
            f"{location}: this store {fault}, and this version of nautile reads layout {LAYOUT}: use the version that "
            "wrote it, or a new store (NAUTILE_STORE). A checkpoint of it can be added there with `nautile store add "
            "FOLDER`; its paid replies are found there once its folder `replies` is copied into the new store"
        )


def short_id(kind: str, key: str, superseded: int = 0) -> str:
    """The id for users: `kind/<12 digits>`, with `.n` for a superseded artifact."""
    return f"{kind}/{key[:12]}" + (f".{superseded}" if superseded else "")


def checkpoint_name(folder: Path) -> str:
    """The display name of a checkpoint: the id of an artifact, else the folder's name."""
    folder = folder.resolve()
    if (folder / MANIFEST).is_file():
        return short_id(folder.parent.name, folder.name)
    return folder.name


def damage_message(artifact_id: str, damaged: list[str], label: str | None) -> str:
    """The message about a damaged artifact: its id, the damaged files, and the command that rebuilds it.

    It contains the placeholder CONFIG, because the store does not know the configuration's file: the caller replaces
    it.
    """
    more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    message = f"artifact {artifact_id} is damaged: {', '.join(damaged[:3])}{more}."
    if label is None:  # the step is unknown if the manifest cannot be read; the run that needs it knows it
        return f"{message} `nautile run CONFIG` names the step that makes it, to run again with `--only` and `--force`"
    if label.partition(":")[0] == ADDED:
        return f"{message} Add it again with `nautile store add FOLDER`"
    return (
        f"{message} Rebuild it with `{shell_command('nautile', 'run', 'CONFIG', '--only', label, '--force')}`, or it "
        f"and every step after it with `{shell_command('nautile', 'run', 'CONFIG', '--from', label, '--force')}`"
    )


@contextmanager
def in_place(artifact: Artifact, action: str) -> Iterator[Callable[[], None]]:
    """Yield a check that raises `Retryable` once the path of the artifact's folder belongs to another version.

    A run that makes the key again gives the path to its own version at any moment: only who holds the key's lock is
    safe from that. `action`: what is done with the artifact, for the message.
    """
    message = f"artifact {artifact.id} was moved by another run while it was {action}"
    try:
        status = artifact.folder.stat()
    except FileNotFoundError:
        raise Retryable(message) from None
    if read_manifest(artifact.folder) != artifact.manifest:
        raise Retryable(message)

    def check() -> None:
        with suppress(FileNotFoundError):
            if os.path.samestat(status, artifact.folder.stat()):
                return
        raise Retryable(message)

    try:
        yield check
    except FileNotFoundError:
        check()  # the file may have moved away with its folder
        raise


def _rename(source: Path, target: Path) -> bool:
    """Rename folder `source` to `target`; False if `target` exists and is not empty."""
    try:
        # POSIX replaces an empty folder by a rename, and refuses to replace one with files.
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True
