"""Work items on an existing Ray cluster, through `prefect-ray`: each a Prefect task run in a Ray worker process.

The worker runs the item in a child process, as a local thread would, with the same staging folder. When a worker dies,
its child ends too, and Ray assigns the item to another worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from prefect.settings import PREFECT_API_URL

from nautile.common.errors import ConfigError
from nautile.configs.operation import LaunchConfig
from nautile.tasks.engine.fanout.executor import Executor
from nautile.tasks.engine.fanout.prefect_executor import executor_of
from nautile.tasks.engine.ray_cluster import connected

LOST_WORKERS = 4  # per item, before it counts as failed


@contextmanager
def ray_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Run items on the cluster. Raises `ConfigError` if no cluster answers."""
    with connected(launch):
        # Of the same optional extra as Ray itself.
        import ray
        from prefect_ray import RayTaskRunner
        from prefect_ray.context import remote_options

        check_prefect_url(ray, PREFECT_API_URL.value() or "")

        def capacity() -> int:
            # Queried for each item, so that hosts which join the cluster later get work.
            return launch.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

        # A core for each item, spread over the hosts, so that they share network and disks. Prefect counts the retries
        # of an item, Ray only those after a lost worker.
        options = {"num_cpus": 1, "max_retries": LOST_WORKERS, "scheduling_strategy": "SPREAD"}
        with RayTaskRunner() as runner, remote_options(**options):
            yield executor_of(runner, capacity)


def check_prefect_url(ray: Any, url: str) -> None:
    """Raise `ConfigError` for a loopback address of Prefect if the cluster has other hosts, which must reach it."""
    host = urlsplit(url).hostname or ""
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError:  # a name
        is_loopback = host in ("", "localhost")
    other_hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    other_hosts -= {ray.util.get_node_ip_address()}
    if other_hosts and is_loopback:
        raise ConfigError(
            f"launch.engine 'ray': the cluster has {len(other_hosts)} other hosts, which cannot reach Prefect at "
            f"{url or 'its embedded server'}: start a server that they can reach and set PREFECT_API_URL to its address"
        )
