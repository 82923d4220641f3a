"""A run that waits for a person: asked once, answered from the command line or the page; what it is told of cost."""

import json
import time
import urllib.request

import pytest

from common.errors import ConfigError
from configs.operation import OperationConfig
from flows.dag import build_dag
from flows.operate import approval
from flows.operate.approval import after_step, before_step, expected
from store.artifacts import Store
from tests.support.toy_cli import start
from tests.support.toy_stages import TOY, toy_dag


@pytest.fixture
def steps(toy):
    return {one.label: one for one in build_dag(toy, toy_dag)}


def test_the_expected_cost_is_what_is_allowed_and_what_it_took(made, toy, steps):
    store, _ = made
    distilled = expected(store, toy, steps["distill"])
    assert distilled.startswith("4 prompts; no limit of money is set; the last time")
    assert distilled.endswith("it took 1.5 s and $0.0300.")  # three calls at a cent, in 1.5 s (tests/support)
    trained = expected(store, toy, steps["pretrain"])
    assert trained.startswith("2,000 tokens to train on; the last time")
    rich = toy.model_copy(update={"distill": toy.distill.model_copy(update={"budget_dollars": 5.0})})
    bounded = {one.label: one for one in build_dag(rich, toy_dag)}["distill"]
    assert "at most $5.00" in expected(store, rich, bounded)


def test_what_was_never_made_has_no_known_time(tmp_path, toy, steps):
    store = Store(tmp_path / "store")
    store.prepare()
    assert "its time is not known" in expected(store, toy, steps["pretrain"])


def asking(toy, **stage):
    return toy.model_copy(update={"operation": OperationConfig.model_validate({"distill": stage})})


@pytest.fixture
def asked(monkeypatch):
    """The questions that would have been asked: key and text."""
    found = []
    monkeypatch.setattr(
        approval, "ask", lambda store, run, key, label, question, patience: found.append((key, question))
    )
    return found


def test_what_is_there_is_not_asked_about_unless_it_is_forced(made, toy, steps, asked, tmp_path):
    store, _ = made
    config, distill = asking(toy, approve=True), steps["distill"]
    before_step(store, config, distill, False, "run")
    before_step(store, config, steps["pretrain"], True, "run")
    before_step(store, toy, distill, True, "run")
    assert asked == []
    before_step(store, config, distill, True, "run")
    empty = Store(tmp_path / "store")
    empty.prepare()
    before_step(empty, config, distill, False, "run")
    assert [key for key, _ in asked] == ["approve:distill", "approve:distill"]
    assert "Stage distill of toy asks for approval" in asked[0][1]
    assert "4 prompts" in asked[0][1]


def test_a_stage_that_stopped_at_its_budget_asks_whether_to_go_on_with_less(tmp_path, toy, steps, asked):
    store, distill = Store(tmp_path / "store"), steps["distill"]
    store.prepare()
    folder = store.staging(distill.key) / "made"
    folder.mkdir()
    (folder / "documents.jsonl").write_text("{}\n")
    facts = {"budget_exhausted": True, "dollars": 4.5, "prompts": 4, "rejected": {"failed_budget": 3}}
    kept = store.publish(
        "documents", distill.key, folder, stage="distill", version=1, config={}, inputs={}, facts=facts, run="mine"
    )
    outputs = {"documents": kept.id}
    after_step(store, toy, distill, outputs, "mine")
    after_step(store, asking(toy, at_budget="pause"), distill, outputs, "another")  # which has only reused it
    assert asked == []
    after_step(store, asking(toy, at_budget="pause"), distill, outputs, "mine")
    ((key, question),) = asked
    assert key == "budget:distill"
    assert "$4.5000 spent, 3 of 4 prompts were not asked about" in question
    assert "raise distill.budget_dollars" in question
    assert "`nautile run toy --from distill`" in question


def test_what_waits_is_listed_and_a_wrong_run_is_refused(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    assert approval.waiting(store) == []
    with pytest.raises(ConfigError, match="no run 'abc' waits"):
        approval.approve(store, "abc", None)


def waiting_run(store, process):
    while not (found := approval.waiting(store)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return found[0]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "asks.toml"
    path.write_text(f'extends = "{TOY}"\n[operation.held_out]\napprove = true\n', encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_waits_says_so_and_goes_on_when_it_is_approved(config, prefect_url, tmp_path):
    store = Store(tmp_path / "store")
    more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "prefect")}
    process = start("run", str(config), "--only", "held_out", store=store.root, cwd=tmp_path, **more)
    try:
        found = waiting_run(store, process)
        assert found["label"] == "held_out"
        with urllib.request.urlopen(f"{prefect_url}/flow_runs/{found['run']}", timeout=30) as reply:
            state = json.loads(reply.read())["state"]
        assert state["type"] == "PAUSED"
        assert "held_out of toy asks for approval" in state["message"]
        assert "Expected cost: it was not made here before" in state["message"]
        approval.approve(store, found["run"][:8], None)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert f"waits for nautile approve {found['run'][:8]}" in out
    assert approval.waiting(store) == []
    assert len(store.list("questions")) == 1


@pytest.mark.slow
def test_a_run_that_is_cancelled_while_it_waits_begins_nothing(config, prefect_url, tmp_path):
    store = Store(tmp_path / "store")
    more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "prefect")}
    process = start("run", str(config), "--only", "held_out", store=store.root, cwd=tmp_path, **more)
    try:
        found = waiting_run(store, process)
        body = json.dumps({"state": {"type": "CANCELLED"}, "force": True}).encode()
        address = f"{prefect_url}/flow_runs/{found['run']}/set_state"
        urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": "application/json"}), timeout=30)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "held_out: the run was cancelled while it waited for an answer" in err
    assert store.list("questions") == []
