"""`nautile run` as processes: the whole toy chain, reuse, faults, signals, `kill -9`, and an operator's Prefect."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from flows.prefect_env import _free_port, _healthy
from store.artifacts import Store
from tests.support.stage_store import flip_byte
from tests.support.toy_cli import ROOT, environment
from tests.support.toy_stages import TOY

pytestmark = pytest.mark.slow


def until(condition, seconds=120.0):
    """Wait for `condition()` to be true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def test_the_whole_chain_runs_quietly_and_writes_nothing_outside_its_store(bench):
    done = bench.first
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "12 stages in" in done.stdout
    assert "Prefect" not in done.stdout.replace("starting the embedded Prefect server", "")
    page = done.stdout.strip().splitlines()[-1].removeprefix("report: ")
    assert (bench.folder / page).read_text().startswith("<!doctype html>")
    assert list((bench.folder / "home").iterdir()) == []
    assert sorted(path.name for path in bench.folder.iterdir()) == ["home", "store"]


def test_a_second_run_reuses_every_stage(bench):
    before = {a.id: a.execution for a in Store(bench.store).list()}
    done = bench.run("run", str(TOY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": reused") == 12
    assert ": started" not in done.stdout
    assert {a.id: a.execution for a in Store(bench.store).list()} == before


def test_only_with_force_makes_one_stage_anew_and_keeps_what_it_replaces(bench):
    before = {a.id: a.execution for a in Store(bench.store).list()}
    done = bench.run("run", str(TOY), "--only", "evaluate:align", "--force")
    assert done.returncode == 0, done.stderr
    after = {a.id: a.execution for a in Store(bench.store).list()}
    (moved,) = [artifact_id for artifact_id in before if after[artifact_id] != before[artifact_id]]
    assert moved.startswith("evaluation/")
    assert Store(bench.store).get(f"{moved}.1").execution == before[moved]


def test_a_flipped_byte_is_refused_by_name_and_the_offered_rerun_mends_it(bench):
    store = Store(bench.store)
    artifact = store.list("documents")[0]
    flip_byte(artifact.path / "documents.jsonl")
    done = bench.run("run", str(TOY))
    assert done.returncode == 2
    assert "documents.jsonl" in done.stderr
    assert "nautile run --only distill --force" in done.stderr
    assert bench.run("run", str(TOY), "--only", "distill", "--force").returncode == 0
    assert store.verify(store.find("documents", artifact.key)) == []


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("align:config", 2, "stage align failed: align.steps: three is a crowd"),
        ("align:crash", 1, "ZeroDivisionError: by zero"),
    ],
)
def test_a_failing_stage_is_accounted_for(bench, fault, code, said):
    done = bench.run("run", str(TOY), "--from", "align", "--until", "align", "--force", NAUTILE_TOY_FAULT=fault)
    assert done.returncode == code
    assert said in done.stderr
    assert f"Go on with: nautile run {TOY} --from align --until align --force" in done.stderr
    assert "nanobind" not in done.stderr
    assert "align: failed" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_a_run_ends_its_processes_and_says_how_to_go_on(bench, tmp_path, number):
    run = bench.start("run", str(TOY), "--only", "pretrain", "--force", NAUTILE_TOY_FAULT=f"pretrain:wait={tmp_path}")
    until(lambda: (tmp_path / "reached").exists() and (tmp_path / "reached").read_text())
    others = [int((tmp_path / "reached").read_text()), *children_of(run.pid)]
    os.kill(run.pid, number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "stopped in pretrain" in err
    assert f"Go on with: nautile run {TOY} --only pretrain --force" in err
    assert "Traceback" not in out + err
    assert "nanobind" not in err
    until(lambda: all(gone(pid) for pid in others), 10)


def test_kill_9_leaves_no_process_and_the_next_run_goes_on(bench, tmp_path):
    store = tmp_path / "store"
    run = bench.start("run", str(TOY), store=store, NAUTILE_TOY_FAULT=f"reason:wait={tmp_path}")
    until(lambda: (tmp_path / "reached").exists() and (tmp_path / "reached").read_text())
    others = [int((tmp_path / "reached").read_text()), *children_of(run.pid)]
    assert len(others) == 3  # the stage, as itself and as a child of the run, and the Prefect server
    run.kill()
    run.communicate(timeout=60)
    until(lambda: all(gone(pid) for pid in others), 10)
    states = {
        row["label"]: row["state"] for row in json.loads(bench.run("status", str(TOY), "--json", store=store).stdout)
    }
    assert (states["evaluate:align"], states["reason"], states["report"]) == ("made", "interrupted", "not made")

    done = bench.run("run", str(TOY), store=store)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": reused") == 7
    # Toy runs of different stores make the same keys, hence the same ids.
    assert {a.id for a in Store(store).list()} == {a.id for a in Store(bench.store).list()}


def test_a_store_that_cannot_be_written_is_one_clear_message(bench, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = bench.run("run", str(TOY), store=tmp_path / "file")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_prefect_server_that_does_not_answer_is_one_clear_message(bench):
    url = f"http://127.0.0.1:{_free_port()}/api"
    done = bench.run("run", str(TOY), PREFECT_API_URL=url)
    assert done.returncode == 2
    assert done.stderr == f"PREFECT_API_URL: {url} does not answer; start that server, or unset the variable\n"


def test_a_run_is_seen_in_the_server_that_the_operator_names(bench):
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    server = subprocess.Popen(
        [sys.executable, "-m", "flows.prefect_env", str(port), str(os.getpid())],
        env=environment(bench.store, PREFECT_HOME=bench.home, PREFECT_SERVER_ANALYTICS_ENABLED="false"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _healthy(url, 5.0))
        done = bench.run("run", str(TOY), "--until", "distill", PREFECT_API_URL=url)
        assert done.returncode == 0, done.stderr
        assert "embedded" not in done.stdout
        newest = {"sort": "START_TIME_DESC", "limit": 1}
        (flow_run,) = ask(url, "flow_runs/filter", newest)
        assert (flow_run["name"], flow_run["state_type"]) == ("toy", "COMPLETED")
        runs = ask(url, "task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})
        assert {run["name"]: run["state_type"] for run in runs} == dict.fromkeys(
            ("ingest:wikipedia", "ingest:synth", "distill"), "COMPLETED"
        )
    finally:
        server.terminate()
        server.wait(30)


def ask(url: str, path: str, body: dict) -> list[dict]:
    request = urllib.request.Request(
        f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)
