"""Kernel locks on files, which are released when their process ends, and detection of file systems without locks.

A file system without locks is named once in the log. On it every lock is granted, so a granted lock proves nothing:
code that cleans up after an ended process, or shares a file with a running one, must also check `has_locks`.
"""

import errno
import fcntl
import logging
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

# EINVAL: the kernel does not know this kind of lock.
_UNSUPPORTED = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_without_locks: set[Path] = set()  # folders on file systems without locks, which were named in the log


def try_lock(path: Path, lock: Callable[[], object]) -> bool:
    """Call `lock`, which locks (a part of) the file `path` without waiting; False if another process has the lock.

    On a file system without locks it is always granted.
    """
    try:
        lock()
    except (BlockingIOError, PermissionError):  # which of the two depends on the file system
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        # Said once for each folder, or a polled lock would fill the log.
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
    """Acquire an flock on an open file without waiting; returns as `try_lock`."""
    return try_lock(path, lambda: fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB))


def has_locks(folder: Path) -> bool:
    """Whether files in `folder` can be locked, as far as this process has tried."""
    return folder not in _without_locks
