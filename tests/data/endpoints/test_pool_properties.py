"""The pool under random faults, answers of any shape and restarts: `ask` returns, and the ledger balances."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.endpoint import BatchConfig, EndpointConfig
from nautile.data.endpoints import batch as batches
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest
from nautile.data.endpoints.endpoint import CONFIRM_TOKENS
from nautile.data.endpoints.pool import EndpointPool, raise_for_outage
from tests.data.endpoints.conftest import Events
from tests.support.samples.replies import reply_rows, unknown_rows
from tests.support.servers.fake_openai import FakeOpenAI

RETURNS_S = 120.0  # patience with a busy machine; an `ask` that waits for nobody would never return
PER_MILLION = (1e5, 2e5)
PRICES = {"dollars_per_million_in": 1e5, "dollars_per_million_out": 2e5}
MOST = (1e5 * (len("number 0") // 3 + 8) + 2e5 * 20) / 1e6  # dollars of a request
# Dollars of the one that asks whether the endpoint answers at all.
MOST_OF_CHECK = (1e5 * (len("Reply with OK.") // 3 + 8) + 2e5 * CONFIRM_TOKENS) / 1e6

QUICK = (Phase.explicit, Phase.generate)  # no search for a smaller example: each starts a server

faults = st.lists(
    st.sampled_from([None, None, "429", "500", "cut", "close", "invalid", "not_chat", "400"]), max_size=12
)
odd_values = st.sampled_from([None, [], {}, "text", -1, 1.5, [None], {"choices": None}])
places = st.sampled_from(["", "choices", "usage", "message", "content", "finish_reason", "prompt_tokens"])
batch_steps = st.sampled_from(["upload", "create", "status", "download"])
batch_fields = st.sampled_from(["", "id", "status", "errors", "output_file_id", "output_file", "metadata"])


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.005, longest_s=0.02))
        patch.setattr(circuit_breaker, "OUTAGE_S", 0.1)
        patch.setattr(batches, "LINGER_S", 0.01)
        patch.setattr(batches, "GIVE_UP_S", 0.05)
        yield


def replaced(answer, place, value):
    """The answer with `value` at that place of it."""
    if place == "" or not isinstance(answer, dict):
        return value
    choice = {**answer["choices"][0]} if "choices" in answer else {}
    if place in ("message", "finish_reason"):
        return {**answer, "choices": [{**choice, place: value}]}
    if place == "content":
        return {**answer, "choices": [{**choice, "message": {**choice["message"], "content": value}}]}
    if place == "prompt_tokens":
        return {**answer, "usage": {**answer["usage"], place: value}}
    return {**answer, place: value}


def requests(count):
    return [ChatRequest("fake", ({"role": "user", "content": f"number {i}"},), 20) for i in range(count)]


def ask(pool, count):
    """The results, or what `ask` raises; fails if it does not return."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(pool.ask, requests(count)).result(RETURNS_S)


def check(pool, events, results, folder, budget, most=MOST):
    """Nothing is lost, nothing counted twice, no limit overrun. `most`: what a reply without counts is booked at."""
    assert all(isinstance(result, ChatReply | ChatFailure) for result in results)
    bounds = {"check": MOST_OF_CHECK}
    dollars = sum(bounds.get(e["purpose"], most) if e["dollars"] is None else e["dollars"] for e in events)
    assert pool.spent == pytest.approx(dollars)
    assert sum(event.get("unknown_dollars", 0.0) for event in events) == pytest.approx(pool.unknown)
    rows = reply_rows(folder)
    assert len({row["digest"] for row in rows}) == len(rows)
    assert sum(row["dollars"] for row in rows) == pytest.approx(dollars)
    assert sum(row["dollars"] for row in unknown_rows(folder)) == pytest.approx(pool.unknown)
    assert not budget or pool.spent + pool.unknown <= budget + 1e-9
    limits = (pool._limit, *(limit for e in pool._endpoints.values() for limit in e.budget._limits))
    assert all(limit._holds == limit._parked for limit in limits), "a hold is settled, or parked with its job"


@pytest.mark.slow
@settings(max_examples=20, phases=QUICK)
@given(faults, st.dictionaries(st.integers(0, 12), st.tuples(places, odd_values), max_size=4), st.data())
def test_live_requests_always_end_and_every_cent_is_counted(fault_list, odd, data):
    count, budget = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([0.0, 1.5 * MOST, 6.5 * MOST]))
    fields = {"concurrency": data.draw(st.sampled_from([1, 3])), "attempts": data.draw(st.sampled_from([1, 3]))}

    def reshape(arrival, answer):
        return replaced(answer, *odd[arrival]) if arrival in odd else answer

    with tempfile.TemporaryDirectory() as at, FakeOpenAI(per_million=PER_MILLION, reshape=reshape) as server:
        server.faults = lambda arrival: fault_list[arrival] if arrival < len(fault_list) else None
        config = EndpointConfig(kind="openai", model="fake", url=server.url, timeout_s=60.0, **PRICES, **fields)
        events = Events()
        for _ in range(data.draw(st.integers(1, 3))):  # lives of the process
            with EndpointPool({"fake": config}, Path(at), events, budget) as pool:
                results = ask(pool, count)
                # An answer of another shape may still be a reply, with or without counts: then it costs the most.
                extra = pool.spent - server.dollars
                assert extra >= -1e-9
                assert odd or extra == pytest.approx(0.0)
                check(pool, events, results, Path(at), budget)
        if not fault_list and not odd and not budget:
            assert all(isinstance(result, ChatReply) for result in results)


@pytest.mark.slow
@settings(max_examples=20, phases=QUICK)
@given(st.lists(st.tuples(batch_steps, batch_fields, odd_values), max_size=3), st.data())
def test_batch_jobs_always_end_and_every_cent_is_counted(odd, data):
    count, budget = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0.0, 1.3 * MOST]))
    end = data.draw(st.sampled_from(["completed", "completed", "expired", "failed"]))
    row_faults = data.draw(st.lists(st.sampled_from([None, None, "500", "400", "missing", "expired"]), max_size=6))
    kind = data.draw(st.sampled_from(["openai", "mistral"]))
    left = list(odd)

    def reshape(step, answer):
        if not left or left[0][0] != step:
            return answer
        _, place, value = left.pop(0)
        if isinstance(answer, bytes):
            return b"[1]\n{}\n" + answer[: len(answer) // 2]
        return {**answer, place: value} if place else value

    def row_fault(text, times):
        index = int(text.split()[1])
        return row_faults[index] if times == 1 and index < len(row_faults) else None

    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as at,
        FakeOpenAI(per_million=PER_MILLION) as server,
    ):
        patch.setenv("FAKE_KEY", "sk-planted-0123456789abcdef")
        server.batches.reshape, server.batches.end, server.batches.row_fault = reshape, end, row_fault
        batch = BatchConfig(requests_per_job=3, jobs_at_once=2, poll_s=0.005)
        config = EndpointConfig(
            kind=kind, model="fake", url=server.url, mode="batch", batch=batch, attempts=2, key_variable="FAKE_KEY",
            **PRICES,
        )  # fmt: skip
        events = Events()
        for _ in range(3):  # lives of the process
            with EndpointPool({"fake": config}, Path(at), events, budget) as pool:
                results = ask(pool, count)
                check(pool, events, results, Path(at), budget, 0.5 * MOST)
            try:
                raise_for_outage(results, unpaid_allowed=True)
            except (ConfigError, Retryable):
                continue
        submitted = server.batches.submitted
        assert pool.spent <= server.batch_dollars + 1e-9
        if not odd and end == "completed" and not row_faults and not budget:
            assert all(isinstance(result, ChatReply) for result in results)
            assert set(submitted.values()) == {1}
            assert pool.spent == pytest.approx(server.batch_dollars)
