"""Each process of `nautile up` is killed while a step works; then a run, a cancellation, a schedule, a clean `down`."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nautile.common.processes import free_port, module_command
from nautile.configs.load import load
from nautile.flows.operate import services
from nautile.flows.operate.kept_changes import kept_changes
from nautile.flows.operate.questions import approve, waiting
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from tests.support.servers.prefect_calls import fetch, request
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import environment_of_operator
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
SETTINGS = '[schedule]\ncron = "* * * * *"\n'


@dataclass
class Operated:
    """The services over a store of stand-ins, whose stage `held_out` waits in its process for a file."""

    store: Store
    config: Path
    folder: Path
    server_port: int
    dashboard_port: int

    def up(self) -> None:
        services.up(self.store, str(self.config), self.server_port, self.dashboard_port, lambda _: None)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api"

    def service(self, name: str) -> services.Service:
        return next(service for service in services.services(self.store) if service.name == name)

    def kill(self, name: str) -> None:
        """Kill a service and wait for its end: until then `up` rightly counts it as running."""
        service = self.service(name)
        os.kill(service.pid, signal.SIGKILL)
        wait_for(lambda: not service.alive())

    def start(self, deployment: str, **parameters: Any) -> str:
        entry = fetch(f"{self.api}/deployments/name/pipeline/{deployment}-toy")
        return fetch(f"{self.api}/deployments/{entry['id']}/create_flow_run", {"parameters": parameters})["id"]

    def state(self, run: str) -> dict[str, Any]:
        return fetch(f"{self.api}/flow_runs/{run}")["state"]

    def set_state(self, run: str, **state: Any) -> None:
        fetch(f"{self.api}/flow_runs/{run}/set_state", {"state": state, "force": True})

    def end_of(self, run: str) -> str:
        return wait_for(lambda: (state := self.state(run)["type"]) in ENDED and state)

    def step_at_work(self) -> tuple[str, psutil.Process]:
        """A run whose step works, and the process of the step."""
        (self.folder / "reached").unlink(missing_ok=True)
        run = self.start("held_out", force=True)
        wait_for(lambda: (self.folder / "reached").exists() and (self.folder / "reached").read_text())
        return run, psutil.Process(int((self.folder / "reached").read_text()))

    def scheduled(self) -> list[dict[str, Any]]:
        """The ended runs of the schedule, newest first."""
        body = {"flows": {"name": {"any_": ["evaluation"]}}, "flow_runs": {"state": {"type": {"any_": list(ENDED)}}}}
        return fetch(f"{self.api}/flow_runs/filter", body | {"sort": "END_TIME_DESC"})


@pytest.fixture
def operated(tmp_path, prefect_home) -> Iterator[Operated]:
    store, folder = Store(tmp_path / "store"), tmp_path / "gate"
    folder.mkdir()
    shutil.copytree(prefect_home, store.root / "prefect")
    config = tmp_path / "toy.toml"
    config.write_text(f'extends = "{TOY}"\n{SETTINGS}', encoding="utf-8")
    with environment_of_operator(store.root, NAUTILE_TOY_FAULT=f"held_out:wait={folder}", **TOY_DAG):
        operated = Operated(store, config, folder, free_port(), free_port())
        try:
            operated.up()
            yield operated
        finally:
            services.down(store)


@pytest.mark.parametrize("victim", ["server", "deployments", "dashboard"])
def test_after_the_death_of_any_service_everything_goes_on(operated, victim):
    run, step = operated.step_at_work()
    operated.kill(victim)
    operated.up()
    assert {service.name for service in services.services(operated.store) if service.alive()} == {
        "server", "deployments", "dashboard",
    }  # fmt: skip
    # A cancellation.
    if victim == "deployments":  # the run has ended with the process that served it
        assert operated.end_of(run) == "CRASHED"
    else:
        assert step.is_running()
        operated.set_state(run, type="CANCELLING", name="Cancelling")
        assert operated.end_of(run) == "CANCELLED"
    wait_for(lambda: not step.is_running())
    in_run = {"flow_runs": {"id": {"any_": [run]}}}  # the server learns of the ends of tasks from events, so later
    wait_for(lambda: all(task["state_type"] in ENDED for task in fetch(f"{operated.api}/task_runs/filter", in_run)))
    tasks = fetch(f"{operated.api}/task_runs/filter", in_run)
    assert {task["state_type"] for task in tasks} <= {"CANCELLED", "CRASHED"}
    # A run: no slot was lost.
    (operated.folder / "go").touch()
    again = operated.start("held_out", force=True)
    assert operated.end_of(again) == "COMPLETED", operated.state(again)
    # A schedule.
    since = len(operated.scheduled())
    assert (
        wait_for(lambda: len(operated.scheduled()) > since and operated.scheduled())[0]["state"]["type"] == "COMPLETED"
    )
    # A clean end, without a run that is stopped.
    alive = [psutil.Process(service.pid) for service in services.services(operated.store)]
    stopped: list[str] = []
    services.down(operated.store, stopped.append)
    assert not any(process.is_running() for process in alive)
    assert not {run, again} & set(stopped)  # at most one of the schedule


def test_down_names_the_run_that_it_stops_and_frees_its_slot_and_retry_goes_on_after_it(operated):
    run, step = operated.step_at_work()
    stopped: list[str] = []
    services.down(operated.store, stopped.append)
    assert run in stopped
    assert not step.is_running()
    (row,) = Catalog(operated.store).query("SELECT state FROM plans WHERE run = ?", [run])
    assert row["state"] == "interrupted"  # nobody has cancelled it
    # The printed command, from another folder: it starts the services again as they were.
    (operated.folder / "go").touch()
    command = module_command("nautile.flows.cli.main", "retry", run)
    done = subprocess.run(command, cwd=operated.folder, capture_output=True, text=True, check=False)
    assert (done.returncode, f"run {run[:8]} starts again" in done.stdout) == (0, True), done
    wait_for(lambda: operated.state(run)["type"] == "COMPLETED")
    limits = fetch(f"{operated.api}/v2/concurrency_limits/filter", {})
    assert {entry["name"] for entry in limits if entry["name"].startswith("nautile-")} == {
        "nautile-accelerator", "nautile-cpu", "nautile-network",
    }  # fmt: skip
    states = fetch(f"{operated.api}/flow_run_states/?flow_run_id={run}")
    assert [state["type"] for state in states].count("CRASHED") == 1


def test_a_run_whose_process_hangs_is_crashed_with_its_tasks_and_nobody_has_cancelled_it(operated):
    """The automation for silent runs ends it on the server alone."""
    run, step = operated.step_at_work()
    processes = services.run_processes(operated.service("deployments").pid)
    (process,) = [process for process, of in processes.items() if of == run]
    process.suspend()
    operated.set_state(run, type="CRASHED", message="No heartbeat")  # as the automation does after 90 s
    wait_for(lambda: not process.is_running() and not step.is_running())
    in_run = {"flow_runs": {"id": {"any_": [run]}}}
    (task,) = wait_for(
        lambda: [row for row in fetch(f"{operated.api}/task_runs/filter", in_run) if row["state_type"] in ENDED]
    )
    assert task["state_type"] == "CRASHED"
    state = "SELECT state FROM plans WHERE run = ?"
    wait_for(lambda: Catalog(operated.store).query(state, [run])[0]["state"] == "interrupted")
    assert operated.state(run)["type"] == "CRASHED"


def test_a_restart_keeps_what_the_operator_has_changed_and_runs_one_of_the_missed(operated):
    deployment = fetch(f"{operated.api}/deployments/name/evaluation/evaluation-toy")
    (schedule,) = deployment["schedules"]
    own = f"{operated.api}/deployments/{deployment['id']}/schedules"
    request(f"{own}/{schedule['id']}", {"active": False}, method="PATCH").raise_for_status()
    fetch(own, [{"schedule": {"cron": "0 5 * * *", "timezone": "UTC"}, "active": True}])
    limit = f"{operated.api}/v2/concurrency_limits/nautile-network"
    request(limit, {"limit": 3}, method="PATCH").raise_for_status()
    # As the scheduler leaves them while nothing serves the deployment.
    services._end(operated.service("deployments"))
    window = {"start_time": "2026-01-01T00:00:00Z", "end_time": "2026-01-03T23:00:00Z"}
    request(f"{operated.api}/deployments/{deployment['id']}/schedule", window).raise_for_status()
    filters = {"deployments": {"id": {"any_": [deployment["id"]]}}, "sort": "EXPECTED_START_TIME_ASC"}
    waiting_runs = fetch(f"{operated.api}/flow_runs/filter", filters)
    missed = [run["id"] for run in waiting_runs if run["expected_start_time"] < "2026-01-04"]
    assert len(missed) == 3
    operated.up()
    times = {
        entry["schedule"]["cron"]: entry["active"]
        for entry in fetch(f"{operated.api}/deployments/{deployment['id']}")["schedules"]
    }
    assert times == {"* * * * *": False, "0 5 * * *": True}
    assert fetch(limit)["limit"] == 3
    changes = [
        "the limit nautile-network is 3; resources.network is 1",
        "the deployment evaluation-toy: its schedule * * * * * UTC is paused",
        "the deployment evaluation-toy has a schedule of its own, 0 5 * * * UTC",
    ]
    assert kept_changes(operated.api, load(str(operated.config))) == changes
    # `nautile deploy` alone, without `up`, says so as well.
    log = Path(operated.service("deployments").log)
    wait_for(lambda: all(change in log.read_text() for change in changes), "the lines of deploy")
    assert [operated.end_of(run) for run in missed] == ["CANCELLED", "CANCELLED", "COMPLETED"]
    # A configuration that changed its own schedule replaces that one alone; it stays paused.
    operated.config.write_text(
        operated.config.read_text().replace('"* * * * *"', '"30 4 * * *"') + "[resources]\nnetwork = 2\n"
    )
    services._end(operated.service("deployments"))
    operated.up()
    times = {
        entry["schedule"]["cron"]: entry["active"]
        for entry in fetch(f"{operated.api}/deployments/{deployment['id']}")["schedules"]
    }
    assert times == {"30 4 * * *": False, "0 5 * * *": True}
    assert fetch(limit)["limit"] == 2


@pytest.mark.heavy
def test_a_gate_is_held_longer_than_every_time_limit_and_over_crashes_and_retries(operated):
    """For real: the automation for silent runs acts after a minute and a half."""
    operated.config.write_text(operated.config.read_text() + "[operation.held_out]\napprove = true\n")
    services.down(operated.store)
    operated.up()
    (operated.folder / "go").touch()
    run = operated.start("held_out")

    def suspended() -> bool:
        return operated.state(run)["name"] == "Suspended" and [note["run"] for note in waiting(operated.store)] == [run]

    wait_for(suspended)
    begun = time.monotonic()
    while time.monotonic() - begun < 130:
        assert suspended()
        time.sleep(2)
    # A restart of the server, and of all services.
    operated.kill("server")
    operated.up()
    assert suspended()
    services.down(operated.store)
    operated.up()
    assert suspended()
    # Whatever ends the wait but Resume: it asks again after a retry from any place.
    for end in ({"type": "CRASHED"}, {"type": "CANCELLED"}, None):
        if end:
            operated.set_state(run, **end)
        operated.set_state(run, type="SCHEDULED", name="AwaitingRetry" if end else "Scheduled")
        wait_for(lambda: operated.state(run)["type"] == "RUNNING" or suspended())
        wait_for(suspended)
        assert operated.store.list("questions") == []
    approve(operated.store, run[:8], None)
    assert operated.end_of(run) == "COMPLETED", operated.state(run)
    assert len(operated.store.list("questions")) == 1
