"""Pools of several runs on one folder of replies, as several processes have them."""

import threading

import pytest

from nautile.configs.endpoint import BatchConfig, EndpointConfig
from nautile.data.endpoints import batch as batches
from nautile.data.endpoints import pool as pool_module
from nautile.data.endpoints.chat_types import ChatRequest
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.endpoints.reply_source import ReplySource
from tests.support.samples.replies import reply_rows
from tests.support.servers.fake_openai import FakeOpenAI, script

PRICES = {"dollars_per_million_in": 1.0, "dollars_per_million_out": 2.0}
REQUESTS = [ChatRequest("t", ({"role": "user", "content": f"number {number}"},), 20) for number in range(24)]


@pytest.fixture
def pools(tmp_path, monkeypatch):
    """Makes the pool of an execution; its events are in `pool.events`."""
    monkeypatch.setattr(pool_module, "LONGEST_POLL_S", 0.05)
    made = []

    def make(server, execution, name="t", **fields):
        events = []
        config = EndpointConfig(kind="openai", model="fake", url=server.url, **{**PRICES, **fields})
        source = ReplySource(tmp_path / "replies", execution)
        made.append(EndpointPool({name: config}, source, lambda kind, **row: events.append(row), 1.0))
        made[-1].events = events
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def ask_at_once(*pools):
    replies = [[] for _ in pools]
    threads = [
        threading.Thread(target=lambda pool=pool, out=out: out.extend(pool.ask(REQUESTS)))
        for pool, out in zip(pools, replies, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    return replies


@pytest.mark.parametrize("faults", [(), ("500", "400", "500")])
def test_two_runs_at_once_pay_for_each_request_once(pools, tmp_path, faults):
    with FakeOpenAI(per_million=(1.0, 2.0), delay_s=0.02, faults=script(*faults)) as server:
        first, second = pools(server, "a"), pools(server, "b")
        replies = ask_at_once(first, second)
        assert server.answered == 24
        assert first.spent + second.spent == pytest.approx(server.dollars)
        paid = sum(row["dollars"] for pool in (first, second) for row in pool.events)
        assert paid == pytest.approx(server.dollars)
    answered = [[reply for reply in of_pool if hasattr(reply, "text")] for of_pool in replies]
    assert sum(map(len, answered)) == 48 - faults.count("400")
    assert sum(not reply.reused for of_pool in answered for reply in of_pool) == 24
    assert len(reply_rows(tmp_path / "replies")) == 24


def test_two_runs_at_once_do_not_put_a_request_into_two_batch_jobs(pools, monkeypatch):
    monkeypatch.setattr(batches, "LINGER_S", 0.05)
    batch = {"mode": "batch", "batch": BatchConfig(requests_per_job=10, jobs_at_once=2, poll_s=0.05)}
    with FakeOpenAI(per_million=(1.0, 2.0)) as server:
        ask_at_once(pools(server, "a", **batch), pools(server, "b", **batch))
        assert server.batches.submitted == {f"number {number}": 1 for number in range(24)}


def test_a_request_that_a_batch_job_failed_is_sent_again_by_only_one_of_two_runs(pools, monkeypatch):
    """The other run waits for it while the first one puts it into another job."""
    monkeypatch.setattr(
        batches, "LINGER_S", 0.3
    )  # long beside the pause of a run that waits: it looks between the jobs
    batch = {"mode": "batch", "batch": BatchConfig(requests_per_job=24, jobs_at_once=2, poll_s=0.02)}
    with FakeOpenAI(per_million=(1.0, 2.0)) as server:
        server.batches.row_fault = lambda text, times: "500" if times == 1 else None
        first, second = pools(server, "a", **batch), pools(server, "b", **batch)
        replies = ask_at_once(first, second)
        assert server.batches.submitted == {f"number {number}": 2 for number in range(24)}
        assert first.spent + second.spent == pytest.approx(server.batch_dollars)
    assert all(hasattr(reply, "text") for of_pool in replies for reply in of_pool)


def test_another_name_of_the_endpoint_finds_the_same_replies(pools):
    with FakeOpenAI() as server:
        pools(server, "a").ask(REQUESTS)
        renamed = [ChatRequest("u", request.messages, request.max_tokens) for request in REQUESTS]
        replies = pools(server, "b", name="u").ask(renamed)
        assert server.answered == 24
    assert all(reply.reused and reply.endpoint == "u" for reply in replies)
