"""Batch interfaces through the vendors' SDKs over a real socket: answers get lost, rows fail, processes are killed."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.common.retry import Backoff
from nautile.configs.endpoint import BatchConfig, EndpointConfig
from nautile.data.endpoints import batch as batches
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.batch import PendingJob, pending_jobs
from nautile.data.endpoints.budget import Usage
from nautile.data.endpoints.chat_types import ChatFailure, ChatReply, ChatRequest, request_digest
from nautile.data.endpoints.pool import raise_for_outage
from nautile.data.endpoints.reply_cache import RequestLocks
from tests.support.processes import asking_process
from tests.support.samples.replies import reply_rows
from tests.support.servers.fake_openai import FakeOpenAI, always

KEY = "sk-planted-batch-0123456789"
PRICES = {"dollars_per_million_in": 1e5, "dollars_per_million_out": 2e5}
PER_MILLION = (1e5, 2e5)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.02))
    monkeypatch.setattr(batches, "LINGER_S", 0.05)
    monkeypatch.setenv("FAKE_KEY", KEY)


@pytest.fixture(params=["openai", "mistral"])
def kind(request):
    return request.param


def endpoint(server, kind, requests_per_job=10, jobs_at_once=2, **fields):
    batch = BatchConfig(requests_per_job=requests_per_job, jobs_at_once=jobs_at_once, poll_s=0.02)
    fields = {"timeout_s": 60.0, "key_variable": "FAKE_KEY", **PRICES, **fields}
    return EndpointConfig(kind=kind, model="fake", url=server.url, mode="batch", batch=batch, **fields)


def requests(count, **fields):
    return [ChatRequest("fake", ({"role": "user", "content": f"number {i}"},), 20, **fields) for i in range(count)]


def jobs_on_disk(tmp_path):
    return list((tmp_path / "replies" / "fake" / "batches").glob("*"))


def test_every_request_is_answered_once_at_half_the_price(pool_for, events, tmp_path, kind):
    with FakeOpenAI(per_million=PER_MILLION, key=KEY) as server:
        pool = pool_for(fake=endpoint(server, kind))
        reported = {}
        replies = pool.ask(requests(35), reported.__setitem__)
        again = pool.ask(requests(35))
    assert all(isinstance(reply, ChatReply) for reply in replies)
    assert reported == dict(enumerate(replies))
    assert {reply.latency_s for reply in replies} == {None}
    assert server.batches.submitted == {f"number {i}": 1 for i in range(35)}
    assert sorted(len(job["rows"]) for job in server.batches.jobs.values()) == [5, 10, 10, 10]
    assert pool.spent == pytest.approx(server.batch_dollars)
    assert sum(event["dollars"] for event in events) == pytest.approx(server.batch_dollars)
    assert all(reply.cached for reply in again)
    assert not server.bodies, "nothing was sent live"
    assert not jobs_on_disk(tmp_path)


def test_rows_with_transient_errors_go_into_another_job_and_others_do_not(pool_for, events, kind):
    def faults(text, times):
        by_number = {"number 3": "500", "number 4": "400", "number 5": "expired", "number 6": "missing"}
        return by_number.get(text) if times == 1 or text == "number 4" else None

    with FakeOpenAI(per_million=PER_MILLION) as server:
        server.batches.row_fault = faults
        pool = pool_for(fake=endpoint(server, kind))
        results = pool.ask(requests(9))
    assert [i for i, result in enumerate(results) if isinstance(result, ChatFailure)] == [4]
    assert (results[4].reason, results[4].attempts) == ("refused", 1)
    twice = {text for text, times in server.batches.submitted.items() if times == 2}
    assert twice == {"number 3", "number 5", "number 6"}
    assert max(server.batches.submitted.values()) == 2
    assert sorted(e["status"] for e in events if e["status"] != "ok")[:2] == ["400", "500"]
    assert pool.spent == pytest.approx(server.batch_dollars)


@pytest.mark.parametrize("end", ["expired", "cancelled"])
def test_requests_that_a_job_did_not_get_to_are_sent_again(pool_for, kind, end):
    with FakeOpenAI() as server:
        server.batches.end = end
        results = pool_for(fake=endpoint(server, kind, attempts=2)).ask(requests(8))
        failures = [result for result in results if isinstance(result, ChatFailure)]
        assert len(failures) == 2, "a half of eight, then a half of four"
        assert {result.reason for result in failures} == {"expired"}
        server.batches.end = "completed"
        assert all(isinstance(result, ChatReply) for result in pool_for(fake=endpoint(server, kind)).ask(requests(8)))


def test_a_job_that_is_refused_as_a_whole_fails_its_requests(pool_for, tmp_path, kind):
    with FakeOpenAI() as server:
        server.batches.end = "failed"
        results = pool_for(fake=endpoint(server, kind)).ask(requests(3))
    assert {(result.reason, result.attempts) for result in results} == {("refused", 1)}
    assert "no such file" in results[0].message
    assert not jobs_on_disk(tmp_path)


@pytest.mark.parametrize("step", ["upload", "create", "status", "download"])
def test_a_lost_answer_creates_no_second_job(pool_for, kind, step):
    with FakeOpenAI(per_million=PER_MILLION) as server:
        server.batches.loses = [step]
        pool = pool_for(fake=endpoint(server, kind))
        replies = pool.ask(requests(5))
    assert all(isinstance(reply, ChatReply) for reply in replies)
    assert len(server.batches.jobs) == 1
    assert server.batches.steps["list"] == (step == "create")
    assert pool.spent == pytest.approx(server.batch_dollars)


def test_the_budget_is_reserved_before_a_job_is_created(pool_for, kind):
    most = 0.5 * (2e5 * 20 + 1e5 * (len("number 0") // 3 + 8)) / 1e6  # of one request
    with FakeOpenAI(per_million=PER_MILLION) as server:
        pool = pool_for(budget=3.5 * most, fake=endpoint(server, kind, jobs_at_once=3))
        results = pool.ask(requests(40))
        kept = [result for result in results if isinstance(result, ChatReply)]
        assert {result.reason for result in results if isinstance(result, ChatFailure)} == {"budget"}
        assert max(len(job["rows"]) for job in server.batches.jobs.values()) == 3
        assert 3.5 * most - most < server.batch_dollars <= 3.5 * most
        assert len(kept) == sum(server.batches.submitted.values())
        raise_for_outage(results, unpaid_allowed=True)
        with pytest.raises(ConfigError, match=r"of the budget, .* are spent; raise it"):
            raise_for_outage(results)
        assert pool_for(budget=3.5 * most, fake=endpoint(server, kind)).spent == pytest.approx(server.batch_dollars)


def test_a_wrong_key_stops_everything_and_is_not_shown(pool_for, tmp_path, kind):
    with FakeOpenAI(key="another") as server:
        pool = pool_for(fake=endpoint(server, kind))
        results = pool.ask(requests(5))
        with pytest.raises(ConfigError, match=r"Incorrect API key provided: \[key\]"):
            raise_for_outage(results)
    assert KEY not in repr(results) + "".join(path.read_text() for path in tmp_path.rglob("*.*") if path.is_file())
    assert not jobs_on_disk(tmp_path)


@pytest.mark.parametrize("kind", ["openai"])
def test_a_job_file_that_cannot_be_read_is_named(pool_for, tmp_path, kind):
    folder = tmp_path / "replies" / "fake" / "batches"
    folder.mkdir(parents=True)
    (folder / "x.job.json").write_text("{")
    with FakeOpenAI() as server, pytest.raises(ConfigError, match=r"x\.job\.json"):
        pool_for(fake=endpoint(server, kind))


@pytest.mark.parametrize("kind", ["openai"])
def test_jobs_of_an_endpoint_whose_mode_is_live_now_are_not_forgotten(pool_for, tmp_path, kind):
    with FakeOpenAI() as server:
        (request,) = requests(1)
        digest = request_digest(request, endpoint(server, kind))
        job = PendingJob.write(tmp_path / "replies" / "fake" / "batches", "fake", {digest: request}, Usage(), {}, bool)
        with pytest.raises(ConfigError, match=f"batch job {job.label} in progress"):
            pool_for(fake=endpoint(server, kind).model_copy(update={"mode": "live"}))
        (reply,) = pool_for(fake=endpoint(server, kind)).ask(requests(1))
    assert reply.digest == digest
    assert not jobs_on_disk(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        pytest.param("before upload", "openai", marks=pytest.mark.heavy),
        pytest.param("after upload", "openai", marks=pytest.mark.heavy),
        ("after create", "openai"),
        pytest.param("after create", "mistral", marks=pytest.mark.heavy),
        pytest.param("while polling", "openai", marks=pytest.mark.heavy),
        ("amid replies", "openai"),
    ],
)
def test_a_process_killed_at_any_moment_submits_nothing_twice(pool_for, tmp_path, kind, moment):
    """A real process kills itself at that moment; this one continues with its files."""
    root = str(Path(__file__).parents[3])
    with FakeOpenAI(per_million=PER_MILLION) as server:
        config = endpoint(server, kind)
        command = [sys.executable, asking_process.__file__, config.model_dump_json(), str(tmp_path / "replies")]
        killed = subprocess.run([*command, "8", moment], env={**os.environ, "PYTHONPATH": root}, timeout=600)
        assert killed.returncode == -9
        assert len(server.batches.jobs) == (moment not in ("before upload", "after upload"))
        pool = pool_for(fake=config)
        replies = pool.ask([ChatRequest("fake", r.messages, r.max_tokens) for r in asking_process.requests(8)])
    assert all(isinstance(reply, ChatReply) for reply in replies)
    assert server.batches.submitted == {str(i): 1 for i in range(8)}
    assert pool.spent == pytest.approx(server.batch_dollars)
    assert sorted(row["digest"] for row in reply_rows(tmp_path / "replies")) == sorted(r.digest for r in replies)
    assert not jobs_on_disk(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openai"])
def test_a_job_of_a_process_that_dies_beside_this_one_is_continued(pool_for, tmp_path, kind):
    """Both share the replies; the other process is killed when the vendor has its job."""
    root = str(Path(__file__).parents[3])
    with FakeOpenAI(per_million=PER_MILLION) as server:
        config = endpoint(server, kind)
        pool = pool_for(fake=config)
        command = [sys.executable, asking_process.__file__, config.model_dump_json(), str(tmp_path / "replies")]
        killed = subprocess.run([*command, "8", "after create"], env={**os.environ, "PYTHONPATH": root}, timeout=600)
        assert killed.returncode == -9
        replies = pool.ask([ChatRequest("fake", r.messages, r.max_tokens) for r in asking_process.requests(9)])
    assert all(isinstance(reply, ChatReply) for reply in replies)
    assert server.batches.submitted == {str(i): 1 for i in range(9)}
    assert pool.spent == pytest.approx(server.batch_dollars)
    assert not jobs_on_disk(tmp_path)


def test_a_job_is_locked_before_another_process_can_find_it(tmp_path):
    locks, others = (RequestLocks(tmp_path / "locks") for _ in range(2))
    (request,) = requests(1)
    early_jobs = []

    def acquire(label):
        early_jobs.extend(pending_jobs(tmp_path, "fake", others.acquire))  # as a process that starts at this moment
        return locks.acquire(label)

    PendingJob.write(tmp_path, "fake", {"d1": request}, Usage(), {}, acquire)
    assert not early_jobs
    assert not pending_jobs(tmp_path, "fake", others.acquire)
    locks.close()
    assert [job.requests for job in pending_jobs(tmp_path, "fake", others.acquire)] == [{"d1": request}]


@pytest.fixture
def _gives_up_soon(monkeypatch):
    monkeypatch.setattr(batches, "GIVE_UP_S", 0.1)


@pytest.mark.usefixtures("_gives_up_soon")
def test_live_requests_do_not_wait_for_the_money_of_a_job_that_was_left(pool_for):
    """The job's vendor stops answering, and live requests need what is reserved for the job."""
    most = 0.5 * (2e5 * 20 + 1e5 * (len("number 0") // 3 + 8)) / 1e6  # of one request in the job
    with FakeOpenAI(per_million=PER_MILLION) as server, FakeOpenAI(per_million=PER_MILLION) as live_server:
        server.batches.reshape = lambda step, answer: b"gone" if step == "status" else answer
        live = EndpointConfig(kind="openai", model="live", url=live_server.url, concurrency=1, **PRICES)
        live_server.models = ["live"]
        pool = pool_for(budget=4.5 * most, fake=endpoint(server, "openai"), live=live)
        batch, live_requests = requests(4), [ChatRequest("live", r.messages, r.max_tokens) for r in requests(4)]
        assert {result.reason for result in pool.ask(batch)} == {"outage"}
        assert {result.reason for result in pool.ask(live_requests)} == {"budget"}
        server.batches.reshape = lambda step, answer: answer
        again = pool.ask(batch)
    assert all(isinstance(reply, ChatReply) for reply in again), "the job was still there"
    assert pool.spent == pytest.approx(server.batch_dollars + live_server.dollars)
    assert server.batches.submitted == {f"number {i}": 1 for i in range(4)}


@pytest.mark.usefixtures("_gives_up_soon")
def test_a_job_that_may_exist_survives_a_wrong_key(pool_for, tmp_path, kind, monkeypatch):
    """The answer to its creation was lost, and the next process may not search the vendor's jobs."""
    with FakeOpenAI(per_million=PER_MILLION, key=KEY) as server:
        config = endpoint(server, kind)
        server.batches.reshape = lambda step, answer: b"gone" if step in ("create", "list") else answer
        first = pool_for(fake=config)
        assert {result.reason for result in first.ask(requests(3))} == {"outage"}
        first.close()
        server.batches.reshape = lambda step, answer: answer
        monkeypatch.setenv("FAKE_KEY", "sk-another-key-0123456789")
        second = pool_for(fake=config)
        with pytest.raises(ConfigError, match="Incorrect API key"):
            raise_for_outage(second.ask(requests(3)))
        assert jobs_on_disk(tmp_path), "the vendor has created it, and charges for it"
        second.close()
        monkeypatch.setenv("FAKE_KEY", KEY)
        pool = pool_for(fake=config)
        assert all(isinstance(reply, ChatReply) for reply in pool.ask(requests(3)))
    assert set(server.batches.submitted.values()) == {server.batches.steps["create"]}
    assert not jobs_on_disk(tmp_path)


@pytest.mark.usefixtures("_gives_up_soon")
@pytest.mark.parametrize(
    ("step", "reshape"),
    [
        ("status", lambda answer: {**answer, "errors": ["of another shape"]}),
        ("status", lambda answer: [answer]),
        ("upload", lambda answer: "file-0"),
        ("create", lambda answer: {**answer, "id": None}),
        ("download", lambda answer: b"[1, 2]\n{}\nnull\n\xff\n"),
    ],
)
def test_an_answer_of_another_shape_is_a_failure_and_no_wait_without_end(pool_for, kind, step, reshape):
    with FakeOpenAI(per_million=PER_MILLION) as server:
        server.batches.reshape = lambda at, answer: reshape(answer) if at == step else answer
        pool = pool_for(fake=endpoint(server, kind, attempts=2))
        results = pool.ask(requests(3))
        pool.close()
        if step in ("upload", "download"):  # a job without an id is found by its label, a status may come again
            assert all(isinstance(result, ChatFailure) for result in results)
        server.batches.reshape = lambda at, answer: answer
        pool_for(fake=endpoint(server, kind)).ask(requests(3))


def each_row(change):
    """The lines of a file of results, each replaced by those that `change` makes of it."""
    return lambda content: b"".join(
        json.dumps(row).encode() + b"\n" for line in content.splitlines() for row in change(json.loads(line))
    )


NO_FILES = {"output_file_id": None, "output_file": None}


@pytest.mark.parametrize(
    ("step", "reshape"),
    [
        ("download", each_row(lambda row: [row, {**row, "response": None, "error": {"code": "batch_expired"}}])),
        ("download", each_row(lambda row: [{**row, "response": {"status_code": 500, "body": {}}}, row])),
        ("download", each_row(lambda row: [row, {**row, "custom_id": ["x"]}, {**row, "custom_id": "0" * 64}, 7, row])),
        ("download", each_row(lambda row: [{**row, "error": {"code": None, "message": None}}])),
        ("download", each_row(lambda row: [{**row, "response": {"body": row["response"]["body"]}}])),
        ("download", each_row(lambda row: [{**row, "response": {**row["response"], "status_code": "200"}}])),
        ("download", each_row(lambda row: [{**row, "response": {**row["response"], "status_code": "OK"}}])),
        ("download", each_row(lambda row: [{**row, "response": {**row["response"], "status_code": math.inf}}])),
        ("download", each_row(lambda row: [{**row, "response": {"body": json.dumps(row["response"]["body"])}}])),
        ("status", lambda answer: {**answer, "status": answer["status"].swapcase()}),
        ("status", lambda answer: answer if answer.pop("late", None) else {**answer, **NO_FILES}),
    ],
    ids=[
        "error after",
        "error before",
        "others",
        "empty error",
        "no status",
        "text",
        "word",
        "infinite",
        "JSON in JSON",
        "capitals",
        "late files",
    ],
)
def test_a_reply_in_a_job_is_kept_whatever_stands_around_it(pool_for, kind, step, reshape):
    def answer_of(at, answer):
        if at == "status" and server.batches.steps["status"] > 2:
            answer["late"] = True
        return reshape(answer) if at == step else answer

    with FakeOpenAI(per_million=PER_MILLION) as server:
        server.batches.reshape = answer_of
        pool = pool_for(fake=endpoint(server, kind))
        replies = pool.ask(requests(3))
    assert all(isinstance(reply, ChatReply) for reply in replies)
    assert server.batches.submitted == {f"number {i}": 1 for i in range(3)}
    assert pool.spent == pytest.approx(server.batch_dollars)


@pytest.mark.parametrize("kind", ["openai"])
def test_an_error_in_a_job_reaches_the_caller_with_its_log(pool_for, tmp_path, kind, monkeypatch, caplog):
    def fails(job):
        raise RuntimeError("an error of ours")

    with FakeOpenAI(per_million=PER_MILLION) as server:
        pool = pool_for(fake=endpoint(server, kind))
        with monkeypatch.context() as broken:
            broken.setattr(PendingJob, "remove", fails)
            with pytest.raises(RuntimeError, match="an error of ours"):
                pool.ask(requests(3))
        assert "is left for the next attempt" in caplog.text
        assert "Traceback" in caplog.text
        pool.ask(requests(3))  # from the cache, while the job is taken to its end
        deadline = time.monotonic() + 60
        while not pool.spent and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not jobs_on_disk(tmp_path)
    assert pool.spent == pytest.approx(server.batch_dollars), "what was recorded before the error is booked once"
    assert server.batches.submitted == {f"number {i}": 1 for i in range(3)}


@pytest.mark.parametrize("kind", ["openai"])
def test_an_error_while_a_job_is_written_reaches_the_caller(pool_for, kind, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("an error of ours")

    with FakeOpenAI() as server:
        pool = pool_for(budget=100.0, fake=endpoint(server, kind))
        with monkeypatch.context() as broken:
            broken.setattr(PendingJob, "write", fails)
            with pytest.raises(RuntimeError, match="an error of ours"):
                pool.ask(requests(3))
        assert all(isinstance(reply, ChatReply) for reply in pool.ask(requests(1)))


@pytest.mark.parametrize("kind", ["openai"])
def test_replies_that_a_dead_process_had_recorded_are_not_recorded_again_with_its_job(pool_for, events, tmp_path, kind):
    """It recorded them after this process had last looked, and died before it could remove the job."""
    (own,), others = requests(1), [ChatRequest("fake", ({"role": "user", "content": text},), 20) for text in "abc"]

    def dies(job):
        raise RuntimeError("as if it were killed here")

    with FakeOpenAI(per_million=PER_MILLION) as server:
        config = endpoint(server, kind)
        pool, dying = pool_for(fake=config), pool_for(fake=config)
        locks = RequestLocks(tmp_path / "replies" / "fake" / "requests.lock")
        with pool.session() as session:
            session.submit([(0, own)], more_follow=True)
            while locks.acquire(digest := request_digest(own, config)):
                locks.release(digest)
                time.sleep(0.01)
            with pytest.MonkeyPatch.context() as killed:
                killed.setattr(PendingJob, "remove", dies)
                with pytest.raises(RuntimeError, match="as if it were killed"):
                    dying.ask(others)
            dying.close()
            session.submit([], more_follow=False)
            assert isinstance(session.next_result()[1], ChatReply)
        while jobs_on_disk(tmp_path):
            time.sleep(0.01)
        assert sum(event["dollars"] for event in events) == pytest.approx(server.batch_dollars)
    digests = [row["digest"] for row in reply_rows(tmp_path / "replies")]
    assert len(digests) == len(set(digests)) == 4


@pytest.mark.usefixtures("_gives_up_soon")
def test_a_request_in_a_job_stays_locked_when_a_live_fallback_of_the_same_model_fails(pool_for, tmp_path):
    """The vendor still has the job, so that no other process may send the request."""
    (request,) = requests(1, purpose="teacher")
    with FakeOpenAI(per_million=PER_MILLION) as server, FakeOpenAI(faults=always("400")) as live_server:
        server.batches.reshape = lambda step, answer: b"gone" if step == "status" else answer
        config = endpoint(server, "openai", fallback=("live",))
        live = EndpointConfig(kind="openai", model="fake", url=live_server.url)
        pool = pool_for(fake=config, live=live)
        assert isinstance(pool.ask([request])[0], ChatFailure)
        assert len(live_server.bodies) == 1
        others = RequestLocks(tmp_path / "replies" / "fake" / "requests.lock")
        assert not others.acquire(request_digest(request, config))
        others.close()


@pytest.mark.parametrize("kind", ["openai"])
def test_a_request_stays_locked_when_its_session_ends_while_its_job_is_written(pool_for, tmp_path, kind, monkeypatch):
    (request,), write = requests(1), PendingJob.write
    writing, may_write = threading.Event(), threading.Event()

    def write_slowly(*arguments):
        writing.set()
        may_write.wait()
        return write(*arguments)

    def fails(pool):
        with pool.session() as session:
            session.submit([(0, request)])
            writing.wait()
            raise RuntimeError("an error of the caller")

    monkeypatch.setattr(PendingJob, "write", write_slowly)
    with FakeOpenAI(per_million=PER_MILLION) as server:
        config = endpoint(server, kind)
        pool, others = pool_for(fake=config), RequestLocks(tmp_path / "replies" / "fake" / "requests.lock")
        with pytest.raises(RuntimeError, match="an error of the caller"):
            fails(pool)
        is_free = others.acquire(request_digest(request, config))
        others.close()
        may_write.set()
        assert not is_free
        assert isinstance(pool.ask([request])[0], ChatReply)
        assert server.batches.submitted == {"number 0": 1}
