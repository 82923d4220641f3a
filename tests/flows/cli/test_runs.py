"""`nautile runs` and `nautile status` over a store with event files of other machines and versions."""

import json

import pytest

from nautile.common.files import write_json
from nautile.flows.cli import runs
from nautile.store.catalog import Catalog
from nautile.store.manifest import host, now
from nautile.tasks.engine.attempt_log import write_attempt_row, write_row
from tests.support.samples.foreign_events import OF_ANOTHER_FORM, PLAN, event_of, write_events
from tests.support.samples.stage_store import key_of, published


def good_run(store):
    steps = [{"label": "align", "stage": "align", "key": key_of("align"), "after": []}]
    plan = {"id": "good-1", "run": "good0000-1111", "config": "toy", "name": "good", "state": "failed", "steps": steps}
    write_row(store, "plan", plan | {"started": now(), "resume": "nautile run toy", "settings": {}, "changes": []})


def test_one_event_of_another_form_hides_no_run_and_is_counted(store, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    good_run(store)
    forms = [PLAN | part | {"id": str(number)} for number, part in enumerate(OF_ANOTHER_FORM)]
    write_events(store, *(event_of("plan", **fields) | {"id": fields["id"]} for fields in forms))
    code, out, err = command_line("runs")
    assert (code, [line.split()[1] for line in out.splitlines()[1:]]) == (0, ["good"])
    assert f"{len(forms)} events are left out" in err
    assert "`nautile store verify`" in err
    code, out, err = command_line("status", "good")
    assert (code, "run good0000 (good): failed" in out, "left out" in err) == (0, True, True)
    code, out, _ = command_line("store", "verify")
    assert f"events/other.jsonl: {len(forms)} events are left out" in out


def test_a_plan_that_says_little_and_its_attempts_are_shown(store):
    """Almost every field of an event may be missing."""
    event = event_of("plan", id="p", run="r2", state="running", host=host(), steps=[{"label": "align"}, {"label": "b"}])
    attempt = event_of("run", id="a", run="r2", state="running", label="align", host=host())
    write_events(store, event, attempt, event_of("run", id="b", run="r2", state="failed", label="b") | {"id": "b"})
    with store.run_lock("r2").for_life():
        [row], _ = runs.list_runs(store, 9)
        assert (row["state"], row["steps"]) == ("running", 2)
        run = runs.run_unless_config(store, "r2")
    assert [(step.label, step.state) for step in run.steps] == [("align", "running"), ("b", "failed")]
    runs.run_view(runs.step_rows(run))
    runs.runs_table([row])


@pytest.mark.parametrize(
    "live", [[1], {"done": "3", "total": [4], "unit": 5, "note": {"a": 1}, "metrics": [1]}], ids=str
)
def test_progress_of_another_form_is_no_progress(store, live):
    write_events(store, event_of("plan", id="p", run="r2", state="running", host=host(), steps=[{"label": "align"}]))
    row = {"id": "a", "run": "r2", "stage": "align", "label": "align", "key": key_of("align"), "execution": "e"}
    write_attempt_row(store, row | {"state": "running", "attempt": 1, "started": now(), "host": host()})
    write_json(store.staging(key_of("align")) / "live.json", live)
    with store.run_lock("r2").for_life():
        (step,) = runs.run_unless_config(store, "r2").steps
    assert (step.state, step.done, step.total, step.note, step.metrics) == ("running", None, None, "", {})


def test_the_cost_of_one_call_of_another_form_hides_no_other(store):
    good_run(store)
    row = {"id": "a", "run": "good0000-1111", "stage": "align", "label": "align", "key": key_of("align")}
    write_attempt_row(store, row | {"execution": "e", "state": "failed", "attempt": 1, "started": now()})
    calls = [{"dollars": 0.5, "unknown_dollars": "much"}, {"dollars": 0.25}, {"dollars": -9.0}]
    write_events(
        store, *(event_of("call", **fields) | {"id": str(n), "execution": "e"} for n, fields in enumerate(calls))
    )
    run = runs.run_unless_config(store, "good")
    assert (run.steps[0].row["dollars"], run.steps[0].row["calls"]) == (0.75, 2)
    assert Catalog(store).left_out() == {"events/other.jsonl": 1}


def test_a_list_that_is_cut_off_says_how_many_there_are(store, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    for number in range(5):
        write_row(store, "plan", PLAN | {"id": f"p{number}", "run": f"r{number}", "started": now()})
        published(store, "tokens", f"t{number}")
    assert "2 of 5 runs: `nautile runs --most 5` lists all" in command_line("runs", "--most", "2")[1]
    assert "of 5 runs" not in command_line("runs", "--most", "5")[1]
    assert len(json.loads(command_line("runs", "--most", "2", "--json")[1])) == 2
    out = command_line("artifacts", "--most", "2")[1]
    assert "the last 2 of 5 artifacts: `nautile artifacts --most 5` lists all" in out
    assert [key_of(f"t{number}")[:12] in out for number in range(5)] == [False] * 3 + [True] * 2
    assert "of 5 artifacts" not in command_line("artifacts")[1]
    assert len(json.loads(command_line("artifacts", "--json")[1])) == 5


def test_lists_are_searched_and_sorted(store, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    for number, name in enumerate(("beta", "Alpha", "gamma")):
        change = {"field": "seed", "before": 0, "after": 70 + number}
        row = PLAN | {"id": f"p{number}", "run": f"r{number}", "name": name, "changes": [change]}
        write_row(store, "plan", row | {"started": now()})
        published(store, "tokens", name, {"a.txt": "x" * (9 - number)}, run=f"r{number}")
    write_row(store, "note", {"id": "r2", "text": "the one for the paper", "tags": []})

    def listed(*words):
        return [row.get("name", row["id"]) for row in json.loads(command_line(*words, "--json")[1])]

    assert listed("runs", "--sort", "name") == ["Alpha", "beta", "gamma"]
    for text, found in (("ALPH", "Alpha"), ("r0", "beta"), ("71", "Alpha"), ("paper", "gamma")):
        assert listed("runs", "--match", text) == [found]
    assert listed("runs", "--match", "Paper gamma") == ["gamma"]
    assert listed("runs", "--sort", "oldest") == ["beta", "Alpha", "gamma"]
    assert listed("runs", "--match", "100%") == []
    code, _, err = command_line("runs", "--match", "100%")
    assert (code, "no run has '100%'" in err) == (2, True)
    assert (
        "1 of 3 runs: `nautile runs --most 3 --match a --sort name`"
        in command_line("runs", "--match", "a", "--sort", "name", "--limit", "1")[1]
    )
    ids = [f"tokens/{key_of(name)[:12]}" for name in ("beta", "Alpha", "gamma")]
    assert listed("artifacts", "--sort", "bytes") == ids[::-1]
    assert listed("artifacts", "tokens", "--match", "gamma") == listed("artifacts", "--match", "r2") == ids[2:]
    for command, option in (("runs", "--sort"), ("artifacts", "--sort"), ("runs", "--state")):
        code, _, err = command_line(command, option, "nam")
        assert (code, err.startswith(f"{option} nam: must be")) == (2, True)


def test_runs_are_found_by_the_state_that_is_shown(store, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    for name, state in (("ended", "done"), ("killed", "running")):  # its process, which has recorded no end, is gone
        write_row(
            store,
            "plan",
            PLAN | {"id": name, "run": name, "name": name, "state": state, "started": now(), "host": host()},
        )

    def listed(*words):
        return [row["name"] for row in json.loads(command_line("runs", *words, "--json")[1])]

    assert listed("--state", "interrupted") == listed("--match", "interrupted") == ["killed"]
    assert listed("--state", "running") == listed("--match", "running") == []
    assert listed("--state", "done") == ["ended"]
    code, _, err = command_line("runs", "--state", "failed")
    assert (code, err.strip()) == (2, "no run is failed")


@pytest.mark.parametrize(("state", "resume"), [("done", None), ("failed", "nautile run toy")])
def test_a_run_that_is_done_has_no_command_that_resumes_it(store, state, resume):
    write_row(store, "plan", PLAN | {"state": state})
    [row], _ = runs.list_runs(store, 9)
    assert row["resume"] == resume
    assert runs.run_row(runs.run_unless_config(store, "r2"))["resume"] == resume
