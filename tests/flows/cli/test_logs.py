"""`nautile logs`, `nautile status --watch`: which log is meant, reading along while it moves, only changes told."""

import shutil
import threading

import pytest

from common.errors import ConfigError
from common.files import write_json
from flows.cli import logs
from flows.cli.logs import choose, follow, last_lines
from flows.cli.status_watch import changes
from store.artifacts import Store
from tasks.engine.attempt_log import write_attempt_row
from tests.support.stage_parent import wait_for
from tests.support.stage_store import key_of


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    for minute, (run, label, state) in enumerate(
        [("aaa-1", "ingest:x", "done"), ("aab-2", "ingest:x", "reused"), ("aab-2", "pretrain", "failed")]
    ):
        row = {"run": run, "label": label, "stage": label.partition(":")[0], "key": key_of(label), "attempt": 1}
        row |= {"id": f"{run}-{label}", "execution": f"made-{label}", "state": state, "reused": state == "reused"}
        write_attempt_row(store, row | {"started": f"2026-01-02T03:0{minute}:00+00:00"})
        (store.root / "logs" / f"{row['stage']}-{row['execution']}.txt").write_text(f"one\ntwo\nthe end of {label}\n")
    return store


def test_the_newest_run_and_its_last_work_are_meant_unless_told(store):
    assert choose(store, None, None).label == "pretrain"
    assert choose(store, None, "ingest").execution == "made-ingest:x"
    told = choose(store, "aaa", None)
    assert last_lines(told.log(store), 1) == "the end of ingest:x\n"
    assert last_lines(told.log(store), 0).startswith("one\n")


@pytest.mark.parametrize(
    ("run", "stage", "said"),
    [
        ("aa", None, "means more than one run"),
        ("b", None, "names no run; there are aab-2, aaa-1"),
        (None, "z", "this run has"),
    ],
)
def test_what_is_not_there_is_refused_with_what_there_is(store, run, stage, said):
    with pytest.raises(ConfigError, match=said):
        choose(store, run, stage)


def test_an_empty_store_has_no_log(tmp_path):
    with pytest.raises(ConfigError, match="nautile run"):
        choose(Store(tmp_path / "none"), None, None)


def test_a_log_is_read_along_through_the_move_into_the_store_and_shown_safely(store, monkeypatch):
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    told = choose(store, None, None)
    (store.root / "logs" / "pretrain-made-pretrain.txt").unlink()
    staging = store.staging(told.key)
    write_json(staging / "execution.json", {"execution": told.execution})
    log, heard = staging / "log.txt", []
    log.write_text("begun\n")
    with store.run_lock(told.run).for_life():
        lock = store.lock(told.key)
        assert lock.try_acquire()
        reader = threading.Thread(target=lambda: heard.extend(p for _, p in follow(store, told, True, 5)))
        reader.start()
        wait_for(lambda: "".join(heard) == "begun\n")
        letter = "é".encode()
        with log.open("ab") as file:
            file.write(b"\x1b[31mred " + letter[:1])
            file.flush()
            wait_for(lambda: "red" in "".join(heard))
            file.write(letter[1:] + b"\n")
        shutil.copyfile(log, store.root / "logs" / "pretrain-made-pretrain.txt")
        store.discard(staging)
        lock.release()
        wait_for(lambda: "é" in "".join(heard))
        assert reader.is_alive()  # the run is not over
    reader.join(30)
    assert not reader.is_alive()
    assert "".join(heard) == "begun\n�[31mred é\n"
    assert told.log(store) == store.root / "logs" / "pretrain-made-pretrain.txt"


def test_only_what_changed_is_told():
    before = [{"label": "a", "state": "made"}, {"label": "b", "state": "running"}]
    after = [{"label": "a", "state": "made"}, {"label": "b", "state": "failed"}, {"label": "c", "state": "not made"}]
    assert changes(before, after) == ["b: failed", "c: not made"]
    assert changes(after, after) == []
