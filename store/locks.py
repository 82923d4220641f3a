"""One worker a key: an flock on a file of the store, which the kernel drops when the process that holds it dies.

A run has one too, `locks/run-<id>.lock`: whoever can take it knows that the run's process is gone, whatever its last
words were.
And a queue for the catalog's file, shared by those who read and alone for who writes.
"""

import fcntl
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from common.files import writing


class KeyLock:
    """`with lock:` waits for its turn. Not reentrant. A child process does not inherit it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Raises `ConfigError` if the store cannot be written."""
        with writing(self.path.parent.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        if not self._is_the_file(descriptor):
            os.close(descriptor)
            return self.try_acquire()  # removed by `remove` between the two calls: that one holds nothing any more
        self._descriptor = descriptor
        return True

    def acquire(self, wait: Callable[[float], object] = time.sleep) -> None:
        """Take the lock, calling `wait(seconds)` between tries; whatever it raises ends the waiting."""
        while not self.try_acquire():
            wait(0.2)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Release the lock and take its file away. Only for the one who holds it."""
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            self.release()

    @contextmanager
    def for_life(self) -> Iterator[None]:
        """Hold it for the length of the block, then take its file away: one that is left tells of a sudden death."""
        self.acquire()
        os.utime(self.path)
        try:
            yield
        finally:
            self.remove()

    def held_elsewhere(self) -> bool:
        """True while some process (or another lock object of this one) holds it."""
        if not self.path.exists():
            return False
        if self.try_acquire():
            self.release()
            return False
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
def turn(path: Path, deadline: float, *, shared: bool) -> Iterator[bool]:
    """Wait for a turn at what `path` stands for, until `deadline` (monotonic seconds); False if none came.

    To ask an flock costs microseconds, so it is asked often and a turn is noticed within milliseconds. Where the file
    cannot be opened (a store that may only be read) there is no queue, and everybody has a turn.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield True
        return
    try:
        yield _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, deadline)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(random.uniform(0.001, 0.005))
