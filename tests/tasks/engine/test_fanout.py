"""Units of a stage without Prefect: marks, set aside, gone on with by any number of workers, ended with the parent."""

import json
import signal
import threading
from pathlib import Path

import pytest

from common.errors import ConfigError, Retryable
from common.events import silent
from configs.operation import LaunchConfig
from store.artifacts import Store
from store.catalog import Catalog
from tasks.engine import child_process as child
from tasks.engine.attempt import run_stage
from tasks.engine.errors import StageCancelled, StageCrash
from tasks.engine.fanout import FanOut, Markers, finished_items, skipped_items, write_item_list
from tasks.engine.fanout_item import WorkItem, open_lease, run_item
from tasks.engine.job import Job
from tasks.engine.progress import subscribe
from tasks.engine.stage import RunContext, stage
from tests.support.stage_parent import is_alive, wait_for
from tests.support.stage_pieces import pieces, runs, section, start, whole


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def context(store):
    return RunContext("r1", str(store.root), label="pieces", launch=LaunchConfig(workers=2))


@pytest.fixture
def gate(tmp_path):
    gate = tmp_path / "gate"
    gate.mkdir()
    return gate


@pytest.fixture
def updates():
    heard = []
    unsubscribe = subscribe(heard.append)
    yield heard
    unsubscribe()


def text(store, made):
    return (store.get(made["numbers"]).path / "all.txt").read_text()


def times(store):
    """Unit -> how often it was worked at."""
    return {unit: len(pids) for unit, pids in runs(store.root).items()}


def test_rounds_are_done_in_order_and_their_events_reach_the_catalog(store, context, updates):
    made = run_stage(pieces, section(4), {}, context)
    assert text(store, made) == whole(4)
    units_of_both = [f"{start}piece-{index}" for start in ("", "double-") for index in range(4)]
    assert store.get(made["numbers"]).manifest["facts"] == {
        "set_aside": {},
        "runs": dict.fromkeys(["list", *units_of_both], 1),
    }
    shown = [(update.note, update.done, update.total, update.unit) for update in updates if update.total]
    assert ("cut", 4.0, 4, "files") in shown
    assert ("double", 4.0, 4, "pieces") in shown
    Catalog(store).ingest()
    rows = Catalog(store).query("SELECT name, source, value FROM metrics ORDER BY name, source")
    assert [(row["name"], row["source"], row["value"]) for row in rows] == [
        ("cut_set_aside", None, 0.0),
        ("cut_units", None, 4.0),
        ("double_set_aside", None, 0.0),
        ("double_units", None, 4.0),
        ("joined", None, 4.0),
        *(("rows", f"cut/piece-{index}", 5.0) for index in range(4)),
    ]
    (run,) = Catalog(store).query("SELECT state, peak_bytes FROM runs")
    assert run["state"] == "done"
    assert run["peak_bytes"] > 10**7
    (log,) = (path.read_text() for path in (store.root / "logs").glob("pieces-*.txt"))
    assert {line for line in log.splitlines() if line.startswith("said by")} == {"said by piece-1", "said by piece-3"}
    assert run_stage(pieces, section(4), {}, context) == made


def test_a_unit_under_way_counts_as_the_share_it_has_done(store, context, gate, updates):
    asked = section(2, gate=str(gate), gated=["piece-0", "piece-1"])
    thread = threading.Thread(target=run_stage, args=(pieces, asked, {}, context))
    thread.start()
    wait_for(lambda: [update for update in updates if (update.done, update.total) == (1.0, 2)])
    (gate / "open").touch()
    thread.join()
    assert [update.done for update in updates if update.note == "cut"][-1] == 2.0


def test_bad_units_are_set_aside_by_name_up_to_the_share(store, context, caplog):
    asked = section(4, faults={"piece-1": {"bad": 99}}, tolerated=0.25)
    made = run_stage(pieces, asked, {}, context)
    assert text(store, made) == whole(4, without=(1,))
    assert store.get(made["numbers"]).manifest["facts"]["set_aside"] == {"piece-1": "piece-1: not a text"}
    assert "cut: piece-1 is skipped: piece-1: not a text" in caplog.text
    Catalog(store).ingest()
    (row,) = Catalog(store).query("SELECT sample.* FROM (SELECT * FROM samples) AS sample")
    assert (row["set"], row["index"]) == ("cut: set aside", 1)
    assert "piece-1: not a text" in str(row)
    counted = Catalog(store).query("SELECT name, value FROM metrics WHERE name LIKE 'cut_%' ORDER BY name")
    assert [tuple(row.values()) for row in counted] == [("cut_set_aside", 1.0), ("cut_units", 4.0)]


def test_too_many_bad_units_are_one_message_and_are_tried_again_by_the_next_run(store, context):
    asked = section(4, faults={"piece-3": {"bad": 1}, "piece-2": {"bad": 1}}, tolerated=0.25)
    told = (
        r"^piece-\d: not a text \(piece-\d is the first of 2 of 4 files skipped in cut; at most a share of "
        r"0\.25 may be\)$"
    )
    with pytest.raises(ConfigError, match=told):
        run_stage(pieces, asked, {}, context)
    before = times(store)
    assert before == {"list": 1, "piece-0": 1, "piece-1": 1, "piece-2": 1, "piece-3": 1}
    assert text(store, run_stage(pieces, asked, {}, context)) == whole(4)


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        ("retry", Retryable, r"^cut: 1 of 3 files left; piece-0: http://127.0.0.1:9 does not answer$"),
        ("crash", StageCrash, r"(?s)cut: 1 of 3 .*exit code 1: by zero.*its last lines:.*ZeroDivisionError: by zero"),
    ],
)
def test_a_unit_that_fails_lets_the_others_be_done_and_is_the_only_one_done_again(store, context, fault, error, told):
    asked = section(3, faults={"piece-0": {fault: 1}})
    with pytest.raises(error, match=told):
        run_stage(pieces, asked, {}, context)
    marks = sorted(path.name for path in store.root.glob("staging/*/rounds/cut/done/*"))
    assert marks == ["piece-1", "piece-2"]
    assert times(store) == {"list": 1, "piece-0": 1, "piece-1": 1, "piece-2": 1}
    made = run_stage(pieces, asked, {}, context)
    assert text(store, made) == whole(3)
    assert store.get(made["numbers"]).manifest["facts"]["runs"] == {
        "list": 1,
        "piece-0": 2,
        **dict.fromkeys(("piece-1", "piece-2", "double-piece-0", "double-piece-1", "double-piece-2"), 1),
    }


def test_three_units_that_fail_end_the_stage(store):
    faults = {f"piece-{index}": {"retry": 9} for index in range(5)}
    one = RunContext("r1", str(store.root), launch=LaunchConfig(workers=1))
    with pytest.raises(Retryable, match="cut: 5 of 5 files left; piece-0: "):
        run_stage(pieces, section(5, faults=faults), {}, one)
    assert times(store) == {"list": 1, "piece-0": 1, "piece-1": 1, "piece-2": 1}


def test_a_full_disk_is_not_the_unit_s_fault(store, context):
    asked = section(3, faults={"piece-1": {"full": 1}}, tolerated=1.0)
    with pytest.raises(ConfigError, match=r"^the store .* cannot be written \(No space left on device\)"):
        run_stage(pieces, asked, {}, context)
    made = run_stage(pieces, asked, {}, context)
    assert text(store, made) == whole(3)


@pytest.mark.slow
def test_a_killed_parent_is_gone_on_from_by_another_number_of_workers(store, gate):
    asked = section(4, gate=str(gate), gated=["piece-1", "piece-3"])
    parent = start(store.root, asked, 2)
    wait_for(lambda: all((gate / name).exists() for name in ("piece-1", "piece-3")))
    at_work = [int((gate / name).read_text().split()[0]) for name in ("piece-1", "piece-3")]
    assert all(map(is_alive, at_work))
    parent.kill()
    parent.communicate()
    wait_for(lambda: not any(map(is_alive, at_work)))
    assert times(store) == {"list": 1} | {f"piece-{index}": 1 for index in range(4)}
    (gate / "piece-1").unlink()
    again = start(store.root, asked, 3)
    wait_for((gate / "piece-1").exists)
    (gate / "open").touch()
    told, _ = again.communicate()
    assert told.startswith("made ")
    (made,) = store.list()
    assert (made.path / "all.txt").read_text() == whole(4)
    cut = {"list": 1, "piece-0": 1, "piece-1": 2, "piece-2": 1, "piece-3": 2}
    double = {f"double-piece-{index}": 1 for index in range(4)}
    assert made.manifest["facts"]["runs"] == cut | double
    Catalog(store).ingest()
    rows = Catalog(store).query("SELECT count(*) AS n, sum(value) AS rows FROM metrics WHERE name = 'rows'")
    assert rows == [{"n": 4, "rows": 20.0}]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_ends_all_units(store, gate, number):
    parent = start(store.root, section(4, gate=str(gate), gated=["piece-0", "piece-1"]), 2)
    wait_for(lambda: all((gate / name).exists() for name in ("piece-0", "piece-1")))
    at_work = [int((gate / name).read_text().split()[0]) for name in ("piece-0", "piece-1")]
    parent.send_signal(number)
    told, _ = parent.communicate(timeout=20)
    wait_for(lambda: not any(map(is_alive, at_work)), 10)
    if number == signal.SIGINT:
        assert told.startswith("KeyboardInterrupt")
    assert set(times(store)) == {"list", "piece-0", "piece-1"}


def test_cancelling_ends_the_units_of_a_stage_in_another_thread(store, context, gate):
    ended = []

    def run():
        try:
            run_stage(pieces, section(3, gate=str(gate), gated=["piece-0", "piece-1"]), {}, context)
        except StageCancelled as error:
            ended.append(error)

    thread = threading.Thread(target=run)

    def interrupted():
        with child.cancelling():
            thread.start()
            wait_for(lambda: all((gate / name).exists() for name in ("piece-0", "piece-1")))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    thread.join(20)
    child._cancelled.clear()
    assert len(ended) == 1
    assert not any(is_alive(int((gate / name).read_text().split()[0])) for name in ("piece-0", "piece-1"))
    assert set(times(store)) == {"list", "piece-0", "piece-1"}


def job(staging: Path) -> Job:
    return Job("toy", "key", "execution", {}, {}, staging, silent)


@pytest.mark.parametrize(
    ("names", "share", "told"),
    [
        (["a", "b/c"], 0.0, "'b/c' is no valid file name"),
        ([".hidden"], 0.0, "is no valid file name"),
        (["a", "b", "a"], 0.0, "names an item twice"),
        (["a"], 1.5, r"share that may be skipped is 1.5"),
    ],
)
def test_a_list_must_make_sense(tmp_path, names, share, told):
    step = FanOut("cut", lambda job: names, lambda job, unit: None, skippable=lambda job: share)
    with pytest.raises(RuntimeError, match=told):
        write_item_list(step, job(tmp_path))
    assert Markers.of(tmp_path, "cut").items is None


def test_what_a_round_left_is_read_only_once_it_is_over(tmp_path):
    write_item_list(FanOut("cut", lambda job: ["a", "b"], lambda job, unit: None), job(tmp_path))
    with pytest.raises(RuntimeError, match="fan-out 'cut' is not finished"):
        finished_items(job(tmp_path), "cut")
    Markers.of(tmp_path, "cut").write_finished({"b": "bad"})
    assert finished_items(job(tmp_path), "cut") == ["a"]
    assert skipped_items(job(tmp_path), "cut") == {"b": "bad"}


def test_rounds_are_declared_soundly():
    one = FanOut("cut", lambda job: [], lambda job, unit: None)
    for rounds in ((one, one), (FanOut("No Name", one.list_items, one.work),)):
        with pytest.raises(ValueError, match="its fan-outs need distinct lower-case names"):
            stage("x", version=1, outputs=("a",), fan_outs=rounds)
    with pytest.raises(ValueError, match="`multihost` is for processes that do"):
        stage("x", version=1, outputs=("a",), fan_outs=(one,), multihost=True)


def test_an_order_of_an_attempt_that_is_over_is_not_followed(tmp_path):
    (tmp_path / "staging" / "key").mkdir(parents=True)
    order = WorkItem(str(tmp_path / "staging" / "key" / "request.json"), 1, "cut", "a", 1)
    with pytest.raises(StageCancelled, match="cut a: its attempt is over"):
        run_item(order)
    open_lease(order.staging, 2)
    with pytest.raises(StageCancelled):
        run_item(order)
    elsewhere = WorkItem("/no/such/store/staging/key/request.json", 1, "cut", "a", 1)
    with pytest.raises(ConfigError, match="must lie on a file system that all of them share"):
        run_item(elsewhere)


def test_a_host_with_other_code_is_refused(tmp_path):
    folder = tmp_path / "staging" / "key"
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps({"host": "head", "commit": "a" * 40}))
    open_lease(folder, 1)
    with pytest.raises(ConfigError, match=r"the run's host head has a{40}: install the same on every host"):
        run_item(WorkItem(str(folder / "request.json"), 1, "cut", "a", 1))


def test_ray_is_reached_through_a_flow_only(store):
    launch = LaunchConfig(engine="ray")
    with pytest.raises(ConfigError, match=r"launch\.engine 'ray' needs Prefect"):
        run_stage(pieces, section(), {}, RunContext("r1", str(store.root), launch=launch))
    with pytest.raises(ValueError, match=r"launch\.ray_address needs engine 'ray'"):
        LaunchConfig(ray_address="127.0.0.1:6379")
