"""Hosts that share only an object store: network namespaces of this machine, each with its own folder.

    sudo PYTHONPATH=. .venv/bin/python bench/training/hosts.py [pretrain] [distill] [ray]

Needs root on Linux (`ip netns`, `unshare`); takes some minutes on two cores. An S3 server and a teacher run on a bridge
in a separate namespace; the machine's own network is not changed. Each host sees its own folder at /mnt, and an empty
folder where all the folders are. In each part one host is lost: its processes are killed with SIGKILL, its folder is
deleted, and another host takes its place. At the end the bytes are compared with those of an undisturbed run on one
machine, with a store in a folder.
"""

import argparse
import itertools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import s3fs
from moto.server import ThreadedMotoServer
from prefect import flow

from common.errors import Retryable
from common.events import silent
from common.files import write_json
from configs.base import TaskConfig
from configs.distill import IndexConfig
from configs.operation import LaunchConfig
from configs.training import PretrainConfig
from data.sources.corpus_source import synth_record
from data.sources.reasoning_gym import problems
from data.tokens.exemplar_sample import write_exemplars
from store import lease as leases
from store import staging_mirror
from store.artifacts import Artifact, Store
from store.mirror import MirroredStore, open_store
from store.remote import Remote
from tasks.distill import distill
from tasks.engine import attempt
from tasks.engine.attempt import run_stage
from tasks.engine.child_process import cancelling
from tasks.engine.job import Job
from tasks.engine.prefect_task import as_prefect_task
from tasks.engine.progress import StageUpdate, subscribe
from tasks.engine.stage import RunContext, Stage
from tasks.index import index
from tasks.pretrain import pretrain
from tests.support.processes.training import MODEL, ROW, write_tokens
from tests.support.samples.stage_store import key_of
from tests.support.servers.fake_openai import FakeOpenAI
from tests.support.servers.object_store import CREDENTIALS
from tests.support.stages.stage_pieces import pieces, section

ROOT = Path(__file__).resolve().parents[2]
# Inherited by the processes on the hosts, so that all of them speak of the same namespaces.
NAMES = os.environ.setdefault("NAUTILE_NAMES", f"nautile-{os.getpid()}")  # prefix of the namespaces' names
SERVER, S3_PORT, TEACHER_PORT, COORDINATOR_PORT = "10.77.0.1", 5000, 7000, 6000
URL = "s3://runs/demo"
RAY_PORT = 6379
RAY_ADDRESS = f"10.77.0.10:{RAY_PORT}"
PIECES, GATED = 12, ("piece-4", "piece-5", "piece-6", "piece-7")  # the gated ones wait until a host is lost
PIDS = Path("/run") / NAMES
STEPS, SAVE_EVERY = 1000, 100
PROMPTS = 200
START = float(os.environ.setdefault("NAUTILE_BEGAN", str(time.time())))


def log(text: str) -> None:
    sys.stdout.write(f"{time.time() - START:6.1f} s  {text}\n")
    sys.stdout.flush()


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


# The network and its hosts


class Network:
    """A bridge with the servers, and hosts on it. `base` holds the folder of each host."""

    def __init__(self, base: Path) -> None:
        self.base, self.names = base, [f"{NAMES}-net"]
        self.children: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """Create the bridge, and start the servers on it."""
        # Under /run and not in a host's folder: the one place that every host and the servers see.
        PIDS.mkdir(exist_ok=True)
        run_ip("netns", "add", self.names[0])
        inside = ["netns", "exec", self.names[0], "ip"]
        run_ip(*inside, "link", "set", "lo", "up")
        run_ip(*inside, "link", "add", "bridge", "type", "bridge")
        run_ip(*inside, "address", "add", f"{SERVER}/24", "dev", "bridge")
        run_ip(*inside, "link", "set", "bridge", "up")
        # The servers live in a namespace of their own, so that losing a host never takes them along.
        self.start(["ip", "netns", "exec", self.names[0], sys.executable, __file__, "serve"])
        wait_until(lambda: (PIDS / "serving").exists(), "the servers")

    def add(self, number: int, name: str) -> None:
        """Add a host at 10.77.0.1<number>, with an empty folder."""
        full, port, folder = f"{NAMES}-{name}", f"nb{number}{name[-1]}", self.base / name
        self.names.append(full)
        run_ip("netns", "add", full)
        # A veth pair: one end at the bridge, the other is eth0 of the host.
        run_ip("link", "add", port, "netns", self.names[0], "type", "veth", "peer", "name", "eth0", "netns", full)
        run_ip("netns", "exec", self.names[0], "ip", "link", "set", port, "master", "bridge", "up")
        for settings in (["link", "set", "lo", "up"], ["link", "set", "eth0", "up"]):
            run_ip("netns", "exec", full, "ip", *settings)
        run_ip("netns", "exec", full, "ip", "address", "add", f"10.77.0.1{number}/24", "dev", "eth0")
        folder.mkdir()
        # A host finds its own name without a name server.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.1{number} {full}\n")
        steps = (
            f"mount --bind {folder} /mnt",
            "mount --bind /mnt/hosts /etc/hosts",
            # Over the folder of folders: a host must not find the files of another one.
            f"mount -t tmpfs none {self.base}",
            f"echo {full} >/proc/sys/kernel/hostname",
            f"echo $$ >{PIDS / str(number)}",
            "exec sleep 100000",
        )
        # The first process of the host holds its namespaces open; every command enters through its id.
        self.start(["ip", "netns", "exec", full, "unshare", "--mount", "--uts", "sh", "-c", " && ".join(steps)])
        wait_until(lambda: (PIDS / str(number)).exists(), f"host {name}")

    def run(self, number: int, part: str, **settings: Any) -> subprocess.Popen[bytes]:
        """Start a function of `ON_HOSTS` on a host."""
        return self.shell(number, f"{sys.executable} {__file__} {part}", settings)

    def shell(self, number: int, command: str, settings: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
        """Start a command on a host."""
        return self.start(remote_shell(number, f"cd {ROOT} && exec {command}"), settings)

    def kill(self, number: int, name: str) -> None:
        """Lose a host: its processes, its network and its disk."""
        (PIDS / str(number)).unlink()
        self._remove_host(f"{NAMES}-{name}")

    def remove_hosts(self) -> None:
        """End all hosts."""
        for name in self.names[1:]:
            self._remove_host(name)
        for number in range(3):
            (PIDS / str(number)).unlink(missing_ok=True)

    def _remove_host(self, full: str) -> None:
        end_processes(full)
        run_ip("netns", "delete", full)
        self.names.remove(full)
        shutil.rmtree(self.base / full.removeprefix(f"{NAMES}-"))

    def start(self, command: list[str], settings: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
        environment = os.environ | {"NAUTILE_HOSTS": json.dumps(settings or {})}
        self.children.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL))
        return self.children[-1]

    def remove(self) -> None:
        for name in self.names:
            end_processes(name)
            with suppress(subprocess.CalledProcessError):
                run_ip("netns", "delete", name)
        for child in self.children:
            child.kill()
            child.wait()
        shutil.rmtree(PIDS, ignore_errors=True)


def end_processes(namespace: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    for pid in pids.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


ENVIRONMENT = CREDENTIALS | {
    "AWS_ENDPOINT_URL": f"http://{SERVER}:{S3_PORT}",
    "NAUTILE_STORE": URL,
    "NAUTILE_STORE_CACHE": "/mnt/store",
    "PYTHONPATH": str(ROOT),
    "JAX_NUM_CPU_DEVICES": "1",
    "MPLCONFIGDIR": "/mnt/matplotlib",
    "PREFECT_API_URL": "http://10.77.0.12:4200/api",
    "PREFECT_HOME": "/mnt/prefect",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": str(PIDS / "token"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "HOME": "/mnt",
}


def remote_shell(number: int | str, command: str) -> list[str]:
    """The command line that runs `command` in the namespaces of a host, as `ssh` would."""
    settings = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    # A lost host answers with ssh's exit code for a connection that fails.
    check_alive = f"[ -e {PIDS}/{number} ] || exit 255"
    return [
        "sh",
        "-c",
        f'{check_alive}; exec nsenter -t $(cat {PIDS}/{number}) -n -m -u -- env {settings} sh -c "{command}"',
    ]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise SystemExit(f"{what}: nothing after {seconds:g} s")
        time.sleep(0.1)
    return value


def serve(_: dict[str, Any]) -> None:
    """Run the S3 server and the teacher until they are killed, and write their status every half second."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    ThreadedMotoServer(ip_address=SERVER, port=S3_PORT, verbose=False).start()
    os.environ |= ENVIRONMENT
    s3fs.S3FileSystem().mkdir("runs")
    remote = Remote(URL)
    teacher = FakeOpenAI(delay_s=0.2, port=TEACHER_PORT)
    teacher.address = SERVER
    with teacher:
        while True:
            snapshots = [name for name in remote.names("staging") if name.endswith(staging_mirror.SNAPSHOT)]
            finished = [
                json.loads(remote.read(f"staging/{name}", 2**25) or b"{}").get("progress", [0])[0] for name in snapshots
            ]
            write_json(PIDS / "status", {"answered": teacher.answered, "finished": max(finished, default=0)})
            (PIDS / "serving").touch()
            time.sleep(0.5)


# What the hosts do


def launch_pretraining(_: dict[str, Any]) -> None:
    """On the launching machine: publish the tokens, and let two other hosts train on them."""
    store = open_store()
    assert isinstance(store, MirroredStore)
    store.prepare()
    inputs = tokens(store)
    store.push(inputs.values())
    shell, option, script = remote_shell("{host}", f"cd {ROOT} && exec env {{member}}")
    coordinator = f"10.77.0.10:{COORDINATOR_PORT}"
    launch = LaunchConfig(processes=2, command=f"{shell} {option} '{script}'", coordinator=coordinator, silent_s=20)
    run_until_published(pretrain, pretraining(), inputs, store, launch)


def distil(settings: dict[str, Any]) -> None:
    """On the host that gets the lease: distil the documents."""
    # Ten seconds in place of minutes until the waiting host takes over.
    leases.EXPIRES_S, leases.RENEW_S, attempt.MIRROR_REPLIES_EVERY_S = 10.0, 1.0, 1.0
    store = open_store(settings.get("store"))
    store.prepare()
    store.refresh()
    inputs = {"retrieval": retrieval(store)}
    if isinstance(store, MirroredStore):
        store.push(inputs.values())
    run_until_published(distill, distillation(settings["teacher"]), inputs, store, LaunchConfig())


def ray_items(_: dict[str, Any]) -> None:
    """On the launching machine: a fan-out over the nodes of the Ray cluster."""
    store = open_store()
    store.prepare()
    launch = LaunchConfig(engine="ray", ray_address=RAY_ADDRESS)
    context = RunContext("demo", str(store.root), label="pieces", launch=launch)

    @flow(name="ray")
    def items() -> dict[str, str]:
        with cancelling():
            return as_prefect_task(pieces)(section(PIECES, gate=str(PIDS), gated=GATED), {}, context)

    log(f"pieces: published {items()['numbers']}")


def run_until_published(
    stage: Stage, section: dict[str, Any], inputs: dict[str, Artifact], store: Store, launch: LaunchConfig
) -> None:
    """Run a stage, and retry it after an outage, as a Prefect task does."""
    last_line = ""

    def print_update(update: StageUpdate) -> None:
        nonlocal last_line
        if (line := f"{update.stage}: {update.state} {update.note}".rstrip()) != last_line and not update.metrics:
            last_line = line
            log(line)

    unsubscribe = subscribe(print_update)
    while True:
        try:
            context = RunContext("demo", str(store.root), label=stage.name, launch=launch)
            outputs = run_stage(stage, section, {name: artifact.id for name, artifact in inputs.items()}, context)
        except Retryable as error:
            log(f"{stage.name}: {error}")
            time.sleep(3.0)
        else:
            unsubscribe()
            return log(f"{stage.name}: published {', '.join(outputs.values())}")


def tokens(store: Store) -> dict[str, Artifact]:
    artifacts = {}
    for seed, name in enumerate(("web", "synth")):
        folder = write_tokens(store.staging(key_of(name)) / "output" / "tokens", seed)
        artifacts[name] = store.publish("tokens", key_of(name), folder, **PUBLISHED)
    return artifacts


def retrieval(store: Store) -> Artifact:
    """An index of eight exemplars, the same on every machine."""
    if existing := store.find("retrieval", key_of("index")):
        return existing
    work = store.staging(key_of("index"))
    problem_sample = itertools.islice(problems([TaskConfig(name="chain_sum")], 1, "train"), 8)
    write_exemplars(work / "exemplars.jsonl", map(synth_record, problem_sample))
    job = Job("index", "key", "e", {"index": IndexConfig().model_dump(mode="json")}, {"exemplars": work}, work, silent)
    index.work(job)
    return store.publish("retrieval", key_of("index"), job.output("retrieval"), **PUBLISHED)


PUBLISHED: dict[str, Any] = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}


def pretraining() -> dict[str, Any]:
    config = {
        "phases": [{"name": "one", "tokens": STEPS * 4 * ROW, "mixture": {"web": 0.5, "synth": 0.5}}],
        "batch_rows": 4, "save_every": SAVE_EVERY, "keep": 2, "log_every": 100, "validate_every": STEPS,
        "sample_every": STEPS, "validation_rows": 4, "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
    }  # fmt: skip
    part = PretrainConfig.model_validate(config).model_dump(mode="json")
    return {"pretrain": part, "model": MODEL.model_dump(mode="json")}


def distillation(teacher: str) -> dict[str, Any]:
    return {
        "row_length": 128,
        "tokenizer": {"ranks": 400},
        "index": IndexConfig().model_dump(mode="json"),
        "distill": {"prompts": PROMPTS, "chunk": 10, "teachers": [{"endpoint": "t"}]},
        "endpoints": {"t": {"kind": "openai", "model": "fake", "url": teacher, "concurrency": 2}},
    }


# The parts of the demonstration


def show_pretraining(network: Network, baseline: Store) -> None:
    log("PRETRAINING: two hosts (a, b) train as one; a third machine (c) launches them; b is lost")
    # Lost only after a checkpoint is at the remote: before that there is nothing to continue from, and the run would
    # simply begin again.
    launching = network.run(2, "launch_pretraining")
    wait_until(lambda: read_status("finished"), "the first uploaded checkpoint")
    log(f"a checkpoint is uploaded: step {read_status('finished')} of {STEPS}")
    network.kill(1, "b")
    log("host b is lost: its processes, its network, its disk; host d takes its place")
    network.add(1, "d")
    launching.wait()
    # The undisturbed run has two processes as well, on one machine: sums over two shards are rounded differently than
    # over one.
    launch = LaunchConfig(processes=2)
    run_until_published(pretrain, pretraining(), tokens(baseline), baseline, launch)
    compare("checkpoint", network, baseline)


def show_distillation(network: Network, baseline: Store) -> None:
    log("DISTILLATION: host a asks the teacher; it is lost, and host c, which waited for it, goes on")
    teacher = f"http://{SERVER}:{TEACHER_PORT}/v1"
    network.run(0, "distil", teacher=teacher)
    wait_until(lambda: read_status("answered") > PROMPTS // 4, "the teacher")
    # It waits for the lease that host a holds, and must not send a single request before it has it.
    waiting = network.run(2, "distil", teacher=teacher)
    wait_until(lambda: read_status("answered") > PROMPTS // 2, "the teacher")
    network.kill(0, "a")
    log(f"host a is lost; the teacher has answered {read_status('answered')} of {PROMPTS} requests")
    waiting.wait()
    log(f"the teacher has answered {read_status('answered')} requests for {PROMPTS} prompts in all")
    with FakeOpenAI() as local:
        distil({"store": str(baseline.root), "teacher": local.url})
    compare("documents", network, baseline)


def compare(kind: str, network: Network, baseline: Store) -> None:
    """Compare the bytes that the hosts published with those of an undisturbed machine; exits if they differ."""
    (PIDS / "files").unlink(missing_ok=True)
    network.run(2, "list_files", kind=kind).wait()
    files = json.loads((PIDS / "files").read_text())
    expected = baseline.list(kind)[-1].manifest["files"]
    size = sum(entry["bytes"] for entry in expected.values())
    same = "the same" if files == expected else "OTHER"
    log(f"{same} bytes as one machine that nobody disturbed: {len(expected)} files of {kind}, {size:,} bytes")
    if files != expected:
        raise SystemExit(1)


def list_files(settings: dict[str, Any]) -> None:
    """On a host: write the files of the newest artifact of a kind at the remote, with their digests."""
    store = open_store()
    store.refresh()
    (PIDS / "files").write_text(json.dumps(store.list(settings["kind"])[-1].manifest["files"]))


def show_ray(network: Network, baseline: Store) -> None:
    log("RAY: a cluster of hosts a and b; a fan-out of work items is launched on c; b is lost with items at work")
    (PIDS / "token").write_text(secrets.token_hex(32))
    start = f"{ROOT}/.venv/bin/ray start --block --disable-usage-stats --object-store-memory=80000000"
    head = f"--head --port={RAY_PORT} --include-dashboard=false --temp-dir=/mnt/ray"
    network.shell(0, f"{start} {head} --node-ip-address=10.77.0.10 --num-cpus=2 >/mnt/ray.txt 2>&1")
    time.sleep(10)
    for number, cpus in ((1, 2), (2, 0)):
        address = f"--address={RAY_ADDRESS} --node-ip-address=10.77.0.1{number} --num-cpus={cpus}"
        network.shell(number, f"{start} {address} >/mnt/ray.txt 2>&1")
    network.shell(2, f"{ROOT}/.venv/bin/prefect server start --host 10.77.0.12 --port 4200 >/mnt/prefect.txt 2>&1")
    time.sleep(20)
    launching = network.run(2, "ray_items")
    wait_until(lambda: all((PIDS / name).exists() for name in GATED) or launching.poll() is not None, "the work items")
    network.kill(1, "b")
    log("host b is lost: its processes, its network, its disk")
    # Opens the gate of the items that were held back, so that some of them were surely at work on the lost host.
    (PIDS / "open").touch()
    if launching.wait():
        raise SystemExit("the fan-out failed")
    run_until_published(pieces, section(PIECES), {}, baseline, LaunchConfig())
    compare("numbers", network, baseline)


def read_status(name: str) -> int:
    """A number from the servers' status: `answered` requests, or the last uploaded `finished` step."""
    return json.loads((PIDS / "status").read_text())[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parts = parser.parse_args().parts or list(PARTS)
    if os.geteuid() or not namespaces_available():
        return log("skipped: this needs root and network namespaces (`ip netns`, `unshare`) on Linux")
    os.environ |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix=f"{NAMES}-") as folder, ExitStack() as stack:
        (Path(folder) / "hosts").mkdir()
        network = Network(Path(folder) / "hosts")
        stack.callback(network.remove)
        network.begin()
        baseline = Store(Path(folder) / "undisturbed")
        baseline.prepare()
        for part in parts:
            # Every part begins with three new hosts: the part before it has lost one.
            for number, name in enumerate("abc"):
                network.add(number, name)
            PARTS[part](network, baseline)
            network.remove_hosts()


def namespaces_available() -> bool:
    """Whether network namespaces can be created on this machine."""
    if not (shutil.which("ip") and shutil.which("unshare") and shutil.which("nsenter")):
        return False
    probe = f"{NAMES}-probe"
    is_possible = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode == 0
    if is_possible:
        run_ip("netns", "delete", probe)
    return is_possible


PARTS = {"pretrain": show_pretraining, "distill": show_distillation, "ray": show_ray}
ON_HOSTS = {part.__name__: part for part in (serve, launch_pretraining, distil, ray_items, list_files)}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ON_HOSTS:
        ON_HOSTS[sys.argv[1]](json.loads(os.environ["NAUTILE_HOSTS"]))
    else:
        main()
