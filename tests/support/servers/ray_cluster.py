"""A real Ray cluster on loopback, of several nodes with a scheduler and workers of their own, ended with us.

`python -m tests.support.servers.ray_cluster FOLDER NODES` prints its address and lives until its input ends. NODES is
JSON: for each node, the head first, what Ray's `Cluster.add_node` takes.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
OBJECTS = 80 * 2**20  # bytes of shared memory for a node's object store: work items pass none


def surroundings(folder: Path) -> dict[str, str]:
    """What the cluster and those who connect to it have in common: loopback only, a token of its own, no statistics.

    Ray takes 127.0.0.1 for "find my address out" and listens on all interfaces, except where it thinks that this
    machine could not be part of a cluster: the switch for that is named after two other systems.
    """
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "500",  # a node that is killed counts as dead after five: not after 15 s
        "PYTHONPATH": str(ROOT),
    }


@contextmanager
def cluster(nodes: list[dict[str, Any]], folder: Path) -> Iterator[str]:
    """Its address, for the length of the block."""
    (folder / "token").write_text(secrets.token_hex(32))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers.ray_cluster", str(folder), json.dumps(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **surroundings(folder)},
    )
    assert process.stdin
    assert process.stdout
    try:
        address = next((line.split()[1] for line in process.stdout if line.startswith("address ")), None)
        assert address, "the cluster did not start"
        yield address
    finally:
        process.stdin.close()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(folder: str, nodes: str) -> None:
    import ray._private.utils
    from ray.cluster_utils import Cluster

    # It would make this the cluster that "auto" finds on this machine.
    ray._private.utils.write_ray_address = lambda *_: None
    running = Cluster()
    for node in json.loads(nodes):
        running.add_node(
            object_store_memory=OBJECTS, node_ip_address="127.0.0.1", temp_dir=folder, include_dashboard=False, **node
        )
    sys.stdout.write(f"address {running.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    running.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3])
