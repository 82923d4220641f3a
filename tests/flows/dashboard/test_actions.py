"""Approve, cancel, retry and note from the page: only beside the server that `nautile up` started with it."""

import json
import os
import re
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.flows.cli.document import OUTPUTS
from nautile.flows.dashboard import shared
from nautile.flows.notes import read_note
from nautile.flows.operate import run_actions
from nautile.flows.operate.services import Service
from nautile.store.catalog import Catalog
from nautile.store.manifest import host, now
from nautile.tasks.engine.attempt_log import write_row
from tests.support.pages.parts import literals, shown_page
from tests.support.samples.stage_store import key_of
from tests.support.servers.http_server import FakeServer, json_response

pytestmark = pytest.mark.slow

RUN = "9bdd20f2-7a6c-49ae-83fd-8758cc196433"


class FakePrefect(FakeServer):
    """Knows one run of a deployment, and accepts what is asked of it."""

    base_path = "/api"
    refuses = False

    def __init__(self):
        self.asked = []
        self.queued = []

    def respond(self, request):
        if request.method == "GET":
            return json_response({"deployment_id": "d1"}, 200 if request.path.endswith(RUN) else 404)
        if request.path.endswith("/filter"):
            return json_response(self.queued)
        state = request.json().get("state", {}).get("type", "")
        self.asked.append((request.path.rpartition("/")[2], state))
        return json_response({"status": "REJECT" if self.refuses else "ACCEPT", "details": {"reason": "not <now>"}})


@pytest.fixture
def prefect():
    with FakePrefect() as server:
        yield server


def write_services(store, *services):
    """Let these be the services that `nautile up` started: name, process and address of each."""
    entries = [asdict(Service.begun(name, process, url, "")) for name, process, url in services]
    write_json(store.root / "services.json", {"services": entries})


@pytest.fixture
def beside(store, prefect, monkeypatch):
    """A store whose dashboard is this process, started by `nautile up` beside the server."""
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    shared.queued_runs.clear()  # what another test's server has answered is kept for some seconds
    write_services(store, ("server", os.getpid(), prefect.url), ("dashboard", os.getpid(), "http://x"))
    return store


@pytest.fixture
def page(beside, monkeypatch):
    """Draws the first page, over that store."""
    return lambda: shown_page(beside, "overview", monkeypatch)


def planned(store, state):
    steps = [{"label": "align", "stage": "align", "key": key_of("align"), "after": []}]
    row = {"id": "p", "run": RUN, "config": "toy", "state": state, "steps": steps, "started": now(), "host": host()}
    write_row(store, "plan", row | {"resume": f"nautile retry {RUN}"})
    Catalog(store).ingest()


def waits(store, api):
    store.questions.mkdir()
    note = {"run": RUN, "label": "align", "message": "May it?", "since": now(), "host": "other", "pid": 1, "api": api}
    write_json(store.questions / f"{RUN}.json", note)


def press(shown, label):
    (button,) = (button for button in shown.button if button.label == label)
    shown = button.click().run()
    assert not shown.exception
    return shown


def labels(shown):
    return [button.label for button in shown.button]


def test_a_question_is_answered_from_the_page(beside, prefect, page):
    planned(beside, "running")
    waits(beside, prefect.url)
    shown = page()
    assert {"Approve", "Yes, cancel it"} <= set(labels(shown))
    press(shown, "Approve")
    assert prefect.asked == [("resume", "")]


@pytest.mark.parametrize(
    ("state", "label", "asked"),
    [
        ("failed", "Retry", ("set_state", "SCHEDULED")),
        ("cancelled", "Retry", ("set_state", "SCHEDULED")),
    ],
)
def test_a_run_that_ended_badly_is_retried_from_the_page(beside, prefect, state, label, asked, page):
    planned(beside, state)
    press(page(), label)
    assert prefect.asked == [asked]


def test_a_run_at_work_is_cancelled_and_a_refusal_is_shown_as_text(beside, prefect, page):
    planned(beside, "running")
    prefect.refuses = True
    with beside.run_lock(RUN).for_life():
        shown = press(page(), "Yes, cancel it")
    assert prefect.asked == [("set_state", "CANCELLING")]
    assert "not \\<now\\>" in shown.error[0].value


def test_a_run_that_waits_for_a_process_is_in_the_list_and_on_the_page(beside, prefect, command_line, page):
    planned(beside, "done")
    waits_there = {"id": "a1", "name": "toy-run", "parameters": {"config": "toy"}}
    due = "2026-11-25T08:00:00Z"
    prefect.queued = [waits_there | {"expected_start_time": due}, waits_there | {"id": RUN, "expected_start_time": due}]
    first, second = json.loads(command_line("runs", "--json")[1])
    assert (first["id"], first["name"], first["state"], first["begun"]) == ("a1", "toy-run", "queued", due)
    assert (second["id"], second["state"]) == (RUN, "done")  # what has a record is not listed twice
    TypeAdapter(OUTPUTS["runs"]).validate_python([first, second])
    assert "queued" in command_line("runs")[1]
    assert "**i 1 run waits in Prefect for a process**" in [element.value for element in page().markdown]
    prefect.queued = "a page of another server"
    assert "are not listed" in command_line("runs")[2]


def test_the_status_of_a_run_that_no_process_has_begun_says_what_it_waits_for(beside, prefect, command_line):
    assert "no run in" in command_line("status")[1]
    run = {"id": "b2c3d4e5-0000", "name": "night-run", "parameters": {"config": "toy"}}
    prefect.queued = [run | {"expected_start_time": "2026-11-25T08:00:00Z", "state_name": "Late"}]
    for words in ((), ("night-run",), ("b2c3",)):  # no run has a record yet
        code, out, err = command_line("status", *words)
        assert (code, err) == (0, "")
        assert re.search(r"run b2c3d4e5 \(night-run\): queued\ndue at 2026-11-25 ..:00, .+ ago\n", out)
        assert "nothing serves the deployments: `nautile up` starts it again" in out
    assert command_line("status", "b2c3", "--json")[1].strip() == "[]"
    planned(beside, "done")
    api = [("server", os.getpid(), prefect.url), ("deployments", os.getpid(), "")]
    write_services(beside, *api)
    out = command_line("status")[1]  # the newest run, and what waits behind it
    assert out.index(f"run {RUN[:8]}") < out.index("run b2c3d4e5") < out.index("it waits for a process")
    assert "b2c3" not in command_line("status", RUN[:8])[1]
    prefect.queued[0]["state_name"] = "AwaitingConcurrencySlot"
    assert "as many runs work as may at once" in command_line("status", "night-run")[1]
    code, _, err = command_line("status", "morning-run")
    assert (code, "nor is it the id or name of a run" in err) == (2, True)


def test_a_note_is_kept_from_the_page(beside, page):
    planned(beside, "done")
    shown = page()
    assert "Retry" not in labels(shown)
    shown.text_area[0].input("better <b>than</b> r1")
    (tags,) = (box for box in shown.text_input if box.label.startswith("Tags"))
    tags.input("kept, kept, low")
    press(shown, "Save")
    assert read_note(beside, RUN) == {"text": "better <b>than</b> r1", "tags": ["kept", "low"]}


@pytest.mark.parametrize("name", ["server", "dashboard", None])
def test_elsewhere_the_page_only_shows_commands(beside, prefect, name, page):
    """Not beside a server of `up`, or in another process than the dashboard that it started."""
    planned(beside, "running")
    waits(beside, prefect.url)
    own, others = os.getpid(), os.getppid()
    write_services(beside, *{
        "server": [("dashboard", own, "")],
        "dashboard": [("dashboard", others, ""), ("server", others, prefect.url)],
        None: [],
    }[name])  # fmt: skip
    assert run_actions.server_beside(beside) is None
    shown = page()
    assert labels(shown) == []
    assert f"nautile approve {RUN[:8]}" in literals(shown)


def test_a_server_that_is_gone_is_named(store):
    with pytest.raises(ConfigError, match=r"does not answer"):
        run_actions.cancel("http://127.0.0.1:9/api", RUN)
