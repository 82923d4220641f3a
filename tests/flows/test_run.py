"""`nautile run` as processes: reuse, faults, signals, `kill -9`, and an operator's Prefect. Whole: test_chain.py."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Running, Scheduled
from rich.console import Console

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.load import load
from nautile.flows.cli import inspect
from nautile.flows.operate import questions, reconcile
from nautile.flows.operate.prefect_server import require_api
from nautile.flows.pipeline import pipeline
from nautile.flows.run import exit_code, print_failure
from nautile.flows.selection import PreparedRun, Selection
from nautile.flows.stored_configs import follow
from nautile.store.artifacts import Store
from nautile.tasks.engine.errors import StageCrash
from tests.support.samples.stage_store import flip_byte
from tests.support.servers.fake_webhook import FakeWebhook
from tests.support.servers.prefect_calls import fetch
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import environment, nautile
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

pytestmark = pytest.mark.slow


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_a_second_run_reuses_every_stage_and_is_seen_in_the_server_that_the_operator_names(bench):
    before = {a.id: a.execution for a in Store(bench.store).list()}
    done = bench.run("run", str(TOY), PREFECT_LOGGING_LEVEL="DEBUG")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": reused") == 14
    assert ": started" not in done.stdout
    assert "embedded" not in done.stdout
    assert {a.id: a.execution for a in Store(bench.store).list()} == before

    (newest,) = fetch(f"{bench.url}/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    # The server records what tasks report in batches, so the last ones may come after the end of the run.
    wait_for(lambda: sum(run["state_type"] == "COMPLETED" for run in read_run(bench.url, newest["id"])[1]) >= 14)
    flow_run, runs = read_run(bench.url, newest["id"])
    assert (flow_run["name"], flow_run["state_type"]) == ("toy", "COMPLETED")
    parameters = flow_run["parameters"]
    assert (parameters["overrides"], parameters["only"], parameters["name"]) == ([], "", "toy")
    assert follow(Store(bench.store), parameters["config"], ()) == (load(TOY), load(TOY), str(TOY))
    # They can be followed by others: Prefect's own command runs the same again.
    entrypoint = f"{pipeline.fn.__module__}.{pipeline.fn.__name__}"
    again = subprocess.run(
        [sys.executable, "-P", "-m", "prefect", "flow-run", "retry", newest["id"], "--entrypoint", entrypoint],
        env=environment(bench.store, PREFECT_HOME=bench.home, **bench.server(), **TOY_DAG),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "completed successfully" in again.stdout, again.stdout + again.stderr
    assert {a.id: a.execution for a in Store(bench.store).list()} == before
    assert len(runs) == 14
    assert {run["state_type"] for run in runs} == {"COMPLETED"}
    assert not any(run["tags"] for run in runs)  # Prefect would ask for a limit of each before the task begins
    assert {"ingest:wikipedia", "evaluate:align", "report"} <= {run["name"] for run in runs}


def test_a_run_with_nothing_to_do_starts_no_server_and_is_recorded_like_any_other(made, tmp_path):
    store = Store(shutil.copytree(made[0].root, tmp_path / "store"))
    before = {a.id: a.execution for a in store.list()}
    done = nautile("run", str(TOY), "--name", "again", store=store.root, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": reused") == 14
    assert "14 stages in" in done.stdout
    assert "embedded" not in done.stdout
    assert not (store.root / "prefect" / "prefect.db").exists()
    assert {a.id: a.execution for a in store.list()} == before
    shown = nautile("runs", "--json", store=store.root, cwd=tmp_path)
    newest = json.loads(shown.stdout)[0]
    assert (newest["name"], newest["state"]) == ("again", "done")


def test_a_flipped_byte_is_refused_by_name_and_the_offered_rerun_mends_it_keeping_the_old(bench):
    store = Store(bench.store)
    before = {a.id: a.execution for a in store.list()}
    (artifact,) = store.list("documents")
    flip_byte(artifact.path / "documents.jsonl")
    done = bench.run("run", str(TOY))
    assert done.returncode == 2
    assert "documents.jsonl" in done.stderr
    assert f"nautile run {TOY} --only distill --force" in done.stderr

    done = bench.run("run", str(TOY), "--only", "distill", "--force")
    assert done.returncode == 0, done.stderr
    assert store.verify(store.find("documents", artifact.key)) == []
    after = {a.id: a.execution for a in store.list()}
    moved = {artifact_id for artifact_id in before if after[artifact_id] != before[artifact_id]}
    assert {artifact_id.partition("/")[0] for artifact_id in moved} == {"documents", "tokens"}
    assert store.get(f"{artifact.id}.1").execution == artifact.execution


def test_a_stage_refused_for_bad_input_is_accounted_for_and_no_secret_is_shown(bench):
    """Secrets: what the environment of every run here holds, a key and the login of the server."""
    fault = {"NAUTILE_TOY_FAULT": "align:config", "PREFECT_LOGGING_LEVEL": "DEBUG"}
    done = bench.run("run", str(TOY), "--from", "align", "--until", "align", "--force", **fault)
    assert done.returncode == 2
    assert "stage align failed: align.steps: three is a crowd" in done.stderr
    assert f"Continue with: nautile run {TOY} --from align --until align --force" in done.stderr
    assert "nanobind" not in done.stderr
    assert "align: failed" in done.stdout
    (account,) = (bench.store / "logs" / "failures").glob("align-*.md")
    assert f"nautile run {TOY} --from align --until align --force" in account.read_text()
    secrets = (bench.key, bench.login)
    written = {path: path.read_bytes() for path in bench.folder.rglob("*") if path.is_file()}
    assert any(b"TOY_KEY" in content for path, content in written.items() if path.name == "manifest.json")
    assert not [path for path, content in written.items() if any(secret.encode() in content for secret in secrets)]
    shown = [json.dumps(fetch(f"{bench.url}/{what}/filter", {})) for what in ("flow_runs", "artifacts", "logs")]
    printed = "".join((done.stdout, done.stderr, *shown))
    assert not [secret for secret in secrets if secret in printed]


@pytest.mark.parametrize(
    ("cause", "code"), [(ConfigError("x"), 2), (Retryable("x"), 2), (StageCrash("x"), 1), (OSError("x"), 1), (None, 1)]
)
def test_exit_codes(cause, code):
    assert exit_code(cause) == code


def test_the_account_of_a_crash_has_the_reason_the_last_lines_and_the_resume_command(tmp_path):
    err = Console(file=io.StringIO(), width=60)
    crash = StageCrash("its process ended with exit code 1", log=Path("/x"), log_tail="[a]\nKeyError: 1")
    run = PreparedRun("my.toml", Selection(last="report"), [], set())
    print_failure(err, "reason", crash, run, tmp_path / "nautile.log")
    lines = err.file.getvalue().splitlines()
    assert lines[0].startswith("stage reason failed: its process ended with exit code 1. The log is /x")
    assert lines[1:3] == ["[a]", "KeyError: 1"]
    assert lines[3].startswith("This is an error of the code or the machine")
    assert lines[4] == "Finished work is kept. Continue with: nautile run my.toml --until report"


def test_stopping_a_run_ends_its_processes_and_says_how_to_go_on(bench, tmp_path):
    """As a supervisor does; Ctrl-C: test_side_by_side.py."""
    run = bench.start("run", str(TOY), "--only", "pretrain", "--force", NAUTILE_TOY_FAULT=f"pretrain:wait={tmp_path}")
    wait_for(lambda: (tmp_path / "reached").exists() and (tmp_path / "reached").read_text())
    others = [int((tmp_path / "reached").read_text()), *children_of(run.pid)]
    os.kill(run.pid, signal.SIGTERM)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 130
    assert "stopped in pretrain" in err
    assert f"Continue with: nautile run {TOY} --only pretrain --force" in err
    assert "Traceback" not in out + err
    assert "nanobind" not in err
    wait_for(lambda: all(gone(pid) for pid in others))


def test_kill_9_leaves_no_process_and_the_next_run_goes_on(bench, tmp_path, toy, toy_stages):
    store, fault = tmp_path / "store", {"NAUTILE_TOY_FAULT": f"index:wait={tmp_path}"}
    run = bench.start("run", str(TOY), store=store, PREFECT_API_URL="", **fault)
    wait_for(lambda: (tmp_path / "reached").exists() and (tmp_path / "reached").read_text())
    children = children_of(run.pid)
    assert int((tmp_path / "reached").read_text()) in children
    assert len(children) == 2  # the stage, and the Prefect server that the run brought along
    run.kill()
    run.communicate(timeout=240)
    wait_for(lambda: all(gone(pid) for pid in children))
    states = {row["label"]: row["state"] for row in inspect.status(Store(store), toy)}
    assert (states["ingest:synth"], states["index"], states["distill"]) == ("made", "interrupted", "not made")

    done = bench.run("run", str(TOY), "--until", "distill", store=store)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": reused") == 3
    # The toy chain makes the same keys in every store, hence the same ids.
    assert {a.id for a in Store(store).list()} < {a.id for a in Store(bench.store).list()}


def test_a_run_waits_says_so_and_goes_on_when_it_is_approved_with_the_login(bench, tmp_path, monkeypatch):
    config, store = tmp_path / "asks.toml", Store(tmp_path / "store")
    operation = '[operation]\nnotify = "HOOK"\n[operation.held_out]\napprove = true\n'
    config.write_text(f'extends = "{TOY}"\nname = "approved"\n{operation}', encoding="utf-8")
    with FakeWebhook(503, 204) as webhook:
        run = bench.start("run", str(config), "--only", "held_out", store=store.root, HOOK=webhook.secret_url)
        try:
            wait_for(lambda: run.poll() is not None or questions.waiting(store))
            (note,) = questions.waiting(store)
            assert note["label"] == "held_out"
            state = fetch(f"{bench.url}/flow_runs/{note['run']}")["state"]
            assert state["type"] == "PAUSED"
            assert "held_out of approved asks for approval" in state["message"]
            assert "Expected cost: it never ran here" in state["message"]
            with pytest.raises(ConfigError, match=r"requires a login.*PREFECT_API_AUTH_STRING"):
                questions.approve(store, note["run"][:8], None)
            monkeypatch.setenv("PREFECT_API_URL", bench.url)
            with pytest.raises(ConfigError, match=r"PREFECT_API_URL: .*requires a login"):
                require_api()
            monkeypatch.setenv("PREFECT_API_AUTH_STRING", bench.login)
            assert require_api() == bench.url
            questions.approve(store, note["run"][:8], None)
            out, err = run.communicate(timeout=300)
        finally:
            run.kill()
    assert run.returncode == 0, err
    assert f"waits for nautile approve {note['run'][:8]}" in out
    assert questions.waiting(store) == []
    assert len(store.list("questions")) == 1
    # The first is sent again after its 503.
    messages = [(entry["event"], entry["run"]) for entry in webhook.messages]
    assert messages == [(f"nautile.{event}", note["run"]) for event in ("waiting", "waiting", "finished")]
    assert f"`nautile approve {note['run'][:8]}`" in webhook.messages[1]["text"]


@pytest.mark.heavy
def test_only_dead_runs_of_this_store_are_touched(bench, tmp_path):
    store = Store(tmp_path / "store")

    @flow
    def empty():
        """Never run."""

    server = {PREFECT_API_URL: bench.url, PREFECT_API_AUTH_STRING: bench.login}
    with temporary_settings(server), get_client(sync_client=True) as client:
        states = {"dead": Running(), "other": Running(), "waiting": Scheduled(), "stopping": Cancelling()}
        runs = {name: client.create_flow_run(empty, state=state) for name, state in states.items()}
        runs["restarting"] = client.create_flow_run(empty, state=Running())
        for name in ("dead", "waiting", "stopping", "restarting"):
            lock = store.run_lock(str(runs[name].id))
            lock.acquire()
            lock.release()
        past = time.time() - 30
        os.utime(store.run_lock(str(runs["restarting"].id)).path, (past, past))
        with store.run_lock(str(runs["other"].id)).for_life():
            results = list(reconcile.flow_runs(store))
        after = {name: client.read_flow_run(run.id).state.name for name, run in runs.items()}
    assert after == {
        "dead": "Crashed",
        "other": "Running",
        "waiting": "Scheduled",
        "stopping": "Cancelled",
        "restarting": "Running",
    }
    assert len(results) == 2
    assert set(store.begun_runs()) == {str(runs[name].id) for name in ("waiting", "restarting")}


def read_run(url: str, run_id: str) -> tuple[dict, list[dict]]:
    """A flow run and its task runs, from the server."""
    body = {"flow_runs": {"id": {"any_": [run_id]}}}
    (flow_run,) = fetch(f"{url}/flow_runs/filter", body)
    return flow_run, fetch(f"{url}/task_runs/filter", body)
