"""Fan-outs: markers, retried and skipped items, resume by any number of workers, ending with the parent."""

import json
import threading
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.common.events import silent
from nautile.common.files import read_json
from nautile.configs.operation import LaunchConfig
from nautile.store.catalog import Catalog
from nautile.tasks.engine import child_process as child
from nautile.tasks.engine import fanout
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import ITEM_BACKOFF, StageCancelled, StageCrash
from nautile.tasks.engine.fanout import (
    FanOut,
    Markers,
    WorkItem,
    finished_items,
    lease,
    run_item,
    skipped_items,
    write_item_list,
)
from nautile.tasks.engine.job import Job
from nautile.tasks.engine.stage import RunContext, stage
from tests.support.stages.stage_parent import is_alive, wait_for
from tests.support.stages.stage_pieces import joined, pieces, runs, section, start


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No pauses between the tries of an item."""
    monkeypatch.setattr(fanout, "ITEM_BACKOFF", replace(ITEM_BACKOFF, first_s=0.01, longest_s=0.01))


@pytest.fixture
def one_try(monkeypatch):
    monkeypatch.setattr(fanout, "ITEM_BACKOFF", replace(ITEM_BACKOFF, attempts=1))


@pytest.fixture
def context(store):
    return RunContext("r1", str(store.root), label="pieces", launch=LaunchConfig(workers=2))


def text(store, outputs):
    return (store.get(outputs["numbers"]).path / "all.txt").read_text()


def times(store):
    """Item -> how often it was run."""
    return {item: len(pids) for item, pids in runs(store.root).items()}


@pytest.mark.slow
def test_fan_outs_run_in_order_skip_bad_items_and_their_events_reach_the_catalog(store, context, updates, caplog):
    config = section(3, faults={"piece-1": {"bad": 99}}, skippable=0.34)
    outputs = run_stage(pieces, config, {}, context)
    assert text(store, outputs) == joined(3, without=(1,))
    assert "cut: piece-1 is skipped: piece-1: not a text" in caplog.text
    items_of_both = ["piece-0", "piece-1", "piece-2", "double-piece-0", "double-piece-2"]
    facts = store.get(outputs["numbers"]).manifest["facts"]
    assert {name: facts[name] for name in ("skipped", "runs")} == {
        "skipped": {"piece-1": "piece-1: not a text"},
        "runs": dict.fromkeys(["list", *items_of_both], 1),
    }
    shown = [(update.note, update.done, update.total, update.unit) for update in updates if update.total]
    assert ("cut, 1 skipped", 3.0, 3, "files") in shown
    assert ("double", 2.0, 2, "pieces") in shown
    Catalog(store).ingest()
    rows = Catalog(store).query("SELECT name, source, value FROM metrics ORDER BY name, source")
    assert [(row["name"], row["source"], row["value"]) for row in rows] == [
        ("cut_items", None, 3.0),
        ("cut_skipped", None, 1.0),
        ("double_items", None, 2.0),
        ("double_skipped", None, 0.0),
        ("joined", None, 2.0),
        *(("rows", f"cut/piece-{index}", 5.0) for index in (0, 2)),
    ]
    (row,) = Catalog(store).query("SELECT sample.* FROM (SELECT * FROM samples) AS sample")
    assert (row["set"], row["index"]) == ("cut: skipped", 1)
    assert "piece-1: not a text" in str(row)
    (run,) = Catalog(store).query("SELECT state, peak_bytes FROM attempts")
    assert run["state"] == "done"
    assert run["peak_bytes"] > 10**7
    (log,) = (path.read_text() for path in (store.root / "logs").glob("pieces-*.txt"))
    printed = {line for line in log.splitlines() if line.startswith("printed by")}
    assert printed == {"printed by piece-0", "printed by piece-2"}
    assert run_stage(pieces, config, {}, context) == outputs


@pytest.mark.slow
def test_progress_counts_a_running_item_by_the_share_it_has_done(store, context, gate, updates):
    config = section(2, gate=str(gate), gated=["piece-0", "piece-1"])
    thread = threading.Thread(target=run_stage, args=(pieces, config, {}, context))
    thread.start()
    wait_for(lambda: [update for update in updates if (update.done, update.total) == (1.0, 2)])
    (gate / "open").touch()
    thread.join()
    assert [update.done for update in updates if update.note == "cut"][-1] == 2.0


@pytest.mark.slow
def test_too_many_bad_items_are_one_message_and_are_tried_again_by_the_next_run(store, context):
    config = section(3, faults={"piece-1": {"bad": 1}, "piece-2": {"bad": 1}}, skippable=0.34)
    message = (
        r"^piece-\d: not a text \(piece-\d is the first of 2 of 3 files skipped in cut; at most a share of "
        r"0\.34 may be\)$"
    )
    with pytest.raises(ConfigError, match=message):
        run_stage(pieces, config, {}, context)
    assert times(store) == {"list": 1, "piece-0": 1, "piece-1": 1, "piece-2": 1}
    assert text(store, run_stage(pieces, config, {}, context)) == joined(3)


@pytest.mark.slow
def test_a_failed_item_does_not_stop_the_others_and_is_the_only_one_run_again(store, context, one_try):
    config = section(3, faults={"piece-0": {"crash": 1, "retry": 2}})  # a crash at the first try, an outage at the next
    crash = r"(?s)cut: 1 of 3 .*exit code 1: by zero.*its last lines:.*ZeroDivisionError: by zero"
    with pytest.raises(StageCrash, match=crash):
        run_stage(pieces, config, {}, context)
    markers = sorted(path.name for path in store.root.glob("staging/*/fan_outs/cut/done/*"))
    assert markers == ["piece-1", "piece-2"]
    assert times(store) == {"list": 1, "piece-0": 1, "piece-1": 1, "piece-2": 1}
    with pytest.raises(Retryable, match=r"^cut: 1 of 3 files left; piece-0: http://127.0.0.1:9 does not answer$"):
        run_stage(pieces, config, {}, context)
    outputs = run_stage(pieces, config, {}, context)
    assert text(store, outputs) == joined(3)
    assert store.get(outputs["numbers"]).manifest["facts"]["runs"] == {
        "list": 1,
        "piece-0": 3,
        **dict.fromkeys(("piece-1", "piece-2", "double-piece-0", "double-piece-1", "double-piece-2"), 1),
    }


@pytest.mark.slow
def test_three_failed_items_end_the_stage(store, one_try):
    faults = {f"piece-{index}": {"retry": 9} for index in range(5)}
    one_worker = RunContext("r1", str(store.root), launch=LaunchConfig(workers=1))
    with pytest.raises(Retryable, match="cut: 5 of 5 files left; piece-0: "):
        run_stage(pieces, section(5, faults=faults), {}, one_worker)
    assert times(store) == {"list": 1, "piece-0": 1, "piece-1": 1, "piece-2": 1}


@pytest.mark.slow
def test_each_item_is_retried_or_skipped_by_itself(store, context, caplog):
    faults = {"piece-0": {"bad": 9}, "piece-1": {"retry": 2}, "piece-2": {"killed": 1}}
    outputs = run_stage(pieces, section(4, faults=faults, skippable=0.25), {}, context)
    assert text(store, outputs) == joined(4, without=(0,))
    facts = store.get(outputs["numbers"]).manifest["facts"]
    assert facts["skipped"] == {"piece-0": "piece-0: not a text"}
    cut = {"list": 1, "piece-0": 1, "piece-1": 3, "piece-2": 2, "piece-3": 1}
    assert {item: facts["runs"][item] for item in cut} == cut
    assert caplog.text.count("cut piece-1 failed, and is retried in 0 s: http://127.0.0.1:9 does not answer") == 2
    assert "cut piece-2 failed, and is retried in 0 s: its process was ended by signal 9 (SIGKILL" in caplog.text


def test_the_pause_before_another_try_ends_with_the_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(fanout, "ITEM_BACKOFF", replace(ITEM_BACKOFF, first_s=600.0, longest_s=600.0))
    item = WorkItem(str(tmp_path / "request.json"), 1, "cut", "a", 1)

    def fail():
        raise Retryable("no answer")

    def is_over():
        raise StageCancelled("its attempt is over")

    with pytest.raises(StageCancelled, match="its attempt is over"):
        fanout.with_retries(item, fail, is_over)


@pytest.mark.slow
def test_a_full_disk_skips_no_item_and_is_named_though_the_counts_cannot_be_written_either(store, context, monkeypatch):
    def full(*_arguments, **_fields):
        raise OSError(28, "No space left on device")

    config = section(2, faults={"piece-1": {"full": 1}}, skippable=1.0)
    with monkeypatch.context() as patch:
        patch.setattr("nautile.tasks.engine.fanout.EventWriter", full)
        with pytest.raises(ConfigError, match=r"^the store .* cannot be written \(No space left on device\)"):
            run_stage(pieces, config, {}, context)
    assert text(store, run_stage(pieces, config, {}, context)) == joined(2)


@pytest.mark.slow
def test_after_a_killed_parent_another_number_of_workers_continues(store, gate):
    config = section(4, gate=str(gate), gated=["piece-1", "piece-3"])
    parent = start(store.root, config, 2)
    wait_for(lambda: all((gate / name).exists() for name in ("piece-1", "piece-3")))
    running = [int((gate / name).read_text().split()[0]) for name in ("piece-1", "piece-3")]
    assert all(map(is_alive, running))
    parent.kill()
    parent.communicate()
    wait_for(lambda: not any(map(is_alive, running)))
    assert times(store) == {"list": 1} | {f"piece-{index}": 1 for index in range(4)}
    (gate / "piece-1").unlink()
    again = start(store.root, config, 3)
    wait_for((gate / "piece-1").exists)
    (gate / "open").touch()
    message, _ = again.communicate()
    assert message.startswith("made ")
    (outputs,) = store.list()
    assert (outputs.path / "all.txt").read_text() == joined(4)
    cut = {"list": 1, "piece-0": 1, "piece-1": 2, "piece-2": 1, "piece-3": 2}
    double = {f"double-piece-{index}": 1 for index in range(4)}
    assert outputs.manifest["facts"]["runs"] == cut | double
    Catalog(store).ingest()
    rows = Catalog(store).query("SELECT count(*) AS n, sum(value) AS rows FROM metrics WHERE name = 'rows'")
    assert rows == [{"n": 4, "rows": 20.0}]


@pytest.mark.slow
def test_cancelling_ends_the_items_of_a_stage_in_another_thread(store, context, gate):
    ended, threads = [], []

    def run():
        try:
            run_stage(pieces, section(3, gate=str(gate), gated=["piece-0", "piece-1"]), {}, context)
        except StageCancelled as error:
            ended.append(error)

    def interrupted():
        with child.cancelling():
            threads.append(threading.Thread(target=copy_context().run, args=(run,)))
            threads[0].start()
            wait_for(lambda: all((gate / name).exists() for name in ("piece-0", "piece-1")))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    threads[0].join(120)
    assert len(ended) == 1
    assert not any(is_alive(int((gate / name).read_text().split()[0])) for name in ("piece-0", "piece-1"))
    assert set(times(store)) == {"list", "piece-0", "piece-1"}


def job(staging: Path) -> Job:
    return Job("toy", "key", "execution", {}, {}, staging, silent)


@pytest.mark.parametrize(
    ("names", "share", "message"),
    [
        (["a", "b/c"], 0.0, "'b/c' is no valid file name"),
        ([".hidden"], 0.0, "is no valid file name"),
        (["a", "b", "a"], 0.0, "names an item twice"),
        (["a"], 1.5, r"share that may be skipped is 1.5"),
    ],
)
def test_an_invalid_item_list_is_refused(tmp_path, names, share, message):
    fan_out = FanOut("cut", lambda job: names, lambda job, item: None, skippable=lambda job: share)
    with pytest.raises(RuntimeError, match=message):
        write_item_list(fan_out, job(tmp_path))
    assert Markers(tmp_path, "cut").items is None


def test_results_of_a_fan_out_are_readable_only_when_it_is_finished(tmp_path):
    write_item_list(FanOut("cut", lambda job: ["a", "b"], lambda job, item: None), job(tmp_path))
    with pytest.raises(RuntimeError, match="fan-out 'cut' is not finished"):
        finished_items(job(tmp_path), "cut")
    markers = Markers(tmp_path, "cut")
    markers.write_finished({"b": "bad"})
    # Staging folders of every version have these names and fields, so that an interrupted run resumes after an update.
    assert read_json(tmp_path / "fan_outs" / "cut" / "list.json") == {"items": ["a", "b"], "skippable": 0.0}
    assert read_json(tmp_path / "fan_outs" / "cut" / "finished.json") == {"skipped": {"b": "bad"}}
    assert finished_items(job(tmp_path), "cut") == ["a"]
    assert skipped_items(job(tmp_path), "cut") == {"b": "bad"}


def test_an_invalid_declaration_is_refused():
    cut = FanOut("cut", lambda job: [], lambda job, item: None)
    for fan_outs in ((cut, cut), (FanOut("No Name", cut.list_items, cut.work),)):
        with pytest.raises(ValueError, match="its fan-outs need distinct lower-case names"):
            stage("x", version=1, outputs=("a",), fan_outs=fan_outs)
    with pytest.raises(ValueError, match="both `fan_outs`, for independent items, and `multihost`"):
        stage("x", version=1, outputs=("a",), fan_outs=(cut,), multihost=True)


def test_an_item_of_an_attempt_that_is_over_does_not_run(tmp_path):
    (tmp_path / "staging" / "key").mkdir(parents=True)
    item = WorkItem(str(tmp_path / "staging" / "key" / "request.json"), 1, "cut", "a", 1)
    with pytest.raises(StageCancelled, match="cut a: its attempt is over"):
        run_item(item)
    with lease(item.staging, 2), pytest.raises(StageCancelled):
        run_item(item)
    elsewhere = WorkItem("/no/such/store/staging/key/request.json", 1, "cut", "a", 1)
    with pytest.raises(ConfigError, match="must lie on a file system that all of them share"):
        run_item(elsewhere)


def test_a_host_with_other_code_is_refused(tmp_path):
    folder = tmp_path / "staging" / "key"
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps({"host": "head", "commit": "a" * 40}))
    with (
        lease(folder, 1),
        pytest.raises(ConfigError, match=r"the run's host head has a{40}: install the same commit on every host"),
    ):
        run_item(WorkItem(str(folder / "request.json"), 1, "cut", "a", 1))


def test_the_address_of_a_cluster_needs_the_engine_ray():
    with pytest.raises(ValueError, match=r"launch\.ray_address needs engine 'ray'"):
        LaunchConfig(ray_address="127.0.0.1:6379")
