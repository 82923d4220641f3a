"""A lease of a key at the remote: one machine at a time, and what becomes of one that falls silent."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nautile.common.errors import Retryable
from nautile.common.files import folder_identity
from nautile.store import lease as leases
from nautile.store.lease import Lease, machine_id
from nautile.store.mirror import open_store
from tests.support.samples.stage_store import key_of

pytestmark = pytest.mark.slow
KEY = key_of("x")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(leases, "RENEW_S", 0.1)
    monkeypatch.setattr(leases, "POLL_S", 0.05)


class Refused(Exception):
    """Somebody waited."""


def refuse(_):
    raise Refused


def test_one_machine_at_a_time_has_it_in_the_order_of_the_fences(pair):
    a, b = pair
    first, second = Lease(a.remote, a.root, KEY), Lease(b.remote, b.root, KEY)
    first.acquire(refuse, refuse)
    hosts = []
    with pytest.raises(Refused):
        second.acquire(refuse, hosts.append)
    assert hosts == [leases.host()]
    waiting, acquired = threading.Event(), threading.Event()

    def wait_for_it():
        second.acquire(time.sleep, lambda _: waiting.set())
        acquired.set()

    waiter = threading.Thread(target=wait_for_it)
    waiter.start()
    assert waiting.wait(60)
    renewed = first._newest()[1]["renewed"]
    while first._newest()[1]["renewed"] < renewed + 3:  # so it does not expire
        time.sleep(0.05)
    assert not acquired.is_set()
    first.check()
    first.release()
    waiter.join(60)
    assert (first.fence, second.fence) == (1, 2)
    second.check()
    second.release()
    # No number is given twice, whatever an old listing shows: the objects of earlier holders stay.
    assert list(a.remote.names("leases")) == [f"{KEY}/00000001.json", f"{KEY}/00000002.json"]
    with a.lease(KEY, refuse, refuse) as lease:
        assert lease.fence == 3
        lease.check()


def test_a_machine_that_vanishes_is_replaced_and_one_that_returns_has_lost_it(pair, monkeypatch):
    a, b = pair
    first, second = Lease(a.remote, a.root, KEY), Lease(b.remote, b.root, KEY)
    monkeypatch.setattr(leases, "RENEW_S", 600)
    first.acquire(refuse, refuse)  # its thread sleeps: the machine has stopped
    monkeypatch.setattr(leases, "RENEW_S", 0.1)
    monkeypatch.setattr(leases, "EXPIRES_S", 1.0)
    second.acquire(time.sleep, lambda _: None)
    monkeypatch.setattr(leases, "EXPIRES_S", 300.0)
    assert second.fence == 2
    first._stop.set()
    first._thread.join()
    first._stop.clear()
    first._renew()  # it returns
    with pytest.raises(Retryable, match=f"taken over by {leases.host()}"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_who_has_lost_the_lease_learns_it_by_a_request_before_anything_others_rely_on(pair):
    a, b = pair
    first, second = Lease(a.remote, a.root, KEY), Lease(b.remote, b.root, KEY)
    assert first.try_acquire()
    first.confirm()
    assert second._create(2)
    first.check()  # it has not asked since
    with pytest.raises(Retryable, match="taken over by"):
        first.confirm()
    second.confirm()


def test_an_old_listing_gives_no_number_twice(pair, monkeypatch):
    a, b = pair
    holders = [Lease(a.remote, a.root, KEY) for _ in range(3)]
    for holder in holders:
        assert holder.try_acquire()
        if holder is not holders[-1]:
            holder.release()
    names = b.remote.names
    monkeypatch.setattr(b.remote, "names", lambda folder: dict(list(names(folder).items())[:1]))
    late = Lease(b.remote, b.root, KEY)
    assert not late.try_acquire()
    holders[-1].release()
    assert late.try_acquire()
    assert [holder.fence for holder in (*holders, late)] == [1, 2, 3, 4]
    # Nor do the numbers begin again in a bucket that was emptied: artifacts here have greater ones.
    a.remote.delete_folder("leases")
    after = Lease(b.remote, b.root, KEY, above=4)
    assert after.try_acquire()
    assert after.fence == 5


def test_the_time_in_which_a_machine_was_suspended_counts(pair, monkeypatch):
    a, _ = pair
    lease = Lease(a.remote, a.root, KEY)
    assert lease.try_acquire()
    awake, real = time.clock_gettime(time.CLOCK_BOOTTIME), time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 1000 * (clock == time.CLOCK_BOOTTIME))
    assert leases.clock() >= awake + 1000
    with pytest.raises(Retryable, match="could not be renewed"):
        lease.check()


def test_a_lease_that_was_last_written_long_ago_by_the_clock_of_the_remote_has_expired(pair):
    a, b = pair
    assert Lease(a.remote, a.root, KEY).try_acquire()
    now = b.remote.server_time()
    look = Lease(b.remote, b.root, KEY)
    assert not look.is_free(now)
    assert not look.is_free(now + leases.EXPIRES_S)
    assert look.is_free(now + 3 * leases.EXPIRES_S)


def test_a_holder_that_cannot_renew_stops_before_another_begins(pair, monkeypatch):
    a, _ = pair
    lease = Lease(a.remote, a.root, KEY)
    lease.acquire(refuse, refuse)

    def unreachable(*_):
        raise Retryable("the store cannot be reached")

    monkeypatch.setattr(a.remote, "write", unreachable)
    lease.check()
    time.sleep(0.2)
    monkeypatch.setattr(leases, "EXPIRES_S", 0.2)
    with pytest.raises(Retryable, match="could not be renewed at s3://"):
        lease.check()
    lease.release()


def test_a_process_of_the_same_machine_need_not_wait_for_one_that_was_killed(pair):
    a, _ = pair
    killed, after = Lease(a.remote, a.root, KEY), Lease(a.remote, a.root, KEY)
    killed._create(1)
    after.acquire(refuse, refuse)
    assert after.fence == 2
    after.release()


def test_two_steps_that_start_on_a_new_machine_agree_on_its_id(store, monkeypatch):
    read, other = leases.read_json, []

    def read_before_another(path):
        record = read(path)
        if record is None and not other:
            other.append("")
            other[0] = machine_id(store.root)
        return record

    monkeypatch.setattr(leases, "read_json", read_before_another)
    assert machine_id(store.root) == other[0]


def test_a_copy_of_a_folder_is_another_machine(store, tmp_path, monkeypatch):
    own = machine_id(store.root)
    assert machine_id(store.root) == own
    shutil.copytree(store.root, tmp_path / "copy")
    assert machine_id(tmp_path / "copy") != own
    # The same bytes at the same place on another machine, as a copied image has them.
    monkeypatch.setattr(leases, "folder_identity", lambda root: folder_identity(root).replace("-", "+"))
    assert machine_id(store.root) != own


def test_of_many_that_create_an_object_at_once_one_succeeds(machine):
    store = machine("a")
    remotes = [open_store(store.root).remote for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda remote: remote.create("leases/x/1.json", b"{}"), remotes))
    assert sorted(created) == [False] * 7 + [True]
