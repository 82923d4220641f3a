"""Locks where flock behaves as on a local disk it does not: over NFS, on a file system without locks, in a store that
may only be read."""

import errno
import fcntl
import os
import time

import pytest

from nautile.common import file_locks
from nautile.store.catalog import Catalog, CatalogBusy
from nautile.store.events import EventWriter
from nautile.store.locks import flock_until, locks_work
from tests.support.samples.stage_store import key_of, published

COUNT = "SELECT count(*) AS n FROM metrics"


@pytest.fixture
def nfs(monkeypatch):
    """flock as over NFS, where it is a lock of a range of bytes: an exclusive one needs a file opened for writing, a
    shared one a file opened for reading (flock(2))."""
    local = fcntl.flock

    def flock(descriptor, operation):
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        local(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def emit_metric(store):
    emit = EventWriter(store.root / "events" / "child.jsonl", "e1")
    emit("metric", name="loss", step=0, value=0.5)
    emit.close()


def test_over_nfs_the_catalog_is_written_and_read_and_locks_exclude(store, nfs, caplog):
    emit_metric(store)
    catalog = Catalog(store)
    assert catalog.ingest() == 1
    assert catalog.query(COUNT) == [{"n": 1}]
    path = store.root / "locks" / "catalog.lock"
    with flock_until(path, time.monotonic(), shared=True) as acquired:
        assert acquired
        assert catalog.query(COUNT) == [{"n": 1}]  # readers share it
        with pytest.raises(CatalogBusy):
            catalog.ingest(patience=0.05)
    lock = store.lock(key_of("x"))
    with lock:
        assert store.lock(key_of("x")).held_elsewhere()
    assert not lock.held_elsewhere()
    assert locks_work(store.root / "locks")
    assert "no locks" not in caplog.text


@pytest.mark.parametrize("code", [errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_once_and_survived(store, monkeypatch, caplog, code):
    def flock(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(file_locks, "_without_locks", set())  # a folder's name may have been that of another test's
    emit_metric(store)
    assert Catalog(store).ingest() == 1
    assert Catalog(store).query(COUNT) == [{"n": 1}]
    with store.lock(key_of("x")):
        published(store, "tokens", "x")
    assert caplog.text.count("this file system has no locks") == 1
    # Whether its holder lives cannot be known, so nothing is taken from it.
    assert store.lock(key_of("x")).held_elsewhere()
    with store.run_lock("r-1").for_life():
        assert store.lost_runs() == []
    assert not locks_work(store.root / "locks")
    assert list((store.root / "locks").glob(".probe*")) == []


def test_any_other_error_of_a_lock_is_raised(store, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"):
        store.lock(key_of("x")).try_acquire()


def test_readers_of_a_store_that_may_only_be_read_share_its_lock(store, monkeypatch):
    path = store.root / "locks" / "catalog.lock"
    opened = os.open

    def read_only(name, flags, *mode, **options):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return opened(name, flags, *mode, **options)

    def acquired(*, shared):
        with flock_until(path, time.monotonic(), shared=shared) as result:
            return result

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        assert acquired(shared=True)  # there is no lock file, so nobody writes
        assert acquired(shared=False)
    path.touch()
    with flock_until(path, time.monotonic(), shared=False):
        monkeypatch.setattr(os, "open", read_only)
        assert not acquired(shared=True)
    assert acquired(shared=True)
