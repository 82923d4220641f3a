"""Deployments for a work pool: `prefect.yaml` deploys whole with the real command, and equals `nautile deploy`."""

import shutil
import subprocess
import sys
import time

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, PREFECT_CLI_COLORS, temporary_settings
from prefect.testing.cli import CycloptsCliRunner

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.flows.operate import concurrency
from nautile.flows.operate.automations import SILENT, TAG
from nautile.flows.operate.deployments import POOL, _Runner, deploy_settings, deployments, register
from nautile.flows.operate.kept_changes import SCHEDULE, kept_changes
from nautile.store.artifacts import Store
from tests.support.servers.prefect_calls import fetch, remove_limits, request
from tests.support.stages.toy_cli import ROOT, environment
from tests.support.stages.toy_dag import TOY_DAG
from tests.support.stages.toy_stages import TOY


@pytest.fixture(scope="module")
def local():
    return load("local")


@pytest.mark.heavy
def test_prefect_deploys_every_entry_of_the_file(local, prefect_url, tmp_path):
    """The real command against a real server: it stopped after the first entry with a fastapi that refuses nulls."""
    more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "prefect")}
    env = environment(tmp_path / "store", **more)

    prefect(prefect_url, "work-pool", "create", POOL, "--type", "process")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    in_pool = {"work_pools": {"name": {"any_": [POOL]}}}
    registered = {entry["name"]: entry for entry in fetch(f"{prefect_url}/deployments/filter", in_pool)}
    served = {entry.name: entry for entry in deployments(local, "local")}
    assert set(registered) == set(served)
    for name, deployment in registered.items():
        ours = served[name]
        assert (deployment["entrypoint"], deployment["tags"]) == (ours.entrypoint, ours.tags)
        assert deployment["concurrency_options"]["collision_strategy"] == "ENQUEUE"
        assert deployment["global_concurrency_limit"]["limit"] == 1
        assert deployment["job_variables"] == {"env": {"NAUTILE_STORE": str(tmp_path / "store")}}
        assert deployment["parameters"].keys() == (ours.parameters or {}).keys()
    schedules = {name: entry["schedules"] for name, entry in registered.items() if entry["schedules"]}
    ((_, (schedule,)),) = schedules.items()
    assert list(schedules) == ["evaluation-local"]
    assert schedule["schedule"]["cron"] == local.schedule.cron
    automations = {entry["name"]: entry for entry in fetch(f"{prefect_url}/automations/filter", {})}
    assert SILENT in automations
    limits = {entry["name"]: entry["limit"] for entry in fetch(f"{prefect_url}/v2/concurrency_limits/filter", {})}
    assert {f"nautile-{name}": limit for name, limit in local.resources.limits().items()}.items() <= limits.items()
    automation = automations["nautile: show regressions of local"]
    (trigger,) = served["regression-local"].triggers
    assert automation["trigger"]["expect"] == list(trigger.expect)
    assert automation["trigger"]["match"] == trigger.match.model_dump(mode="json")
    assert automation["description"] == trigger.description
    (action,) = automation["actions"]
    assert action["parameters"] == trigger.parameters

    # What the operator lists: these failed in the same way, for they send null limits too.
    run = fetch(f"{prefect_url}/deployments/{registered['pipeline-local']['id']}/create_flow_run", {})
    for what, shown in (("deployment", "pipeline/"), ("flow-run", run["name"]), ("flow", "pipeline")):
        assert shown[:12] in prefect(prefect_url, what, "ls")
    assert POOL in prefect(prefect_url, "work-pool", "ls")
    request(f"{prefect_url}/flow_runs/{run['id']}", method="DELETE").raise_for_status()


def prefect(url: str, *arguments: str) -> str:
    """What Prefect's command line prints, in this process: another one takes seconds to import Prefect."""
    with temporary_settings({PREFECT_API_URL: url, PREFECT_CLI_COLORS: False}):
        result = CycloptsCliRunner().invoke(list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_where_the_server_differs_from_the_configuration_is_said(prefect_url):
    """Declared by the API with the names of ours, and changed as in Prefect's page."""
    settings = ["name=changed", 'schedule.cron="30 4 * * *"', "schedule.timezone=Europe/Paris"]
    config = load(TOY, settings)
    times = {"cron": config.schedule.cron, "timezone": config.schedule.timezone}
    flow = fetch(f"{prefect_url}/flows/", {"name": "evaluation"})["id"]
    body = {"name": "evaluation-changed", "flow_id": flow, "tags": [TAG, "changed"]}
    schedules = [{"schedule": times, "active": True, "slug": SCHEDULE}]
    deployment = fetch(f"{prefect_url}/deployments/", body | {"schedules": schedules})
    own = f"{prefect_url}/deployments/{deployment['id']}"
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        concurrency.declare(config.resources.limits())
    try:
        assert kept_changes(prefect_url, config) == []
        for limit, change in (("cpu", {"limit": 3}), ("network", {"active": False})):
            url = f"{prefect_url}/v2/concurrency_limits/nautile-{limit}"
            request(url, change, method="PATCH").raise_for_status()
        request(f"{prefect_url}/v2/concurrency_limits/nautile-accelerator", method="DELETE").raise_for_status()
        fetch(f"{own}/schedules", [{"schedule": {"interval": 3600}, "active": True}])
        schedule = f"{own}/schedules/{deployment['schedules'][0]['id']}"
        request(schedule, {"active": False}, method="PATCH").raise_for_status()
        request(own, {"paused": True}, method="PATCH").raise_for_status()
        name = "the deployment evaluation-changed"
        assert sorted(kept_changes(prefect_url, config)) == [
            f"{name} has a schedule of its own, every 3600 s UTC",
            f"{name} is paused",
            f"{name}: its schedule 30 4 * * * Europe/Paris is paused",
            "the limit nautile-accelerator is gone: `nautile down` and `up` declare it again",
            "the limit nautile-cpu is 3; resources.cpu is 1",
            "the limit nautile-network is switched off; resources.network is 1",
        ]
        assert "the limit nautile-cpu is 3; --limit is 2" in kept_changes(prefect_url, config, 2)
        request(schedule, {"schedule": {"cron": "0 5 * * *"}}, method="PATCH").raise_for_status()
        assert f"{name} runs at 0 5 * * * UTC, which is paused; [schedule] says 30 4 * * * Europe/Paris" in (
            kept_changes(prefect_url, config)
        )
        request(schedule, method="DELETE").raise_for_status()
        assert f"{name} has no schedule; [schedule] says 30 4 * * * Europe/Paris" in kept_changes(prefect_url, config)
    finally:
        request(own, method="DELETE").raise_for_status()
        remove_limits(prefect_url)
    with pytest.raises(ConfigError, match="does not say what was changed there"):
        kept_changes("http://127.0.0.1:9/api", config)


def test_a_stop_of_the_deployments_leaves_no_coroutine_that_nobody_awaits():
    with pytest.raises(SystemExit) as ending:
        _Runner.handle_sigterm(object())
    assert ending.value.code == 0


def test_an_unknown_type_of_pool_is_refused(local):
    with pytest.raises(ConfigError, match="process, kubernetes, cloud"):
        register(local, "local", "abacus", 1)


ROUTED = f"""
extends = "{TOY}"
name = "routed"
[deploy.accelerator]
pool = "gpu-workers"
[deploy.cpu]
pool = "cpu-workers"
job_variables = {{env = {{KIND = "cpu"}}}}
[deploy.evaluate]
resource = "cpu"
[deploy.index]
pool = "nautile"
"""


@pytest.fixture
def routed(tmp_path):
    path = tmp_path / "routed.toml"
    path.write_text(ROUTED, encoding="utf-8")
    return path


def test_a_stages_pool_is_that_of_its_resource_unless_it_has_its_own(routed):
    settings = deploy_settings(load(str(routed)))
    pools = {stage: deploy.pool for stage, deploy in settings.items()}
    assert (pools["pretrain"], pools["reason"], pools["held_out"]) == ("gpu-workers", "gpu-workers", "cpu-workers")
    assert (pools["evaluate"], pools["index"]) == ("cpu-workers", "nautile")
    assert settings["index"].job_variables == {"env": {"KIND": "cpu"}}  # each field by itself
    assert set(deploy_settings(load("local"))) >= {"pretrain", "report"}
    routed.write_text(ROUTED.replace('pool = "gpu-workers"', 'resource = "cpu"'), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"deploy.accelerator.resource: only the section of a stage"):
        load(str(routed))


@pytest.mark.heavy
def test_workers_of_two_pools_run_the_stages_of_their_resource(routed, made, prefect_url, tmp_path, monkeypatch):
    """Each worker is a process of its own: what needs an accelerator waits for the one that has it."""
    store = Store(shutil.copytree(made[0].root, tmp_path / "store"))
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))
    names = ("cpu-workers", "gpu-workers", POOL)
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        own = [name for name in names if name not in {pool.name for pool in client.read_work_pools()}]
        for name in own:
            client.create_work_pool(WorkPoolCreate(name=name, type="process"))
        register(load(str(routed)), str(routed), "process", None)
        runs = {}
        for stage in ("held_out", "pretrain"):
            entry = client.read_deployment_by_name(f"pipeline/{stage}-routed")
            runs[stage] = client.create_flow_run_from_deployment(entry.id, parameters={"force": True}).id
    more = {
        "PREFECT_API_URL": prefect_url,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
    }
    workers = []

    def start_worker(pool: str) -> None:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
        with (tmp_path / f"{pool}.log").open("wb") as log:
            workers.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env=environment(store.root, **TOY_DAG, **more), stdout=log, stderr=log
                )
            )

    def state(stage: str) -> str:
        return fetch(f"{prefect_url}/flow_runs/{runs[stage]}")["state"]["type"]

    def until_completed(stage: str) -> None:
        deadline = time.monotonic() + 240
        while state(stage) != "COMPLETED":
            assert time.monotonic() < deadline
            assert state(stage) not in ("FAILED", "CRASHED", "CANCELLED")
            assert [worker.poll() for worker in workers] == [None] * len(workers)
            time.sleep(0.3)

    try:
        start_worker("cpu-workers")
        until_completed("held_out")
        assert state("pretrain") == "SCHEDULED"
        start_worker("gpu-workers")
        until_completed("pretrain")
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)
    by_run = {artifact.manifest["run"]: artifact.kind for artifact in store.list()}
    assert (by_run[str(runs["held_out"])], by_run[str(runs["pretrain"])]) == ("questions", "checkpoint")
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        for name in own:  # other tests use the server
            client.delete_work_pool(name)
    remove_limits(prefect_url)
