"""Work pools per stage, and the job template for Kubernetes, against Prefect's schema and a real server."""

import os
import re
import subprocess
import tomllib

import jsonschema
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.schema_tools import ValidationError, is_valid_schema, validate
from prefect.utilities.templating import apply_values

from common.errors import ConfigError
from configs.load import load
from flows.dag import build_dag
from flows.operate.deployments import POOL, job_variables, register
from flows.operate.manifests import job_template, manifest
from store.mirror import open_store
from tasks.engine.multihost import host_command
from tests.support.servers.prefect_calls import fetch

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


def test_the_job_template_fits_prefects_schema_and_fills_in_a_job():
    template = job_template()
    WorkPoolCreate(name="nautile-gpu", type="kubernetes", base_job_template=template)  # every placeholder is declared
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
        own = [WorkPoolCreate(name="nautile-gpu", type="kubernetes", base_job_template=job_template())]
        if not any(pool.name == POOL for pool in client.read_work_pools()):
            own.append(WorkPoolCreate(name=POOL, type="process"))
        for pool in own:
            client.create_work_pool(pool)
        lines = register(config, pools_file, "process", None)
        assert "12 deployments in work pool 'nautile';" in lines
        assert "1 deployments in work pool 'nautile-gpu';" in lines
        entries = fetch(f"{prefect_url}/deployments/filter", {"deployments": {"tags": {"all_": [config.name]}}})
        pools = {entry["entrypoint"].rpartition(".")[2]: entry for entry in entries}
        assert pools["pretrain"]["work_pool_name"] == "nautile-gpu"
        assert pools["pretrain"]["job_variables"]["gpus"] == 8
        assert all("NAUTILE_WORKER" in entry["job_variables"]["env"] for entry in entries)
        assert {entry["work_pool_name"] for name, entry in pools.items() if name != "pretrain"} == {POOL}
        deploy = config.deploy["pretrain"].model_copy(update={"job_variables": {"gpus": "many", "image": "gpu:1"}})
        with pytest.raises(ConfigError, match=r"deploy.pretrain.job_variables: work pool 'nautile-gpu'.*'gpus'"):
            register(config.model_copy(update={"deploy": {"pretrain": deploy}}), pools_file, "process", None)
        for pool in own:  # other tests use the server
            client.delete_work_pool(pool.name)


SPREAD = POOLS + "[launch]\nprocesses = 4\n"

# The fields of the JobSet API (jobset.x-k8s.io/v1alpha2), and those of jobs and pods that are used.
STRING, COUNT, OBJECTS = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "array", "items": {"type": "object"}},
)


def schema_of(required: str, **properties):
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": {name.rstrip("_"): value for name, value in properties.items()},
    }


CONTAINER = schema_of(
    "name image command",
    name=STRING,
    image=STRING,
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    command={"type": "array", "items": STRING},
    env={"type": "array", "items": schema_of("name value", name=STRING, value=STRING)},
    envFrom=OBJECTS,
    volumeMounts=OBJECTS,
    resources=schema_of("", limits={"type": "object"}, requests={"type": "object"}),
)
POD = schema_of(
    "containers restartPolicy",
    containers={"type": "array", "minItems": 1, "items": CONTAINER},
    restartPolicy={"enum": ["Never", "OnFailure"]},
    serviceAccountName=STRING,
    nodeSelector={"type": "object", "additionalProperties": STRING},
    tolerations=OBJECTS,
    volumes=OBJECTS,
    terminationGracePeriodSeconds=COUNT,
)
JOB = schema_of(
    "template", backoffLimit=COUNT, parallelism=COUNT, completions=COUNT, template=schema_of("spec", spec=POD)
)
DEPENDS_ON = schema_of("name status", name=STRING, status={"enum": ["Ready", "Complete"]})
REPLICATED_JOB = schema_of(
    "name template",
    name=STRING,
    replicas=COUNT,
    template=schema_of("spec", metadata={"type": "object"}, spec=JOB),
    dependsOn={"type": "array", "maxItems": 1, "items": DEPENDS_ON},
)
JOBSET = schema_of(
    "apiVersion kind metadata spec",
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=schema_of("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}),
    spec=schema_of(
        "replicatedJobs",
        replicatedJobs={"type": "array", "minItems": 1, "items": REPLICATED_JOB},
        network=schema_of("", enableDNSHostnames={"type": "boolean"}, subdomain=STRING),
        successPolicy=schema_of(
            "operator", operator={"enum": ["All", "Any"]}, targetReplicatedJobs={"type": "array", "items": STRING}
        ),
        failurePolicy=schema_of("", maxRestarts=COUNT),
    ),
)
# The fields of a SkyPilot task (docs.skypilot.co, "SkyPilot YAML") that are used.
SKYPILOT = schema_of(
    "num_nodes run",
    name=STRING,
    workdir=STRING,
    num_nodes={"type": "integer", "minimum": 1},
    resources=schema_of(
        "", infra=STRING, accelerators={"type": ["string", "object"]}, cpus={}, memory={}, use_spot={"type": "boolean"}
    ),
    envs={"type": "object", "additionalProperties": STRING},
    setup=STRING,
    run=STRING,
)


def launched_by(text: str, folder) -> list[str]:
    """The command that starts the process of host 2, by the `[launch]` of a manifest's configuration."""
    (folder / "run.toml").write_text(text, encoding="utf-8")
    launch = load(str(folder / "run.toml")).launch
    assert (launch.processes, launch.stages) == (4, ("pretrain",))
    request = {"launch": launch.model_dump(mode="json"), "commit": "0" * 40}
    return host_command(request, folder / "request.json", 2)


@pytest.fixture
def spread(tmp_path, monkeypatch):
    path = tmp_path / "spread.toml"
    path.write_text(SPREAD, encoding="utf-8")
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
    return path


def test_a_jobset_has_a_job_for_each_host_and_one_that_starts_the_stage_on_them(spread, tmp_path):
    written = yaml.safe_load(manifest(load(str(spread)), str(spread), "jobset"))
    jsonschema.validate(written, JOBSET)
    hosts, launcher = written["spec"]["replicatedJobs"]
    assert (hosts["replicas"], launcher["replicas"]) == (4, 1)
    (host,), (first,) = (job["template"]["spec"]["template"]["spec"]["containers"] for job in (hosts, launcher))
    assert host["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert first["resources"]["limits"] == {}
    assert first["command"][-1].endswith("nautile run /tmp/run.toml --only pretrain")
    environment = {entry["name"]: entry["value"] for entry in first["env"]}
    assert environment["NAUTILE_STORE"] == str(tmp_path / "store")
    command = launched_by(environment["NAUTILE_RUN"], tmp_path)
    assert command[:6] == ["kubectl", "exec", "-i", "job/nautile-pretrain-hosts-2", "--", "sh"]
    assert command[-1].startswith(
        "exec env NAUTILE_PROCESSES=4 NAUTILE_PROCESS=2 NAUTILE_COORDINATOR=nautile-pretrain-"
    )


def test_a_skypilot_task_starts_the_stage_on_all_nodes_from_the_first(spread, tmp_path):
    task = yaml.safe_load(manifest(load(str(spread)), str(spread), "skypilot"))
    jsonschema.validate(task, SKYPILOT)
    assert task["num_nodes"] == 4
    for name, script in (("nautile", 'cp "$2" started.toml'), ("ssh", 'echo "$@"')):
        stub = tmp_path / ".venv" / "bin" / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        stub.chmod(0o755)
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4", "TMPDIR": str(tmp_path)}
    path = f"{tmp_path}/.venv/bin:{os.environ['PATH']}"

    def run(rank: int) -> None:
        environment = {**os.environ, **nodes, "PATH": path, "SKYPILOT_NODE_RANK": str(rank)}
        subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment, check=True)

    run(1)
    assert not (tmp_path / "started.toml").exists()
    run(0)
    command = launched_by((tmp_path / "started.toml").read_text(), tmp_path)
    shown = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("-o StrictHostKeyChecking=no 10.0.0.3 cd ~/sky_workdir && exec env NAUTILE_PROCESSES=4 ")
    assert "NAUTILE_COORDINATOR=10.0.0.1:8476" in shown


def test_the_name_of_a_configuration_is_no_part_of_the_shells_script(spread, tmp_path):
    name = 'a $(touch made) `touch made` \\ "b".toml'
    script = yaml.safe_load(manifest(load(str(spread)), name, "skypilot"))["run"]
    here = re.search(r'cat > "\$folder/run.toml" <<END\n.*?\nEND\n', script, re.DOTALL)
    subprocess.run(
        ["sh", "-c", here[0]], cwd=tmp_path, env={"folder": str(tmp_path), "PATH": os.environ["PATH"]}, check=True
    )
    assert tomllib.loads((tmp_path / "run.toml").read_text())["extends"] == name
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("what", ["slurm", "jobset", "skypilot"])
def test_an_unknown_manifest_and_a_stage_of_one_process_are_refused(config, what):
    with pytest.raises(ConfigError, match=r"unknown manifest|launch.processes must be the number of hosts"):
        manifest(config, "local", what)
