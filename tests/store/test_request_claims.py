"""Of hosts that share only a remote, one sends a request, whatever steps need its reply; the others wait for it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from nautile.common.errors import Retryable
from nautile.common.events import silent
from nautile.data.endpoints.chat_types import ChatReply
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.endpoints.reply_source import ReplySource
from nautile.store import request_claims
from nautile.store.garbage import collect, find_garbage
from nautile.store.mirror import MirroredStore
from nautile.store.request_claims import RequestClaims
from tests.support.processes.asking_process import config, requests
from tests.support.samples.stage_store import key_of
from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.servers.simulated_bucket import Bucket, BucketView

pytestmark = pytest.mark.slow
DIGEST = key_of("request")


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(request_claims, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(request_claims, "RENEW_S", 0.05)


@pytest.fixture
def pair(tmp_path):
    """Two machines with one bucket."""
    bucket, stores = Bucket(time.time), []
    for name in "ab":
        stores.append(MirroredStore(tmp_path / name, "s3://simulated/run"))
        stores[-1].remote.__dict__["_filesystem"] = BucketView(bucket, lambda at: None), "simulated/run"
        stores[-1].prepare()
    return stores


def until(condition):
    while not condition():
        threading.Event().wait(0.02)


def test_two_hosts_with_different_steps_pay_once_for_the_requests_that_they_share(pair):
    def ask(store, numbers):
        source = ReplySource(
            store.root / "replies", f"execution of {store.root.name}", claims=partial(RequestClaims, store)
        )
        with EndpointPool({"fake": config(server.url)}, source, silent) as pool:
            return pool.ask([requests(30)[number] for number in numbers])

    def mirror_replies():
        while not ended.wait(0.05):
            for store in pair:
                store.push_replies()

    ended = threading.Event()
    with FakeOpenAI(delay_s=0.02) as server, ThreadPoolExecutor(3) as threads:
        threads.submit(mirror_replies)
        asking = [
            threads.submit(ask, store, numbers)
            for store, numbers in zip(pair, (range(30), range(29, 4, -1)), strict=True)
        ]
        try:
            replies = [future.result() for future in asking]
        finally:
            ended.set()
        assert server.answered == 30
    assert [len(part) for part in replies] == [30, 25]
    assert all(isinstance(reply, ChatReply) for part in replies for reply in part)


def test_a_claim_excludes_other_hosts_and_not_the_own_one(pair):
    a, b = pair
    first, other = RequestClaims(a, "m"), RequestClaims(b, "m")
    assert first.acquire(DIGEST)
    assert first.acquire(DIGEST)
    assert RequestClaims(a, "m").acquire(DIGEST), "a process after one that was killed"
    assert not other.acquire(DIGEST)
    assert RequestClaims(b, "another").acquire(DIGEST)
    first.release(DIGEST, answered=True)
    assert not RequestClaims(b, "m").acquire(DIGEST), "the reply comes with the next upload"


def test_a_request_that_has_failed_is_left_to_the_other_host(pair):
    a, b = pair
    first, other = RequestClaims(a, "m"), RequestClaims(b, "m")
    assert first.acquire(DIGEST)
    assert not other.acquire(DIGEST)
    first.release(DIGEST, answered=False)
    until(lambda: other.acquire(DIGEST))
    assert not first.acquire(DIGEST)


def test_the_claim_of_a_host_that_has_died_lasts_as_long_as_a_lease(pair, monkeypatch):
    a, b = pair
    with monkeypatch.context() as patch:
        patch.setattr(RequestClaims, "_keep_alive", lambda claims: None)
        assert RequestClaims(a, "m").acquire(DIGEST)
    other = RequestClaims(b, "m")
    assert not other.acquire(DIGEST)
    assert RequestClaims(a, "m").acquire(key_of("another")), "that the host works on other things renews nothing"
    monkeypatch.setattr(request_claims, "EXPIRES_S", 0.2)
    until(lambda: other.acquire(DIGEST))


def test_the_process_after_one_that_was_killed_has_a_claim_of_its_own(pair, monkeypatch):
    a, b = pair
    assert RequestClaims(a, "m").acquire(DIGEST)
    second, other = RequestClaims(a, "m"), RequestClaims(b, "m")
    assert second.acquire(DIGEST)
    monkeypatch.setattr(RequestClaims, "_is_alive", lambda claims, process: process == second._process)
    assert not other.acquire(DIGEST), "the first one's has expired, the second one's has not"


def test_what_cannot_be_claimed_is_not_sent(pair, monkeypatch):
    a, _ = pair

    def unreachable(*_):
        raise Retryable("the store cannot be reached")

    monkeypatch.setattr(a.remote, "create", unreachable)
    source = ReplySource(a.root / "replies", "e", claims=partial(RequestClaims, a))
    with FakeOpenAI() as server:
        with EndpointPool({"fake": config(server.url)}, source, silent) as pool, pytest.raises(Retryable):
            pool.ask(requests(3))
        assert server.answered == 0
        # Who pays again on purpose waits for nobody.
        again = ReplySource(a.root / "replies", "f", ask_again=True, claims=partial(RequestClaims, a))
        with EndpointPool({"fake": config(server.url)}, again, silent) as pool:
            pool.ask(requests(3))
        assert server.answered == 3


def test_old_claims_are_garbage(pair, monkeypatch):
    a, _ = pair
    assert RequestClaims(a, "m").acquire(DIGEST)
    assert find_garbage(a, stale_days=0.0) == []
    now = a.remote.server_time()
    monkeypatch.setattr(a.remote, "server_time", lambda: now + 8 * 86400)
    items = find_garbage(a)
    assert [item.path.name for item in items] == ["claims"]
    collect(a, items)
    assert a.remote.names("claims/m") == {}
