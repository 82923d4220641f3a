"""A local cache of bounded size for single files of artifacts that only the remote has.

    <root>/cache/files/<sha256>                   a complete file; its mtime is the time of its last use
    <root>/cache/files/.<sha256>.<bytes>.tmp      a file being downloaded; its size counts from the beginning

A reader holds a shared flock on its file, a download an exclusive one. So a file in use by any process is never
evicted, and the leftovers of a killed process can be. The least recently used files are evicted first.
"""

import math
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from time import sleep

from nautile.common.errors import ConfigError
from nautile.common.file_locks import try_flock
from nautile.common.files import sha256_of, writing
from nautile.store.locks import flock_until
from nautile.store.manifest import read_manifest
from nautile.store.mirror import MirroredStore, payload_prefix

POLL_S = 0.05
LOCK = "lock"  # held briefly while a file is opened, added or evicted
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.([0-9]+)\.tmp")


class FileCache:
    """Opens files of a store's artifacts, with at most `limit` bytes of downloaded files on this machine.

    The limit is exceeded only while the files that are open need more. For any number of threads and processes.
    """

    def __init__(self, store: MirroredStore, limit: int) -> None:
        self.limit = limit
        self.fetched_bytes = 0
        self._store = store
        self._folder = store.cache / "files"
        with writing(store.root):
            self._folder.mkdir(parents=True, exist_ok=True)
        # Artifact folder -> file name -> (name of the object, bytes, sha256).
        self._files: dict[Path, dict[str, tuple[str, int, str]]] = {}

    def open(self, path: str | Path) -> int:
        """Open `path`, a file of an artifact, for reading; returns the descriptor.

        A file that is not on this machine is downloaded and verified first, and is not evicted while it is open. Raises
        `ConfigError` for a file that is damaged or in no manifest, `Retryable` for an outage.
        """
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            name, size, sha256 = self._entry(Path(path))
        while True:
            descriptor = self._open_cached(sha256)
            if descriptor is None:
                descriptor = self._fetch(name, size, sha256)
            if descriptor is not None:
                return descriptor
            sleep(POLL_S)  # another process or thread is downloading it

    def _entry(self, path: Path) -> tuple[str, int, str]:
        """The object, size and sha256 of a file, from the manifest of its artifact."""
        kind, key, *name_parts = path.relative_to(self._store.artifacts).parts
        folder = self._store.artifacts / kind / key
        if folder not in self._files:
            manifest = read_manifest(folder)
            if manifest is None:
                raise ConfigError(f"{folder} is no longer an artifact: start the stage again")
            prefix = payload_prefix(manifest)
            self._files[folder] = {
                name: (f"{prefix}/{name}", entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
            }
        try:
            return self._files[folder]["/".join(name_parts)]
        except KeyError:
            raise ConfigError(f"{path} is not in the manifest of its artifact") from None

    def _open_cached(self, sha256: str) -> int | None:
        """Open a cached file and lock it against eviction; None if it is not in the cache."""
        with self._folder_lock():
            try:
                descriptor = os.open(self._folder / sha256, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try_flock(descriptor, self._folder / LOCK, shared=True)
            # The time of its last use, by which `_make_room` sorts; access times are off on many mounts.
            os.utime(descriptor)
            return descriptor

    def _fetch(self, name: str, size: int, sha256: str) -> int | None:
        """Download an object and return its file's descriptor; None if another process has or is downloading it."""
        temporary = self._folder / f".{sha256}.{size}.tmp"
        # Reserve the space under the lock, then download without it.
        with self._folder_lock(), writing(self._store.root):
            # Another process has finished it between our look and this lock.
            if (self._folder / sha256).exists():
                return None
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not try_flock(descriptor, self._folder / LOCK):
                os.close(descriptor)
                return None
            try:
                self._make_room(size, temporary)
            except BaseException:
                os.close(descriptor)  # and with it the lock, or every later reader would wait for this download
                raise
        url = f"{self._store.url}/{name}"
        try:
            with writing(self._store.root):
                if not self._store.remote.get(name, temporary):
                    raise ConfigError(f"{url} is missing: `nautile store verify` lists all such files")
                if sha256_of(temporary, sync=True) != sha256:
                    raise ConfigError(
                        f"{url} is damaged (its digest differs): `nautile store verify` lists all such files"
                    )
                with self._folder_lock():
                    temporary.rename(self._folder / sha256)
                    try_flock(descriptor, self._folder / LOCK, shared=True)
        except BaseException:
            # Under the lock: else another process could open the file just before it is removed, and download to a new
            # file of that name while its descriptor is of the removed, empty one.
            with self._folder_lock():
                temporary.unlink(missing_ok=True)
                os.close(descriptor)
            raise
        self.fetched_bytes += size
        return descriptor

    def _folder_lock(self) -> AbstractContextManager[bool]:
        return flock_until(self._folder / LOCK, math.inf, shared=False)

    def _make_room(self, size: int, own: Path) -> None:
        """Evict the least recently used files that are not open, until `size` more bytes fit. `own`: not to evict."""
        entries = []
        for entry in os.scandir(self._folder):
            if entry.name not in (own.name, LOCK):
                partial, status = _PARTIAL.fullmatch(entry.name), entry.stat()
                used_at = 0 if partial else status.st_mtime_ns  # leftovers of killed downloads go first
                entries.append((used_at, entry.path, int(partial[1]) if partial else status.st_size))
        # Downloads that are under way count with their full size.
        used = sum(bytes_ for _, _, bytes_ in entries)
        for _, path, bytes_ in sorted(entries):
            if used + size <= self.limit:
                return
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if try_flock(descriptor, self._folder / LOCK):
                os.unlink(path)
                used -= bytes_
            os.close(descriptor)
