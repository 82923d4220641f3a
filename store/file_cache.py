"""Files of artifacts that only the remote has, opened one at a time through a folder of this machine of bounded size.

    <root>/cache/files/<sha256>                   a file, whole; the time of its last use is its mtime
    <root>/cache/files/.<sha256>.<bytes>.tmp      one that is being fetched; its bytes count from the beginning

Whoever reads a file holds a shared flock on it, and whoever fetches it an exclusive one. So a file in use is never
removed, whichever process uses it, and what a killed process left is. Of the others the least recently used go first.
"""

import math
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from time import sleep

from common.errors import ConfigError
from common.file_locks import try_flock
from common.files import sha256_of, writing
from store.locks import flock_until
from store.manifest import read_manifest
from store.mirror import MirroredStore, payload_prefix

POLL_S = 0.05
LOCK = "lock"  # held for a moment by whoever adds or removes a file
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.([0-9]+)\.tmp")


class FileCache:
    """Opens files of a store's artifacts; at most `limit` bytes of those fetched for it stay on this machine.

    More than that are kept only while more are open at a time. For any number of threads and processes.
    """

    def __init__(self, store: MirroredStore, limit: int) -> None:
        self.limit = limit
        self.fetched_bytes = 0
        self._store = store
        self._folder = store.root / "cache" / "files"
        with writing(store.root):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[Path, dict[str, tuple[str, int, str]]] = {}  # of an artifact: name -> object, bytes, sha256

    def open(self, path: str | Path) -> int:
        """The descriptor of `path`, a file of an artifact, which is fetched and verified first if it is not here. As
        long as it is open, the file is not removed. Raises `ConfigError` for a file that is damaged or in no manifest,
        `Retryable` for an outage."""
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            name, size, sha256 = self._entry(Path(path))
        while True:
            descriptor = self._open_whole(sha256)
            if descriptor is None:
                descriptor = self._fetch(name, size, sha256)
            if descriptor is not None:
                return descriptor
            sleep(POLL_S)  # another process or thread fetches it

    def _entry(self, path: Path) -> tuple[str, int, str]:
        kind, key, *rest = path.relative_to(self._store.root / "artifacts").parts
        folder = self._store.root / "artifacts" / kind / key
        if folder not in self._files:
            manifest = read_manifest(folder)
            if manifest is None:
                raise ConfigError(f"{folder} is no artifact any more: begin the stage again")
            prefix = payload_prefix(manifest)
            self._files[folder] = {
                name: (f"{prefix}/{name}", entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
            }
        try:
            return self._files[folder]["/".join(rest)]
        except KeyError:
            raise ConfigError(f"{path} is not in the manifest of its artifact") from None

    def _open_whole(self, sha256: str) -> int | None:
        """The descriptor of a file that is here, locked against removal; None if it is not."""
        with self._alone():
            try:
                descriptor = os.open(self._folder / sha256, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try_flock(descriptor, self._folder / LOCK, shared=True)
            os.utime(descriptor)
            return descriptor

    def _fetch(self, name: str, size: int, sha256: str) -> int | None:
        """Fetch an object and return its file's descriptor; None if another process is about to have it here."""
        temporary = self._folder / f".{sha256}.{size}.tmp"
        with self._alone(), writing(self._store.root):
            if (self._folder / sha256).exists():
                return None
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not try_flock(descriptor, self._folder / LOCK):
                os.close(descriptor)
                return None
            self._make_room(size, temporary)
        where = f"{self._store.url}/{name}"
        try:
            with writing(self._store.root):
                if not self._store.remote.get(name, temporary):
                    raise ConfigError(f"{where} is missing: `nautile store verify` names what else is")
                if sha256_of(temporary, sync=True) != sha256:
                    raise ConfigError(
                        f"{where} is damaged (its digest differs): `nautile store verify` names what else is"
                    )
                with self._alone():
                    temporary.rename(self._folder / sha256)
                    try_flock(descriptor, self._folder / LOCK, shared=True)
        except BaseException:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self.fetched_bytes += size
        return descriptor

    def _alone(self) -> AbstractContextManager[bool]:
        return flock_until(self._folder / LOCK, math.inf, shared=False)

    def _make_room(self, size: int, own: Path) -> None:
        """Remove the least recently used files that nobody reads, until `size` more bytes fit."""
        kept = []
        for entry in os.scandir(self._folder):
            if entry.name not in (own.name, LOCK):
                partial, status = _PARTIAL.fullmatch(entry.name), entry.stat()
                used_at = 0 if partial else status.st_mtime_ns
                kept.append((used_at, entry.path, int(partial[1]) if partial else status.st_size))
        used = sum(bytes_ for _, _, bytes_ in kept)
        for _, path, bytes_ in sorted(kept):
            if used + size <= self.limit:
                return
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if try_flock(descriptor, self._folder / LOCK):
                os.unlink(path)
                used -= bytes_
            os.close(descriptor)
