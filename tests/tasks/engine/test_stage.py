"""One attempt at a stage, without Prefect: run, reused, refused, continued, forced."""

import json
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.operation import StageOperation
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.attempt_log import note_failure, note_giving_up
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.progress import subscribe
from nautile.tasks.engine.stage import RunContext, stage
from tests.support.samples.stage_store import damage, flip_byte
from tests.support.stages.stage_sums import local_stage, nothing, section, sums


@pytest.fixture
def context(store):
    return RunContext("r1", str(store.root), label="sums:a", config="toy")


def forced(context, run_id="r2"):
    return RunContext(run_id, context.store_root, force=True, label=context.label)


def runs(store):
    Catalog(store).ingest()
    return Catalog(store).query("SELECT * FROM attempts ORDER BY started, time")


def test_a_stage_runs_once_and_is_then_reused(store, context, updates):
    given = section(totals=True, digest="0" * 64)
    outputs = run_stage(sums, given, {}, replace(context, operation=StageOperation(niceness=2)))
    numbers, totals = store.get(outputs["numbers"]), store.get(outputs["totals"])
    assert numbers.manifest["files"]["0.txt"]["sha256"] == "0" * 64  # the stage's word, not read again
    assert sorted(path.name for path in numbers.path.glob("*.txt")) == ["0.txt", "1.txt", "2.txt"]
    assert (totals.path / "total.txt").read_text() == "3"
    made_in = numbers.manifest["facts"].pop("environment")
    assert made_in["machine"]
    assert made_in["libraries"]["python"] == platform.python_version()
    niceness = min(os.nice(0) + 2, 19)
    made = {"platforms": "cpu", "store": str(store.root)}
    assert numbers.manifest["facts"] == {"written": 3, "niceness": niceness, **made}
    assert totals.manifest["facts"] == {"seed": 5, "environment": made_in}
    assert numbers.execution == totals.execution
    assert numbers.manifest["config"] == given
    assert (numbers.manifest["run"], numbers.manifest["label"]) == ("r1", "sums:a")
    assert list((store.root / "staging").iterdir()) == []
    assert [update.state for update in updates if update.state != "running"] == ["publishing", "done"]
    last = updates[-1]
    assert (last.label, last.done, last.total, last.unit, last.note) == ("sums:a", 3, 3, "files", "adding")
    assert (last.share, last.metrics, last.outputs, last.key) == (1.0, {"value": 2.0}, outputs, numbers.key)

    assert run_stage(sums, given, {}, RunContext("r2", str(store.root))) == outputs
    assert updates[-1].state == "reused"
    first, second = runs(store)
    assert (first["state"], first["exit_code"], first["reused"], first["config"]) == ("done", 0, False, "toy")
    assert first["peak_bytes"] > 10**7
    assert first["ended"] >= first["started"]
    assert json.loads(first["outputs"]) == outputs
    assert (second["state"], second["reused"], second["run"], second["execution"]) == (
        "reused",
        True,
        "r2",
        first["execution"],
    )
    counts = Catalog(store).query("SELECT (SELECT count(*) FROM metrics) m, (SELECT count(*) FROM samples) s")
    assert counts == [{"m": 3, "s": 3}]


@pytest.mark.slow
def test_inputs_are_read_and_are_in_the_key(store, context):
    result, two = run_stage(sums, section(3), {}, context), run_stage(sums, section(4), {}, context)
    outputs = [run_stage(sums, section(1), {"x": base["numbers"]}, context)["numbers"] for base in (result, two)]
    assert [(store.get(name).path / "0.txt").read_text() for name in outputs] == ["3", "6"]
    full = {"x": store.get(result["numbers"]).full_id}
    assert store.get(outputs[0]).key == sums.key(section(1), full)
    assert run_stage(sums, section(1), full, context)["numbers"] == outputs[0]
    assert len(Catalog(store).lineage(outputs[0])) == 2
    with pytest.raises(ConfigError, match="no artifact 'numbers/0123'"):
        run_stage(sums, section(1), {"x": "numbers/0123"}, context)


@pytest.mark.slow
def test_bad_input_is_one_message_and_leaves_the_store_valid(store, context, updates):
    with pytest.raises(ConfigError, match=r"^sums.count: three is a crowd$"):
        run_stage(sums, section(faults={"config": 1}), {}, context)
    with pytest.raises(ConfigError, match=r"^stage sums: `sums.count`: "):
        run_stage(sums, {"sums": {"count": "many"}}, {}, context)
    with pytest.raises(ConfigError, match=r"the section of stage sums has no `sums`; it has \['seeds'\]"):
        run_stage(sums, {"seeds": {"data": 1}}, {}, context)
    assert updates[-1].state == "failed"
    assert "has no `sums`" in updates[-1].error
    assert {(run["state"], run["exit_code"]) for run in runs(store)} == {("failed", 2)}
    assert store.list() == []


@pytest.mark.slow
def test_each_failure_is_named_with_the_log_and_the_next_attempt_continues(store, context):
    full = r"the store .* cannot be written \(No space left on device at .*{}\)"
    failures = {
        "retry": (Retryable, r"127.0.0.1:9 does not answer"),
        "crash": (
            StageCrash,
            r"(?s)exit code 1: by zero\. The log is .*log\.txt; its last lines:.*ZeroDivisionError: by zero",
        ),
        "full": (ConfigError, full.format("big.bin")),
        "full_replies": (ConfigError, full.format("replies/m/a.jsonl")),
        "unreadable": (StageCrash, r"exit code 1: .*Permission denied: '/root/private.txt'"),
        "killed": (StageCrash, r"was ended by signal 9 \(SIGKILL: out of memory\?\)"),
        "exit": (StageCrash, r"ended with exit code 0"),
        "unknown": (StageCrash, r"sums wrote \['surprise'\]; its outputs are \['numbers', 'totals'\]"),
        "link": (StageCrash, r"output numbers cannot be published: .*link: an artifact holds plain files only"),
    }
    config, began = section(faults=dict.fromkeys(failures, 1)), set()  # each attempt meets the next
    for fault, (error, message) in failures.items():
        with pytest.raises(error, match=message):
            run_stage(sums, config, {}, context)
        (staging,) = (store.root / "staging").iterdir()
        began.add(json.loads((staging / "request.json").read_text())["began"])
        if left := {"unknown": "surprise/a.txt", "link": "numbers/link"}.get(fault):
            (staging / "output" / left).unlink()
    assert len(began) == 1, "all attempts know when their execution began"
    outputs = store.get(run_stage(sums, config, {}, context)["numbers"])
    assert store.verify(outputs) == []
    result = runs(store)
    assert [run["state"] for run in result] == ["failed"] * len(failures) + ["done"]
    assert [run["attempt"] for run in result] == list(range(1, len(failures) + 2))
    assert [run["exit_code"] for run in result][:3] == [75, 1, 2]
    assert {run["execution"] for run in result} == {outputs.execution}


@pytest.mark.slow
def test_a_stage_must_write_its_outputs(store, context):
    with pytest.raises(StageCrash, match=r"stage nothing wrote nothing for \['numbers'\]"):
        run_stage(nothing, {}, {}, context)
    with pytest.raises(ConfigError, match="is not a stage: @stage must decorate a module-level function"):
        run_stage(local_stage(), {}, {}, context)
    with pytest.raises(ValueError, match="'Bad Name' is not a lower-case name"):
        stage("x", version=1, outputs=("Bad Name",))
    with pytest.raises(ValueError, match="`optional` must name some of them"):
        stage("x", version=1, outputs=("a",), optional=("b",))


def test_a_store_that_cannot_be_written_is_refused_before_anything(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run_stage(sums, section(), {}, RunContext("r1", str(tmp_path / "file")))


@pytest.mark.slow
def test_a_damaged_artifact_is_refused_by_name_and_replaced_by_force(store, context):
    outputs = run_stage(sums, section(), {}, context)
    flip_byte(store.get(outputs["numbers"]).path / "1.txt")
    message = (
        rf"{outputs['numbers']} is damaged: 1.txt \(its digest differs\)\. .*`nautile run CONFIG --only sums:a --force`"
    )
    with pytest.raises(ConfigError, match=message):
        run_stage(sums, section(), {}, context)
    with pytest.raises(ConfigError, match=message):
        run_stage(sums, section(7), {"x": outputs["numbers"]}, context)
    again = run_stage(sums, section(), {}, forced(context))
    assert again == outputs
    assert damage(store) == {outputs["numbers"]: [], f"{outputs['numbers']}.1": ["1.txt (its digest differs)"]}
    assert run_stage(sums, section(), {}, context) == outputs
    assert run_stage(sums, section(7), {"x": outputs["numbers"]}, context)
    flip_byte(store.get(outputs["numbers"]).path / "manifest.json", 50)
    with pytest.raises(ConfigError, match=r"damaged: manifest.json\. .*`nautile run CONFIG --only sums:a --force`"):
        run_stage(sums, section(), {}, context)
    assert run_stage(sums, section(), {}, forced(context, "r3")) == outputs
    assert store.verify(store.get(outputs["numbers"])) == []


@pytest.mark.slow
def test_force_runs_again_and_keeps_the_old_artifact(store, context):
    outputs = run_stage(sums, section(totals=True), {}, context)
    old = store.get(outputs["numbers"])
    assert run_stage(sums, section(totals=True), {}, forced(context)) == outputs
    new = store.get(outputs["numbers"])
    assert new.execution != old.execution == store.get(f"{outputs['numbers']}.1").execution
    assert new.manifest["digest"] == old.manifest["digest"]
    # A retry within the same run finds its own work and takes it.
    assert run_stage(sums, section(totals=True), {}, forced(context)) == outputs
    assert store.get(outputs["numbers"]).execution == new.execution
    Catalog(store).ingest()
    steps = Catalog(store).query("SELECT execution, count(*) AS n FROM metrics GROUP BY 1")
    assert {row["execution"]: row["n"] for row in steps} == {old.execution: 3, new.execution: 3}
    # An output that is missing is written again with its siblings.
    store.discard(store.get(outputs["totals"]).path)
    assert run_stage(sums, section(totals=True), {}, context) == outputs
    assert store.get(outputs["numbers"]).execution == store.get(outputs["totals"]).execution != new.execution
    assert store.get(f"{outputs['numbers']}.2").execution == new.execution


@pytest.mark.slow
def test_force_drops_unforced_work_but_continues_its_own(store, context):
    config = section(faults={"retry": 2})
    with pytest.raises(Retryable):
        run_stage(sums, config, {}, context)
    with pytest.raises(Retryable):
        run_stage(sums, config, {}, forced(context))
    assert [run["attempt"] for run in runs(store)] == [1, 1]
    with pytest.raises(Retryable):
        run_stage(sums, config, {}, forced(context, "r3"))
    assert [run["attempt"] for run in runs(store)] == [1, 1, 2]
    assert len({run["execution"] for run in runs(store)}) == 2


@pytest.mark.slow
def test_work_starts_afresh_when_an_input_was_replaced_by_other_bytes(store, context):
    base = run_stage(sums, section(2), {}, context)
    config = section(1, faults={"retry": 1})
    with pytest.raises(Retryable):
        run_stage(sums, config, {"x": base["numbers"]}, context)
    live = store.get(base["numbers"])
    source = store.root / "staging/other"
    source.mkdir()
    (source / "0.txt").write_text("41")
    fields = {name: live.manifest[name] for name in ("stage", "version", "config", "facts")}
    store.publish("numbers", live.key, source, inputs={}, supersede=True, **fields)
    with pytest.raises(Retryable):
        run_stage(sums, config, {"x": base["numbers"]}, context)
    outputs = run_stage(sums, config, {"x": base["numbers"]}, context)
    assert (store.get(outputs["numbers"]).path / "0.txt").read_text() == "41"
    assert [run["attempt"] for run in runs(store)][1:] == [1, 1, 2]


@pytest.mark.slow
def test_a_crash_between_two_publications_is_finished_without_working_again(store, context, monkeypatch):
    publish, kinds = Store.publish, []

    def killed_after_the_first(self, kind, *arguments, **fields):
        if kinds:
            raise KeyboardInterrupt
        kinds.append(kind)
        return publish(self, kind, *arguments, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "publish", killed_after_the_first)
        with pytest.raises(KeyboardInterrupt):
            run_stage(sums, section(totals=True), {}, context)
    assert [artifact.kind for artifact in store.list()] == kinds == ["numbers"]
    outputs = run_stage(sums, section(totals=True), {}, context)
    numbers, totals = store.get(outputs["numbers"]), store.get(outputs["totals"])
    assert numbers.execution == totals.execution
    assert numbers.manifest["facts"]["written"] == 3
    assert [run["exit_code"] for run in runs(store)] == [0, None]  # the second needed no process
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.slow
def test_a_forced_run_cut_short_between_its_two_renames_is_finished_by_any_run(store, context, monkeypatch):
    outputs = run_stage(sums, section(totals=True), {}, context)
    old = store.get(outputs["numbers"]).execution
    supersede = Store._supersede

    def killed_after(self, folder):
        supersede(self, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_supersede", killed_after)
        with pytest.raises(KeyboardInterrupt):
            run_stage(sums, section(totals=True), {}, forced(context))
    assert [artifact.kind for artifact in store.list()] == ["totals"]
    assert run_stage(sums, section(totals=True), {}, context) == outputs
    new = store.get(outputs["numbers"])
    assert new.execution == store.get(outputs["totals"]).execution != old
    assert {store.get(f"{name}.1").execution for name in outputs.values()} == {old}


def test_two_runs_of_one_key_do_the_work_once(store, context, updates, tmp_path):
    gate = tmp_path / "gate"
    gate.mkdir()
    config, outputs = section(gate=str(gate)), []
    threads = [threading.Thread(target=lambda: outputs.append(run_stage(sums, config, {}, context))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not any(update.state == "waiting" for update in list(updates)) and any(t.is_alive() for t in threads):
        pass
    (gate / "open").touch()
    for thread in threads:
        thread.join()
    assert outputs[0] == outputs[1]
    assert sorted(run["state"] for run in runs(store)) == ["done", "reused"]


@pytest.mark.slow
def test_neither_a_damaged_catalog_nor_a_listener_that_fails_fails_a_stage(store, context, caplog):
    store.prepare()
    store.catalog_path.write_text("this is no database")
    unsubscribe = subscribe(lambda update: 1 / 0)
    try:
        outputs = run_stage(sums, section(), {}, context)
    finally:
        unsubscribe()
    assert "a progress listener failed on sums:a" in caplog.text
    assert Catalog(store).rebuild()["metrics"] == 3
    assert Catalog(store).lineage(outputs["numbers"])


@pytest.mark.slow
def test_what_failed_for_a_run_of_a_sweep_is_not_tried_by_each_other_one(store, context):
    given, staging = section(faults={"crash": 9}), store.root / "staging"
    first = replace(context, sweep="s1")
    with store.run_lock("r1").for_life(), ThreadPoolExecutor(1) as pool:
        with pytest.raises(StageCrash):
            run_stage(sums, given, {}, first)
        (key,) = (path.name for path in staging.iterdir())
        waits = threading.Event()
        unsubscribe = subscribe(lambda update: update.state == "waiting" and waits.set())
        try:  # while the first may try again
            second = pool.submit(run_stage, sums, given, {}, replace(first, run_id="r2"))
            assert waits.wait(60)
        finally:
            unsubscribe()
        with pytest.raises(StageCrash):
            run_stage(sums, given, {}, first)
        note_giving_up(staging / key, replace(first, run_id="r2"))  # which has no failure of its own
        assert not second.done()
        note_giving_up(staging / key, first)
        with pytest.raises(
            ConfigError, match=r"failed in run r1 of this sweep \(.*by zero.*\), and is not tried again"
        ):
            second.result()
    assert len((staging / key / "scratch" / "met-crash").read_text()) == 2
    with pytest.raises(StageCrash):
        run_stage(sums, given, {}, replace(first, run_id="r2", sweep="s2"))
    note_failure(staging / key, replace(first, run_id="killed"), "it was killed after this")
    with pytest.raises(StageCrash):
        run_stage(sums, given, {}, first)
