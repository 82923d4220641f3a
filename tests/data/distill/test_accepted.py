"""A distillation that asks until so many documents are accepted (`distill.accepted`)."""

import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.configs.distill import PromptSetConfig
from nautile.configs.endpoint import EndpointConfig
from nautile.data.distill import run as distillation
from nautile.data.distill.checks import ReplyVerdict
from nautile.data.distill.prompts import Prompt
from nautile.data.distill.run import PromptWindow
from nautile.data.endpoints.chat_types import ChatReply
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


@pytest.mark.parametrize(("wanted", "chunk", "concurrency"), [(1, 5, 8), (5, 3, 1), (7, 12, 3)])
def test_it_asks_until_so_many_documents_are_accepted_and_not_one_prompt_more(
    run, tmp_path, monkeypatch, twelve, wanted, chunk, concurrency
):
    """The prompts that are asked are those up to the last needed document, whatever the order of the replies."""
    monkeypatch.setattr(distillation, "BLOCK", 4)
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


class Session:
    """Answers the requests in a random order; each request is the prompt's number."""

    def __init__(self, random):
        self._open, self._random, self.asked = [], random, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    open_count = property(lambda self: len(self._open))
    has_result = property(lambda self: bool(self._open))

    def submit(self, requests, *, more_follow=True):
        self._open += requests
        self.asked += len(requests)

    def next_result(self, *_):
        key, request = self._open.pop(self._random.randrange(len(self._open)))
        return key, ChatReply(request, "stop", 1, 1, 0.1, cached=False, digest="")


class TeachersOf:
    """Stands for `Teachers`, of one endpoint."""

    def __init__(self, session, chunk):
        self.config = SimpleNamespace(chunk=chunk, endpoints=["t"])
        self.pool = SimpleNamespace(window=lambda names: 4, session=lambda: session)

    def prepare(self, prompts):
        return prompts

    def probe_requests(self, prompt):
        return []

    def first_task(self, prompt, replies):
        return SimpleNamespace(request=prompt.id, prompt=prompt, neighbours=[], template=None)

    def next_task(self, task, reply):
        return None

    def reply_result(self, task, reply, probes, verdict):
        return SimpleNamespace(number=int(task.prompt.id), reason=verdict.reason, reply=reply)


@given(
    outcomes=st.lists(st.one_of(st.none(), st.integers(0, 3), st.integers(10, 99)), min_size=1, max_size=20),
    wanted=st.integers(1, 20), chunk=st.integers(1, 8), block=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_whatever_the_order_of_the_replies_it_asks_up_to_the_last_needed_document(outcomes, wanted, chunk, block, seed):
    """`outcomes`: of each prompt, None for a rejected reply, else its document, which may be an earlier one's."""
    wanted = min(wanted, len(outcomes))
    # Not Hypothesis' own: how often it is asked depends on the thread that prepares.
    session, known, kept = Session(Random(seed)), set(), []

    def settle(file):
        news = file.results[file.settled :]
        for result in news:
            if result.reason is None and outcomes[result.number] in known:
                result.reason = "duplicate"
            elif result.reason is None:
                known.add(outcomes[result.number])
        file.settled = len(file.results)
        return sum(result.reason == "duplicate" for result in news)

    def finish(file):
        kept.extend(result.number for result in file.results if result.reason is None)

    def judge(text, *_):
        return ReplyVerdict(None, "unparsable" if outcomes[int(text)] is None else None, [])

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name, value in (("BLOCK", block), ("judge_reply", judge), ("raise_for_outage", lambda *_, **__: None)):
            patch.setattr(distillation, name, value)
        rows = [Prompt(str(n), f"query {n}", "rag") for n in range(len(outcomes))]
        paths = [Path(folder) / f"{begin:02d}.jsonl" for begin in range(0, len(rows), chunk)]
        for path in paths:
            begin = int(path.stem)
            path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows[begin : begin + chunk]))
        PromptWindow(TeachersOf(session, chunk), 0, lambda result: None, lambda: None, needed=wanted).run(
            paths, settle, finish
        )

    firsts = {outcome: n for n, outcome in reversed(list(enumerate(outcomes))) if outcome is not None}
    expected = sorted(firsts.values())[:wanted]
    assert kept == expected
    assert session.asked == (expected[-1] + 1 if len(expected) == wanted else len(outcomes))


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
