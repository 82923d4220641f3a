import json
from collections import Counter

import pytest

from configs.schema import DistillConfig, EndpointConfig, TeacherConfig
from configs.section import ConfigError, Retryable
from data import retry
from data.distillation import DOCUMENTS, REJECTED, distil
from data.embeddings import Encoder
from data.endpoints import EndpointPool
from data.records import SynthRecord, from_dict
from data.retrieval import ExemplarIndex
from data.tally import by_reason, facts
from tests.support.fake_openai import FakeOpenAI, always, mixed, useful


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(retry, "OUTAGE_S", 0.2)


@pytest.fixture(scope="module")
def encoder():
    return Encoder()


@pytest.fixture(scope="module")
def index(encoder):
    queries = ["How many legs have 2 cats?", "What is 3 + 4?", "Spell cat backward.", "What is 2 * 3?", "9 - 1?"]
    records = [SynthRecord(query, "One. Two.", "3", synth_id=f"e/{n}") for n, query in enumerate(queries)]
    return ExemplarIndex.build(records, encoder)


@pytest.fixture
def run(tmp_path, encoder, index):
    """Distil with the given endpoints; returns the tally, its facts, what was emitted, and the two files' rows."""

    def distilled(endpoints, **fields):
        events = []
        teachers = fields.pop("teachers", tuple(TeacherConfig(endpoint=name) for name in endpoints))
        config = DistillConfig(**{"prompts": 20, "teachers": teachers, **fields})
        out = tmp_path / "out"
        with EndpointPool(
            endpoints, tmp_path / "replies.jsonl", lambda kind, **f: events.append((kind, f)), config.budget_dollars
        ) as pool:
            tally = distil(config, pool, index, encoder, out, 1, lambda kind, **f: events.append((kind, f)))
            counts = facts(tally, config, pool)
        rows = [[json.loads(line) for line in (out / name).read_text().splitlines()] for name in (DOCUMENTS, REJECTED)]
        return tally, counts, events, *rows

    return distilled


def openai(server, **fields):
    return EndpointConfig(kind="openai", model="fake", url=server.url, **fields)


def test_every_prompt_becomes_a_document_with_its_provenance(run):
    with FakeOpenAI() as server:
        tally, counts, events, kept, rejected = run({"t": openai(server, stand_in=True)})
    assert (len(kept), rejected, tally.accepted) == (20, [], 20)
    assert counts["accepted_share"] == 1.0
    assert counts["teachers"]["t"]["kept"] == 20
    assert counts["teachers"]["t"]["tokens_out"] == server.tokens_out
    assert counts["stand_in"] == "fake, in place of a teacher"
    record = from_dict(kept[0], "synth")
    assert record.query_seed_url.startswith("https://en.wikipedia.org/")
    assert record.model == "fake"
    origin = kept[0]["provenance"]
    assert origin["teacher"] == "t"
    assert set(origin["neighbours"]) == {f"e/{n}" for n in range(5)}
    calls = {fields["digest"] for kind, fields in events if kind == "call"}
    assert {row["provenance"]["request"] for row in kept} == calls, "a document leads to its call"
    bars = [fields for kind, fields in events if kind == "progress"]
    assert bars[-1] == {"done": 20, "total": 20, "unit": "prompts", "note": "100% accepted"}
    assert sum(kind == "sample" for kind, _ in events) == 20


def test_rejected_replies_are_kept_by_reason(run):
    refused = {"reasoning": "We are asked for it.", "answer": "I'm sorry, but I cannot help with that."}
    said = iter(["no json", json.dumps({"reasoning": "", "answer": "x"}), json.dumps(refused)])
    with FakeOpenAI(reply=lambda body: next(said, None) or useful(body)) as server:
        tally, counts, _, kept, rejected = run({"t": openai(server, concurrency=1)})
    assert Counter(row["reason"] for row in rejected) == {"unparsable": 1, "empty": 1, "refusal": 1}
    assert counts["rejected"] == dict(tally.rejected)
    assert rejected[0]["reply"] == "no json"
    assert len(kept) == 17
    assert set(by_reason(tally)) == {"kept", "unparsable", "empty", "refusal"}


def test_what_says_the_same_as_another_is_a_duplicate(run):
    same = json.dumps({"reasoning": "They all are something.", "answer": "They are things like others."})
    with FakeOpenAI(reply=lambda body: same) as server:
        _, _, _, kept, rejected = run({"t": openai(server)})
    assert len(kept) == 1
    assert {row["reason"] for row in rejected} == {"duplicate"}


def test_all_prompts_end_once_under_faults(run):
    faults = mixed(2, f429=0.1, f500=0.1, cut=0.05, invalid=0.05, f400=0.1)
    with FakeOpenAI(faults=faults) as server:
        _, counts, _, kept, rejected = run({"t": openai(server, concurrency=4)}, prompts=60)
    prompts = [row["provenance"]["prompt"] for row in kept + rejected]
    assert len(prompts) == len(set(prompts)) == 60
    assert set(counts["rejected"]) <= {"failed_refused", "failed_rate_limited", "failed_server_error"}


def test_a_second_run_asks_nothing_and_writes_the_same(run, tmp_path):
    with FakeOpenAI(faults=always(None)) as server:
        endpoints = {"t": openai(server, concurrency=5)}
        first = run(endpoints)
        content = (tmp_path / "out" / DOCUMENTS).read_bytes()
        asked = len(server.bodies)
        second = run(endpoints)
        assert len(server.bodies) == asked == 20
    assert (tmp_path / "out" / DOCUMENTS).read_bytes() == content
    assert first[1] == second[1]


def test_teachers_share_the_prompts_by_difficulty(run):
    with FakeOpenAI() as small, FakeOpenAI(models=["fake"]) as big:
        endpoints = {"small": openai(small), "big": openai(big)}
        teachers = (TeacherConfig(endpoint="small", up_to=0.2), TeacherConfig(endpoint="big"))
        _, counts, _, kept, _ = run(endpoints, teachers=teachers)
    assert len(small.bodies) == counts["teachers"]["small"]["asked"] > 0
    assert len(big.bodies) == counts["teachers"]["big"]["asked"] > 0
    for row in kept:
        origin = row["provenance"]
        assert origin["teacher"] == ("small" if origin["difficulty"] <= 0.2 else "big")


def test_an_outage_stops_the_work_and_what_was_answered_stays(run):
    with FakeOpenAI(faults=lambda arrival: "500" if arrival >= 6 else None) as server:
        endpoints = {"t": openai(server, concurrency=2)}
        with pytest.raises(Retryable, match="has stopped answering"):
            run(endpoints)
        answered = server.answered
        server.faults = always(None)
        run(endpoints)
        assert server.answered == 20
        assert answered == 6


def test_the_budget_ends_the_work_cleanly(run):
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1000.0}
    with FakeOpenAI(per_million=(0.0, 1000.0)) as server:
        _, counts, _, kept, rejected = run({"t": openai(server, **prices)}, budget_dollars=0.5, max_tokens=100)
    assert counts["budget_exhausted"]
    assert counts["dollars"] == pytest.approx(server.dollars)
    assert server.dollars <= 0.5
    assert {row["reason"] for row in rejected} == {"failed_budget"}
    assert 0 < len(kept) < 20


def test_too_many_rejects_are_refused_with_their_reasons(run):
    said = iter(["no json"] * 5)
    poor = FakeOpenAI(reply=lambda body: next(said, None) or useful(body))
    with poor as server, pytest.raises(ConfigError, match=r"max_rejected_share is 0\.2.*5 unparsable"):
        run({"t": openai(server)}, max_rejected_share=0.2)
    with FakeOpenAI(reply=lambda body: "no json") as server, pytest.raises(ConfigError, match="not one of 20"):
        run({"other": openai(server, structured="none")})


def test_a_wrong_address_is_the_operators_to_mend(run):
    with FakeOpenAI(faults=always("404")) as server, pytest.raises(ConfigError, match="404"):
        run({"t": openai(server)})
