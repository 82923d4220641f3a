"""The manifests of `nautile deploy --print`: a job template for Kubernetes work pools, a JobSet, a SkyPilot task.

The job template is Prefect's own with additional variables for accelerators, nodes and disks, which stages set with
`[deploy.STAGE] job_variables`. The JobSet and the SkyPilot task run one stage on `[launch] processes` hosts of a
cluster or cloud: `nautile run` on the first host starts the stage's processes on all hosts, with the manifest's
`launch.command`.
"""

import json
import re
from pathlib import Path
from string import Template
from typing import Any

import prefect
import yaml
from prefect.utilities.templating import apply_values

from common.errors import ConfigError
from configs.schema import RunConfig
from flows.operate.deployments import job_variables

GRACE_S = 600  # time for a stage to save its work when its pod is terminated
PORT = 8476  # port of the first process, to which the others connect
RESTARTS = 20  # of a JobSet; each resumes from the last checkpoint
_SHIPPED = "server/api/collections_data/views/aggregate-worker-metadata.json"  # of the package prefect


def manifest(config: RunConfig, name: str, what: str) -> str:
    """The text of a manifest. `name`: the configuration as given on the command line.

    Raises `ConfigError` for an unknown manifest, or if `[launch]` does not configure one stage on several hosts.
    """
    if what == "job-template":
        return json.dumps(job_template(), indent=2)
    if what not in ("jobset", "skypilot"):
        raise ConfigError(f"--print: unknown manifest {what!r}; use job-template, jobset or skypilot")
    if config.launch.processes < 2 or len(config.launch.stages) != 1:
        raise ConfigError(
            f"--print {what}: launch.processes must be the number of hosts, of one stage in launch.stages"
        )
    data = jobset(config, name) if what == "jobset" else skypilot_task(config, name)
    return yaml.safe_dump(data, sort_keys=False, width=120)


def job_template() -> dict[str, Any]:
    """Prefect's base job template for Kubernetes, with additional variables (`_VARIABLES`)."""
    shipped = json.loads((Path(prefect.__file__).parent / _SHIPPED).read_text(encoding="utf-8"))
    template = shipped["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    template["variables"]["properties"] |= _VARIABLES
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    pod |= {
        "nodeSelector": "{{ node_selector }}",
        "tolerations": "{{ tolerations }}",
        "volumes": "{{ volumes }}",
        "terminationGracePeriodSeconds": "{{ grace_seconds }}",
    }
    (container,) = pod["containers"]
    container["resources"]["limits"] |= {"nvidia.com/gpu": "{{ gpus }}", "google.com/tpu": "{{ tpu_chips }}"}
    container |= {"envFrom": "{{ env_from }}", "volumeMounts": "{{ volume_mounts }}"}
    return template


def jobset(config: RunConfig, name: str) -> dict[str, Any]:
    """A Kubernetes JobSet: a job for each host of the stage, and a launcher that runs `nautile run` and ends the set.

    All pods use the stage's job template (`[deploy.STAGE] job_variables`). The launcher requests no accelerator, and
    its service account needs the permission to exec in pods.
    """
    (stage,), hosts = config.launch.stages, config.launch.processes
    variables = job_variables(config.deployment(stage), "kubernetes")
    full_name = f"nautile-{stage.replace('_', '-')}"
    start = f"kubectl exec -i job/{full_name}-hosts-{{host}} -- sh -c 'exec env {{member}}'"
    run = _launch_toml(json.dumps(name), stage, hosts, start, f"{full_name}-hosts-0-0.{full_name}:{PORT}")
    script = f'printf %s "$NAUTILE_RUN" > /tmp/run.toml && exec .venv/bin/nautile run /tmp/run.toml --only {stage}'
    # The launcher only talks to the hosts. On a node with accelerators it would take one from the stage.
    launcher = {key: value for key, value in variables.items() if key not in ("gpus", "tpu_chips", "node_selector")}
    launcher["env"] = {**variables["env"], "NAUTILE_RUN": run}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": full_name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": full_name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": [
                _replicated_job("hosts", hosts, variables, "exec sleep infinity"),
                _replicated_job("launcher", 1, launcher, script)
                | {"dependsOn": [{"name": "hosts", "status": "Ready"}]},
            ],
        },
    }


def skypilot_task(config: RunConfig, name: str) -> dict[str, Any]:
    """A SkyPilot task: `nautile run` on the head node starts the stage's processes on all nodes over ssh.

    `[deploy.STAGE] job_variables` sets SkyPilot's `resources`, and `env`. Its `workdir` is the checkout.
    """
    (stage,), nodes = config.launch.stages, config.launch.processes
    variables = job_variables(config.deployment(stage), "process")
    # The shell puts in `$folder` and `$head`, and nothing that is in the configuration's name.
    quoted = re.sub(r"([\\$`])", r"\\\1", json.dumps(name))
    run = _launch_toml(quoted, stage, nodes, "sh $folder/start {host} '{member}'", f"$head:{PORT}")
    return {
        "name": f"nautile-{stage.replace('_', '-')}",
        "workdir": ".",
        "num_nodes": nodes,
        "resources": variables.get("resources", {}),
        "envs": variables["env"],
        "setup": "make .venv/.ready",
        "run": _SKYPILOT_RUN.substitute(run=run, stage=stage),
    }


_SKYPILOT_RUN = Template("""set -e
[ "$$SKYPILOT_NODE_RANK" = 0 ] || exit 0
folder=$$(mktemp -d)
echo "$$SKYPILOT_NODE_IPS" > "$$folder/hosts"
head=$$(head -n 1 "$$folder/hosts")
cat > "$$folder/start" <<'END'
node=$$(sed -n "$$(($$1 + 1))p" "$$(dirname "$$0")/hosts")
exec ssh -o StrictHostKeyChecking=no "$$node" "cd ~/sky_workdir && exec env $$2"
END
cat > "$$folder/run.toml" <<END
${run}END
exec .venv/bin/nautile run "$$folder/run.toml" --only ${stage}
""")


def _launch_toml(extends: str, stage: str, processes: int, command: str, coordinator: str) -> str:
    """A TOML file that extends a configuration with the `[launch]` of a manifest, which is not part of any key.

    `extends`: the configuration's name as a TOML string, quoted for the place where the file is written.
    """
    values = {"processes": processes, "stages": [stage], "command": command, "coordinator": coordinator}
    lines = [f"extends = {extends}", "[launch]", *(f"{key} = {json.dumps(values[key])}" for key in values)]
    return "\n".join([*lines, ""])


def _replicated_job(name: str, replicas: int, variables: dict[str, Any], script: str) -> dict[str, Any]:
    """A replicated job of one pod per job, so that `job/NAME-INDEX` names a pod; the pod is the job template's."""
    values = {"grace_seconds": GRACE_S, **variables}
    job = apply_values(job_template()["job_configuration"]["job_manifest"], values)
    shipped_pod = job["spec"]["template"]["spec"]
    # Prefect's template has these two in the pod's part too; Kubernetes accepts them only in the job's.
    pod = {key: value for key, value in shipped_pod.items() if key not in ("parallelism", "completions")}
    (container,) = pod["containers"]
    environment = [{"name": key, "value": value} for key, value in container["env"].items()]
    pod["containers"] = [{**container, "name": name, "env": environment, "command": ["sh", "-c", script]}]
    template = {"spec": {"backoffLimit": 0, "parallelism": 1, "completions": 1, "template": {"spec": pod}}}
    return {"name": name, "replicas": replicas, "template": template}


def _objects(title: str, description: str) -> dict[str, Any]:
    return {"title": title, "description": description, "type": "array", "items": {"type": "object"}}


_VARIABLES: dict[str, dict[str, Any]] = {
    "gpus": {"title": "GPUs", "description": "NVIDIA GPUs of the container.", "type": "integer", "minimum": 1},
    "tpu_chips": {"title": "TPU chips", "description": "TPU chips of the container.", "type": "integer", "minimum": 1},
    "node_selector": {
        "title": "Node selector",
        "description": "Labels of the nodes to run on.",
        "type": "object",
        "additionalProperties": {"type": "string"},
    },
    "tolerations": _objects("Tolerations", "Taints of nodes that are tolerated."),
    "volumes": _objects("Volumes", "Volumes of the pod, such as the claim of a shared store."),
    "volume_mounts": _objects("Volume mounts", "Where the volumes are mounted in the container."),
    "env_from": _objects("Environment from", "Secrets and config maps whose entries become variables."),
    "grace_seconds": {
        "title": "Grace period",
        "description": "Seconds that a stage has to save its work when its pod is asked to end.",
        "type": "integer",
        "default": GRACE_S,
    },
}
