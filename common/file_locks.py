"""Locks of the kernel on files, which it releases when their holder dies, and file systems that have none.

Such a file system is named once in the log. There every lock is granted, and none can be seen to be free: who would
tidy up after a dead process, or share a file with a live one, asks `has_locks` as well.
"""

import errno
import fcntl
import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# EINVAL: the kernel does not know this kind of lock.
_UNSUPPORTED = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_without_locks: set[Path] = set()  # folders that were named in the log


def try_lock(path: Path, lock: Callable[[], object]) -> bool:
    """Make the system call `lock`, which locks (a part of) the file `path` without waiting.

    False if another has the lock. Where there are no locks, everybody gets it.
    """
    try:
        lock()
    except (BlockingIOError, PermissionError):  # which of the two depends on the file system
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if has_locks(path.parent):
            _without_locks.add(path.parent)
            logger.warning(
                "%s: this file system has no locks (%s). Let one run at a time use the store, or mount the file system "
                "with locks (NFS: without `nolock`, with lockd or version 4)",
                path.parent,
                error.strerror,
            )
    return True


def try_flock(descriptor: int, path: Path, *, shared: bool = False) -> bool:
    """Take an flock on the whole open file without waiting; returns as `try_lock`."""
    return try_lock(path, lambda: fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB))


def has_locks(folder: Path) -> bool:
    """Whether the files of `folder` can be locked, as far as the locks tried by this process have shown."""
    return folder not in _without_locks
