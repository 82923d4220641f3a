"""A stage run plainly, without Prefect: made, reused, refused, retried, forced."""

import json
import threading

import pytest

from common.errors import ConfigError, Retryable
from store.artifacts import Store
from store.catalog import Catalog
from tasks.engine.attempt import run_stage
from tasks.engine.errors import StageCrash
from tasks.engine.progress import subscribe
from tasks.engine.stage import RunContext, stage
from tests.support.stage_store import damage, flip_byte
from tests.support.stage_sums import local_stage, nothing, section, sums


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def context(store):
    return RunContext("r1", str(store.root), label="sums:a", config="toy")


@pytest.fixture
def updates():
    heard = []
    unsubscribe = subscribe(heard.append)
    yield heard
    unsubscribe()


def forced(context, run_id="r2"):
    return RunContext(run_id, context.store_root, force=True, label=context.label)


def runs(store):
    Catalog(store).ingest()
    return Catalog(store).query("SELECT * FROM runs ORDER BY started, time")


def test_a_stage_is_made_once_and_then_reused(store, context, updates):
    made = run_stage(sums, section(totals=True), {}, context)
    numbers, totals = store.get(made["numbers"]), store.get(made["totals"])
    assert sorted(path.name for path in numbers.path.glob("*.txt")) == ["0.txt", "1.txt", "2.txt"]
    assert (totals.path / "total.txt").read_text() == "3"
    assert numbers.manifest["facts"] == {"made": 3, "platforms": "cpu", "store": str(store.root)}
    assert totals.manifest["facts"] == {"seed": 5}
    assert numbers.execution == totals.execution
    assert numbers.manifest["config"] == section(totals=True)
    assert (numbers.manifest["run"], numbers.manifest["label"]) == ("r1", "sums:a")
    assert list((store.root / "staging").iterdir()) == []
    assert [update.state for update in updates if update.state != "running"] == ["publishing", "done"]
    last = updates[-1]
    assert (last.label, last.done, last.total, last.unit, last.note) == ("sums:a", 3, 3, "files", "adding")
    assert (last.share, last.metrics, last.outputs, last.key) == (1.0, {"value": 2.0}, made, numbers.key)

    assert run_stage(sums, section(totals=True), {}, RunContext("r2", str(store.root))) == made
    assert updates[-1].state == "reused"
    first, second = runs(store)
    assert (first["state"], first["exit_code"], first["reused"], first["config"]) == ("done", 0, False, "toy")
    assert first["peak_bytes"] > 10**7
    assert first["ended"] >= first["started"]
    assert json.loads(first["outputs"]) == made
    assert (second["state"], second["reused"], second["run"], second["execution"]) == (
        "reused",
        True,
        "r2",
        first["execution"],
    )
    counts = Catalog(store).query("SELECT (SELECT count(*) FROM metrics) m, (SELECT count(*) FROM samples) s")
    assert counts == [{"m": 3, "s": 3}]


def test_inputs_are_read_and_are_in_the_key(store, context):
    one, two = run_stage(sums, section(3), {}, context), run_stage(sums, section(4), {}, context)
    made = [run_stage(sums, section(1), {"x": given["numbers"]}, context)["numbers"] for given in (one, two)]
    assert [(store.get(name).path / "0.txt").read_text() for name in made] == ["3", "6"]
    full = {"x": store.get(one["numbers"]).full_id}
    assert store.get(made[0]).key == sums.key(section(1), full)
    assert run_stage(sums, section(1), full, context)["numbers"] == made[0]
    assert len(Catalog(store).lineage(made[0])) == 2
    with pytest.raises(ConfigError, match="no artifact 'numbers/0123'"):
        run_stage(sums, section(1), {"x": "numbers/0123"}, context)


def test_bad_input_is_one_message_and_leaves_the_store_valid(store, context, updates):
    with pytest.raises(ConfigError, match=r"^sums.count: three is a crowd$"):
        run_stage(sums, section(faults={"config": 1}), {}, context)
    with pytest.raises(ConfigError, match=r"^stage sums: `sums.count`: "):
        run_stage(sums, {"sums": {"count": "many"}}, {}, context)
    with pytest.raises(ConfigError, match=r"the section of stage sums has no `sums`; it has \['seed'\]"):
        run_stage(sums, {"seed": 1}, {}, context)
    assert updates[-1].state == "failed"
    assert "has no `sums`" in updates[-1].error
    assert {(run["state"], run["exit_code"]) for run in runs(store)} == {("failed", 2)}
    assert store.list() == []


def test_a_failure_worth_a_retry_goes_on_where_it_was(store, context):
    asked = section(4, faults={"retry": 1})
    with pytest.raises(Retryable, match=r"127.0.0.1:9 does not answer"):
        run_stage(sums, asked, {}, context)
    made = store.get(run_stage(sums, asked, {}, context)["numbers"])
    found = runs(store)
    assert [(run["state"], run["attempt"], run["exit_code"]) for run in found] == [("failed", 1, 75), ("done", 2, 0)]
    assert {run["execution"] for run in found} == {made.execution}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("crash", r"(?s)exit code 1: by zero\. The log is .*log\.txt; its last lines:.*ZeroDivisionError: by zero"),
        ("killed", r"was ended by signal 9 \(SIGKILL: out of memory\?\)"),
        ("exit", r"ended with exit code 0"),
        ("unreadable", r"exit code 1: .*Permission denied: '/root/private.txt'"),
        ("unknown", r"sums wrote \['surprise'\]; its outputs are \['numbers', 'totals'\]"),
        ("link", r"output numbers cannot be published: .*link: an artifact holds plain files only"),
    ],
)
def test_a_crash_quotes_the_log_and_can_be_gone_on_from(store, context, fault, told):
    with pytest.raises(StageCrash, match=told):
        run_stage(sums, section(faults={fault: 1}), {}, context)
    assert runs(store)[0]["state"] == "failed"
    (staging,) = (store.root / "staging").iterdir()
    for name in ("surprise/a.txt", "numbers/link"):
        (staging / "output" / name).unlink(missing_ok=True)
    made = run_stage(sums, section(faults={fault: 1}), {}, context)
    assert store.verify(store.get(made["numbers"])) == []


def test_a_full_disk_is_the_operator_s_to_mend(store, context):
    with pytest.raises(ConfigError, match=r"the store .* cannot be written \(No space left on device at .*big.bin\)"):
        run_stage(sums, section(faults={"full": 1}), {}, context)


def test_a_stage_must_write_what_it_says(store, context):
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


def test_a_damaged_artifact_is_refused_by_name_and_made_anew_by_force(store, context):
    made = run_stage(sums, section(), {}, context)
    flip_byte(store.get(made["numbers"]).path / "1.txt")
    told = rf"{made['numbers']} is damaged: 1.txt \(its digest differs\)\. .*`nautile run CONFIG --only sums:a --force`"
    with pytest.raises(ConfigError, match=told):
        run_stage(sums, section(), {}, context)
    with pytest.raises(ConfigError, match=told):
        run_stage(sums, section(7), {"x": made["numbers"]}, context)
    again = run_stage(sums, section(), {}, forced(context))
    assert again == made
    assert damage(store) == {made["numbers"]: [], f"{made['numbers']}.1": ["1.txt (its digest differs)"]}
    assert run_stage(sums, section(), {}, context) == made
    assert run_stage(sums, section(7), {"x": made["numbers"]}, context)


def test_a_damaged_manifest_is_refused_and_made_anew_by_force(store, context):
    made = run_stage(sums, section(), {}, context)
    flip_byte(store.get(made["numbers"]).path / "manifest.json", 50)
    with pytest.raises(ConfigError, match=r"damaged: manifest.json\. .*`nautile run CONFIG --only sums:a --force`"):
        run_stage(sums, section(), {}, context)
    assert run_stage(sums, section(), {}, forced(context)) == made
    assert store.verify(store.get(made["numbers"])) == []


def test_force_makes_anew_and_keeps_the_old(store, context):
    made = run_stage(sums, section(totals=True), {}, context)
    old = store.get(made["numbers"])
    assert run_stage(sums, section(totals=True), {}, forced(context)) == made
    new = store.get(made["numbers"])
    assert new.execution != old.execution == store.get(f"{made['numbers']}.1").execution
    assert new.manifest["digest"] == old.manifest["digest"]
    # A retry within the same run finds its own work and takes it.
    assert run_stage(sums, section(totals=True), {}, forced(context)) == made
    assert store.get(made["numbers"]).execution == new.execution
    Catalog(store).ingest()
    steps = Catalog(store).query("SELECT execution, count(*) AS n FROM metrics GROUP BY 1")
    assert {row["execution"]: row["n"] for row in steps} == {old.execution: 3, new.execution: 3}


def test_force_drops_unforced_work_but_goes_on_with_its_own(store, context):
    asked = section(faults={"retry": 2})
    with pytest.raises(Retryable):
        run_stage(sums, asked, {}, context)
    with pytest.raises(Retryable):
        run_stage(sums, asked, {}, forced(context))
    assert [run["attempt"] for run in runs(store)] == [1, 1]
    with pytest.raises(Retryable):
        run_stage(sums, asked, {}, forced(context, "r3"))
    assert [run["attempt"] for run in runs(store)] == [1, 1, 2]
    assert len({run["execution"] for run in runs(store)}) == 2


def test_work_on_an_input_that_was_made_anew_with_other_bytes_begins_anew(store, context):
    given = run_stage(sums, section(2), {}, context)
    asked = section(1, faults={"retry": 1})
    with pytest.raises(Retryable):
        run_stage(sums, asked, {"x": given["numbers"]}, context)
    live = store.get(given["numbers"])
    source = store.root / "staging/other"
    source.mkdir()
    (source / "0.txt").write_text("41")
    told = {name: live.manifest[name] for name in ("stage", "version", "config", "facts")}
    store.publish("numbers", live.key, source, inputs={}, supersede=True, **told)
    with pytest.raises(Retryable):
        run_stage(sums, asked, {"x": given["numbers"]}, context)
    made = run_stage(sums, asked, {"x": given["numbers"]}, context)
    assert (store.get(made["numbers"]).path / "0.txt").read_text() == "41"
    assert [run["attempt"] for run in runs(store)][1:] == [1, 1, 2]


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
    made = run_stage(sums, section(totals=True), {}, context)
    numbers, totals = store.get(made["numbers"]), store.get(made["totals"])
    assert numbers.execution == totals.execution
    assert numbers.manifest["facts"]["made"] == 3
    assert [run["exit_code"] for run in runs(store)] == [0, None]  # the second needed no process
    assert list((store.root / "staging").iterdir()) == []


def test_a_forced_run_cut_short_between_its_two_renames_is_finished_by_any_run(store, context, monkeypatch):
    made = run_stage(sums, section(totals=True), {}, context)
    old = store.get(made["numbers"]).execution
    supersede = Store._supersede

    def killed_after(self, folder):
        supersede(self, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_supersede", killed_after)
        with pytest.raises(KeyboardInterrupt):
            run_stage(sums, section(totals=True), {}, forced(context))
    assert [artifact.kind for artifact in store.list()] == ["totals"]
    assert run_stage(sums, section(totals=True), {}, context) == made
    new = store.get(made["numbers"])
    assert new.execution == store.get(made["totals"]).execution != old
    assert {store.get(f"{name}.1").execution for name in made.values()} == {old}


def test_a_kind_that_is_missing_has_its_siblings_made_anew_with_it(store, context):
    made = run_stage(sums, section(totals=True), {}, context)
    store.discard(store.get(made["totals"]).path)
    assert run_stage(sums, section(totals=True), {}, context) == made
    assert store.get(made["numbers"]).execution == store.get(made["totals"]).execution
    assert store.get(f"{made['numbers']}.1")


def test_two_runs_of_one_key_work_once(store, context, updates, tmp_path):
    gate = tmp_path / "gate"
    gate.mkdir()
    asked, made = section(gate=str(gate)), []
    threads = [threading.Thread(target=lambda: made.append(run_stage(sums, asked, {}, context))) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not any(update.state == "waiting" for update in list(updates)) and any(t.is_alive() for t in threads):
        pass
    (gate / "open").touch()
    for thread in threads:
        thread.join()
    assert made[0] == made[1]
    assert sorted(run["state"] for run in runs(store)) == ["done", "reused"]


def test_a_catalog_that_cannot_be_used_fails_no_stage(store, context):
    store.prepare()
    store.catalog_path.write_text("this is no database")
    made = run_stage(sums, section(), {}, context)
    assert Catalog(store).rebuild()["metrics"] == 3
    assert Catalog(store).lineage(made["numbers"])


def test_a_listener_that_fails_fails_no_stage(store, context, caplog):
    unsubscribe = subscribe(lambda update: 1 / 0)
    try:
        assert run_stage(sums, section(), {}, context)
    finally:
        unsubscribe()
    assert "a progress listener failed on sums:a" in caplog.text
