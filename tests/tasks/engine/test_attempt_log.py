"""The catalog while a stage is at work: a backlog of events takes it in slices, and its failures fail no stage."""

import threading

import pytest

from nautile.store.catalog import SLICE, Catalog
from nautile.store.events import EventWriter
from nautile.store.mirror import MirroredStore
from nautile.tasks.engine import attempt, attempt_log
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.attempt_log import AttemptLog
from nautile.tasks.engine.progress import subscribe
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_sums import section, sums


def count(store):
    return Catalog(store).query("SELECT count(*) AS n FROM metrics")[0]["n"]


@pytest.mark.slow
def test_a_backlog_is_read_in_slices_while_the_child_is_watched(store, monkeypatch):
    emit = EventWriter(store.root / "events" / "backlog.jsonl", "other", stage="toy")
    emit.many("metric", [{"name": "loss", "step": step, "value": 1.0} for step in range(20_000)])
    emit.close()
    slices = -(-(store.root / "events" / "backlog.jsonl").stat().st_size // SLICE)
    assert slices > 3
    monkeypatch.setitem(attempt_log.WATCHING, "most_s", 0.0)
    log = AttemptLog(store, "sums", "k" * 64, RunContext("r1", str(store.root)))
    counts = []
    for _ in range(2):
        log.ingest()
        counts.append(count(store))
    assert 0 < counts[0] < counts[1] < 20_000 * 3 / slices

    monkeypatch.setattr(attempt, "INGEST_EVERY_S", 0.0)
    seen = []
    unsubscribe = subscribe(lambda update: seen.append(update.state))
    try:
        run_stage(sums, section(), {}, RunContext("r1", str(store.root)))
    finally:
        unsubscribe()
    assert seen.count("running") > 1
    assert count(store) == 20_000 + 3, "the end of a stage reads the rest"


def test_a_catalog_that_the_file_system_refuses_fails_no_stage(store, monkeypatch):
    def refused(*_, **__):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(Catalog, "ingest", refused)
    assert run_stage(sums, section(), {}, RunContext("r1", str(store.root)))


def test_what_another_process_has_just_ingested_is_not_read_again(store, monkeypatch):
    log, ingested = AttemptLog(store, "sums", "k" * 64, RunContext("r1", str(store.root))), []
    monkeypatch.setattr(Catalog, "ingest", lambda *_, **__: ingested.append(1))
    for age_s in (4.0, 6.0):
        monkeypatch.setattr(Catalog, "age_s", lambda _, age_s=age_s: age_s)
        log.ingest(unless_s=5.0)
    assert len(ingested) == 1
    log.ingest()
    assert len(ingested) == 2


class SlowRemote(MirroredStore):
    """A store whose uploads of replies wait until they are let go on."""

    def __init__(self):
        self.uploads, self.begun, self.go_on = [], threading.Event(), threading.Event()

    def push_replies(self):
        self.begun.set()
        self.go_on.wait(60)
        self.uploads.append(threading.current_thread().name)
        return 1

    def push(self, artifacts):
        pass

    def push_events(self):
        pass


def test_one_upload_of_replies_at_a_time_and_the_last_word_is_the_end_s(store):
    """A slow upload that ended after the last one would leave the remote with a shorter file."""
    remote = SlowRemote()
    logs = [AttemptLog(store, "sums", key * 64, RunContext("r1", str(store.root))) for key in "ab"]
    for log in logs:
        log._store = remote
    slow = threading.Thread(target=logs[0].mirror_replies, name="slow")
    slow.start()
    assert remote.begun.wait(60)
    remote.begun.clear()
    late = threading.Thread(target=logs[1].mirror_replies, name="late")
    late.start()
    late.join(60)
    assert not late.is_alive(), "it leaves it to the one that is running"
    last = threading.Thread(target=logs[1].mirror, name="last")
    last.start()
    remote.go_on.set()
    for thread in (slow, last):
        thread.join(60)
    assert remote.uploads == ["slow", "last"]
