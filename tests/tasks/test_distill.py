"""The distill stage against a fake teacher on a real socket: artifacts, facts, going on after an outage, bad input."""

import json
import shutil

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.distill import IndexConfig
from nautile.configs.load import load
from nautile.configs.model import TokenizerConfig
from nautile.data.tokens.loader import Loader
from nautile.tasks.distill import distill
from nautile.tasks.engine.job import Job
from tests.support.samples.exemplar_index import index_exemplars
from tests.support.servers.fake_openai import FakeOpenAI, useful

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory):
    """The index of eight exemplars, which every distillation here reads."""
    return index_exemplars(tmp_path_factory.mktemp("index"))


@pytest.fixture
def job(tmp_path, retrieval):
    """Jobs in one staging folder, as attempts at one execution are, or in others; all share one folder of replies.

    `events`: what they emitted.
    """

    def make(server, events=None, endpoint=None, questions=None, attempt="a", execution="e", ask_again=False, **config):
        section = {
            "row_length": 128,
            "tokenizer": {"ranks": 400},
            "index": IndexConfig().model_dump(mode="json"),
            "distill": {"prompts": 24, "teachers": [{"endpoint": "t"}], **config},
            "endpoints": {
                "t": {"kind": "openai", "model": "fake", "url": server.url, "stand_in": True, **(endpoint or {})}
            },
        }
        emit = (events if events is not None else []).append
        read = {"retrieval": retrieval, **({"questions": questions} if questions else {})}
        staging, replies = tmp_path / attempt / "staging", tmp_path / "replies"
        return Job("distill", "key", execution, section, read, staging, lambda k, **f: emit((k, f)), replies, ask_again)

    return make


def facts(tmp_path, kind, attempt="a"):
    return json.loads((tmp_path / attempt / "staging" / "facts" / f"{kind}.json").read_text())


@pytest.mark.slow
def test_documents_and_their_tokens(job, tmp_path):
    events = []
    with FakeOpenAI() as server:
        distill.work(job(server, events))
    documents, tokens = facts(tmp_path, "documents"), facts(tmp_path, "tokens")
    assert documents["prompts"] == 24
    assert documents["documents"] == tokens["documents"] > 15
    assert documents["documents"] + sum(documents["rejected"].values()) == 24
    assert documents["stand_in"] == tokens["stand_in"] == "fake, in place of a teacher"
    assert documents["exemplars"] == 8
    assert len(documents["samples"]["kept"]) == 3
    assert sum(kind == "call" for kind, _ in events) == 24
    measured = {fields["name"]: fields["value"] for kind, fields in events if kind == "metric"}
    assert measured["documents"] == documents["documents"]
    assert measured["tokens"] == tokens["tokens"]
    rows = Loader({"distilled": tmp_path / "a" / "staging" / "output" / "tokens"}, (), 4, 0, TokenizerConfig(ranks=400))
    assert rows.row_length == 128


@pytest.mark.slow
def test_the_data_card_describes_the_documents(job, tmp_path):
    replies = iter(
        ["no json<|im_end|>", json.dumps({"reasoning": "We are asked for it.", "answer": "<script>x</script> ok"})]
    )
    with FakeOpenAI(reply=lambda body: next(replies, None) or useful(body), per_million=(1.0, 2.0)) as server:
        prices = {"dollars_per_million_in": 1.0, "dollars_per_million_out": 2.0, "concurrency": 1}
        distill.work(job(server, endpoint=prices))
    folder = tmp_path / "a" / "staging" / "output" / "data_card"
    assert {path.name for path in folder.iterdir()} == {"data_card.html", "data_card.md", "data_card.json"}
    plain = json.loads((folder / "data_card.json").read_text())
    assert plain["documents"] + sum(plain["rejected"].values()) == plain["prompts"] == 24
    assert plain["counts"]["difficulties"]
    assert plain["samples"]["unparsable"][0]["reply"] == "no json<|im_end|>"
    assert plain["counts"]["hostile"] == {"chat markers/reply": 1}
    assert plain["counts"]["hostile_kept"] == {"chat markers/reply": 0}
    assert sum(spent for _, spent in plain["curve"]) == pytest.approx(server.dollars)
    page, text = (folder / "data_card.html").read_text(), (folder / "data_card.md").read_text()
    assert page.count("<svg") == 7, "kinds, mix, difficulty, reasons, two lengths and cost"
    assert "<script>x" not in page
    for text_shown in (
        "fake, in place of a teacher",
        "difficulty and thresholds",
        "no benchmark was held out",
        "unparsable",
        "Signs of injection",
        "chat markers",
        "targets in replies",
    ):
        assert text_shown in page
        assert text_shown in text
    assert facts(tmp_path, "data_card")["documents"] == plain["documents"]
    tokens = facts(tmp_path, "tokens")
    assert plain["rows"] == {name: tokens[name] for name in ("fill", "cropped_share", "reply_share")}


@pytest.mark.slow
def test_benchmark_questions_are_neither_prompts_nor_documents(job, tmp_path):
    with FakeOpenAI() as server:
        distill.work(job(server, prompts=3))
        first = json.loads((tmp_path / "a" / "staging" / "scratch" / "prompts-00000.jsonl").read_text().splitlines()[0])
        shutil.rmtree(tmp_path / "a")
        question = {"benchmark": "trivia_qa", "example": "7", "text": first["query"]}
        (tmp_path / "q").mkdir()
        (tmp_path / "q" / "questions.jsonl").write_text(json.dumps(question) + "\n")
        distill.work(job(server, prompts=3, questions=tmp_path / "q"))
    documents = facts(tmp_path, "documents")
    assert documents["held_out"] == 1
    if len(first["query"].split()) >= 5:  # a shorter one is not searched for
        assert documents["prompt_sets"]["wikipedia"]["left_out"] == {"in_a_benchmark": 1}


def test_bad_input_is_refused_before_anything_is_sent(job, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with FakeOpenAI() as server:
        with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
            distill.work(job(server, endpoint={"key_variable": "NO_SUCH_KEY"}))
        with pytest.raises(ConfigError, match="no model 'other'"):
            distill.work(job(server, endpoint={"model": "other"}))
        with pytest.raises(ConfigError, match="8 usable records, but every prompt needs 9"):
            distill.work(job(server, neighbours=9))
        hub = {"name": "chats", "source": "hub"}
        with pytest.raises(ConfigError, match="prompt set 'chats': `path` is not set"):
            distill.work(job(server, prompt_sets=[hub]))
        with pytest.raises(ConfigError, match="prompt set 'chats': `revision` 'main'"):
            distill.work(job(server, prompt_sets=[{**hub, "path": "a/b", "revision": "main"}]))
        with pytest.raises(ConfigError, match="no template 'x'"):
            distill.work(job(server, teachers=[{"endpoint": "t", "template": "x"}]))
        assert not server.bodies


SHIPPED = load("nautile_370m")


@pytest.mark.slow
def test_out_of_money_publishes_what_there_is_with_the_shipped_settings(job, tmp_path):
    """30 % of the prompts are not asked, where 20 % of the replies may be rejected."""
    settings = {"max_rejected_share": SHIPPED.distill.max_rejected_share, "temperature": SHIPPED.distill.temperature}
    assert settings["max_rejected_share"] == 0.2
    assert SHIPPED.operation.distill.at_budget == "pause"
    events = []
    with FakeOpenAI(per_million=(0.0, 1000.0)) as server:
        prices = {"dollars_per_million_out": 1000.0, "concurrency": 1}
        config = {"prompts": 60, "chunk": 10, "max_tokens": 60, "near_duplicates": False, **settings}
        distill.work(job(server, events, endpoint=prices, budget_dollars=1.0, **config))
        assert server.dollars <= 1.0
    documents = facts(tmp_path, "documents")
    assert documents["budget_exhausted"]
    assert documents["unasked"] > 0.25 * 60
    assert documents["documents"] + documents["unasked"] + sum(documents["rejected"].values()) == 60
    assert documents["accepted_share"] > 0.8
    shares = [event["value"] for kind, event in events if event.get("name") == "budget_spent_share"]
    assert len(shares) == 1, "one warning"
    assert 0.8 <= shares[0] < 0.9
