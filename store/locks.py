"""File locks of the store: flocks on files under `locks/`, which the kernel releases when their process ends.

`KeyLock` is exclusive: one process at a time makes a key. The process of a run holds `locks/run-<id>.lock` as long as
it lives, so whoever can acquire that lock knows that the process has ended. `flock_until` is shared or exclusive and
has a deadline: readers and writers of the catalog use it.

Lock files are opened for writing, because NFS implements an exclusive flock as a byte-range lock, which requires it.
"""

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from nautile.common.errors import ConfigError
from nautile.common.file_locks import has_locks, try_flock
from nautile.common.files import writing


class KeyLock:
    """An exclusive lock; `with lock:` waits for it. Not reentrant, and not inherited by child processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free; False if not. Raises `ConfigError` if the store cannot be written."""
        with writing(self.path.parent.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Closed also if the attempt raises: an open descriptor may hold the lock, and nobody would release it.
        acquired = False
        try:
            acquired = try_flock(descriptor, self.path)
        finally:
            if not acquired:
                os.close(descriptor)
        if not acquired:
            return False
        if not self._is_current_file(descriptor):
            # `remove` deleted the file between `open` and `flock`: a lock on it would exclude nobody.
            os.close(descriptor)
            return self.try_acquire()
        self._descriptor = descriptor
        return True

    def acquire(self, wait: Callable[[float], object] = time.sleep) -> None:
        """Acquire the lock, calling `wait(seconds)` between attempts; an exception from `wait` ends the waiting."""
        while not self.try_acquire():
            wait(0.2)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Delete the lock file and release the lock, if this object holds it."""
        if self._descriptor is not None:
            # Deleted while it is locked: whoever opened it in the meantime notices by `_is_current_file`.
            self.path.unlink(missing_ok=True)
            self.release()

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock during the block if it is free; yields whether it was."""
        acquired = self.try_acquire()
        try:
            yield acquired
        finally:
            self.release()

    @contextmanager
    def for_life(self) -> Iterator[None]:
        """Hold the lock during the block, then delete its file: a file without a holder means a killed process."""
        self.acquire()
        # Its time says when the run began: `nautile reconcile` compares it with the state that Prefect reports.
        os.utime(self.path)
        try:
            yield
        finally:
            self.remove()

    def held_elsewhere(self) -> bool:
        """Whether another process, or another lock object of this one, holds the lock.

        True also where the file system has no locks but the lock file exists, because then nothing more is known.
        """
        if not self.path.exists():
            return False
        # Without locks everybody gets it, so having got it proves nothing.
        try:
            acquired = self.try_acquire()
            self.release()
        except ConfigError:  # a store that this user may only read: a shared lock excludes the holder's, too
            with flock_until(self.path, time.monotonic(), shared=True) as is_free:
                acquired = is_free
        return not acquired or not has_locks(self.path.parent)

    def _is_current_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def __enter__(self) -> "KeyLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def flock_until(path: Path, deadline: float, *, shared: bool) -> Iterator[bool]:
    """Hold an flock on `path` during the block; yields False if it was not free by `deadline` (monotonic seconds).

    The lock is polled every few milliseconds; an attempt takes microseconds. If the file cannot be opened for writing
    (a read-only store), a shared lock is still taken on it; if it cannot be opened at all, the block runs without a
    lock and gets True.
    """
    # For writing if possible (see the header), else for reading.
    descriptor = None
    for flags in (os.O_RDWR | os.O_CREAT, *([os.O_RDONLY] if shared else [])):
        with suppress(OSError):
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
            break
    if descriptor is None:
        yield True
        return
    try:
        # At random intervals, so that processes that wait together do not also ask together.
        while not (acquired := try_flock(descriptor, path, shared=shared)) and time.monotonic() <= deadline:
            time.sleep(random.uniform(0.001, 0.005))
        yield acquired
    finally:
        os.close(descriptor)


def locks_work(folder: Path) -> bool:
    """Whether the file system of the writable `folder` supports locks.

    Without locks it is unknown whether another process has ended, so nothing of it may be cleaned up.
    """
    lock = KeyLock(folder / f".probe-{uuid.uuid4().hex}.lock")
    lock.try_acquire()
    lock.remove()
    return has_locks(folder)
