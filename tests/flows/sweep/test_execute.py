"""The runs of a sweep as processes: a failure stops no other, Ctrl-C ends all, and `kill -9` loses nothing."""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time

import psutil
import pytest

from nautile.flows.operate import prefect_server
from nautile.flows.operate.concurrency import SHARED
from nautile.flows.sweep import execute
from nautile.flows.sweep.arms import read_sweep
from tests.support.stages.toy_stages import TOY

ARMS = '[[arms]]\nname = "as it is"\n[[arms]]\nname = "fewer"\nset = ["self_distill.rounds=2"]\n'
GRID = '[grid]\n"reason.policy.steps" = [1, 2, 3]\n'


@pytest.fixture
def run_with(store, tmp_path, toy_stages, monkeypatch):
    """Run a sweep of three arms whose processes run a script; the exit code and what was printed."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(prefect_server, "prefect_api", contextlib.nullcontext)
    monkeypatch.setattr(prefect_server, "configure_prefect", lambda store: None)
    (tmp_path / "try.toml").write_text(f'config = "{TOY}"\n{GRID}', encoding="utf-8")
    sweep, lines = read_sweep(tmp_path / "try.toml", store), []

    def call(script, say=lambda line: None):
        def command(_, run):
            return [sys.executable, "-c", script, run.arm, str(tmp_path)]

        def keep(line):
            lines.append(line)
            say(line)

        monkeypatch.setattr(execute, "command", command)
        return execute.run_sweep(sweep, store, 2, keep), lines

    return call


def test_a_failing_arm_is_counted_and_stops_no_other(run_with):
    script = (
        "import sys; bad = sys.argv[1] == 'steps=2'; print('held_out: reused\\nreason: ' + 'done', flush=True)\n"
        "print('\\nclosing table'); sys.exit('a \\x1b[31mreason' if bad else 0)"
    )
    code, lines = run_with(script)
    assert code == 1
    assert "[steps=1] reason: done" in lines
    assert sum("done after" in line and "1 of 14 steps reused" in line for line in lines) == 2
    assert "[steps=2] a \N{REPLACEMENT CHARACTER}[31mreason" in lines
    assert "1 of 3 runs failed: steps=2" in lines
    assert not any("closing" in line for line in lines)
    assert lines[-1].startswith("Finished work is kept. Continue with: nautile sweep ")


def test_what_failed_in_another_arm_is_shown_once(run_with, store, tmp_path):
    first = read_sweep(tmp_path / "try.toml", store).runs[0]
    note = store.staging(first.prepared.steps[0].key) / "failure.json"
    script = f"""
import json, os, pathlib, sys, time
note = pathlib.Path({str(note)!r})
if sys.argv[1] == "steps=1":
    fields = dict(sweep=os.environ[{SHARED!r}], run="r1", config={first.run_name!r}, reason="by zero", final=True)
    note.with_suffix(".part").write_text(json.dumps(fields))
    note.with_suffix(".part").rename(note)
while not note.exists():
    time.sleep(0.01)
sys.exit("stage held_out failed: by zero")
"""
    code, lines = run_with(script)
    assert code == 1
    assert [line for line in lines if "by zero" in line] == ["[steps=1] stage held_out failed: by zero"]
    assert {"[steps=2] not made: held_out failed for steps=1", "[steps=3] not made: held_out failed for steps=1"} < {
        *lines
    }
    assert "1 of 3 runs failed: steps=1" in lines
    assert "2 more need steps that failed there and were not retried: steps=2; steps=3" in lines


@pytest.mark.parametrize(("how", "code"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 1)])
def test_the_exit_code_is_that_of_the_failure(run_with, how, code):
    assert run_with(f"import os, sys; {how}")[0] == code


def test_ctrl_c_ends_the_runs_and_starts_no_other(run_with):
    script = "import sys, time; open(f'{sys.argv[2]}/{sys.argv[1]}', 'w'); print('begun', flush=True); time.sleep(600)"
    begun, before = [], {*threading.enumerate()}

    def say(line):
        if line.endswith("begun"):
            begun.append(line)
            if len(begun) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    code, lines = run_with(script, say)
    assert code == 130
    assert lines[-1].startswith("Continue with: nautile sweep ")
    assert sorted(begun) == ["[steps=1] begun", "[steps=2] begun"]
    assert [thread for thread in {*threading.enumerate()} - before if "ThreadPool" in thread.name] == []


@pytest.mark.heavy
def test_killed_it_goes_on_where_it_was_and_then_all_is_reused(bench, tmp_path):
    store = shutil.copytree(bench.store, tmp_path / "store", ignore=shutil.ignore_patterns("prefect"))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    lower = f'set = ["launch.niceness={own + 1}"]'
    (tmp_path / "try.toml").write_text(f'config = "{TOY}"\n{lower}\n{ARMS}', encoding="utf-8")
    file, fault = str(tmp_path / "try.toml"), {"NAUTILE_TOY_FAULT": f"self_distill:wait={tmp_path}"}
    process = bench.start("sweep", file, store=store, **fault)
    while not (tmp_path / "reached").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    processes = psutil.Process(process.pid).children(recursive=True)
    assert len(processes) >= 2  # the run and its stage
    assert {member.nice() for member in processes} == {own + 1}
    process.kill()
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []

    done = bench.run("sweep", file, "--json", store=store)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are in the store already" in done.stderr
    assert "[fewer] done after" in done.stderr
    assert "10 of 14 steps reused" in done.stderr or "11 of 14 steps reused" in done.stderr
    report = json.loads(done.stdout)
    assert [row["state"] for row in report["arms"]] == ["done", "done"]
    assert [row["n"] for row in report["metrics"][0]["arms"]] == [20, 20]
    again = bench.run("sweep", file, store=store)
    assert "2 of 2 runs are in the store already" in again.stdout
    assert "Prefect" not in again.stdout


def test_the_command_that_continues_a_large_sweep_allows_its_runs(run_with, monkeypatch):
    monkeypatch.setattr(execute, "MOST_ARMS", 2)
    _, lines = run_with("import sys; sys.exit(1)")
    assert lines[-1].endswith("try.toml --parallel 2 --yes")
