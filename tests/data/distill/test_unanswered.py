"""Prompts that get no reply for a passing reason: unfinished work, counted with the command that asks again."""

import json
import logging
import threading
import time
from itertools import count

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.distill import PromptSetConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill.ask import Teachers
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints import pool as sessions
from tests.support.servers.fake_openai import FakeOpenAI, always

PROMPTS = 24


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.005, longest_s=0.05))
    monkeypatch.setattr(circuit_breaker, "OUTAGE_S", 0.2)


def openai(server, **fields):
    return EndpointConfig(kind="openai", model="fake", url=server.url, **{"concurrency": 4, "attempts": 3, **fields})


@pytest.fixture
def fields(tmp_path):
    """Settings of a distillation of prompts that a server can tell apart."""
    rows = [{"query": f"Which word is number {n} of the list?"} for n in range(PROMPTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = (PromptSetConfig(name="s", source="jsonl", path=str(tmp_path / "rows.jsonl")),)
    return {"prompts": PROMPTS, "prompt_sets": sets, "near_duplicates": False, "same_language": False}


def poison(*numbers):
    return lambda text: "500" if any(f"number {n} of" in text for n in numbers) else None


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 1024])
def test_prompts_that_always_fail_are_counted_and_not_rejected(run, fields, caplog, chunk):
    numbers = (0, 1, 2, 3, 23)
    with FakeOpenAI(poison=poison(*numbers)) as server, caplog.at_level(logging.WARNING):
        output = run({"t": openai(server)}, chunk=chunk, **fields)
        assert len(output.kept) == PROMPTS - 5
        assert output.counts["unanswered"] == {"server_error": 5}
        assert (output.counts["rejected"], output.counts["accepted_share"]) == ({}, 1.0)
        assert {row["reason"] for row in output.rejected} == {"failed_server_error"}
        message = (
            "5 of 24 prompts got no reply (5 server_error); `nautile run CONFIG --only distill --force` asks again"
        )
        assert message in caplog.text
        (*_, last) = (event for kind, event in output.events if kind == "progress")
        assert last["note"].startswith("79% accepted; 5 without a reply (`nautile run CONFIG")
        server.poison = lambda text: None
        again = run({"t": openai(server)}, chunk=chunk, **fields)
        assert (len(again.kept), again.counts["unanswered"], again.rejected) == (PROMPTS, {}, [])
        # A slow machine sends more of the small requests that ask whether the endpoint is down.
        prompts = {text: count for text, count in server.answers.items() if text != "Reply with OK."}
        assert set(prompts.values()) == {1}, "nothing is asked twice"


def test_a_prompt_that_always_fails_while_the_next_one_is_prepared_is_no_outage(run, fields, monkeypatch):
    """Nothing else is in progress then, and the endpoint has answered nothing yet."""
    attempts = threading.Semaphore(0)
    prepare = Teachers.prepare

    def prepare_late(teachers, prompts):
        if prompts[0].query == "Which word is number 1 of the list?":
            assert all(attempts.acquire(timeout=240) for _ in range(3))
            time.sleep(0.1)  # to decide what its failure means
        return prepare(teachers, prompts)

    def fails(text):
        if "number 0 of" not in text:
            return None
        attempts.release()
        return "500"

    monkeypatch.setattr(Teachers, "prepare", prepare_late)
    with FakeOpenAI(poison=fails) as server:
        output = run({"t": openai(server)}, chunk=1, **fields)
    assert (len(output.kept), output.counts["unanswered"]) == (PROMPTS - 1, {"server_error": 1})


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "chunk"), [("429", 1), ("500", 1024)])
def test_what_a_lasting_refusal_leaves_is_asked_again_by_the_next_attempt(run, fields, fault, chunk):
    with FakeOpenAI(faults=lambda arrival: fault if arrival >= 10 else None, retry_after="0.01") as server:
        with pytest.raises(Retryable):
            run({"t": openai(server)}, chunk=chunk, **fields)
        assert server.answered == 10
        server.faults = always(None)
        output = run({"t": openai(server)}, chunk=chunk, **fields)
    assert (len(output.kept), output.rejected, server.answered) == (PROMPTS, [], PROMPTS)


def test_the_progress_line_says_why_it_waits_and_the_log_says_it_once(run, fields, monkeypatch, caplog):
    monkeypatch.setattr(sessions, "WAITING_S", 0.02)
    arrivals = count()
    with FakeOpenAI(faults=lambda arrival: "429" if 4 <= next(arrivals) < 6 else None, retry_after="0.4") as server:
        output = run({"t": openai(server, concurrency=1)}, **fields)
    notes = [event["note"] for kind, event in output.events if kind == "progress"]
    assert any(note.endswith("endpoint 't' refuses requests for their rate (429)") for note in notes)
    assert notes[-1] == "100% accepted"
    assert [line for line in caplog.messages if "429" in line] == ["endpoint 't' refuses requests for their rate (429)"]


def test_an_endpoint_that_fails_at_every_prompt_but_answers_others_is_named(run, fields):
    with (
        FakeOpenAI(poison=poison(*range(PROMPTS))) as server,
        pytest.raises(ConfigError, match=r"24 of 24 prompts got no reply .* answers other requests"),
    ):
        run({"t": openai(server)}, **fields)
