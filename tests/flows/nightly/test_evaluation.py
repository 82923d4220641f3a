"""The scheduled evaluation against a real server: reuse, a regression raised once, and a webhook that fails nothing."""

import json
import subprocess
import sys

import pytest

from nautile.store.artifacts import Store
from tests.support.samples.evaluations import checkpoint, evaluation
from tests.support.servers.fake_webhook import SECRET, FakeWebhook
from tests.support.stages.toy_cli import ROOT, environment
from tests.support.stages.toy_stages import TOY

pytestmark = pytest.mark.heavy

PROGRAM = """
import json, sys
from pathlib import Path
from nautile.flows.nightly.evaluation import evaluation
toy, own = sys.argv[1], Path(sys.argv[2])
for line in sys.stdin:
    call = json.loads(line)
    schedule = [f"{name} = {json.dumps(value)}" for name, value in call["schedule"].items()]
    notify = f'notify = "{call["notify"]}"'
    own.write_text("\\n".join([f'extends = "{toy}"', "[operation]", notify, "[schedule]", *schedule]))
    try:
        state = evaluation(str(own), checkpoint=call.get("checkpoint", ""), return_state=True)
        reply = {"state": state.type.value, "message": state.message, "data": state.result()}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture(scope="module")
def webhook():
    with FakeWebhook(404, 204) as server:
        yield server


@pytest.fixture(scope="module")
def run_flow(tmp_path_factory, prefect_url, webhook):
    """run(schedule, checkpoint) -> how the flow ended, in a process of its own; and its store."""
    store = Store(tmp_path_factory.mktemp("nightly") / "store")
    store.prepare()
    more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(store.root / "prefect"), "HOOK": webhook.secret_url}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(TOY), str(store.root / "own.toml")],
        env=environment(store.root, **more),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def run(schedule=None, name="", notify=""):
        process.stdin.write(json.dumps({"schedule": schedule or {}, "checkpoint": name, "notify": notify}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    try:
        yield run, store
    finally:
        _, log = process.communicate(timeout=60)
        assert SECRET not in log


def test_a_regression_is_raised_once(run_flow, toy, webhook):
    run, store = run_flow
    assert "No checkpoint" in run()["message"]
    good = evaluation(store, toy, checkpoint(store, "good"), lambda item: item.index < 38)
    first = run()
    assert first["state"] == "COMPLETED"
    assert first["data"]["evaluation"] == good.id
    assert "no earlier evaluation" in first["message"]
    worse = checkpoint(store, "bad")
    bad = evaluation(store, toy, worse, lambda item: item.index < 20 or (item.benchmark == "more" and item.index < 38))
    raised = run(notify="HOOK")
    assert raised["state"] == "COMPLETED"
    assert "has REGRESSED" in raised["message"]
    assert "The webhook in HOOK failed: status 404." in raised["message"]
    assert SECRET not in json.dumps(raised)
    assert [(row["benchmark"], row["against"]) for row in raised["data"]["regressions"]] == [("sums", "last and best")]
    published = store.get(raised["data"]["comparison"])
    assert set(published.manifest["files"]) == {"comparison.json", "comparison.md", "comparison.html"}
    assert published.manifest["inputs"] == {"new": bad.full_id, "last": good.full_id, "best": good.full_id}
    assert len(webhook.messages) == 1
    assert webhook.messages[0]["after"] == bad.id
    assert "has regressed against" in webhook.messages[0]["text"]
    assert f"`nautile compare {good.id} {bad.id}`" in webhook.messages[0]["text"]
    again = run(notify="HOOK")
    assert "Nothing new" in again["message"]
    assert again["data"]["regressions"] == raised["data"]["regressions"]
    assert len(webhook.messages) == 1
    looser = run({"margin": 0.9}, notify="HOOK")
    assert "no benchmark has dropped" in looser["message"]
    named = run(name=good.manifest["inputs"]["checkpoint"])
    assert named["data"]["evaluation"] == good.id


def test_an_artifact_that_is_not_a_checkpoint_is_refused(run_flow):
    run, store = run_flow
    (first, *_) = store.list("evaluation")
    assert "schedule.checkpoint" in run(name=first.id)["error"]
