"""The stage over a model behind an endpoint, and over a checkpoint asked in both ways."""

import json

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import silent
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.evaluation import EvaluateConfig
from nautile.tasks.engine.job import Job
from nautile.tasks.evaluate import evaluate
from tests.support.servers.fake_openai import FakeOpenAI, script

ASKED = EvaluateConfig(benchmarks=({"name": "wiki_choice", "items": 8},), max_tokens=20, batch=4)


def job(staging, server, column="smollm2_360m", asked=ASKED):
    endpoint = EndpointConfig(kind="openai", model="fake", url=server.url, attempts=1, concurrency=1)
    section = {
        "seeds": {"evaluation": 1},
        "evaluate": asked.model_dump(mode="json"),
        "model_under_test": {"endpoint": "it", "column": column},
        "endpoints": {"it": endpoint.model_dump(mode="json")},
    }
    return Job("evaluate", "k" * 64, "e", section, {}, staging, silent)


@pytest.mark.slow
def test_a_model_behind_an_endpoint_fills_its_column(tmp_path):
    with FakeOpenAI(lambda body: "A") as server:
        done = job(tmp_path, server)
        evaluate.work(done)
    out = done.output("evaluation")
    scores = json.loads((out / "scores.json").read_text())
    assert (scores["model"], scores["column"]) == ("endpoint fake", "smollm2_360m")
    assert scores["benchmarks"]["wiki_choice"]["n"] == 8
    table = json.loads((out / "table2.json").read_text())
    assert table["columns"][1:3] == ["endpoint fake", "Difference"]
    facts = json.loads((done.staging / "facts" / "evaluation.json").read_text())
    assert facts["latency_s"]["p95"] >= facts["latency_s"]["p50"] > 0
    assert len((out / "latency.rows.jsonl").read_text().splitlines()) == 8


@pytest.mark.slow
def test_an_endpoint_that_stops_half_way_is_gone_on_with(tmp_path):
    with FakeOpenAI(lambda body: "A", faults=script(*[None] * 6, *["500"] * 20)) as failing:
        stopped = job(tmp_path, failing)
        with pytest.raises(Retryable, match=r"endpoint 'it': \d of 4 questions got no reply"):
            evaluate.work(stopped)
    with FakeOpenAI(lambda body: "A") as server:
        evaluate.work(job(tmp_path, server))
        assert len(server.bodies) == 2  # six were answered, and are not asked again


def test_an_endpoint_is_asked_by_generation_alone(tmp_path):
    with FakeOpenAI() as server, pytest.raises(ConfigError, match="endpoint 'it' supports only `generate`"):
        evaluate.work(job(tmp_path, server, asked=ASKED.model_copy(update={"ways": ("likelihood",)})))


@pytest.mark.slow
def test_sampled_answers_stand_beside_the_greedy_ones(tmp_path):
    """Each with a request of its own. The second sample of each question is wrong, and the run goes on from a stop."""
    seen = set()

    def reply(body):
        again = body["temperature"] > 0 and body["messages"][0]["content"] in seen
        if body["temperature"] > 0:
            seen.add(body["messages"][0]["content"])
        return "Z" if again else "A"

    asked = ASKED.model_copy(update={"samples": 2, "sample_temperature": 0.7})
    with FakeOpenAI(reply) as server:
        done = job(tmp_path, server, asked=asked)
        evaluate.work(done)
        assert sorted(body["temperature"] for body in server.bodies) == [0.0] * 8 + [0.7] * 16
        evaluate.work(job(tmp_path, server, asked=asked))
        assert len(server.bodies) == 24
    out = done.output("evaluation")
    scores = json.loads((out / "scores.json").read_text())
    own, greedy = scores["sampled"]["wiki_choice"], scores["benchmarks"]["wiki_choice"]
    assert (own["n"], own["samples"], own["rows"]) == (8, 2, 16)
    assert own["pass_at"]["2"]["accuracy"] == greedy["accuracy"] == 2 * own["accuracy"] > 0
    rows = [json.loads(line) for line in (out / "sampled.jsonl").read_text().splitlines()]
    assert sorted((row["index"], row["sample"]) for row in rows) == [(n, k) for n in range(8) for k in range(2)]
    assert "Sampled answers" in (out / "breakdown.md").read_text()


def test_samples_need_generated_answers():
    with pytest.raises(ValueError, match='add "generate" to `ways`'):
        EvaluateConfig(benchmarks=(), ways=("likelihood",), samples=2)
    with pytest.raises(ValueError, match="sample_temperature: it is that of `samples`"):
        EvaluateConfig(benchmarks=(), sample_temperature=0.5)
