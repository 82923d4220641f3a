"""The application in process, over an engine that answers at once: the default model, /metrics and the key."""

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.support.samples.instant_engine import NAME, instant_application

CHAT = {"messages": [{"role": "user", "content": "2 + 2"}]}


@pytest.fixture
def client():
    with TestClient(instant_application()) as client:
        yield client


def test_a_request_without_a_model_gets_the_served_one_and_another_name_is_refused(client):
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "2 + 2"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [97]}),
    ):
        for named in ({}, {"model": None}, {"model": NAME}):
            reply = client.post(path, json=body | named)
            assert reply.status_code == 200, reply.text
            assert reply.json().get("model", NAME) == NAME
        refused = client.post(path, json=body | {"model": "gpt-4"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_metrics_count_requests_tokens_and_latency(client):
    assert client.post("/v1/completions", json={"prompt": "abcd", "n": 2}).status_code == 200
    stream = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert stream.text.endswith("data: [DONE]\n\n")
    assert client.post("/v1/completions", json={}).status_code == 400
    client.get("/anything/at/all")
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    values = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            values[sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "le")] = (
                sample.value
            )
    completions, chat = "/v1/completions", "/v1/chat/completions"
    prompt = client.post("/tokenize", json={"prompt": "abcd"}).json()["count"]
    assert {key: value for key, value in values.items() if key[0] == "nautile_requests_total"} == {
        ("nautile_requests_total", completions, "200"): 1,
        ("nautile_requests_total", completions, "400"): 1,
        ("nautile_requests_total", chat, "200"): 1,
        ("nautile_requests_total", "other", "404"): 1,
    }
    assert values["nautile_generated_tokens_total",] == 9
    assert values["nautile_prompt_tokens_total",] > prompt
    assert values["nautile_request_seconds_count", completions] == 2
    assert values["nautile_request_seconds_bucket", chat] == 1  # that of the last bound, infinity
    gauges = ("slots", "slots_busy", "queue_limit", "queue_waiting", "ready")
    assert [values[f"nautile_{name}",] for name in gauges] == [4, 0, 64, 0, 1]


def test_a_key_is_described_and_not_needed_for_the_states():
    app = instant_application(key="an-open-secret")
    operations = app.openapi()["paths"]
    assert operations["/v1/models"]["get"]["security"] == [{"key": []}]
    with TestClient(app) as client:
        assert client.get("/v1/models").status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert "security" not in operations[path]["get"]
            assert client.get(path).status_code == 200
