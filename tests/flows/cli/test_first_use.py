"""What a first user met who operated a run from the terminal: each test bears the number it has in that user's list.

Others of the list are tested where their code is: tables and paths that break (B16, B17) in test_tables.py, the form
and the names of deployments (B13, B14) in tests/flows/test_stage_flows.py and operate/test_services.py, Prefect's own
lists (B11) in operate/test_deployments.py, `chat`, `serve` and `logs` (B18, B19, B21) in the tests of those commands.
"""

import json
import os
from io import StringIO

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.configs.keys import changed_settings
from nautile.configs.load import load
from nautile.flows.cli import inspect
from nautile.flows.cli.document import OUTPUTS
from nautile.flows.cli.runs import list_runs, newest_run, run_unless_config, run_view, runs_table, step_rows
from nautile.flows.cli.tables import lineage_tree, status_table
from nautile.flows.dag import build_dag
from nautile.flows.operate.services import Service
from nautile.flows.plans import recorded
from nautile.flows.selection import Selection, prepare_run
from nautile.store.artifacts import Store
from nautile.store.manifest import host, now
from tests.flows.test_run_state import at, attempt, plan
from tests.support.stages.toy_dag import toy_dag
from tests.support.stages.toy_stages import TOY

QUESTION = "Stage reason of toy asks for approval before it begins. Expected cost: 3 steps of 64 completions."


def printed(view, width=100):
    """What a terminal shows."""
    out = StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(view, crop=False)
    return out.getvalue()


def shown(store, name=None):
    """What `nautile status [NAME]` prints of a run; its rows are those that are documented."""
    run = run_unless_config(store, name)
    assert run is not None
    rows = step_rows(run)
    TypeAdapter(OUTPUTS["status RUN"]).validate_json(json.dumps(rows), strict=True)
    return printed(run_view(rows))


def ask(store, run, label):
    """A note of a run that waits for an answer, in this process, which holds the run's lock from now on."""
    store.run_lock(run).acquire()
    note = {"run": run, "label": label, "message": QUESTION, "since": now(), "host": host(), "pid": os.getpid()}
    store.questions.mkdir(exist_ok=True)
    write_json(store.questions / f"{run}.json", note | {"api": None})


@pytest.mark.usefixtures("toy_stages")
def test_a1_a_run_that_waits_says_so_with_its_question_cost_and_command(store, toy):
    steps = [{"label": s.label, "stage": s.stage.name, "key": s.key, "after": []} for s in build_dag(toy, toy_dag)]
    plan(store, run="6a5f1430-1", steps=steps)
    attempt(store, "align", "done", 0, run="6a5f1430-1")
    ask(store, "6a5f1430-1", "reason")
    text = shown(store)
    assert text.startswith("run 6a5f1430 (toy): waiting\n")
    assert f"{QUESTION}\nAnswer with: nautile approve 6a5f1430" in " ".join(text.split(" ")).replace("\n\n", "\n")
    # The configuration's own table too, where the step is only known by its key.
    rows = {row["label"]: row for row in inspect.status(store, toy)}
    assert (rows["reason"]["state"], rows["self_distill"]["state"]) == ("waiting", "not made")
    assert "nautile approve 6a5f1430" in printed(status_table(list(rows.values())), 200)


def test_a3_before_the_first_run_nothing_is_computed(store, monkeypatch, command_line):
    """All steps of the default configuration were shown as not made, after seconds of imports while runs started."""
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    monkeypatch.setattr(
        "nautile.flows.cli.inspect.status", lambda *_: pytest.fail("the steps of a configuration are asked for")
    )
    code, out, _ = command_line("status")
    assert code == 0
    assert " ".join(out.split()).startswith("no run in ")
    assert "nautile run" in out
    code, out, _ = command_line("status", "--json")
    assert (code, json.loads(out)) == (0, [])


def test_a3_without_a_name_the_live_run_is_shown_else_the_newest_and_any_by_its_first_digits(store, tmp_path):
    assert newest_run(store) is None
    plan(store, run="aa11", state="done", started=at(-30), name="first")
    with store.run_lock("aa11").for_life():
        pass
    plan(store, run="bb22", started=at(-20), name="of a form")
    plan(store, run="bb33", state="failed", started=at(-10))
    assert "run bb33 (toy): failed" in shown(store)
    with store.run_lock("bb22").for_life():
        assert "run bb22 (of a form): running" in shown(store)
    assert "run aa11 (first): done" in shown(store, "aa")
    with pytest.raises(ConfigError, match=r"'bb' matches more than one run \(bb33, bb22\): give"):
        run_unless_config(store, "bb")
    with pytest.raises(
        ConfigError, match=r"no configuration 'locl'.*did you mean.*local.*the newest are bb33, bb22, aa11"
    ):
        run_unless_config(store, "locl")
    assert run_unless_config(store, "local") is None
    assert run_unless_config(store, str(TOY)) is None


def test_a7_calls_are_counted_alike_everywhere_and_cached_ones_named(made):
    store, outputs = made
    documents = outputs["distill"]["documents"]
    [(calls, cached)] = inspect.sql(
        store, "SELECT count(*), count(*) FILTER (cached) FROM calls WHERE stage = 'distill'"
    )[1]
    rows = inspect.lineage(store, documents)
    assert (rows[0]["calls"], rows[0]["cached_calls"]) == (calls, cached) == (3, 1)
    TypeAdapter(OUTPUTS["lineage"]).validate_json(json.dumps(rows, default=str), strict=True)
    assert "3 calls, 1 of them cached" in printed(lineage_tree(rows))


@pytest.mark.usefixtures("toy_stages")
def test_b14_runs_say_what_they_changed(store, toy):
    settings = ["reason.policy.steps=3", "seed=5"]
    config = load(TOY, settings)
    for base, name in ((toy, "three steps"), (config, "the same")):
        run = prepare_run(config, Selection(last="held_out"), store, "toy.toml", base)
        with recorded(store, config, run, name.replace(" ", "-"), name, "nautile run toy.toml"):
            pass
    changes = changed_settings(toy, config)
    assert {change.field: change.after for change in changes} == {"reason.policy.steps": 3, "seed": 5}
    rows, _ = list_runs(store, 10)
    TypeAdapter(OUTPUTS["runs"]).validate_json(json.dumps(rows), strict=True)
    by_name = {row["name"]: row for row in rows}
    assert by_name["the same"]["changes"] == []
    line = f"steps {toy.reason.policy.steps} -> 3"
    assert line in printed(runs_table(rows), 140)
    assert f"changes seed 0 -> 5, {line}" in shown(store, "three")


def test_b12_up_prints_how_its_server_is_joined(store, monkeypatch, command_line):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    service = Service.begun("server", os.getpid(), "http://127.0.0.1:4299/api", "server.log")
    monkeypatch.setattr("nautile.flows.operate.services.up", lambda *_: [service])
    monkeypatch.setattr("nautile.flows.operate.services.url_of", lambda store, name: service.url)
    monkeypatch.setattr("nautile.flows.operate.reconcile.reconcile_if_possible", lambda store: [])
    monkeypatch.setattr("nautile.flows.operate.kept_changes.kept_changes", lambda *_: [])
    monkeypatch.setenv("PREFECT_API_URL", service.url)
    code, out, err = command_line("up", str(TOY))
    assert (code, err) == (0, "")
    assert "`nautile run` uses this server" in out
    assert "\nexport PREFECT_API_URL=http://127.0.0.1:4299/api\n" in out


@pytest.mark.parametrize("state", ["cancelled", "failed", "running"])
def test_b20_a_run_that_was_stopped_shows_how_to_go_on(store, state):
    """Cancelled in Prefect's page, failed, or killed: then nobody recorded its end, and no process holds its lock."""
    plan(store, state=state, ended=at(2), resume=f"nautile run {'folder/' * 20}my.toml")
    attempt(store, "pretrain", "cancelled", 0)
    text = shown(store)
    assert text.startswith(f"run r1 (toy): {'interrupted' if state == 'running' else state}\n")
    assert f"\nContinue with: nautile run {'folder/' * 20}my.toml\n" in text
    assert "not started" in text  # what it never came to
    assert Store(store.root).lost_runs() == []
