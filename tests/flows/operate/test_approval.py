"""Approval: what is asked, with which expected cost, and how runs wait and stop.

How a run of the command line goes on: test_run.py; how one of a deployment is suspended and goes on: test_browser.py.
"""

import json
import os
import re
import threading
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest.mock import Mock
from uuid import uuid4

import httpx
import prefect.states
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running

from nautile.common.errors import ConfigError
from nautile.configs.operation import OperationConfig
from nautile.configs.schema import RunConfig
from nautile.flows.dag import build_dag
from nautile.flows.operate import approval
from nautile.flows.operate import questions as questions_module
from nautile.flows.operate.approval import before_step, expected_cost, go_on_with, question_at_budget, was_approved
from nautile.flows.operate.questions import approve, waiting
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog, CatalogBusy
from nautile.store.manifest import host, now
from tests.support.servers.http_server import FakeServer, Response, json_response
from tests.support.stages.toy_dag import toy_dag
from tests.support.stages.toy_stages import TOY


@pytest.fixture
def steps(toy):
    return {step.label: step for step in build_dag(toy, toy_dag)}


@pytest.mark.slow
def test_the_expected_cost_is_what_is_allowed_and_what_it_took(made, toy, steps):
    store, _ = made
    distilled = expected_cost(store, toy, steps["distill"])
    assert distilled.startswith("4 prompts; no budget is set; the last time")
    assert distilled.endswith("it took 1.5 s and $0.0300.")  # three calls at a cent, in 1.5 s (tests/support)
    trained = expected_cost(store, toy, steps["pretrain"])
    assert trained.startswith("2,000 tokens to train on; the last time")
    rich = toy.model_copy(update={"distill": toy.distill.model_copy(update={"budget_dollars": 5.0})})
    bounded = {step.label: step for step in build_dag(rich, toy_dag)}["distill"]
    assert "at most $5.00" in expected_cost(store, rich, bounded)


def test_the_forecast_of_the_calls_stands_beside_the_budget(store, toy):
    prices = {"dollars_per_million_in": 1.0, "dollars_per_million_out": 1.0}
    endpoints = {"local": {**toy.endpoints["local"].model_dump(), **prices}}
    distilled = {**toy.distill.model_dump(), "budget_dollars": 5000.0, "accepted": 3}
    config = RunConfig.model_validate({**toy.model_dump(), "endpoints": endpoints, "distill": distilled})
    step = {step.label: step for step in build_dag(config, toy_dag)}["distill"]
    cost = expected_cost(store, config, step)
    dollars = r"\$0\.\d\d"
    assert re.match(
        rf"{dollars} to {dollars} if every reply is as long as it may be; none is measured yet; until 3 doc", cost
    )
    assert "of at most 4 prompts; at most $5,000.00; it never ran here" in cost


def asking(toy, **stage):
    return toy.model_copy(update={"operation": OperationConfig.model_validate({"distill": stage})})


@pytest.fixture
def questions(monkeypatch):
    """The questions that would have been asked: key and text."""
    asked = []
    monkeypatch.setattr(
        approval, "ask", lambda store, run, key, label, question, patience, force: asked.append((key, question))
    )
    return asked


def test_what_is_there_is_not_asked_about_unless_it_is_forced(made, toy, steps, questions, tmp_path):
    store, _ = made
    config, distill = asking(toy, approve=True), steps["distill"]
    before_step(store, config, distill, False, "run")
    before_step(store, config, steps["pretrain"], True, "run")
    before_step(store, toy, distill, True, "run")
    assert questions == []
    before_step(store, config, distill, True, "run")
    empty = Store(tmp_path / "store")
    empty.prepare()
    before_step(empty, config, distill, False, "run")
    assert [key for key, _ in questions] == ["approve:distill", "approve:distill"]
    assert "Stage distill of toy asks for approval" in questions[0][1]
    assert "4 prompts" in questions[0][1]


def test_a_stage_that_stopped_at_its_budget_asks_whether_to_go_on_with_less(store, toy, steps, monkeypatch):
    distill = steps["distill"]
    folder = store.staging(distill.key) / "made"
    folder.mkdir()
    (folder / "documents.jsonl").write_text("{}\n")
    facts = {"budget_exhausted": True, "dollars": 4.5, "prompts": 4, "unasked": 3}
    kept = store.publish(
        "documents", distill.key, folder, stage="distill", version=1, config={}, inputs={}, facts=facts, run="mine"
    )
    outputs = {"documents": kept.id}

    def question(config):
        return question_at_budget(store, config, distill, outputs, "'my file.toml' --set seed=5")

    assert question(toy) is None
    text = question(asking(toy, at_budget="pause"))
    assert "$4.5000 spent, 3 of 4 prompts were not sent" in text
    assert "raise distill.budget_dollars" in text
    assert "`nautile run 'my file.toml' --set seed=5 --from distill --force`" in text
    # Whoever reuses it is asked too, until somebody has said yes: the run that made it may have been cancelled.
    assert question(asking(toy, at_budget="pause")) == text
    go_on_with(store, outputs, "mine")
    assert question(asking(toy, at_budget="pause")) is None

    def busy(self, *arguments, **options):
        raise CatalogBusy("held by another process")

    monkeypatch.setattr(Catalog, "query", busy)  # the record of answers cannot be read
    assert question(asking(toy, at_budget="pause")) == text


def history(*states):
    """The states of a run, a day after each other: names of Prefect's states, and pauses as (name, key)."""
    made = []
    for day, entry in enumerate(states):
        if isinstance(entry, tuple):
            name, key = entry
            new = getattr(prefect.states, name)
            state = new(timeout_seconds=60, pause_key=f"{key}-{day:032x}")
        elif entry == "Resuming":
            state = prefect.states.Scheduled(name="Resuming")
        else:
            state = getattr(prefect.states, entry)()
        made.append(state.model_copy(update={"timestamp": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=day)}))
    return made


START = ("Scheduled", "Pending", "Running")
ASKED = ("Suspended", "approve-index")
OTHER = ("Suspended", "approve-index-2")
YES = ("Resuming", "Pending", "Running")


@pytest.mark.parametrize(
    ("states", "approved"),
    [
        (START, False),
        ((*START, ASKED), False),
        ((*START, ASKED, *YES), True),
        ((*START, ASKED, "Resuming", "Late", "AwaitingConcurrencySlot", "Pending", "Running"), True),
        ((*START, ("Paused", "approve-index"), "Running"), True),
        # The approval of another question, before it or after it.
        ((*START, OTHER, *YES), False),
        ((*START, ASKED, *YES, OTHER, *YES), True),
        ((*START, OTHER, *YES, ASKED), False),
        # Another end of the wait, and a retry from any place: by the button, the dashboard, or Prefect's command.
        ((*START, ASKED, "Crashed", "AwaitingRetry", "Pending", "Running"), False),
        ((*START, ASKED, "Crashed", "Scheduled", "Pending", "Running"), False),
        ((*START, ASKED, "Failed", "AwaitingRetry", "Pending", "Running"), False),
        ((*START, ASKED, "Cancelling", "Cancelled", "AwaitingRetry", "Pending", "Running"), False),
        ((*START, ASKED, "AwaitingRetry", "Pending", "Running"), False),
        ((*START, ASKED, "Scheduled", "Pending", "Running"), False),
        ((*START, ASKED, "Running"), False),  # a suspended run is scheduled when it is resumed
        ((*START, ("Paused", "approve-index"), "Crashed", "AwaitingRetry", "Running"), False),
        # A retry after the approved work has begun asks again.
        ((*START, ASKED, *YES, "Failed", "AwaitingRetry", "Pending", "Running"), False),
        ((*START, ASKED, *YES, "Crashed", "Scheduled", "Pending", "Running"), False),
        ((*START, ASKED, *YES, "AwaitingRetry", "Pending", "Running"), False),
        ((*START, ASKED, *YES, OTHER, "Crashed", "AwaitingRetry", "Running"), False),
        # And a question that is asked again needs an answer again.
        ((*START, ASKED, *YES, "Failed", "AwaitingRetry", "Running", ASKED), False),
        ((*START, ASKED, *YES, "Failed", "AwaitingRetry", "Running", ASKED, *YES), True),
    ],
)
def test_only_resume_is_a_yes(states, approved):
    made = history(*states)
    assert was_approved(made, "approve-index") is approved
    assert was_approved(made[::-1], "approve-index") is approved


PAUSED = ("Paused", "approve-index")


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ((*START, PAUSED, "Running"), None),
        ((*START, PAUSED, "Crashed", "AwaitingRetry", "Pending", "Running"), "was started again while it waited"),
        ((*START, PAUSED, "Cancelling", "Cancelled", "Scheduled", "Running"), "was started again while it waited"),
        ((*START, PAUSED, "Cancelling"), "was cancelling while it waited"),
        ((*START, PAUSED, "Failed"), "nobody answered within 72 h"),
        ((), "knows nothing of the run any more"),
    ],
    ids=str,
)
def test_a_run_that_waits_in_its_process_hears_only_its_own_answer(monkeypatch, states, message):
    """Between two looks at the server a run may end and be retried, or the server get a new database."""
    client = Mock()
    client.read_flow_run_states.return_value = history(*states)
    answers = [httpx.ConnectError("away"), SimpleNamespace(state=history(PAUSED)[0])]
    answers += [SimpleNamespace(state=history(*states)[-1])] if states else [ObjectNotFound(Exception())]
    client.read_flow_run.side_effect = answers
    monkeypatch.setattr(approval, "POLL_S", 0.0)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        approval._await_answer(client, uuid4(), "approve-index", "index", timedelta(hours=72))
    assert client.read_flow_run.call_count == 3


def test_no_other_state_that_prefect_knows_opens_the_gate():
    names = [name for name in vars(prefect.states) if name[0].isupper() and name != "State"]
    makers = [name for name in names if getattr(getattr(prefect.states, name), "__module__", "") == "prefect.states"]
    for name in {*makers} - {"StateGroup", "Paused", "Suspended"}:
        assert not was_approved(history(*START, ASKED, name, "Running"), "approve-index"), name


def test_what_waits_is_listed_and_a_wrong_run_is_refused(store):
    assert waiting(store) == []
    with pytest.raises(ConfigError, match="no run 'abc' waits"):
        approve(store, "abc", None)


def test_an_empty_name_approves_nothing(store):
    """As from a variable of a script that is not set: an approval may cost money."""
    run = str(uuid4())
    with LockedServer() as server:
        note = {"run": run, "label": "align", "message": "?", "since": now(), "host": host(), "pid": os.getpid()}
        store.questions.mkdir()
        (store.questions / f"{run}.json").write_text(json.dumps(note | {"api": server.url}))
        with store.run_lock(run).for_life(), pytest.raises(ConfigError, match="no run '' waits"):
            approve(store, "", None)
    assert server.requests == 0


def test_a_run_that_was_killed_waits_no_more_though_its_process_id_is_used_again(store):
    """In a container a restarted run often gets the id of the one that was killed."""
    note = {"run": "r1", "label": "align", "message": "?", "since": now(), "host": host(), "pid": os.getpid()}
    path = store.questions / "r1.json"
    path.parent.mkdir()
    path.write_text(json.dumps(note | {"api": None}))
    with store.run_lock("r1").for_life():
        assert [waiting_note["run"] for waiting_note in waiting(store)] == ["r1"]
    assert waiting(store) == []
    assert not path.exists()


def test_a_note_of_a_store_from_elsewhere_sends_no_login_to_its_server(store, monkeypatch):
    """Reading such a store lists the note, and asks nobody."""
    run = str(uuid4())
    note = {"run": run, "label": "align", "message": "?", "since": now(), "host": "x", "pid": None}
    store.questions.mkdir()
    (store.questions / f"{run}.json").write_text(json.dumps(note | {"api": "http://elsewhere.example/api"}))
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "nautile:secret")

    def refused(*_, **__):
        pytest.fail("a request was sent")

    monkeypatch.setattr(questions_module, "call", refused)
    monkeypatch.setattr(questions_module, "ask_server", refused)
    assert [entry["run"] for entry in waiting(store)] == [run]
    with pytest.raises(ConfigError, match=r"waits on the server http://elsewhere\.example/api: set PREFECT_API_URL"):
        approve(store, run[:8], None)


class LockedServer(FakeServer):
    """Prefect's server whose database is locked at the first two requests."""

    requests = 0

    def respond(self, request):
        self.requests += 1
        return json_response({"status": "ACCEPT"}, 503 if self.requests <= 2 else 201)


def test_a_server_whose_database_is_locked_is_asked_again(tmp_path):
    with LockedServer() as server:
        approve(Store(tmp_path), str(uuid4()), server.url)
    assert server.requests == 3


class TokenServer(FakeServer):
    """Prefect's server with its protection against forged requests."""

    client = None

    def respond(self, request):
        if request.path.endswith("/csrf-token"):
            self.client = request.query.removeprefix("client=")
            return json_response({"token": "secret"})
        sent = request.headers["Prefect-Csrf-Token"], request.headers["Prefect-Csrf-Client"]
        accepted = sent == ("secret", self.client)
        return json_response(
            {"status": "ACCEPT"} if accepted else {"detail": "Missing CSRF token."}, 201 if accepted else 403
        )


def test_a_server_that_asks_for_a_token_gets_it(tmp_path):
    with TokenServer() as server:
        approve(Store(tmp_path), str(uuid4()), server.url)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "asks.toml"
    operation = "[operation.held_out]\napprove = true\n"
    path.write_text(f'extends = "{TOY}"\nname = "approved"\n{operation}', encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_suspended_run_that_was_cancelled_waits_no_more(config, prefect_url, store):
    store.questions.mkdir()
    note = {"run": "1" * 8 + "-1111-1111-1111-" + "1" * 12, "label": "held_out", "message": "Resume to continue."}
    note |= {"since": now(), "host": host(), "api": prefect_url, "pid": None}
    (store.questions / "note.json").write_text(json.dumps(note))
    assert waiting(store) == []
    assert list(store.questions.iterdir()) == []


class LostAnswer(FakeServer):
    """A way to Prefect's server on which the answer to the first change of a state is lost after it was made."""

    base_path = "/api"

    def __init__(self, behind: str) -> None:
        self.behind, self.lost = behind.removesuffix("/api"), 0

    def respond(self, request):
        address = f"{self.behind}{request.path}" + (f"?{request.query}" if request.query else "")
        body = json.loads(request.body) if request.body else None
        response = httpx.request(request.method, address, json=body, timeout=60.0)
        if request.path.endswith("/set_state") and not self.lost:
            self.lost = 1
            return Response(503)
        return Response(response.status_code, response.content, response.headers.get("content-type", ""))


@pytest.mark.slow
def test_a_question_whose_first_answer_of_the_server_was_lost_is_waited_for(prefect_url, store, monkeypatch):
    """Prefect's client sends the state again, and the server rejects it, because the run has it already."""

    @flow
    def empty():
        """Never run."""

    with LostAnswer(prefect_url) as server, temporary_settings({PREFECT_API_URL: server.url}):
        with get_client(sync_client=True) as client:
            run = str(client.create_flow_run(empty, state=Running()).id)

        def answer():
            while not waiting(store):
                time.sleep(0.05)
            approve(store, run, None)

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        # Outside the flow, where Prefect is to refuse artifacts.
        monkeypatch.setattr(approval, "_create_artifact", lambda *_: None)
        with store.run_lock(run).for_life():
            approval.ask(store, run, "approve:align", "align", "Really?", timedelta(hours=1))
        answering.join(60)
    assert server.lost == 1
    assert waiting(store) == []
