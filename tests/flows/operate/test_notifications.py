"""The operator's webhook against a real server: which events it is sent, once each, and what its failures do not do."""

import logging
import re
import threading
import time
from types import NoneType
from typing import get_args

import pytest

from nautile.common.processes import free_port
from nautile.configs.operation import OperationConfig
from nautile.configs.schema import RunConfig
from nautile.evals.benchmarks.registry import title_of
from nautile.flows.operate import notifications
from nautile.flows.operate.notifications import OWN_BUDGETS, finished_text, message, notifying, post_webhook
from nautile.flows.pipeline import StageFailed
from nautile.tasks.engine.progress import StageUpdate, notify
from tests.support.samples.stage_store import published
from tests.support.servers.fake_webhook import SECRET, FakeWebhook

RUN = "11112222-3333-4444-5555-666677778888"
REGRESSION = {"text": "fell", "event": "nautile.regression"}


@pytest.fixture
def call(monkeypatch, caplog):
    """call(url) -> (what `post_webhook` returned, the pauses it made); checks that the secret is nowhere."""

    def call(url):
        monkeypatch.setenv("HOOK", url)
        pauses = []
        with caplog.at_level(logging.DEBUG, "nautile.flows"), caplog.at_level(logging.INFO, "httpx"):
            problem = post_webhook("HOOK", REGRESSION, pauses.append)
        assert SECRET not in f"{problem} {caplog.text}"
        return problem, pauses

    return call


def test_an_accepted_message_is_sent_once(call):
    with FakeWebhook(204) as webhook:
        assert call(webhook.secret_url) == (None, [])
    assert webhook.messages == [REGRESSION]


def test_a_temporary_failure_is_retried(call):
    with FakeWebhook(503, 429, 200) as webhook:
        assert call(webhook.secret_url) == (None, [1.0, 4.0])
    assert len(webhook.messages) == 3


@pytest.mark.parametrize(("status", "attempts"), [(500, 3), (404, 1), (302, 1)])
def test_it_gives_up_with_the_status(call, status, attempts):
    with FakeWebhook(status) as webhook:
        problem, _ = call(webhook.secret_url)
    assert problem == f"the webhook in HOOK failed: status {status}"
    assert len(webhook.messages) == attempts


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"http://127.0.0.1:{free_port()}/{SECRET}", "ConnectError"),
        (f"ftp://127.0.0.1/{SECRET}", "UnsupportedProtocol"),
        (f"http://[::1/{SECRET}", "is it a whole URL"),
        ("", "HOOK is not set"),
    ],
    ids=["nobody", "ftp", "torn", "unset"],  # a port in an id would differ between the processes of the test run
)
def test_a_webhook_that_cannot_be_reached_raises_nothing(call, url, message):
    assert message in call(url)[0]


@pytest.fixture
def webhook(monkeypatch):
    with FakeWebhook(204) as server:
        monkeypatch.setenv("HOOK", server.secret_url)
        yield server


def resume(label):
    return f"nautile run toy --from {label}"


def update(state="running", run_id=RUN, **fields):
    notify(StageUpdate("distill", "distill", state, run_id=run_id, **fields))


def test_each_event_of_a_run_is_one_message_with_the_command_that_helps(webhook):
    question = "Stage distill asks for approval. Resume to continue (or `nautile approve 11112222`)"
    with notifying("HOOK", "toy", RUN, resume) as notifier:
        update("waiting", note="waits for nautile approve 11112222", question=question)
        for _ in range(3):
            update("retrying", reason="endpoint 'teacher' does not answer", outage_until=time.time() + 60)
            update(metrics={"loss": 2.0, "budget_spent_share": 0.84})
        update("retrying", reason="the process was killed")  # a crash is no outage
        update("waiting", note="other steps work")
        for _ in range(2):
            update("waiting", note="waits for nautile approve 11112222", question="Stage distill stopped at its budget")
        update(metrics={"budget_spent_share": 0.9}, run_id="another")
        notifier.send("finished", "toy finished")
    events = [entry["event"].partition(".")[2] for entry in webhook.messages]
    assert events == ["waiting", "outage", "budget", "waiting", "finished"]
    assert [entry["label"] for entry in webhook.messages] == ["distill"] * 4 + [""]
    assert all((entry["config"], entry["run"]) == ("toy", RUN) for entry in webhook.messages)
    waiting, outage, budget, _, _ = (entry["text"] for entry in webhook.messages)
    assert waiting == f"Nautile: {question}"
    assert "stage distill of toy waits for an outage to end, until " in outage
    assert "endpoint 'teacher' does not answer\n`nautile logs 11112222`" in outage
    assert "has used 84 % of a budget" in budget
    assert "raise `distill.budget_dollars`" in budget


def test_an_alert_is_one_message_for_each_rule_whatever_the_metric(webhook):
    rules = [{"metric": "kl", "above": 0.5}, {"metric": "entropy", "below": 0.1}, {"metric": "kl", "above": 9.0}]
    rules.append({"metric": "entropy", "below": 0.1, "step": "align"})
    section = OperationConfig.model_validate({"notify": "HOOK", "alerts": rules})
    with notifying("HOOK", "toy", RUN, resume, section.alerts):
        update(metrics={"kl": 0.5, "entropy": 0.1})  # a limit is not beyond itself
        for _ in range(2):
            update(metrics={"kl": 0.75, "loss": 3.0})
            update(metrics={"entropy": 0.05})
        notify(StageUpdate("align", "align", "running", run_id="another", metrics={"kl": 10.0}))
    assert [entry["event"] for entry in webhook.messages] == ["nautile.alert"] * 2
    texts = [entry["text"] for entry in webhook.messages]
    assert "stage distill of toy: KL" in texts[0]
    assert "(`kl`) is 0.75, above 0.5." in texts[0]
    assert "(`entropy`) is 0.05, below 0.1." in texts[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alerts": [{"metric": "kl", "above": 1.0}]}, "set `notify` to the NAME"),
        ({"notify": "HOOK", "alerts": [{"metric": "kl"}]}, "needs a limit: `above` or `below`"),
        ({"notify": "HOOK", "alerts": [{"metric": "kl", "above": 1.0, "below": 2.0}]}, "fires always"),
        ({"notify": "HOOK", "alerts": [{"metric": "kl", "over": 1.0}]}, "over"),
    ],
)
def test_an_alert_that_could_not_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        OperationConfig.model_validate(fields)


def test_a_failed_run_sends_each_failed_step(webhook):
    failures = {"align": ValueError("the judge is gone"), "report": RuntimeError("no memory")}
    with pytest.raises(StageFailed), notifying("HOOK", "toy", RUN, resume):
        raise StageFailed(failures)
    with pytest.raises(OSError, match="full"), notifying("HOOK", "toy", RUN, lambda _: ""):
        raise OSError("the disk is full")
    texts = [entry["text"] for entry in webhook.messages]
    assert [text.splitlines()[0] for text in texts] == [
        "Nautile: stage align of toy failed: the judge is gone",
        "Nautile: stage report of toy failed: no memory",
        "Nautile: the run of toy failed: the disk is full",
    ]
    assert texts[0].endswith("Continue with: `nautile run toy --from align`")
    assert "Continue" not in texts[2]


def test_a_receiver_that_never_answers_blocks_no_run(monkeypatch, caplog):
    answer = threading.Event()

    class Silent(FakeWebhook):
        def respond(self, request):
            answer.wait()
            return super().respond(request)

    monkeypatch.setattr(notifications, "FLUSH_S", 0.05)
    with Silent(204) as webhook:
        monkeypatch.setenv("HOOK", webhook.secret_url)
        with notifying("HOOK", "toy", RUN, resume) as notifier:
            notifier.send("finished", "toy finished")
        assert "not delivered within" in caplog.text
        answer.set()
        notifier._thread.join()  # or its failure would be logged during a later test
        assert len(webhook.messages) == 1


def test_without_a_variable_nothing_is_sent_and_no_thread_is_started(webhook):
    before = {*threading.enumerate()}
    with notifying("", "toy", RUN, resume) as notifier:
        assert not {*threading.enumerate()} - before  # a thread of an earlier test may end meanwhile
        notifier.send("finished", "toy finished")
        update(metrics={"budget_spent_share": 1.0})
    assert webhook.messages == []


def test_a_finished_run_has_its_score_and_its_page(store, monkeypatch):
    facts = {"accuracy": {"held_out": 0.2871, "piqa": None}}
    evaluation = published(store, "evaluation", "e", facts=facts).full_id
    outputs = {"evaluate:pretrain": {"evaluation": "gone"}, "evaluate:align": {"evaluation": evaluation}}
    text = finished_text(store, "toy", outputs)
    assert text.startswith("toy finished, 2 steps.")
    assert text.endswith(f"\nAfter align: {title_of('held_out')} 28.7 %.")  # and nothing of what was not measured
    assert finished_text(store, "toy", {"ingest": {}}) == "toy finished, 1 step. `nautile status` lists what they made."
    facts |= {"not_screened": {"held_out": "training text was not screened for it"}}
    outputs["evaluate:align"]["evaluation"] = published(store, "evaluation", "f", facts=facts).full_id
    assert f"{title_of('held_out')} (not screened for) 28.7 %" in finished_text(store, "toy", outputs)
    monkeypatch.setenv("NAUTILE_DASHBOARD_URL", "http://127.0.0.1:8501")
    page = f"http://127.0.0.1:8501/?run={RUN}"
    assert message("finished", "x" * 5000, run=RUN)["text"].endswith(f"\nThe run in the dashboard: {page}")
    assert message("finished", "", run=RUN)["page"] == page


def test_a_text_is_no_markup_and_calls_nobody():
    text = message("failed", "<!channel> @here & @All: \x1b[31mred", config="x")["text"]
    assert text == "Nautile: &lt;!channel&gt; @ here &amp; @ All: \N{REPLACEMENT CHARACTER}[31mred"


def fields_of(section):
    """The names of a section's fields; the section may be optional."""
    annotation = RunConfig.model_fields[section].annotation
    (model,) = {*(get_args(annotation) or (annotation,))} - {NoneType}
    return set(model.model_fields)


def test_a_budget_is_named_by_the_field_that_sets_it(webhook):
    """Only some stages have a budget of their own; the calls of the others are limited by their endpoint's."""
    with notifying("HOOK", "toy", RUN, resume):
        notify(StageUpdate("align", "align", "running", run_id=RUN, metrics={"budget_spent_share": 0.9}))
    (text,) = (entry["text"] for entry in webhook.messages)
    assert "raise `endpoints.NAME.budget_dollars`" in text
    assert "align.budget_dollars" not in text
    assert all("budget_dollars" in fields_of(stage) for stage in OWN_BUDGETS)
    assert not {"budget_dollars", "budget_tokens"} & fields_of("align")
