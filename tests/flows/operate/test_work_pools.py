"""Work pools per stage, against a real server; the files of docs/launchers.md, against Prefect and `[launch]`."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.schema_tools import ValidationError, is_valid_schema, validate
from prefect.utilities.templating import apply_values

from nautile.common.errors import ConfigError
from nautile.configs.load import load
from nautile.configs.operation import DeployConfig
from nautile.configs.vendors import VENDORS
from nautile.flows.dag import build_dag
from nautile.flows.operate.deployments import POOL, job_variables, register
from nautile.store.mirror import open_store
from nautile.tasks.engine.multihost import host_command
from tests.support.plug_ins import add_plug_in
from tests.support.samples.document import ShownFile, sections
from tests.support.servers.prefect_calls import fetch
from tests.support.stages.toy_cli import ROOT

PAGE = sections((ROOT / "docs" / "launchers.md").read_text(encoding="utf-8"))
FILES = {item.name: item.text for items in PAGE.values() for item in items if isinstance(item, ShownFile)}
TEMPLATE = json.loads(FILES["template.json"])
GPU = {"gpus": 8, "node_selector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}, "memory_request": "200Gi"}
POOLS = """
extends = "local"
name = "pools"
[deploy.evaluate]
resource = "cpu"
[deploy.pretrain]
pool = "nautile-gpu"
[deploy.pretrain.job_variables]
gpus = 8
image = "gpu:1"
memory_request = "200Gi"
node_selector = {"cloud.google.com/gke-accelerator" = "nvidia-h100-80gb"}
env = {XLA_FLAGS = "--xla_gpu_x"}
"""


@pytest.fixture
def pools_file(tmp_path):
    """The path of the configuration."""
    path = tmp_path / "pools.toml"
    path.write_text(POOLS, encoding="utf-8")
    return str(path)


@pytest.fixture
def config(pools_file):
    return load(pools_file)


def test_workers_are_given_the_url_of_a_remote_store_and_not_this_machines_copy(config, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", "s3://bucket/prefix")
    assert job_variables(config.deployment("ingest"), "process") == {"env": {"NAUTILE_STORE": "s3://bucket/prefix"}}


def test_a_stages_variables_are_added_to_ours(config, monkeypatch, tmp_path):
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    variables = job_variables(config.deployment("pretrain"), "kubernetes")
    assert variables.pop("env") == {"NAUTILE_STORE": open_store().location, "XLA_FLAGS": "--xla_gpu_x"}
    assert variables == GPU | {"image": "gpu:1"}
    with pytest.raises(ConfigError, match="NAUTILE_IMAGE must name an image"):
        job_variables(config.deployment("ingest"), "kubernetes")
    monkeypatch.setenv("NAUTILE_IMAGE", "cpu:1")
    assert job_variables(config.deployment("ingest"), "kubernetes")["image"] == "cpu:1"


def test_a_stage_may_use_another_resource(config):
    used = {step.stage.name: step.resource for step in build_dag(config)}
    assert (used["evaluate"], used["pretrain"]) == ("cpu", "accelerator")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[deploy.pretraining]\npool = 'x'", "pretraining"),
        ("[deploy.pretrain]\nresource = 'gpu'", "deploy.pretrain.resource"),
        ("[deploy.pretrain]\npool = 'a/b'", "deploy.pretrain.pool"),
    ],
)
def test_a_wrong_section_is_refused_by_its_field(tmp_path, line, message):
    path = tmp_path / "wrong.toml"
    path.write_text(f'extends = "local"\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load(str(path))


def test_the_job_template_of_the_page_fits_prefects_schema_and_fills_in_a_job():
    template = TEMPLATE
    WorkPoolCreate(name="nautile-gpu", type="kubernetes", base_job_template=template)  # every placeholder is declared
    named = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert named == set(template["variables"]["properties"])
    is_valid_schema(template["variables"], preprocess=False)
    values = GPU | {"image": "gpu:1", "env": {"NAUTILE_STORE": "s3://b/p"}, "grace_seconds": 600}
    validate(values, template["variables"], raise_on_error=True)
    pod = apply_values(template["job_configuration"], values)["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}, "requests": {"memory": "200Gi"}}
    assert pod["nodeSelector"] == GPU["node_selector"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert "tolerations" not in pod
    with pytest.raises(ValidationError, match="gpus"):
        validate({"gpus": "many"}, template["variables"], raise_on_error=True)


@pytest.mark.slow
def test_stages_are_registered_in_pools_of_their_own(config, pools_file, prefect_url, monkeypatch, tmp_path):
    """On a real server, which checks every stage's variables against the template of its pool."""
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    with temporary_settings({PREFECT_API_URL: prefect_url}), get_client(sync_client=True) as client:
        with pytest.raises(ConfigError, match=r"no work pool 'nautile(-gpu)?': create it with `prefect work-pool"):
            register(config, pools_file, "process", None)
        own = [WorkPoolCreate(name="nautile-gpu", type="kubernetes", base_job_template=TEMPLATE)]
        if not any(pool.name == POOL for pool in client.read_work_pools()):
            own.append(WorkPoolCreate(name=POOL, type="process"))
        for pool in own:
            client.create_work_pool(pool)
        lines = register(config, pools_file, "process", None)
        assert "12 deployments in work pool 'nautile';" in lines
        assert "1 deployments in work pool 'nautile-gpu';" in lines
        entries = fetch(f"{prefect_url}/deployments/filter", {"deployments": {"tags": {"all_": [config.name]}}})
        pools = {entry["name"].partition("-")[0]: entry for entry in entries}
        assert pools["pretrain"]["work_pool_name"] == "nautile-gpu"
        assert pools["pretrain"]["job_variables"]["gpus"] == 8
        assert all("NAUTILE_WORKER" in entry["job_variables"]["env"] for entry in entries)
        assert {entry["work_pool_name"] for name, entry in pools.items() if name != "pretrain"} == {POOL}
        deploy = config.deploy["pretrain"].model_copy(update={"job_variables": {"gpus": "many", "image": "gpu:1"}})
        with pytest.raises(ConfigError, match=r"deploy.pretrain.job_variables: work pool 'nautile-gpu'.*'gpus'"):
            register(config.model_copy(update={"deploy": {"pretrain": deploy}}), pools_file, "process", None)
        for pool in own:  # other tests use the server
            client.delete_work_pool(pool.name)


def test_a_worker_has_to_have_the_plug_ins_of_the_machine_that_deployed(monkeypatch, tmp_path):
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    source = "from nautile.configs.vendors import Vendor\nacme = Vendor()\n"
    entry = add_plug_in(monkeypatch, tmp_path, VENDORS, "acme", source)
    jobs = job_variables(DeployConfig(), "process")["env"]
    assert jobs["NAUTILE_PLUGINS"] == f"vendors={entry.reference}"
    (tmp_path / "plugged_acme.py").write_text("acme = None\n")
    command = [sys.executable, "-c", "from nautile.configs.load import load_form; load_form('local')"]
    asked = subprocess.run(
        command, env={**os.environ, **jobs, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    last = asked.stderr.splitlines()[-1]
    assert "ConfigError: this machine has another source of the plug-in vendors=plugged_acme:acme: install" in last


def started(script: str, folder, **variables: str) -> list[str]:
    """The command for host 2 of the configuration with which a script of the page runs `nautile run`."""
    for name, does in (("nautile", 'cp "$2" started.toml'), ("ssh", 'echo "$@"')):
        stub = folder / ".venv" / "bin" / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
        stub.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(folder), **variables}
    script = script.replace("/tmp/run.toml", f"{folder}/run.toml")
    subprocess.run(["sh", "-c", script], cwd=folder, env=environment, check=True)
    launch = load(str(folder / "started.toml")).launch
    assert (launch.processes, launch.stages) == (8, ("pretrain",))
    return host_command({"launch": launch.model_dump(mode="json"), "commit": "0" * 40}, folder / "request.json", 2)


def test_the_jobset_of_the_page_starts_the_stage_on_each_host(tmp_path):
    hosts, launcher = yaml.safe_load(FILES["jobset.yaml"])["spec"]["replicatedJobs"]
    (container,) = launcher["template"]["spec"]["template"]["spec"]["containers"]
    command = started(container["command"][-1], tmp_path)
    assert hosts["replicas"] == 8
    assert command[:6] == ["kubectl", "exec", "-i", "job/nautile-pretrain-hosts-2", "--", "sh"]
    assert command[-1].startswith(
        "exec env NAUTILE_PROCESSES=8 NAUTILE_PROCESS=2 NAUTILE_COORDINATOR=nautile-pretrain-hosts-0-0."
    )


def test_the_skypilot_task_of_the_page_starts_the_stage_on_all_nodes_from_the_first(tmp_path):
    task = yaml.safe_load(FILES["skypilot.yaml"])
    nodes = "\n".join(f"10.0.0.{n}" for n in range(1, 9))
    command = started(task["run"], tmp_path, SKYPILOT_NODE_RANK="0", SKYPILOT_NODE_IPS=nodes)
    path = f"{tmp_path}/.venv/bin:{os.environ['PATH']}"
    shown = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True).stdout
    assert task["num_nodes"] == 8
    assert shown.startswith("-o StrictHostKeyChecking=no 10.0.0.3 cd ~/sky_workdir && exec env NAUTILE_PROCESSES=8 ")
    assert "NAUTILE_COORDINATOR=10.0.0.1:8476" in shown
