"""`nautile logs` and `nautile status --watch`: which log is chosen, following it while it moves, state changes."""

import shutil
import threading

import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.flows import logs
from nautile.flows.logs import choose, follow, last_lines, run_logs
from nautile.store.artifacts import Store
from nautile.store.manifest import host
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row
from tests.support.samples.stage_store import key_of
from tests.support.stages.stage_parent import wait_for


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


def test_the_default_is_the_last_work_of_the_newest_run(store):
    assert choose(store, None, None).label == "pretrain"
    assert choose(store, None, "ingest").execution == "made-ingest:x"
    log = choose(store, "aaa", None)
    assert last_lines(log.path(store), 1) == "the end of ingest:x\n"
    assert last_lines(log.path(store), 0).startswith("one\n")


@pytest.mark.parametrize(
    ("run", "stage", "message"),
    [
        ("aa", None, "matches more than one run"),
        ("b", None, "matches no run; the newest are aab-2, aaa-1"),
        (None, "z", "not in this run, which has"),
        (None, "pretrian", "did you mean 'pretrain'"),
    ],
)
def test_an_unknown_run_or_stage_is_refused_with_the_known_ones(store, run, stage, message):
    with pytest.raises(ConfigError, match=message):
        choose(store, run, stage)


def attempt(store, run, label, state, minute):
    row = {"run": run, "label": label, "stage": label, "key": key_of(label), "attempt": 1, "host": host()}
    row |= {"id": f"{run}-{label}", "execution": f"made-{label}", "state": state, "reused": False}
    write_attempt_row(store, row | {"started": f"2026-01-03T03:{minute:02}:00+00:00"})


def plan(store, run, minute, labels):
    steps = [{"label": label, "stage": label, "key": key_of(label), "after": []} for label in labels]
    row = {"id": run, "run": run, "state": "running", "steps": steps, "host": host()}
    write_row(store, "plan", row | {"started": f"2026-01-03T03:{minute:02}:00+00:00"})


def test_the_default_is_the_pipeline_at_work_and_its_failed_step(store):
    """Not the scheduled evaluation that began after it, and not the step that was done last."""
    plan(store, "ccc-1", 0, ["ingest", "align", "reason"])
    attempt(store, "ccc-1", "align", "failed", 1)
    attempt(store, "ccc-1", "reason", "done", 2)
    plan(store, "ddd-1", 5, ["evaluate"])
    attempt(store, "ddd-1", "evaluate", "done", 6)
    assert choose(store, None, None).label == "evaluate"
    with store.run_lock("ccc-1").for_life():
        chosen = choose(store, None, None)
        assert (chosen.run, chosen.label) == ("ccc-1", "align")
        assert choose(store, "ddd", None).label == "evaluate"


def test_a_run_that_has_begun_no_step_has_no_log(store):
    plan(store, "ccc-1", 0, ["ingest", "align"])
    with store.run_lock("ccc-1").for_life():
        assert choose(store, None, None).run == "aab-2"
    write_attempt_row(store, {"id": "x", "run": "ccc-1", "label": "plan", "state": "done"})
    assert choose(store, "ccc", None).label == "plan"


def test_an_empty_store_has_no_log(tmp_path):
    with pytest.raises(ConfigError, match="nautile run"):
        choose(Store(tmp_path / "none"), None, None)


def test_a_log_is_followed_through_its_move_into_the_store_and_shown_safely(store, monkeypatch):
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    log = choose(store, None, None)
    (store.root / "logs" / "pretrain-made-pretrain.txt").unlink()
    staging = store.staging(log.key)
    write_json(staging / "execution.json", {"execution": log.execution})
    path, output = staging / "log.txt", []
    path.write_text("begun\n")
    with store.run_lock(log.run).for_life():
        lock = store.lock(log.key)
        assert lock.try_acquire()
        reader = threading.Thread(target=lambda: output.extend(text for _, text in follow(store, log, True, 5)))
        reader.start()
        wait_for(lambda: "".join(output) == "begun\n")
        letter = "é".encode()
        with path.open("ab") as file:
            file.write(b"\x1b[31mred " + letter[:1])
            file.flush()
            wait_for(lambda: "red" in "".join(output))
            file.write(letter[1:] + b"\n")
        shutil.copyfile(path, store.root / "logs" / "pretrain-made-pretrain.txt")
        store.discard(staging)
        lock.release()
        wait_for(lambda: "é" in "".join(output))
        assert reader.is_alive()  # the run is not over
    reader.join(120)
    assert not reader.is_alive()
    assert "".join(output) == "begun\n�[31mred é\n"
    assert log.path(store) == store.root / "logs" / "pretrain-made-pretrain.txt"


def test_a_stage_that_is_tried_again_is_followed_on(store, monkeypatch):
    """Between two attempts, as during an outage, nobody holds the lock of its key; the log goes on in the same file."""
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    log, output = choose(store, None, None), []
    (store.root / "logs" / "pretrain-made-pretrain.txt").unlink()
    staging = store.staging(log.key)
    write_json(staging / "execution.json", {"execution": log.execution})
    path = staging / "log.txt"
    path.write_text("first attempt\n")
    with store.run_lock(log.run).for_life():
        reader = threading.Thread(target=lambda: output.extend(text for _, text in follow(store, log, True, 5)))
        with store.lock(log.key):
            reader.start()
            wait_for(lambda: "".join(output) == "first attempt\n")
        again = threading.Event()
        monkeypatch.setattr(logs, "run_logs", lambda *given: again.set() or run_logs(*given))
        wait_for(again.is_set)  # it looks for later stages: the attempt has ended for it
        with store.lock(log.key), path.open("a") as file:
            file.write("second attempt\n")
    reader.join(120)
    assert "".join(output) == "first attempt\nsecond attempt\n"
