"""Deployments for a work pool: `prefect.yaml` deploys whole with the real command, and equals `nautile deploy`."""

import subprocess
import sys

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLI_COLORS, temporary_settings
from prefect.testing.cli import CycloptsCliRunner

from common.errors import ConfigError
from configs.load import load
from flows.operate.deployments import POOL, deploy_settings, deployments, register
from tests.support.prefect_calls import fetch, request
from tests.support.toy_cli import ROOT, environment
from tests.support.toy_stages import TOY


@pytest.fixture(scope="module")
def local():
    return load("local")


@pytest.mark.slow
def test_prefect_deploys_every_entry_of_the_file(local, prefect_url, tmp_path):
    """The real command against a real server: it stopped after the first entry with a fastapi that refuses nulls."""
    more = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "prefect")}
    env = environment(tmp_path / "store", **more)

    prefect(prefect_url, "work-pool", "create", POOL, "--type", "process")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    in_pool = {"work_pools": {"name": {"any_": [POOL]}}}
    registered = {entry["entrypoint"]: entry for entry in fetch(f"{prefect_url}/deployments/filter", in_pool)}
    served = {entry.entrypoint: entry for entry in deployments(local, "local")}
    assert set(registered) == set(served)
    for entrypoint, deployment in registered.items():
        ours = served[entrypoint]
        assert (deployment["name"], deployment["tags"]) == (ours.name, ours.tags)
        assert deployment["concurrency_options"]["collision_strategy"] == "ENQUEUE"
        assert deployment["global_concurrency_limit"]["limit"] == 1
        assert deployment["job_variables"] == {"env": {"NAUTILE_STORE": str(tmp_path / "store")}}
        assert deployment["parameters"].keys() == (ours.parameters or {}).keys()
    schedules = {name: entry["schedules"] for name, entry in registered.items() if entry["schedules"]}
    ((_, (schedule,)),) = schedules.items()
    assert list(schedules) == ["flows.nightly.evaluation.evaluation"]
    assert schedule["schedule"]["cron"] == local.schedule.cron
    (automation,) = [
        entry
        for entry in fetch(f"{prefect_url}/automations/filter", {})
        if entry["name"] == "nautile: show regressions of local"
    ]
    (trigger,) = served["flows.nightly.regression.regression"].triggers
    assert automation["trigger"]["expect"] == list(trigger.expect)
    assert automation["trigger"]["match"] == trigger.match.model_dump(mode="json")
    (action,) = automation["actions"]
    assert action["parameters"] == trigger.parameters

    # What the operator lists: these failed in the same way, for they send null limits too.
    run = fetch(f"{prefect_url}/deployments/{registered['flows.pipeline.pipeline']['id']}/create_flow_run", {})
    for what, shown in (("deployment", "pipeline/"), ("flow-run", run["name"]), ("flow", "held_out")):
        assert shown[:12] in prefect(prefect_url, what, "ls")
    assert POOL in prefect(prefect_url, "work-pool", "ls")
    request(f"{prefect_url}/flow_runs/{run['id']}", method="DELETE").raise_for_status()


def prefect(url: str, *arguments: str) -> str:
    """What Prefect's command line prints, in this process: another one takes seconds to import Prefect."""
    with temporary_settings({PREFECT_API_URL: url, PREFECT_CLI_COLORS: False}):
        result = CycloptsCliRunner().invoke(list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


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
    with pytest.raises(ConfigError, match=r"deploy.accelerator.resource: this section is of a resource"):
        load(str(routed))
