"""`nautile up` whose server has PostgreSQL: runs are started, paused, approved, cancelled and retried."""

import os

import psutil
import pytest

from nautile.common.errors import ConfigError
from nautile.common.processes import free_port
from nautile.configs.load import load
from nautile.flows.operate import services
from nautile.flows.operate.deployments import deployments
from nautile.flows.operate.questions import approve, waiting
from nautile.store.artifacts import Store
from tests.support.servers.postgres import DATABASE, PASSWORD, binary, postgres
from tests.support.servers.prefect_calls import fetch
from tests.support.stages.stage_parent import wait_for
from tests.support.stages.toy_cli import environment
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(binary("initdb") is None, reason="no PostgreSQL here: its program initdb is not installed"),
]
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For the store, the configuration, and what the waiting stage writes."""
    return tmp_path_factory.mktemp("postgres")


@pytest.fixture(scope="module")
def running(folder):
    """Name -> service, of `nautile up`. Its `held_out` asks for approval, and its `ingest` waits for `go`."""
    store, config = Store(folder / "store"), folder / "asks.toml"
    config.write_text(f'extends = "{TOY}"\n[operation.held_out]\napprove = true\n', encoding="utf-8")
    with postgres() as settings, pytest.MonkeyPatch.context() as patch:
        more = {"NAUTILE_TOY_FAULT": f"ingest:wait={folder}", **TOY_DAG, **settings}
        for name in [name for name in os.environ if name.startswith(("NAUTILE_", "PREFECT_"))]:
            patch.delenv(name)
        for name, value in environment(store.root, **more).items():
            patch.setenv(name, value)
        with pytest.MonkeyPatch.context() as wrong:
            wrong.setenv(f"{DATABASE}PASSWORD", "of another database")
            with pytest.raises(ConfigError, match=r"server did not start: .*password authenti") as raised:
                services.up(store, str(config), free_port(), free_port(), lambda _: None)
            assert "of another database" not in str(raised.value)
        try:
            services.up(store, str(config), free_port(), free_port(), lambda _: None)
            yield {service.name: service for service in services.services(store)}
        finally:
            services.down(store)


def begin(api: str, deployment: str) -> str:
    entry = fetch(f"{api}/deployments/name/{deployment}")
    return fetch(f"{api}/deployments/{entry['id']}/create_flow_run", {})["id"]


def end_of(api: str, run: str) -> str:
    return wait_for(lambda: (state := fetch(f"{api}/flow_runs/{run}")["state"])["type"] in ENDED and state["type"])


def test_a_run_waits_for_approval_and_goes_on(running, folder):
    api, store = running["server"].url, Store(folder / "store")
    assert len(fetch(f"{api}/deployments/filter", {})) == len(deployments(load(str(TOY)), str(TOY)))
    run = begin(api, "pipeline/held_out-toy")
    (note,) = wait_for(lambda: waiting(store))
    assert note["run"] == run
    assert fetch(f"{api}/flow_runs/{run}")["state"]["type"] == "PAUSED"
    approve(store, run[:8], None)
    assert end_of(api, run) == "COMPLETED"
    assert {artifact.manifest["run"] for artifact in store.list("questions")} == {run}


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
    assert {limit["active_slots"] for limit in fetch(f"{api}/v2/concurrency_limits/filter", {})} == {0}


def test_only_the_server_knows_the_password_and_no_file_or_command_line_holds_it(running, folder):
    assert psutil.Process(running["server"].pid).environ()[f"{DATABASE}PASSWORD"] == PASSWORD
    for name in ("deployments", "dashboard"):
        process = psutil.Process(running[name].pid)
        for member in (process, *process.children(recursive=True)):
            assert not any(variable.startswith(DATABASE) for variable in member.environ())
    assert not any(PASSWORD in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(PASSWORD.encode() in content for content in written)
    assert not (folder / "store" / "prefect" / "prefect.db").exists()
