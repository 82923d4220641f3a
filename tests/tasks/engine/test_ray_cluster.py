"""Work items and the processes of one stage on a real Ray cluster of three nodes, which are killed at work."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
from prefect import flow

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.operation import LaunchConfig
from nautile.configs.vendors import VENDORS
from nautile.store.catalog import Catalog
from nautile.store.manifest import code_commit, host
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.child_process import cancelling
from nautile.tasks.engine.prefect_task import as_prefect_task
from nautile.tasks.engine.ray_cluster import check_hosts, connected, reserve
from nautile.tasks.engine.stage import RunContext
from tests.support.plug_ins import add_plug_in
from tests.support.servers.ray_cluster import ROOT, cluster, surroundings
from tests.support.stages.stage_parent import is_alive, wait_for
from tests.support.stages.stage_pieces import joined, pieces, runs, section
from tests.support.stages.stage_psum import psum

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]  # the first also starts the cluster


def tpu_host(worker_id):
    """A node as Ray describes a host of the TPU slice v4:2x2x2, without its chips."""
    labels = {"slice-name": "slice", "worker-id": str(worker_id), "pod-type": "v4-16", "topology": "2x2x2"}
    head = {} if worker_id else {"TPU-v4-16-head": 1}
    labels = {f"ray.io/tpu-{name}": value for name, value in labels.items()}
    return {"num_cpus": 1, "resources": {"TPU": 4, **head}, "labels": labels}


@pytest.fixture(scope="module")
def address(prefect_server):
    """One cluster for all tests here. Ray's sockets need a short path."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**surroundings(Path(folder)), "TPU_NAME": "slice"}.items():
            patch.setenv(name, value)
        with cluster([{"num_cpus": 1}, tpu_host(1), tpu_host(0)], Path(folder)) as address:
            yield address


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(as_prefect_task(pieces), "retries", 0)


def through_a_flow(store, config, address):
    @flow(name="one-stage")
    def one_stage():
        where = LaunchConfig(engine="ray", ray_address=address)
        with cancelling():
            return as_prefect_task(pieces)(config, {}, RunContext("r1", str(store.root), label="pieces", launch=where))

    return one_stage(return_state=True)


def test_a_killed_worker_a_bad_item_and_one_that_crashed_lose_and_double_nothing(store, gate, address):
    faults = {"piece-0": {"bad": 9}, "piece-1": {"crash": 1}}
    config = section(5, faults=faults, skippable=0.2, gate=str(gate), gated=["piece-2"])
    killed = {}

    def kill_one():
        wait_for((gate / "piece-2").exists)
        child, worker = map(int, (gate / "piece-2").read_text().split())
        # Meanwhile the other workers finish the rest of the fan-out.
        wait_for(lambda: sum(map(len, runs(store.root).values())) == 7)  # the list, five items, one of them again
        killed.update(child=child, worker=worker, cmdline=psutil.Process(worker).cmdline())
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: not is_alive(child))
        (gate / "open").touch()

    killer = threading.Thread(target=kill_one)
    killer.start()
    state = through_a_flow(store, config, address)
    killer.join()
    outputs = state.result()
    assert "ray::" in killed["cmdline"][0]
    assert (store.get(outputs["numbers"]).path / "all.txt").read_text() == joined(5, without=(0,))
    facts = store.get(outputs["numbers"]).manifest["facts"]
    assert facts["skipped"] == {"piece-0": "piece-0: not a text"}
    again = {item: count for item, count in facts["runs"].items() if count > 1}
    assert again == {"piece-1": 2, "piece-2": 2}
    Catalog(store).ingest()
    (rows,) = Catalog(store).query("SELECT count(*) AS n, sum(value) AS rows FROM metrics WHERE name = 'rows'")
    assert rows == {"n": 4, "rows": 20.0}


def test_an_interrupted_run_leaves_no_process_on_the_cluster(store, gate, address, monkeypatch):
    stopped = []

    def interrupt(update):
        if (gate / "piece-1").exists() and not stopped:
            stopped.append(update)
            raise KeyboardInterrupt

    monkeypatch.setattr("nautile.tasks.engine.attempt_log.notify", interrupt)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        through_a_flow(store, section(2, gate=str(gate), gated=["piece-1"]), address)
    assert stopped
    running = map(int, (gate / "piece-1").read_text().split())
    wait_for(lambda: not any(map(is_alive, running)))
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_cluster_that_is_not_there_is_one_message(store, address):
    with pytest.raises(ConfigError, match=r"no cluster answers at 127.0.0.1:9 \(Connection refused\): start one"):
        through_a_flow(store, section(1), "127.0.0.1:9").result()


def test_a_plug_in_that_the_nodes_do_not_know_reaches_the_workers(store, address, monkeypatch, tmp_path):
    """Each work item compares what it has with the run's."""
    add_plug_in(monkeypatch, tmp_path, VENDORS, "acme", "from nautile.configs.vendors import Vendor\nacme = Vendor()\n")
    outputs = through_a_flow(store, section(2), address).result()
    assert (store.get(outputs["numbers"]).path / "all.txt").read_text() == joined(2)


def launch_on(address, processes=2, **fields):
    return LaunchConfig(engine="ray", ray_address=address, processes=processes, stages=("psum",), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"processes": 4, "host_resources": {"CPU": 1}}, r"launch.processes = 4 of psum: .* has 3 hosts with CPU = 1;"),
        ({"host_resources": {"GPU": 8}}, r"launch.processes = 2 of psum: .* has 0 hosts with CPU = 1, GPU = 8;"),
        ({}, r"launch.host_resources: hosts of the Ray cluster have TPUs, which psum would not get"),
        ({"tpu_slice": "v4:2x2x4"}, r"launch.processes = 2, but a slice v4:2x2x4 has 4 hosts"),
        ({"processes": 4, "tpu_slice": "v4:2x2x4"}, r"launch.tpu_slice of psum: .* has 0 slices v4:2x2x4;"),
        ({"tpu_slice": "v99:2x2"}, r"launch.tpu_slice 'v99:2x2': Invalid accelerator"),
    ],
)
def test_hosts_that_the_cluster_does_not_have_are_refused(address, fields, message):
    with pytest.raises(ConfigError, match=message):
        check_hosts(launch_on(address, **fields), "psum")


def test_the_hosts_of_a_slice_are_taken_in_its_order(address):
    import ray

    launch = launch_on(address, tpu_slice="v4:2x2x2")
    check_hosts(launch, "psum")
    with connected(launch):
        worker_ids = {node["NodeID"]: node["Labels"].get("ray.io/tpu-worker-id") for node in ray.nodes()}
        assert [worker_ids[node.id] for _, node in reserve(launch)] == ["0", "1"]


def members_of(folder):
    """The processes of hosts that work on a request in `folder`, by rank."""
    members = {}
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line and "nautile.tasks.engine.multihost" not in line:
            members[int(process.environ()["NAUTILE_PROCESS"])] = process
    return members


def test_no_host_stays_when_the_launcher_is_killed(address, tmp_path):
    launch = launch_on(address, host_resources={"CPU": 1}).model_dump(mode="json")
    request = {"parent": os.getpid(), "launch": launch, "child": "tests.support.processes.waiting_host"}
    request |= {"staging": str(tmp_path), "store": str(tmp_path), "commit": code_commit(), "host": host()}
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "nautile.tasks.engine.multihost", str(tmp_path / "request.json")]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    begun = {next(line for line in launcher.stdout if line.startswith(b"[host ")) for _ in range(2)}
    assert begun == {b"[host 0] waiting\n", b"[host 1] waiting\n"}
    members = members_of(tmp_path)
    launcher.kill()
    launcher.wait()
    assert sorted(members) == [0, 1]
    wait_for(lambda: not any(is_alive(process.pid) for process in members.values()))


def test_a_lost_node_ends_the_attempt_and_the_next_one_runs_on_other_hosts(store, address):
    launch, failures = launch_on(address, host_resources={"CPU": 1}), []

    def run():
        context = RunContext("r1", str(store.root), label="psum", launch=launch)
        return run_stage(psum, {"fault": "waits", "host": 1}, {}, context)

    def fail():
        with pytest.raises(Retryable) as failure:
            run()
        failures.append(str(failure.value))

    thread = threading.Thread(target=fail)
    thread.start()
    wait_for(lambda: list((store.root / "staging").glob("*/scratch/tried-1")), seconds=240)  # two hosts start JAX
    members = members_of(store.root)
    raylets = {rank: process.parents()[1] for rank, process in members.items()}
    assert all("raylet" in raylet.name() for raylet in raylets.values())
    rank, raylet = next((rank, raylet) for rank, raylet in raylets.items() if "--head" not in raylet.cmdline())
    raylet.kill()
    thread.join()
    assert failures[0].startswith(f"host {rank} of 2 is lost: Ray's actor on the node 127.0.0.1 died: ")
    wait_for(lambda: not any(is_alive(process.pid) for process in members.values()))

    numbers = store.get(run()["numbers"])
    assert (numbers.path / "sum.txt").read_text() == "3.0"
    [log] = (store.root / "logs").glob("psum-*.txt")
    for number in range(2):
        assert f"[host {number}] process {number} of 2" in log.read_text()
