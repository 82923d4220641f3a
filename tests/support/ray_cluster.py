"""A real Ray cluster on loopback, of several worker processes: a head with its store and scheduler, ended with us.

`python -m tests.support.ray_cluster CPUS FOLDER` prints its address and lives until its input ends.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = 80 * 2**20  # bytes of shared memory for the object store: work items pass none


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
        "PYTHONPATH": str(ROOT),
    }


@contextmanager
def cluster(cpus: int, folder: Path) -> Iterator[str]:
    """Its address, for the length of the block."""
    (folder / "token").write_text(secrets.token_hex(32))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_cluster", str(cpus), str(folder)],
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
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(cpus: str, folder: str) -> None:
    import ray

    ray.init(
        num_cpus=int(cpus),
        object_store_memory=OBJECTS,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
        log_to_driver=False,
    )
    sys.stdout.write(f"address {ray.get_runtime_context().gcs_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3])
