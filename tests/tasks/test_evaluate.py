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
