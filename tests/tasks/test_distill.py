"""The distill stage against a fake teacher on a real socket: artifacts, facts, going on after an outage, bad input."""

import itertools
import json

import pytest

from configs.model import TokenizerConfig
from configs.schema import TaskConfig
from configs.section import ConfigError, Retryable
from data import retry
from data.exemplars import write_exemplars
from data.loader import Loader
from data.reasoning import problems
from data.sources import synth_record
from tasks.distill import distill
from tasks.job import Job
from tests.support.fake_openai import FakeOpenAI, always

KEY = "sk-planted-fedcba9876543210"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(retry, "OUTAGE_S", 0.1)


@pytest.fixture
def job(tmp_path):
    """Jobs in one staging folder, as attempts at one execution are; `events`: what they emitted."""
    exemplars = tmp_path / "exemplars"
    drawn = itertools.islice(problems([TaskConfig(name="chain_sum")], 1, "train"), 8)
    write_exemplars(exemplars / "exemplars.jsonl", map(synth_record, drawn))

    def make(server, events=None, endpoint=None, **config):
        section = {
            "seed": 1,
            "row_length": 128,
            "tokenizer": {"ranks": 400},
            "distill": {"prompts": 24, "teachers": [{"endpoint": "t"}], **config},
            "endpoints": {
                "t": {"kind": "openai", "model": "fake", "url": server.url, "stand_in": True, **(endpoint or {})}
            },
        }
        emit = (events if events is not None else []).append
        folder = tmp_path / "staging"
        return Job("distill", "key", "e", section, {"exemplars": exemplars}, folder, lambda k, **f: emit((k, f)))

    return make


def facts(tmp_path, kind):
    return json.loads((tmp_path / "staging" / "facts" / f"{kind}.json").read_text())


def test_documents_and_their_tokens(job, tmp_path):
    events = []
    with FakeOpenAI() as server:
        distill.work(job(server, events))
    told, tokens = facts(tmp_path, "documents"), facts(tmp_path, "tokens")
    assert told["prompts"] == 24
    assert told["documents"] == tokens["documents"] > 15
    assert told["documents"] + sum(told["rejected"].values()) == 24
    assert told["stand_in"] == tokens["stand_in"] == "fake, in place of a teacher"
    assert told["exemplars"] == 8
    assert len(told["samples"]["kept"]) == 3
    assert sum(kind == "call" for kind, _ in events) == 24
    measured = {fields["name"]: fields["value"] for kind, fields in events if kind == "metric"}
    assert measured["documents"] == told["documents"]
    assert measured["tokens"] == tokens["tokens"]
    rows = Loader({"distilled": tmp_path / "staging" / "output" / "tokens"}, (), 4, 0, TokenizerConfig(ranks=400))
    assert rows.row_length == 128


def test_an_outage_pauses_and_the_next_attempt_asks_only_what_is_missing(job, tmp_path):
    with FakeOpenAI(faults=lambda arrival: "500" if arrival >= 9 else None) as server:
        with pytest.raises(Retryable, match="has stopped answering"):
            distill.work(job(server))
        server.faults = always(None)
        distill.work(job(server))
        assert server.answered == 24
    assert facts(tmp_path, "documents")["prompts"] == 24


def test_an_attempt_that_answers_more_is_tokenised_anew(job, tmp_path):
    with FakeOpenAI(faults=lambda arrival: "400" if arrival < 12 else None) as server:
        distill.work(job(server, endpoint={"concurrency": 1}))
        few = facts(tmp_path, "tokens")["documents"]
        server.faults = always(None)
        distill.work(job(server, endpoint={"concurrency": 1}))
    assert facts(tmp_path, "tokens")["documents"] > few


def test_bad_input_is_told_before_anything_is_sent(job, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with FakeOpenAI() as server:
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            distill.work(job(server, endpoint={"key_variable": "NO_SUCH_KEY"}))
        with pytest.raises(ConfigError, match="no model 'other'"):
            distill.work(job(server, endpoint={"model": "other"}))
        with pytest.raises(ConfigError, match="8 usable records, but every prompt is shown 9"):
            distill.work(job(server, neighbours=9))
        with pytest.raises(ConfigError, match="no template 'x'"):
            distill.work(job(server, teachers=[{"endpoint": "t", "template": "x"}]))
        assert not server.bodies


def test_a_key_is_written_nowhere(job, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_KEY", KEY)
    events = []
    with FakeOpenAI(
        key=KEY, reply=lambda body: json.dumps({"reasoning": f"It is {KEY} here", "answer": KEY})
    ) as server:
        with pytest.raises(ConfigError, match="not one"):
            distill.work(job(server, events, endpoint={"key_variable": "FAKE_KEY"}))
        assert len(server.bodies) == 24
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in written + json.dumps(events).encode()
    assert b"[key]" in written
