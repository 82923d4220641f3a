"""The store: artifacts by content key, each published by one rename, and the staging folders where they are made.

    <root>/artifacts/<kind>/<key>/        a live artifact: its files and manifest.json
    <root>/artifacts/<kind>/<key>.<n>/    one that a forced rerun replaced (superseded), kept for its lineage
    <root>/staging/<key>/                 work in progress; survives a crash, so that a retry resumes from it
    <root>/events/*.jsonl  logs/  locks/  catalog.duckdb

`store.mirror.open_store` opens the store that a path or URL means; with a URL it returns a `MirroredStore`, whose root
is a folder of this machine with the same layout.

Two processes that publish one key are safe without any lock: a rename onto a folder that is not empty fails, so the
first wins and the second takes what is there.
"""

import errno
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, Retryable
from common.files import not_writable, sync_folder, write_json, writing
from configs.base import fingerprint
from store.locks import KeyLock
from store.manifest import (
    ADDED,
    FORMAT,
    KEY,
    KIND,
    MANIFEST,
    RUN,
    code_commit,
    creation_order,
    describe_files,
    host,
    now,
    read_manifest,
    with_seal,
)
from store.verify import damaged_files, trust_files

REPLACED_S = 10.0  # how long to look for an artifact: between the two renames of a replacement there is none


class VersionId(NamedTuple):
    """One version of an artifact: a key may have been made by several executions, of which the newest is live."""

    kind: str
    key: str
    execution: str


@dataclass(frozen=True)
class Artifact:
    """One published folder. `superseded` is 0 for the live one, else the `n` of `<key>.<n>`."""

    kind: str
    key: str
    folder: Path
    manifest: dict[str, Any]
    superseded: int
    store: "Store" = field(repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The folder with its files; they are fetched and verified first if only a remote has them. Raises as
        `Store.fetch`."""
        if not self.store.has_files(self):
            self.store.fetch(self)
        return self.folder

    @property
    def id(self) -> str:
        """The short id, `kind/<12 digits>`, with `.n` for a superseded one."""
        return short_id(self.kind, self.key, self.superseded)

    @property
    def full_id(self) -> str:
        """`kind/<64 digits>`: the form that goes into keys."""
        return f"{self.kind}/{self.key}"

    @property
    def execution(self) -> str:
        """The id of the execution that made it."""
        return self.manifest["execution"]

    @property
    def version_id(self) -> VersionId:
        """What tells it from other executions' artifacts of the same key."""
        return VersionId(self.kind, self.key, self.execution)

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(file["bytes"] for file in self.manifest["files"].values())


class Store:
    """The artifacts under one folder. Cheap to construct; nothing is created until something is written."""

    url: str | None = None  # of the remote, for a `MirroredStore`

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()

    @property
    def location(self) -> str:
        """The store's address for messages: its URL, or its folder."""
        return self.url or str(self.root)

    @property
    def catalog_path(self) -> Path:
        """The DuckDB file of `store.catalog.Catalog`."""
        return self.root / "catalog.duckdb"

    @property
    def digest_memory(self) -> Path:
        """Where `common.files.content_digests` remembers the digests of local files that configurations name."""
        return self.root / "local_files.json"

    def prepare(self) -> None:
        """Create the folders and try to write. Raises `ConfigError` if the store cannot be written."""
        try:
            for name in ("artifacts", "staging", "events", "logs", "locks"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            probe = self.root / "staging" / f".probe-{uuid.uuid4().hex[:8]}"
            probe.write_bytes(b"\0")
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(not_writable(self.root, error)) from error

    def refresh(self, *, events: bool = False, held: str | None = None) -> None:
        """Learn what other machines have published. A store without a remote has nothing to learn."""

    def has_files(self, artifact: Artifact) -> bool:
        """Whether the files of `artifact` are on this machine."""
        return True

    def fetch(self, artifact: Artifact, *, without: str | None = None) -> None:
        """Bring the files of `artifact` to this machine, or replace the damaged ones; see `MirroredStore.fetch`."""
        raise ConfigError(f"the store {self.root} has no remote: set NAUTILE_STORE to a URL (s3://bucket/prefix)")

    def find(self, kind: str, key: str, *, label: str | None = None) -> Artifact | None:
        """The live artifact, None if there is none.

        Raises `ConfigError` if its manifest is damaged; `label` names the step to run again in the message.
        """
        folder = self._folder(kind, key)
        if not folder.is_dir():
            return None
        artifact = self.read(kind, key, 0, folder) or self.read(kind, key, 0, folder)  # replaced during the first read
        if artifact is None and folder.is_dir():  # else superseded between the two reads
            raise ConfigError(damage_message(short_id(kind, key), [MANIFEST], label))
        return artifact

    def get(self, artifact_id: str) -> Artifact:
        """The artifact that `kind/prefix`, `kind/prefix.n` or a bare prefix of a key names.

        Raises `ConfigError` if it names none or more than one, or if the manifest is damaged.
        """
        kind, slash, rest = artifact_id.strip().rpartition("/")
        prefix, _, number = rest.partition(".")
        wanted = 0 if not number else int(number) if number.isdigit() else -1
        folders = self.folders(kind if slash else None)
        matches = [match for match in folders if prefix and match[1].startswith(prefix) and match[2] == wanted]
        if not matches:
            raise ConfigError(
                f"no artifact {artifact_id!r} in {self.location}: `nautile artifacts` lists what there is"
            )
        if len(matches) > 1:
            some = ", ".join(f"{kind}/{folder.name[:16]}" for kind, _, _, folder in matches[:4])
            raise ConfigError(
                f"artifact id {artifact_id!r} means more than one ({some}): give more digits, or the kind"
            )
        artifact = self.read(*matches[0])
        if artifact is None:
            kind, key, superseded, _ = matches[0]
            raise ConfigError(damage_message(short_id(kind, key, superseded), [MANIFEST], None))
        return artifact

    def folders(self, kind: str | None = None) -> list[tuple[str, str, int, Path]]:
        """(kind, key, n, folder) of every folder under artifacts/, readable or not; n is 0 for the live ones."""
        folders = []
        for parent in sorted((self.root / "artifacts").glob("*")):
            for folder in sorted(parent.iterdir()) if parent.is_dir() and kind in (None, parent.name) else ():
                key, dot, number = folder.name.partition(".")
                if KEY.fullmatch(key) and (number.isdigit() if dot else True):
                    folders.append((parent.name, key, int(number) if dot else 0, folder))
        return folders

    def read(self, kind: str, key: str, number: int, folder: Path) -> Artifact | None:
        """The artifact in one of `folders()`; None if its manifest is damaged, or is another artifact's."""
        manifest = read_manifest(folder)
        if manifest is None or (manifest["kind"], manifest["key"]) != (kind, key):
            return None
        return Artifact(kind, key, folder, manifest, number, self)

    def staging(self, key: str) -> Path:
        """The folder in which `key` is made; created if need be. Hold `lock(key)` while working in it."""
        if not KEY.fullmatch(key):
            raise ValueError(f"not a key: {key!r}")
        folder = self.root / "staging" / key
        with writing(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def lock(self, key: str) -> KeyLock:
        """The lock of `key`, held by whoever makes it; the kernel releases it with the process that holds it."""
        return KeyLock(self.root / "locks" / f"{key}.lock")

    @contextmanager
    def lease(
        self, key: str, wait: Callable[[float], object], on_wait: Callable[[str], object]
    ) -> Iterator[Callable[[], None]]:
        """Make `key` on this machine alone during the block; hold `lock(key)`. Gives a function to be called now and
        then: it raises `Retryable` once another machine has taken over. A store without a remote needs no lease."""
        yield lambda: None

    @contextmanager
    def mirrored_staging(self, key: str, *, send: bool = True) -> Iterator[None]:
        """Go on from what another machine left unfinished, and `send` to the remote what the block saves, where there
        is one; hold the lock and the lease of `key`."""
        yield

    def run_lock(self, run: str) -> KeyLock:
        """The lock that the process of run `run` holds as long as it lives. A run that ends removes its file."""
        if not RUN.fullmatch(run):
            raise ValueError(f"not the id of a run: {run!r}")
        return KeyLock(self.root / "locks" / f"run-{run}.lock")

    def begun_runs(self) -> list[str]:
        """The runs that have a lock file: those under way, and those whose process was killed."""
        names = sorted(path.stem.removeprefix("run-") for path in (self.root / "locks").glob("run-*.lock"))
        return [name for name in names if RUN.fullmatch(name)]

    def lost_runs(self) -> list[str]:
        """The runs whose process is gone: their lock file is there, and nobody holds the lock."""
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
        outputs: tuple[str, ...] = (),
        run: str = "",
        label: str = "",
        supersede: bool = False,
        digests: Mapping[str, str] | None = None,
    ) -> Artifact:
        """Move the folder `source` (on the store's file system) to `kind/key`, and return what is there afterwards.

        If `kind/key` exists, it stays and `source` is discarded, unless `supersede`: then the old one becomes
        `<key>.<n>`. `outputs` are all the kinds this execution publishes. `digests`: sha256 of files by relative path,
        taken as they were written: those files are fsynced and not read again, and `verify` reads them nonetheless.
        Raises `ConfigError` on an unknown input or a store that cannot be written, `ValueError` on a folder that cannot
        be an artifact.
        """
        folder = self._folder(kind, key)
        given = {name: self.get(a) if isinstance(a, str) else a for name, a in inputs.items()}
        with writing(self.root):
            files = describe_files(source, digests)
            manifest = {
                "format": FORMAT,
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
                "commit": code_commit(),
                "created": now(),
                "execution": execution or uuid.uuid4().hex,
                "run": run,
                "label": label or stage,
                "host": host(),
            }
            write_json(source / MANIFEST, with_seal(manifest))
            folder.parent.mkdir(parents=True, exist_ok=True)
            while not _rename(source, folder):
                if not supersede:
                    self.discard(source)
                    break
                self._supersede(folder)
            sync_folder(folder.parent)
        # Another process may be replacing the artifact: then the key has no folder for a moment.
        until = time.monotonic() + REPLACED_S
        while (artifact := self.find(kind, key, label=label or stage)) is None and time.monotonic() < until:
            time.sleep(0.01)
        if artifact is None:
            raise ConfigError(f"{short_id(kind, key)} vanished from {self.root} while it was published")
        if artifact.execution == manifest["execution"]:
            trust_files(self.root, folder, files)
        return artifact

    def add_version(self, source: Path, manifest: Mapping[str, Any]) -> None:
        """Move the folder `source`, published elsewhere with `manifest`, in: live if it is newer than the live one."""
        folder = self._folder(manifest["kind"], manifest["key"])
        folder.parent.mkdir(parents=True, exist_ok=True)
        live = self.read(manifest["kind"], manifest["key"], 0, folder)
        older = live is not None and creation_order(live.manifest) > creation_order(manifest)
        while not _rename(source, self._free_name(folder) if older else folder):
            if not older:
                self._supersede(folder)
        sync_folder(folder.parent)

    def verify(self, artifact: Artifact, *, remote: bool = True) -> list[str]:
        """The damaged files by name (changed, missing, unexpected), every byte read. Empty: the artifact is whole.

        `remote`: also the copy at the remote, where there is one. Raises `ConfigError` or `Retryable` if that fails.
        """
        if read_manifest(artifact.folder) is None:
            return [MANIFEST]
        return damaged_files(self.root, artifact.folder, artifact.manifest["files"], trust=False)

    def check(self, artifact: Artifact) -> None:
        """Raise `ConfigError`, with the command that helps, if the artifact is damaged.

        Files that this process or (if large) another one has digested are not read again. Of an artifact that only the
        remote has, names and sizes are compared; its digests are when it is fetched. Raises `Retryable` if another
        process put a new one in its place meanwhile, or if the remote cannot be reached.
        """
        if damaged := self._damage(artifact):
            current = read_manifest(artifact.folder)
            if current is not None and current["execution"] != artifact.execution:
                raise Retryable(f"artifact {artifact.id} was replaced by another run while it was read")
            raise ConfigError(self._damage_message(artifact, damaged))

    def discard(self, folder: Path) -> None:
        """Remove a folder so that a crash halfway leaves nothing under its name."""
        trash = self.root / "staging" / f".trash-{uuid.uuid4().hex}"
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
        return self.root / "artifacts" / kind / key

    def _free_name(self, folder: Path) -> Path:
        """The next `<key>.<n>`."""
        taken = [n for _, key, n, _ in self.folders(folder.parent.name) if key == folder.name]
        return folder.with_name(f"{folder.name}.{max(taken, default=0) + 1}")

    def _supersede(self, folder: Path) -> None:
        """Rename a live folder to the next `<key>.<n>`. Another process may have done it, or have taken that name:
        the caller then tries again."""
        with suppress(FileNotFoundError):
            _rename(folder, self._free_name(folder))

    def list(self, kind: str | None = None, *, superseded: bool = False) -> list[Artifact]:
        """The live artifacts (and with `superseded` the replaced ones) whose manifests can be read, oldest first."""
        artifacts = [self.read(k, key, n, folder) for k, key, n, folder in self.folders(kind) if superseded or not n]
        return sorted((a for a in artifacts if a), key=lambda a: (a.manifest["created"], a.id))


def short_id(kind: str, key: str, superseded: int = 0) -> str:
    """The id that people see and type: `kind/<12 digits>`, with `.n` for a superseded artifact."""
    return f"{kind}/{key[:12]}" + (f".{superseded}" if superseded else "")


def checkpoint_name(folder: Path) -> str:
    """What a checkpoint is called: the id of an artifact, the name of any other folder."""
    folder = folder.resolve()
    if (folder / MANIFEST).is_file():
        return short_id(folder.parent.name, folder.name)
    return folder.name


def damage_message(artifact_id: str, damaged: list[str], label: str | None) -> str:
    """The one message about a damaged artifact: which, what is wrong with it, and how to rebuild it.

    The store does not know which file the configuration was read from: the caller replaces CONFIG by it.
    """
    name = label or "STAGE"  # a manifest that cannot be read does not name its step
    more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
    message = f"artifact {artifact_id} is damaged: {', '.join(damaged[:3])}{more}."
    if name.partition(":")[0] == ADDED:
        return f"{message} Bring it in again with `nautile store add FOLDER`"
    return (
        f"{message} Rebuild it with `nautile run CONFIG "
        f"--only {name} --force`, or it and every step after it with `nautile run CONFIG --from {name} --force`"
    )


def _rename(source: Path, target: Path) -> bool:
    """Rename folder `source` to `target`; False if something is there."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True
