"""A distillation that asks until so many documents are accepted (`distill.accepted`)."""

import json
import re

import pytest

from configs.distill import PromptSetConfig
from configs.endpoint import EndpointConfig
from data.distill import window
from tests.support.servers.fake_openai import FakeOpenAI


def openai(server, **fields):
    return {"t": EndpointConfig(kind="openai", model="fake", url=server.url, **fields)}


@pytest.fixture
def twelve(tmp_path):
    """Fields of a configuration whose prompts are twelve numbers, in some order."""
    path = tmp_path / "n.jsonl"
    path.write_text("".join(f'{{"q": "What comes after {n}?"}}\n' for n in range(12)))
    prompt_set = PromptSetConfig(name="s", source="jsonl", path=str(path), form="columns", columns={"query": "q"})
    return {"prompt_sets": (prompt_set,), "prompts": 12, "near_duplicates": False}


@pytest.mark.parametrize("wanted", [1, 5, 7])
@pytest.mark.parametrize(("chunk", "concurrency"), [(3, 1), (5, 8), (12, 3)])
def test_it_asks_until_so_many_documents_are_accepted_and_not_one_prompt_more(
    run, tmp_path, monkeypatch, twelve, wanted, chunk, concurrency
):
    """The prompts that are asked are those up to the last needed document, whatever the order of the replies."""
    monkeypatch.setattr(window, "BLOCK", 4)
    with FakeOpenAI(reply=_some_are_rejected) as server:
        endpoints = openai(server, concurrency=concurrency)
        output = run(endpoints, accepted=wanted, chunk=chunk, **twelve)
        asked, documents = _until(wanted, tmp_path / "work")
        assert len(server.bodies) == asked
        again = run(endpoints, accepted=wanted, chunk=chunk, **twelve)
        assert len(server.bodies) == asked
    assert [int(re.search(r"\d+", row["query"])[0]) for row in output.kept] == documents
    assert len(output.rejected) == asked - wanted, "what was not needed is neither rejected nor unasked"
    assert (output.counts["prompts"], output.counts["documents"], output.counts["unasked"]) == (asked, wanted, 0)
    assert output.counts["wanted"] == wanted
    bar = [fields for kind, fields in output.events if kind == "progress"][-1]
    assert (bar["done"], bar["total"], bar["unit"]) == (wanted, wanted, "documents")
    assert bar["note"] == f"{asked} prompts asked"
    assert (again.files, again.counts) == (output.files, output.counts)


def test_it_publishes_what_it_has_once_there_are_no_more_prompts_and_says_so(run, twelve, caplog):
    with FakeOpenAI(reply=_some_are_rejected) as server:
        output = run(openai(server), accepted=9, chunk=5, **twelve)
    assert (len(server.bodies), len(output.kept), output.counts["unasked"]) == (12, 7, 0)
    assert "7 of 9 documents were accepted; 12 prompts were asked, and there are no more" in caplog.text


def _some_are_rejected(body):
    """Every third number gives no document, and 4 repeats the one of 2."""
    number = int(re.search(r"query\nWhat comes after (\d+)", body["messages"][-1]["content"])[1])
    counted = 2 if number == 4 else number
    document = {"reasoning": f"We count on from {counted}, one by one.", "answer": f"It is {counted + 1}."}
    return json.dumps(document) if number % 3 else "no json"


def _until(wanted, work):
    """(how many prompts are asked, the numbers whose documents are kept) if they are asked one by one."""
    rows = [line for path in sorted(work.glob("prompts-*.jsonl")) for line in path.read_text().splitlines()]
    kept = {}
    for asked, row in enumerate(rows, 1):
        number = int(re.search(r"\d+", json.loads(row)["query"])[0])
        if number % 3:
            kept.setdefault(2 if number == 4 else number, number)
        if len(kept) == wanted:
            return asked, list(kept.values())
    raise AssertionError(f"only {len(kept)} documents")
