"""The pool against a server in another process, a tenth of the requests of bench/corpus/endpoints.py, and killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nautile.common.events import silent
from nautile.data.endpoints.chat_types import ChatReply
from nautile.data.endpoints.pool import EndpointPool
from tests.support.processes import asking_process
from tests.support.samples.replies import reply_rows
from tests.support.servers.fake_openai import own_process

ROOT = str(Path(__file__).parents[3])
FAULTS = {"429": 0.05, "500": 0.02, "hang": 0.01, "cut": 0.01, "invalid": 0.01}
PER_MILLION = (5.0, 15.0)
COUNT = 1000
# Far longer than an answer takes with 64 in flight: a request that the client gave up on would be answered twice.
FIELDS = {"timeout_s": 20.0, "attempts": 9, "dollars_per_million_in": 5.0, "dollars_per_million_out": 15.0}


@pytest.mark.slow
def test_every_prompt_ends_once_and_the_ledger_agrees_with_the_server(tmp_path):
    cache, events = tmp_path / "replies", []
    with own_process(faults=FAULTS, per_million=PER_MILLION, delay_s=0.02) as server:
        config = asking_process.config(server.url, concurrency=64, **FIELDS)
        with EndpointPool({"fake": config}, cache, lambda kind, **row: events.append(row)) as pool:
            reported = []
            results = pool.ask(asking_process.requests(COUNT), lambda index, _: reported.append(index))
            spent, limiter = pool.spent, pool._endpoints["fake"].rate_limiter
        counts = server.counts()
    assert all(isinstance(result, ChatReply) for result in results)
    assert sorted(reported) == list(range(COUNT))
    assert counts["answered"] == counts["prompts"] == len(reply_rows(cache)) == COUNT
    assert spent == pytest.approx(counts["dollars"])
    assert sum(row["dollars"] for row in events) == pytest.approx(counts["dollars"])
    assert len(events) == counts["arrived"] == limiter.sent_count
    assert limiter.refused_count == counts["statuses"]["429"]


@pytest.mark.slow
def test_a_kill_loses_only_what_was_in_flight(tmp_path):
    cache = tmp_path / "replies"
    with own_process(faults=FAULTS, per_million=PER_MILLION, delay_s=0.02) as server:
        config = asking_process.config(server.url, concurrency=64, **FIELDS)
        command = [sys.executable, asking_process.__file__, config.model_dump_json(), str(cache), str(COUNT)]
        pipes = {"stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": ROOT}}
        with subprocess.Popen(command, **pipes) as process:
            reported = {int(process.stdout.readline()) for _ in range(COUNT // 2)}
            process.kill()
        before = _counts_at_rest(server)
        with EndpointPool({"fake": config}, cache, silent) as pool:
            results = pool.ask(asking_process.requests(COUNT))
            spent = pool.spent
        counts = server.counts()
    assert all(isinstance(result, ChatReply) for result in results)
    assert all(results[index].cached for index in reported), "what was returned was on disk before"
    kept = [row["digest"] for row in reply_rows(cache)]
    assert len(set(kept)) == len(kept) == COUNT
    lost = counts["answered"] - COUNT  # answered by the server, but not on disk when the process was killed
    assert 0 <= lost <= 64
    assert counts["prompts"] == COUNT
    assert counts["most_for_a_prompt"] <= 2
    assert spent <= counts["dollars"] + 1e-9
    assert spent == pytest.approx(counts["dollars"] * COUNT / counts["answered"], rel=0.02)
    assert before["answered"] >= len(reported)


def _counts_at_rest(server):
    """The server's counts once it has answered all requests of the dead process."""
    counts = server.counts()
    while True:
        time.sleep(0.1)
        last, counts = counts, server.counts()
        if last["answered"] == counts["answered"]:
            return counts


@pytest.mark.slow
@pytest.mark.parametrize("states", ["openai", "mistral", ""])
def test_a_limit_of_fifty_a_second_is_kept_with_few_refusals(tmp_path, states):
    with own_process(limit=[50, 50], states=states, retry_after="1", delay_s=0.02) as server:
        config = asking_process.config(server.url, concurrency=256, attempts=9)
        with EndpointPool({"fake": config}, tmp_path / "replies", silent) as pool:
            results = pool.ask(asking_process.requests(250))
        counts = server.counts()
    assert all(isinstance(result, ChatReply) for result in results)
    # Without a rate limiter all 256 are sent at once: two hundred refusals, again and again.
    assert counts["statuses"].get("429", 0) <= (0 if states else 100)
