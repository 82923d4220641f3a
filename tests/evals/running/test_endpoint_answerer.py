"""Any model behind a chat endpoint, over a real socket."""

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import silent
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.evaluation import EvaluateConfig
from nautile.data.endpoints.pool import EndpointPool
from nautile.evals.benchmarks.items import BenchmarkItem
from nautile.evals.running.answerers import EndpointAnswerer, SkippedQuestion
from nautile.evals.running.runner import evaluate
from nautile.evals.scoring.scores import score
from tests.support.servers.fake_openai import FakeOpenAI, always, script

ITEMS = [BenchmarkItem("sums", n, str(n), f"{n} + 1?", "number", str(n + 1)) for n in range(12)]
CONFIG = EvaluateConfig(benchmarks=(), max_tokens=20, batch=4)


def thoughtful(body):
    """Right for even questions, a cut thought for the fifth, no thought at all for the seventh."""
    n = int(body["messages"][-1]["content"].split()[0])
    if n == 5:
        return "<think> still at it"
    return str(n + 1) if n == 7 else f"<think>{n} and one</think>The answer is {n + 1 + n % 2}."


@pytest.fixture
def ask(tmp_path):
    """ask(server, **changes) -> rows of all items, with a pool of its own over one cache and one rows file."""

    def ask(server, **changes):
        endpoint = EndpointConfig(kind="openai", model="fake", url=server.url, attempts=1, **changes)
        with EndpointPool({"it": endpoint}, tmp_path / "cache.jsonl", silent) as pool:
            return evaluate(EndpointAnswerer(pool, "it", CONFIG), ITEMS, tmp_path / "rows.jsonl", seed=1)

    return ask


def test_a_chat_endpoint_is_a_model_under_test(ask):
    with FakeOpenAI(thoughtful) as server:
        rows = ask(server)
        again = ask(server)
        assert len(server.bodies) == 12
    assert rows == again
    result = score("sums", rows)
    assert (result["n"], result["correct"], result["unfinished"]) == (12, 7, 1)
    assert {row["model"] for row in rows} == {"endpoint fake"}
    assert rows[7]["reasoning"] == ""
    assert rows[2]["reasoning"] == "2 and one"
    assert all(row["tokens_out"] > 0 for row in rows)


def test_what_follows_the_limit_of_tokens_is_counted_as_cut(ask):
    with FakeOpenAI(lambda body: "so " * 40) as server:
        assert score("sums", ask(server))["truncated"] == 12


def test_an_endpoint_that_stops_half_way_keeps_its_answers_and_goes_on(ask, tmp_path):
    with (
        FakeOpenAI(thoughtful, faults=script(*[None] * 6, *["500"] * 20)) as failing,
        pytest.raises(Retryable, match=r"endpoint 'it': \d of 4 questions got no reply"),
    ):
        ask(failing)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4
    with FakeOpenAI(thoughtful) as server:
        rows = ask(server)
        assert len(server.bodies) == 6
    assert len(rows) == 12


def test_a_question_that_is_refused_is_left_out(ask):
    with FakeOpenAI(thoughtful, faults=script("400")) as server:
        result = score("sums", ask(server, concurrency=1))
    assert (result["items"], result["n"], result["left_out"]) == (12, 11, {"refused": 1})
    assert SkippedQuestion("refused").tokens_in is None


def test_a_question_that_always_fails_is_left_out_too(ask):
    answer, poison = "The answer is 3.", lambda text: "500" if text.startswith("3 ") else None
    with FakeOpenAI(lambda body: answer, poison=poison) as server:
        result = score("sums", ask(server))
    assert (result["items"], result["n"], result["left_out"]) == (12, 11, {"unanswered": 1})


def test_a_question_whose_reply_repeats_the_key_is_paid_for_once(ask, monkeypatch):
    monkeypatch.setenv("FAKE_KEY", "sk-planted-0123456789")
    with FakeOpenAI(lambda body: "sk-planted-0123456789" if "3 +" in body["messages"][0]["content"] else "1") as server:
        result = score("sums", ask(server, key_variable="FAKE_KEY"))
        assert len(server.bodies) == 12
    assert (result["n"], result["left_out"]) == (11, {"unanswered": 1})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_that_reaches_the_limit_of_tokens_is_unfinished(ask, name):
    with FakeOpenAI(message=lambda body: {"content": None, name: "Let me think"}) as server:
        result = score("sums", ask(server))
    assert (result["unfinished"], result["no_answer"], result["truncated"]) == (12, 0, 12)


def test_a_wrong_key_and_an_unknown_endpoint_are_the_operators(ask, tmp_path):
    with FakeOpenAI(thoughtful, faults=always("401")) as server, pytest.raises(ConfigError, match="endpoint 'it'"):
        ask(server)
    with (
        EndpointPool({}, tmp_path / "other.jsonl", silent) as pool,
        pytest.raises(ConfigError, match="no endpoint 'x'"),
    ):
        EndpointAnswerer(pool, "x", CONFIG)
