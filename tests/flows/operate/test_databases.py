"""Gates, slots and cancellations of `nautile up` by Prefect's own API, with SQLite and with PostgreSQL."""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from nautile.common.errors import ConfigError
from nautile.common.processes import free_port
from nautile.configs.load import load
from nautile.flows.operate import services
from nautile.flows.operate.concurrency import PREFIX
from nautile.flows.operate.deployments import deployments
from nautile.flows.operate.questions import waiting
from nautile.store.artifacts import Store
from tests.support.servers.postgres import DATABASE, PASSWORD, binary, postgres
from tests.support.servers.prefect_calls import fetch, request
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import environment
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]
NO_POSTGRES = pytest.mark.skipif(binary("initdb") is None, reason="no PostgreSQL here: initdb is not installed")
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=NO_POSTGRES)])
def database(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, database):
    """For the store, the configuration, and what the waiting stage writes."""
    return tmp_path_factory.mktemp(database)


@pytest.fixture(scope="module")
def running(folder, database, prefect_home):
    """Name -> service, of `nautile up`. Its `held_out` asks for approval, and its `ingest` waits for `go`."""
    store, config = Store(folder / "store"), folder / "asks.toml"
    if database == "sqlite":
        shutil.copytree(prefect_home, store.root / "prefect")
    config.write_text(f'extends = "{TOY}"\n[operation.held_out]\napprove = true\n', encoding="utf-8")
    with postgres() if database == "postgres" else nullcontext({}) as settings, pytest.MonkeyPatch.context() as patch:
        more = {"NAUTILE_TOY_FAULT": f"ingest:wait={folder}", **TOY_DAG, **settings}
        for name in [name for name in os.environ if name.startswith(("NAUTILE_", "PREFECT_"))]:
            patch.delenv(name)
        for name, value in environment(store.root, **more).items():
            patch.setenv(name, value)
        if database == "postgres":
            refused_password(store, config)
        try:
            services.up(store, str(config), free_port(), free_port(), lambda _: None)
            yield {service.name: service for service in services.services(store)}
        finally:
            services.down(store)


def refused_password(store: Store, config: Path) -> None:
    with pytest.MonkeyPatch.context() as wrong:
        wrong.setenv(f"{DATABASE}PASSWORD", "of another database")
        with pytest.raises(ConfigError, match=r"server did not start: .*password authenti") as raised:
            services.up(store, str(config), free_port(), free_port(), lambda _: None)
        assert "of another database" not in str(raised.value)


def begin(api: str, deployment: str, **parameters: Any) -> str:
    entry = fetch(f"{api}/deployments/name/{deployment}")
    return fetch(f"{api}/deployments/{entry['id']}/create_flow_run", {"parameters": parameters})["id"]


def used_slots(api: str) -> dict[str, int]:
    """Resource -> its slots that are taken."""
    limits = fetch(f"{api}/v2/concurrency_limits/filter", {})
    return {
        entry["name"].removeprefix(PREFIX): entry["active_slots"]
        for entry in limits
        if entry["name"].startswith(PREFIX) and entry["active_slots"]
    }


def task_of(api: str, run: str) -> dict[str, Any]:
    """The newest task of a run, as soon as the server knows of one."""
    in_run = {"flow_runs": {"id": {"any_": [run]}}, "sort": "EXPECTED_START_TIME_DESC"}
    return wait_for(lambda: fetch(f"{api}/task_runs/filter", in_run))[0]


def end_of(api: str, run: str) -> str:
    return wait_for(lambda: (state := fetch(f"{api}/flow_runs/{run}")["state"])["type"] in ENDED and state["type"])


def test_a_gate_is_opened_by_resume_alone_and_holds_no_slot(running, folder):
    api, store = running["server"].url, Store(folder / "store")
    assert len(fetch(f"{api}/deployments/filter", {})) == len(deployments(load(str(TOY)), str(TOY)))
    run = begin(api, "pipeline/held_out-toy")

    def asks() -> bool:
        state = fetch(f"{api}/flow_runs/{run}")["state"]
        return (state["type"], state["name"]) == ("PAUSED", "Suspended") and [n["run"] for n in waiting(store)] == [run]

    wait_for(asks)
    assert "asks for approval" in fetch(f"{api}/flow_runs/{run}")["state"]["message"]
    assert used_slots(api) == {}
    for name in ("AwaitingRetry", "Scheduled"):  # a process begins, and asks again
        state = {"type": "SCHEDULED", "name": name}
        fetch(f"{api}/flow_runs/{run}/set_state", {"state": state, "force": True})
        wait_for(lambda: fetch(f"{api}/flow_runs/{run}")["state"]["name"] == "Running")
        wait_for(asks)
    assert store.list("questions") == []
    assert fetch(f"{api}/flow_runs/{run}/resume", {"run_input": {}})["status"] == "ACCEPT"
    assert end_of(api, run) == "COMPLETED"
    assert {artifact.manifest["run"] for artifact in store.list("questions")} == {run}
    assert waiting(store) == []


def test_a_run_is_cancelled_and_retried(running, folder):
    api, store = running["server"].url, Store(folder / "store")
    run = begin(api, "pipeline/ingest-toy")
    wait_for((folder / "reached").exists)
    fetch(f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    assert end_of(api, run) == "CANCELLED"
    assert store.list("tokens") == []
    (folder / "go").touch()
    again = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}}
    assert fetch(f"{api}/flow_runs/{run}/set_state", again)["status"] == "ACCEPT"
    wait_for(lambda: fetch(f"{api}/flow_runs/{run}")["state"]["type"] not in ("CANCELLED", "SCHEDULED"))
    assert end_of(api, run) == "COMPLETED"
    assert {artifact.manifest["run"] for artifact in store.list("tokens")} == {run}
    assert used_slots(api) == {}


def test_a_step_waits_for_a_slot_takes_one_that_the_operator_adds_and_a_killed_one_gives_its_own_back(running, folder):
    api, store = running["server"].url, Store(folder / "store")
    reached, limit = folder / "reached", f"{api}/v2/concurrency_limits/{PREFIX}cpu"
    for file in (reached, folder / "go"):
        file.unlink(missing_ok=True)
    first = begin(api, "pipeline/ingest-toy", force=True)
    wait_for(lambda: reached.exists() and reached.read_text())
    step = psutil.Process(int(reached.read_text()))
    reached.unlink()
    assert used_slots(api) == {"cpu": 1}
    second = begin(api, "pipeline/pipeline-toy", only="ingest:synth", force=True)
    wait_for(lambda: task_of(api, second)["state"]["name"] == "AwaitingConcurrencySlot")
    assert task_of(api, second)["state"]["message"] == f"It waits for {PREFIX}cpu."
    logged = {"logs": {"flow_run_id": {"any_": [second]}}}
    waits = f"ingest:synth waits: other steps work: it waits for {PREFIX}cpu"
    wait_for(lambda: waits in [line["message"] for line in fetch(f"{api}/logs/filter", logged)])
    assert not reached.exists()
    request(limit, {"limit": 2}, method="PATCH").raise_for_status()
    wait_for(lambda: reached.exists() and reached.read_text())
    wait_for(lambda: task_of(api, second)["state"]["name"] == "Running")
    assert used_slots(api) == {"cpu": 2}
    # Its process is killed: the kernel ends that of the step, and the lease of its slot runs out.
    processes = services.run_processes(running["deployments"].pid)
    next(process for process, run in processes.items() if run == first).kill()
    assert end_of(api, first) == "CRASHED"
    wait_for(lambda: not step.is_running())
    wait_for(lambda: used_slots(api) == {"cpu": 1})
    (folder / "go").touch()
    assert end_of(api, second) == "COMPLETED"
    assert {artifact.manifest["run"] for artifact in store.list("tokens")} >= {second}
    assert used_slots(api) == {}


def test_only_the_server_knows_the_password_and_no_file_or_command_line_holds_it(running, folder, database):
    if database != "postgres":
        pytest.skip("SQLite has no password")
    assert psutil.Process(running["server"].pid).environ()[f"{DATABASE}PASSWORD"] == PASSWORD
    for name in ("deployments", "dashboard"):
        process = psutil.Process(running[name].pid)
        for member in (process, *process.children(recursive=True)):
            assert not any(variable.startswith(DATABASE) for variable in member.environ())
    assert not any(PASSWORD in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(PASSWORD.encode() in content for content in written)
    assert not (folder / "store" / "prefect" / "prefect.db").exists()
