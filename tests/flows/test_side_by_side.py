"""Steps of one run at the same time: on different resources, within the limits, beside a failure, and on Ctrl-C.

Each run is a process: Prefect's threads that send events keep to the first server that a process has used.
"""

import os
import signal
import time

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.flows.dag import build_dag
from nautile.flows.pipeline import _StepRunner
from nautile.flows.selection import PreparedRun, Selection, prepare_run
from tests.support.servers.prefect_calls import remove_limits
from tests.support.stages.stage_parent import is_alive
from tests.support.stages.toy_cli import start
from tests.support.stages.toy_stages import TOY

DAGS = "tests.support.stages.side_by_side_dags"


@pytest.fixture
def run(store, tmp_path, prefect_url):
    """Start `nautile run` with a DAG of that module."""
    remove_limits(prefect_url)

    def call(dag: str, config: str = str(TOY)):
        more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "prefect")}
        more |= {"NAUTILE_DAG": f"{DAGS}:{dag}", "NAUTILE_MARKERS": str(tmp_path)}
        return start("run", config, store=store.root, cwd=tmp_path, **more)

    return call


@pytest.mark.heavy
def test_steps_work_side_by_side_within_the_limits_of_their_resources(run, store, tmp_path):
    (tmp_path / "two.toml").write_text(f'extends = "{TOY}"\n[resources]\naccelerator = 2\n', encoding="utf-8")
    process = run("limited", "two.toml")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err  # those that wait for each other's markers met
    at_work = {a.manifest["label"]: int((a.path / "at_work.txt").read_text()) for a in store.list()}
    assert {at_work[name] for name in ("network1", "network2", "network3", "last")} == {1}
    assert max(at_work[name] for name in ("first", "second", "third")) == 2
    begun = {path.stem: path.stat().st_mtime_ns for path in tmp_path.glob("*.begun")}
    assert begun["network1"] < begun["network2"] < begun["network3"]  # in the order of the DAG
    assert max(begun, key=begun.get) == "last"


@pytest.mark.slow
def test_a_failure_lets_what_does_not_need_it_finish(run, store):
    process = run("broken")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert "after_long: done" in out
    assert "stage bad failed: bad has bad input" in err
    assert "not started, because they need a failed step: after_bad, report" in err
    assert {artifact.manifest["label"] for artifact in store.list()} == {"long", "after_long"}


@pytest.mark.heavy
def test_ctrl_c_ends_the_processes_of_all_steps(run, tmp_path):
    process = run("stuck")
    begun = [tmp_path / "text.begun", tmp_path / "teachers.begun"]
    deadline = time.monotonic() + 240
    while not all(path.exists() and path.read_text() for path in begun):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped in text, teachers" in err
    assert not any(is_alive(int(path.read_text().split()[0])) for path in begun)


@pytest.mark.parametrize("name", ["spark", "nautile_370m"])
def test_by_default_a_shipped_run_is_in_order_one_step_at_a_time(name, store):
    config = load(name)
    dag = build_dag(config)
    runner = _StepRunner(store, config, PreparedRun(name, Selection(), dag, set()), "run", str, {})
    started = []
    while step := runner._next_step():
        started.append(step)
        runner.waiting.remove(step)
        runner.running = {step.label: step}
        assert runner._next_step() is None
        runner.running = {}
        runner._record(step, {kind: f"{kind}/{step.key}" for kind in step.outputs})
    assert started == dag


def test_evaluations_of_the_default_run_leave_the_cores_to_the_training_beside_them(store):
    config = load("local")
    assert config.operation.evaluate.niceness > config.operation.reason.niceness
    dag = {step.label: step for step in build_dag(config)}
    runner = _StepRunner(store, config, PreparedRun("local", Selection(), list(dag.values()), set()), "run", str, {})

    def end(*labels: str) -> list[str]:
        """The steps that are at work once these have ended."""
        for label in labels:
            runner.waiting = [step for step in runner.waiting if step.label != label]
            runner.running.pop(label, None)
            runner._record(dag[label], {kind: f"{kind}/{dag[label].key}" for kind in dag[label].outputs})
        while step := runner._next_step():
            runner.waiting.remove(step)
            runner.running[step.label] = step
        return list(runner.running)

    end()
    assert end("held_out", "ingest:fineweb_edu", "ingest:exemplars") == ["ingest:synth", "index"]
    assert end("ingest:synth", "index", "distill", "pretrain") == ["evaluate:pretrain", "align"]
    assert end("align") == ["evaluate:pretrain", "evaluate:align", "reason"]
    assert end("reason") == ["evaluate:pretrain", "evaluate:align", "self_distill"]


def test_a_resource_without_a_limit_is_refused_in_plain_words(store, tmp_path, toy, monkeypatch):
    monkeypatch.setenv("NAUTILE_MARKERS", str(tmp_path))
    monkeypatch.setenv("NAUTILE_DAG", f"{DAGS}:unlimited")
    message = r"odd uses the resource 'quantum', which has no limit: \[resources\] has accelerator, cpu, network"
    with pytest.raises(ConfigError, match=message):
        prepare_run(toy, Selection(), store)
