"""Distillation against fake teachers on a real socket."""

import itertools
import json
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import comb

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.distill import ProbeConfig, PromptSetConfig, TeacherConfig
from nautile.configs.endpoint import BatchConfig, EndpointConfig
from nautile.data.distill import checks, stats
from nautile.data.distill import run as distillation
from nautile.data.distill.ask import Teachers
from nautile.data.distill.stats import DistillStats, chance_of_rejects
from nautile.data.endpoints import batch as batches
from nautile.data.endpoints import pool
from nautile.data.endpoints.pool import EndpointPool
from nautile.data.records import from_dict
from nautile.data.screening.contamination import Hit
from tests.support.servers.fake_openai import FakeOpenAI, always, openai, script, useful


def document(reasoning, answer):
    return json.dumps({"reasoning": reasoning, "answer": answer})


def test_every_prompt_becomes_a_document_with_its_provenance(run):
    with FakeOpenAI() as server:
        output = run({"t": openai(server, stand_in=True)})
    assert (len(output.kept), output.rejected, output.stats.accepted) == (20, [], 20)
    assert output.counts["accepted_share"] == 1.0
    assert output.counts["teachers"]["t"]["kept"] == 20
    assert output.counts["teachers"]["t"]["tokens_out"] == server.tokens_out
    assert output.counts["stand_in"] == "fake, in place of a teacher"
    record = from_dict(output.kept[0], "synth")
    assert record.query_seed_url.startswith("https://en.wikipedia.org/")
    assert record.model == "fake"
    origin = output.kept[0]["provenance"]
    assert (origin["teacher"], origin["set"], origin["probe"]) == ("t", "wikipedia", None)
    assert set(origin["neighbours"]) == {f"e/{n}" for n in range(5)}
    calls = {fields["digest"] for kind, fields in output.events if kind == "call"}
    assert {row["provenance"]["request"] for row in output.kept} == calls, "a document leads to its call"
    bars = [fields for kind, fields in output.events if kind == "progress"]
    assert bars[-1] == {"done": 20, "total": 20, "unit": "prompts", "note": "100% accepted"}
    assert sum(kind == "sample" for kind, _ in output.events) == 20


def test_rejected_replies_are_kept_by_reason(run):
    replies = iter(
        ["no json", document("", "x"), document("We are asked for it.", "I'm sorry, but I cannot help with that.")]
    )
    with FakeOpenAI(reply=lambda body: next(replies, None) or useful(body)) as server:
        output = run({"t": openai(server, concurrency=1)})
    assert Counter(row["reason"] for row in output.rejected) == {"unparsable": 1, "empty": 1, "refusal": 1}
    assert output.counts["rejected"] == dict(output.stats.rejected)
    assert output.rejected[0]["reply"] == "no json"
    assert len(output.kept) == 17
    assert set(output.stats.samples) == {"kept", "unparsable", "empty", "refusal"}


def test_a_teachers_latex_reaches_the_documents_as_it_was_meant_or_not_at_all(run, tmp_path):
    """Of a teacher that does not double its backslashes: JSON would read a form feed and "rac"."""
    half, root = r"It is \frac{1}{2} \times 2.", r"It is \sqrt{2}, a number."
    replies = iter(
        [
            rf'{{"reasoning": "The half is \frac{{1}}{{2}}, and the angle is \theta.", "answer": "{half}"}}',
            rf'{{"reasoning": "The root \sqrt{{2}} is no fraction at all.", "answer": "{root}"}}',
            r'{"reasoning": "Rows: \\begin{pmatrix} 1 \\ 2 \\end{pmatrix} are two.", "answer": "Two rows."}',
        ]
    )
    with FakeOpenAI(reply=lambda body: next(replies)) as server:
        output = run({"t": openai(server, concurrency=1)}, prompts=3, prompt_sets=numbered(tmp_path / "n.jsonl"))
    assert {row["synthetic_answer"] for row in output.kept} == {half, root}
    assert any(r"\frac{1}{2}, and the angle is \theta" in row["synthetic_reasoning"] for row in output.kept)
    assert output.counts["rejected"] == {"ambiguous": 1}


@pytest.mark.slow
def test_a_document_like_another_is_a_duplicate_also_in_a_later_file(run):
    same = document("They all are something.", "They are things like others.")
    with FakeOpenAI(reply=lambda body: same) as server:
        output = run({"t": openai(server)}, chunk=3)
    assert len(output.kept) == 1
    assert {row["reason"] for row in output.rejected} == {"duplicate"}
    assert sorted(output.files) == ["documents-00000.jsonl", *(f"rejected-{n:05d}.jsonl" for n in range(7))]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 2])
def test_finished_files_are_not_computed_again(run, tmp_path, monkeypatch, kept):
    with FakeOpenAI(per_million=(1.0, 1.0)) as server:
        prices = {"dollars_per_million_in": 1.0, "dollars_per_million_out": 1.0}
        endpoints = {"t": openai(server, **prices)}
        whole = run(endpoints, chunk=6)
        for path in (tmp_path / "work").glob("documents-*"):
            if int(path.name[10:15]) >= kept:
                path.unlink()  # as if killed while it worked on this file: the marker is written last
        (tmp_path / "out" / f"documents-{kept:05d}.jsonl").write_bytes(b'{"torn')
        parsed = []
        real = checks.read_reply
        monkeypatch.setattr(checks, "read_reply", lambda text: parsed.append(1) or real(text))
        again = run(endpoints, chunk=6)
        assert len(server.bodies) == 20
    assert len(parsed) == 20 - 6 * kept
    assert again.files == whole.files
    assert again.counts == whole.counts
    assert sum(spent for _, spent in again.stats.curve) == pytest.approx(server.dollars)


def test_teachers_share_the_prompts_by_difficulty(run):
    with FakeOpenAI() as small, FakeOpenAI(models=["fake"]) as big:
        endpoints = {"small": openai(small), "big": openai(big)}
        teachers = (TeacherConfig(endpoint="small", up_to=0.2), TeacherConfig(endpoint="big"))
        output = run(endpoints, teachers=teachers)
    assert len(small.bodies) == output.counts["teachers"]["small"]["asked"] > 0
    assert len(big.bodies) == output.counts["teachers"]["big"]["asked"] > 0
    for row in output.kept:
        origin = row["provenance"]
        assert origin["teacher"] == ("small" if origin["difficulty"] <= 0.2 else "big")


def query_of(body):
    return re.search(r"=== \w{8} query\n(.+)\n=== \w{8} end\Z", body["messages"][-1]["content"])[1]


def numbered(path, **columns):
    rows = [{"q": f"What comes after {n}?", "a": n + 1} for n in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return (
        PromptSetConfig(name="s", source="jsonl", path=str(path), form="columns", columns={"query": "q", **columns}),
    )


@pytest.mark.parametrize("columns", [{}, {"reference": "a"}])
def test_a_prompt_is_easy_where_probes_agree_or_are_right(run, tmp_path, columns):
    def counts(body):
        number = int(re.search(r"\d+", query_of(body))[0])
        return document(f"After {number} comes the next number.", f"It is {number + 1}.")

    def counts_to_six(body):
        number = int(re.search(r"\d+", query_of(body))[0])
        return counts(body) if number < 6 else document(f"After {number} comes no number.", f"It is {number + 9}.")

    with (
        FakeOpenAI(reply=counts, per_million=(1.0, 2.0)) as first,
        FakeOpenAI(reply=counts_to_six, per_million=(1.0, 2.0)) as two,
        FakeOpenAI(reply=counts, per_million=(5.0, 5.0)) as big,
    ):
        prices = {"dollars_per_million_in": 1.0, "dollars_per_million_out": 2.0}
        endpoints = {
            "one": openai(first, **prices),
            "two": EndpointConfig(kind="openai", model="two", url=two.url, **prices),
        }
        dear = openai(big, dollars_per_million_in=5.0, dollars_per_million_out=5.0)
        endpoints["big"] = dear.model_copy(update={"model": "big"})
        two.models, big.models = ["two"], ["big"]
        output = run(
            endpoints,
            prompts=12,
            prompt_sets=numbered(tmp_path / "n.jsonl", **columns),
            probe={"endpoints": ("one", "two"), "weight": 1.0},
            teachers=(TeacherConfig(endpoint="one", up_to=0.3), TeacherConfig(endpoint="big")),
            near_duplicates=False,
        )
        assert (len(first.bodies), len(two.bodies), len(big.bodies)) == (12, 12, 6), "a probe's reply is the document"
        paid = first.dollars + two.dollars + big.dollars
    by_teacher = {row["query"]: row["provenance"]["teacher"] for row in output.kept}
    assert by_teacher == {f"What comes after {n}?": "one" if n < 6 else "big" for n in range(12)}
    hard = 1.0 if not columns else 0.5
    assert {row["provenance"]["probe"] for row in output.kept} == {0.0, hard}
    assert output.counts["dollars"] == pytest.approx(paid)
    assert output.counts["dollars_by_purpose"]["probe"] == pytest.approx(first.dollars + two.dollars, rel=1e-4)
    assert output.counts["prompts_without_probe"] == 0


def test_a_prompt_whose_probes_fail_keeps_its_own_difficulty(run):
    with FakeOpenAI() as good, FakeOpenAI(faults=always("400"), models=["bad"]) as bad:
        wrong = EndpointConfig(kind="openai", model="bad", url=bad.url)
        output = run(
            {"t": openai(good), "x": wrong, "y": wrong.model_copy(update={"model": "bad"})},
            prompts=4,
            teachers=(TeacherConfig(endpoint="t"),),
            probe={"endpoints": ("x", "y")},
        )
    assert output.counts["prompts_without_probe"] == 4
    assert {row["provenance"]["probe"] for row in output.kept} == {None}


def test_a_document_that_overlaps_a_benchmark_is_rejected_with_the_evidence(run, tmp_path):
    def screen(texts):
        return [
            [Hit("gsm8k", "17", 0.5, "some words")] if "\n" in text and "number 3" in text else [] for text in texts
        ]

    numbers = iter(range(100))
    words = ["apple", "boat", "cloud", "drum", "egg", "fan"]

    def word(body):
        number = next(numbers)
        return document(f"This is number {number}.", f"{words[number]} is the word.")

    with FakeOpenAI(reply=word) as server:
        config = {"prompts": 6, "same_language": False}
        rows = [{"query": f"Say a word of the list that is like {word}."} for word in words]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        sets = (PromptSetConfig(name="s", source="jsonl", path=str(tmp_path / "rows.jsonl")),)
        output = run({"t": openai(server, concurrency=1)}, screen, **config, prompt_sets=sets)
    assert output.stats.contaminated == {"gsm8k": 1}
    (sample,) = output.stats.samples["contaminated"]
    assert sample["evidence"] == {"benchmark": "gsm8k", "example": "17", "words": "some words"}
    (row,) = output.rejected
    assert (row["reason"], row["benchmark"], row["example"], row["words"]) == (
        "contaminated",
        "gsm8k",
        "17",
        "some words",
    )


def test_an_outage_stops_the_run_and_its_replies_stay(run):
    with FakeOpenAI(faults=lambda arrival: "500" if arrival >= 6 else None) as server:
        endpoints = {"t": openai(server, concurrency=2)}
        with pytest.raises(Retryable, match="has stopped answering"):
            run(endpoints)
        answered = server.answered
        server.faults = always(None)
        run(endpoints)
        assert server.answered == 20
        assert answered == 6


@pytest.mark.slow
def test_files_larger_than_the_window_of_a_resumed_run_are_finished(run, monkeypatch):
    """`chunk` was lowered after the prompts were collected in files of the larger size."""
    with FakeOpenAI(faults=always("500")) as server:
        endpoints = {"t": openai(server, concurrency=2)}
        with pytest.raises(Retryable):
            run(endpoints, chunk=20)
        server.faults = always(None)
        monkeypatch.setattr(distillation, "BLOCK", 4)
        monkeypatch.setattr(distillation, "FIRST_JUDGED", 2)
        monkeypatch.setattr(EndpointPool, "window", lambda *_: 2)
        checks, has_room = iter(range(5000)), distillation.PromptWindow._has_room.fget

        def counted(self):
            assert next(checks, None) is not None, "it waits for nothing"
            return has_room(self)

        monkeypatch.setattr(distillation.PromptWindow, "_has_room", property(counted))
        assert len(run(endpoints, chunk=2).kept) == 20


def test_a_spent_budget_ends_the_run_cleanly(run, monkeypatch):
    monkeypatch.setattr(EndpointPool, "window", lambda self, names: 8)
    monkeypatch.setattr(distillation, "FIRST_JUDGED", 8)
    monkeypatch.setattr(distillation, "BLOCK", 3)
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1000.0}
    with FakeOpenAI(per_million=(0.0, 1000.0)) as server:
        endpoints = {"t": openai(server, **prices, concurrency=2)}
        output = run(endpoints, budget_dollars=0.5, max_tokens=100, prompts=60, chunk=8)
    assert output.counts["budget_exhausted"]
    assert (output.counts["rejected"], output.counts["accepted_share"]) == ({}, 1.0), "unasked is not rejected"
    assert output.counts["unasked"] == len(output.rejected)
    assert output.counts["dollars"] == pytest.approx(server.dollars)
    assert server.dollars <= 0.5
    assert {row["reason"] for row in output.rejected} == {"failed_budget"}
    assert 0 < len(output.kept) < 40
    assert len(output.kept) + len(output.rejected) == 60, "also those that were never sent"


@pytest.mark.slow
def test_a_poor_teacher_is_noticed_within_the_first_replies_and_no_more_are_paid_for(run, monkeypatch):
    """One prompt in two is rejected where one in five may be: $5 of $5,000 are spent, not all."""
    monkeypatch.setattr(stats, "FIRST_JUDGED", 60)
    monkeypatch.setattr(distillation, "FIRST_JUDGED", 60)
    # Slow enough that every reply is looked at before many more are asked for.
    with FakeOpenAI(reply=lambda body: useful(body) if len(str(body)) % 2 else "no json", delay_s=0.1) as server:
        with pytest.raises(ConfigError, match=r"max_rejected_share is 0\.2, but \d+ of the first \d+ .*no more are"):
            run({"t": openai(server, concurrency=8)}, prompts=150, chunk=150, max_rejected_share=0.2)
        asked = len(server.bodies)
        assert 60 <= asked < 140
        assert server.answered == asked, "what was in flight was awaited, because it is paid for"
        server.reply, server.delay_s = useful, 0.0
        output = run({"t": openai(server, concurrency=8)}, prompts=150, chunk=150, max_rejected_share=0.6)
        assert len(server.bodies) == 150, "a higher limit goes on with what is there"
    assert output.stats.judged == 150


def test_the_chance_of_rejects_is_bounded_from_above():
    assert chance_of_rejects(40, 200, 0.2) == 1.0
    assert chance_of_rejects(1, 200, 0.0) == 0.0
    assert chance_of_rejects(200, 200, 1.0) == 1.0
    assert chance_of_rejects(200, 200, 0.5) == pytest.approx(0.5**200)
    for count, judged, share in ((60, 200, 0.2), (90, 300, 0.2), (30, 400, 0.05)):
        exact = sum(comb(judged, k) * share**k * (1 - share) ** (judged - k) for k in range(count, judged + 1))
        assert exact <= chance_of_rejects(count, judged, share) <= 50 * exact


@pytest.mark.slow
def test_a_larger_budget_asks_what_an_attempt_had_no_money_for(run):
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1000.0}
    with FakeOpenAI(per_million=(0.0, 1000.0)) as server:
        endpoints = {"t": openai(server, **prices, concurrency=2)}
        with pytest.raises(ConfigError, match=r"pays for none of 30 prompts; raise distill\.budget_dollars"):
            run(endpoints, budget_dollars=0.01, max_tokens=100, prompts=30, chunk=8)
        first = run(endpoints, budget_dollars=0.3, max_tokens=100, prompts=30, chunk=8)
        whole = run(endpoints, budget_dollars=100.0, max_tokens=100, prompts=30, chunk=8)
    assert 0 < first.counts["documents"] < 30 == whole.counts["documents"]
    assert whole.counts["dollars"] == pytest.approx(server.dollars)
    assert server.answered == 30


@pytest.mark.slow
def test_a_spent_teacher_stops_neither_the_easier_nor_the_harder_one(run):
    """The small teacher's prompts go to the big one once its own budget is spent; those of a big one are left."""
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1000.0}
    with FakeOpenAI(per_million=(0.0, 1000.0)) as small, FakeOpenAI() as big:
        teachers = (TeacherConfig(endpoint="small", up_to=0.2), TeacherConfig(endpoint="big"))
        poor = openai(small, **prices, budget_dollars=0.25, concurrency=1)
        output = run({"small": poor, "big": openai(big)}, teachers=teachers, max_tokens=100, prompts=30, chunk=8)
    assert 0 < small.dollars <= 0.25
    assert (len(output.kept), output.counts["unasked"]) == (30, 0)
    assert any(row["provenance"]["teacher"] == "big" and row["provenance"]["difficulty"] <= 0.2 for row in output.kept)

    with FakeOpenAI() as small, FakeOpenAI(per_million=(0.0, 1000.0)) as big:
        poor = openai(big, **prices, budget_dollars=0.25, concurrency=1).model_copy(update={"model": "big"})
        big.models = ["big"]
        fields = {"teachers": teachers, "max_tokens": 100, "prompts": 60, "chunk": 8}
        output = run({"small": openai(small), "big": poor}, **fields)
        assert output.counts["budget_exhausted"]
        unasked = {row["provenance"]["prompt"] for row in output.rejected if row["reason"] == "failed_budget"}
        assert len(unasked) == output.counts["unasked"] > 0
        assert all(row["provenance"]["difficulty"] > 0.2 for row in output.rejected)
        assert output.counts["teachers"]["small"]["asked"] > 10
        output = run({"small": openai(small), "big": poor.model_copy(update={"budget_dollars": 0.0})}, **fields)
        assert output.counts["unasked"] == 0, "a larger budget asks what was left"


def forget(tmp_path, *, replies=True):
    """Remove what a run has written; its prompts stay."""
    paths = [*(tmp_path / "work").glob("documents-*"), *(tmp_path / "out").iterdir()]
    for path in [*paths, *(tmp_path / "replies").glob("*/*.jsonl")] if replies else paths:
        path.unlink()


@pytest.mark.slow
def test_a_slow_teacher_does_not_hold_up_the_other(run, tmp_path):
    """All prompts of the fast teacher are answered while the slow one is at its first, and results are as always."""
    may_answer, seen_by_slow = threading.Event(), []
    may_answer.set()

    def slow(body):
        seen_by_slow.append(body)
        assert may_answer.wait(120)
        return useful(body)

    with FakeOpenAI(reply=slow, models=["slow"]) as slow_server, FakeOpenAI() as fast_server:
        slow_endpoint = openai(slow_server, concurrency=1).model_copy(update={"model": "slow"})
        teachers = (TeacherConfig(endpoint="fast", up_to=0.2), TeacherConfig(endpoint="slow"))
        endpoints = {"fast": openai(fast_server, concurrency=2), "slow": slow_endpoint}
        fields = {"teachers": teachers, "prompts": 40, "chunk": 5, "near_duplicates": False}
        whole = run(endpoints, **fields)
        of_fast, of_slow = fast_server.answered, len(seen_by_slow)
        assert of_fast + of_slow == 40
        assert min(of_fast, of_slow) > 3
        forget(tmp_path)
        may_answer.clear()
        seen_by_slow.clear()
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(run, endpoints, **fields)
            deadline = time.monotonic() + 100
            while fast_server.answered < 2 * of_fast and time.monotonic() < deadline:
                time.sleep(0.02)
            answered, begun = fast_server.answered - of_fast, len(seen_by_slow)
            may_answer.set()
            again = running.result(120)
    assert (answered, begun) == (of_fast, 1)
    assert again.files == whole.files


@pytest.mark.slow
def test_files_are_written_as_they_fill(run, tmp_path, monkeypatch):
    """In windows of any size the result is the same, and a file is on disk before the last prompt is sent."""
    written = []

    def reply(body):
        written.append(len(list((tmp_path / "out").glob("documents-*"))))
        return useful(body)

    with FakeOpenAI(reply=reply) as server:
        whole = run({"t": openai(server, concurrency=2)}, chunk=4)
        assert len(server.bodies) == 20
    forget(tmp_path)
    monkeypatch.setattr(EndpointPool, "window", lambda self, names: 5)
    monkeypatch.setattr(distillation, "FIRST_JUDGED", 5)
    monkeypatch.setattr(distillation, "BLOCK", 2)
    written.clear()
    with FakeOpenAI(reply=reply) as server:
        small = run({"t": openai(server, concurrency=2)}, chunk=4)
    assert small.files == whole.files
    assert written[-1] >= 2


@pytest.mark.slow
def test_batch_mode_keeps_as_many_full_jobs_open_as_are_allowed(run, monkeypatch):
    monkeypatch.setattr(batches, "LINGER_S", 0.3)
    monkeypatch.setattr(distillation, "FIRST_JUDGED", 10)
    monkeypatch.setattr(distillation, "BLOCK", 4)
    monkeypatch.setattr(pool, "SMALLEST_WINDOW", 1)
    batch = BatchConfig(requests_per_job=10, jobs_at_once=3, poll_s=0.3)
    with FakeOpenAI() as server:
        server.batches.polls = 3
        output = run({"t": openai(server, mode="batch", batch=batch)}, prompts=80, chunk=8, near_duplicates=False)
    assert len(output.kept) + len(output.rejected) == 80
    assert server.batches.most_open == 3
    sizes = sorted(len(job["rows"]) for job in server.batches.jobs.values())
    assert len(sizes) <= 12, f"jobs are full where prompts are left: {sizes}"


def test_a_batch_job_that_is_not_full_is_sent_once_the_budget_is_spent(run, monkeypatch):
    """The probes cannot be paid for, and no prompt follows that would fill the job of the teacher, which is free."""
    sessions, spent, blocks = [], threading.Event(), itertools.count()
    prepare, begin, handle_reply = Teachers.prepare, EndpointPool.session, distillation.PromptWindow._handle_reply

    def see_session(self):
        sessions.append(begin(self))
        return sessions[0]

    def prepare_slowly(self, prompts):
        block = next(blocks)  # the second is ready after the first replies, the third after the first without money
        while block == 1 and not (sessions[0].has_result or spent.is_set()):
            time.sleep(0.01)
        if block > 1:
            spent.wait()
        return prepare(self, prompts)

    def see_reply(self, session, open_prompt, sample, reply):
        handle_reply(self, session, open_prompt, sample, reply)
        spent.set()

    monkeypatch.setattr(EndpointPool, "session", see_session)
    monkeypatch.setattr(batches, "LINGER_S", 0.05)
    monkeypatch.setattr(distillation, "BLOCK", 4)
    monkeypatch.setattr(Teachers, "prepare", prepare_slowly)
    monkeypatch.setattr(distillation.PromptWindow, "_handle_reply", see_reply)
    batch = BatchConfig(requests_per_job=10, poll_s=0.02)
    with FakeOpenAI() as server:
        probes = {name: openai(server, dollars_per_million_out=1000.0) for name in ("p", "q")}
        output = run(
            {"t": openai(server, mode="batch", batch=batch), **probes},
            teachers=(TeacherConfig(endpoint="t"),),
            probe=ProbeConfig(endpoints=("p", "q")),
            budget_dollars=0.01,
        )
        assert not server.bodies
        assert sum(server.batches.submitted.values()) == output.stats.judged == 20 - output.stats.unasked
    assert output.stats.judged in (4, 8), "the first block, or two"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": None}, "empty"),
        ({"content": None, "refusal": "No."}, "refusal"),
        # gpt-oss on vLLM: its thoughts have used up the limit, whatever the server says of the end.
        ({"content": None, "reasoning_content": "We need to"}, "cut_while_thinking"),
        ({"content": "<|channel|>analysis<|message|>We need to"}, "truncated"),
    ],
)
def test_a_reply_without_a_document_says_why(run, message, reason):
    with FakeOpenAI(message=lambda body: message) as server, pytest.raises(ConfigError, match=f"3 {reason}"):
        run({"t": openai(server)}, prompts=3)


@pytest.mark.parametrize(
    ("finish", "text", "reason"),
    [
        ("length", "", "cut_while_thinking"),
        ("length", "<think>We need to", "cut_while_thinking"),
        ("length", "<|channel|>analysis<|message|>We need to", "cut_while_thinking"),
        ("length", '<think>So.</think>{"reasoning": "We', "cut_in_reply"),
        ("length", document("They all are something.", "They are like others."), "cut_in_reply"),
        ("content_filter", '{"reasoning": "We', "content_filter"),
    ],
)
def test_what_is_cut_is_counted_by_its_cause_and_the_message_says_what_helps(run, finish, text, reason):
    def ends(arrival, answer):
        (choice,) = answer["choices"]
        return answer | {"choices": [choice | {"finish_reason": finish}]}

    with FakeOpenAI(reply=lambda body: text, reshape=ends) as server, pytest.raises(ConfigError) as error:
        run({"t": openai(server)}, prompts=3, max_tokens=100)
    assert f"3 {reason}" in str(error.value)
    assert ("raise distill.max_tokens" in str(error.value)) == (finish == "length")
    assert ("reasoning_effort" in str(error.value)) == (reason == "cut_while_thinking")


def test_what_lost_replies_may_have_cost_stands_beside_the_cost(run):
    prices = {"dollars_per_million_in": 0.0, "dollars_per_million_out": 1000.0}
    with FakeOpenAI(faults=script("cut", "invalid"), per_million=(0.0, 1000.0)) as server:
        output = run({"t": openai(server, **prices)}, prompts=4, max_tokens=100)
    assert output.counts["dollars"] == pytest.approx(server.dollars)
    assert output.counts["dollars_unknown"] == pytest.approx(2 * 100 * 1000.0 / 1e6)


@pytest.mark.slow
def test_verdicts_in_processes_are_those_of_this_one(run, tmp_path, monkeypatch):
    replies = ["no json", document("", "x"), document("They all are something.", "They are like others."), None]

    def reply(body):
        return replies[len(str(body)) % len(replies)] or useful(body)

    with FakeOpenAI(reply=reply) as server:
        here = run({"t": openai(server)}, chunk=4)
        forget(tmp_path, replies=False)
        monkeypatch.setattr(distillation, "WORTH_PROCESSES", 1)
        elsewhere = run({"t": openai(server)}, chunk=4)
        assert len(server.bodies) == 20
    assert elsewhere.files == here.files
    assert elsewhere.counts == here.counts
    assert elsewhere.counts["rejected"]


def test_the_exemplars_are_still_there_when_signs_of_injection_are_counted(run, monkeypatch):
    counted, add = [], DistillStats.add
    monkeypatch.setattr(
        DistillStats, "add", lambda self, result, pool: (counted.append(result), add(self, result, pool))
    )
    with FakeOpenAI() as server:
        run({"t": openai(server)}, prompts=3)
    shown = [neighbour.record for result in counted for neighbour in result.task.neighbours]
    assert len(shown) == 15
    assert all(record.query and record.synthetic_reasoning and record.synthetic_answer for record in shown)
