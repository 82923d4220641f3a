"""Locks of the store: flocks on files under `locks/`, which the kernel releases when the process that holds them dies.

`KeyLock` is exclusive: one process makes a key; a run's process holds `locks/run-<id>.lock` as long as it lives, so
that whoever can take that lock knows the process to be gone. `flock_until` is shared or exclusive, with a deadline:
readers and writers of the catalog queue at it.

Files are opened for writing: over NFS an exclusive flock becomes a lock of a range of bytes, which needs that.
"""

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from common.file_locks import has_locks, try_flock
from common.files import writing


class KeyLock:
    """An exclusive lock: `with lock:` waits for it. Not reentrant, and not inherited by child processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Raises `ConfigError` if the store cannot be written."""
        with writing(self.path.parent.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        acquired = False
        try:
            acquired = try_flock(descriptor, self.path)
        finally:
            if not acquired:
                os.close(descriptor)
        if not acquired:
            return False
        if not self._is_the_file(descriptor):
            os.close(descriptor)
            return self.try_acquire()  # `remove` deleted the file between the two calls
        self._descriptor = descriptor
        return True

    def acquire(self, wait: Callable[[float], object] = time.sleep) -> None:
        """Take the lock, calling `wait(seconds)` between attempts; an exception out of `wait` ends the waiting."""
        while not self.try_acquire():
            wait(0.2)

    def release(self) -> None:
        """Give the lock up, if this object holds it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Delete the lock's file and release the lock, if this object holds it."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            self.release()

    @contextmanager
    def for_life(self) -> Iterator[None]:
        """Hold the lock during the block, then delete its file: a file that is left means a killed process."""
        self.acquire()
        os.utime(self.path)
        try:
            yield
        finally:
            self.remove()

    def held_elsewhere(self) -> bool:
        """True while some process (or another lock object of this one) holds it, or may: where there are no locks, a
        lock file is all that can be known."""
        if not self.path.exists():
            return False
        if self.try_acquire():
            self.release()
            return not has_locks(self.path.parent)
        return True

    def _is_the_file(self, descriptor: int) -> bool:
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
    """Hold an flock on `path` during the block; False if it was not free until `deadline` (monotonic seconds).

    An attempt costs microseconds, so it is polled every few milliseconds. Where the file cannot be opened for writing
    (a store that may only be read) readers still share the lock with those who may; without any file all get True.
    """
    descriptor = None
    for flags in (os.O_RDWR | os.O_CREAT, *([os.O_RDONLY] if shared else [])):
        with suppress(OSError):
            descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
            break
    if descriptor is None:
        yield True
        return
    try:
        while not (acquired := try_flock(descriptor, path, shared=shared)) and time.monotonic() <= deadline:
            time.sleep(random.uniform(0.001, 0.005))
        yield acquired
    finally:
        os.close(descriptor)


def locks_work(folder: Path) -> bool:
    """Whether the file system of `folder`, which can be written, has locks. Without them no process is known to be
    gone, so nothing may be tidied up after it."""
    lock = KeyLock(folder / f".probe-{uuid.uuid4().hex}.lock")
    lock.try_acquire()
    lock.remove()
    return has_locks(folder)
