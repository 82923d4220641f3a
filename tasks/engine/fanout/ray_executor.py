"""Work items on an existing Ray cluster, through `prefect-ray`: each a Prefect task run in one of its worker processes.

The worker runs the item in a child process, as a thread here would, over the same staging folder. A worker that dies
takes its child along, and Ray gives the item to another. Two things that RayTaskRunner does are prevented: it would
start a cluster of its own where it finds none, and `ray.init` takes the SIGTERM handler away from the run.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from prefect.settings import PREFECT_API_URL

from common.errors import ConfigError
from configs.operation import LaunchConfig
from tasks.engine.fanout.executor import Executor
from tasks.engine.fanout.prefect_executor import executor_of

LOST_WORKERS = 4  # per item, before it counts as failed
CONNECT_S = 10.0


@contextmanager
def ray_executor(launch: LaunchConfig) -> Iterator[Executor]:
    """Connected to the cluster for the length of the block. Raises `ConfigError` if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = launch.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_reachable(address)
    try:
        # An optional extra, which most installations do not have.
        import ray
        from prefect_ray import RayTaskRunner
        from prefect_ray.context import remote_options
    except ImportError as error:
        raise ConfigError(
            "launch.engine 'ray' needs Ray, which is not installed: pip install 'nautile[ray]' on every host, or set "
            'launch.engine = "processes"'
        ) from error

    connected_here = not ray.is_initialized()
    if connected_here:
        _connect(ray, address)
    try:
        check_prefect_url(ray, PREFECT_API_URL.value() or "")

        def capacity() -> int:
            # Asked for each item, so that hosts which join the cluster meanwhile get work.
            return launch.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

        options = {"num_cpus": 1, "max_retries": LOST_WORKERS, "scheduling_strategy": "SPREAD"}
        with RayTaskRunner() as runner, remote_options(**options):
            yield executor_of(runner, capacity)
    finally:
        if connected_here:
            ray.shutdown()  # the cluster ends what this run still has there


def _connect(ray: Any, address: str) -> None:
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        ray.init(address, namespace="nautile", log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(_unreachable(address, connection_problem(error))) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)


def connection_problem(error: BaseException) -> str:
    """Why the connection failed. Ray mentions a missing token only deep in the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if "Authentication" in f"{type(cause).__name__} {cause}":
            return (
                "it needs a token: copy the head's to ~/.ray/auth_token or to the file that RAY_AUTH_TOKEN_PATH names"
            )
        cause = cause.__cause__ or cause.__context__
    return str(error).splitlines()[0]


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens; Ray itself would wait for minutes, and write to the terminal."""
    if address == "auto":
        return
    if address == "local":
        raise ConfigError("launch.ray_address 'local' would start a cluster; engine 'ray' uses one that already runs")
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"launch.ray_address: {address!r} is not an address:port (as `ray start` prints it)")
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(_unreachable(address, error.strerror or str(error))) from error


def _unreachable(address: str, problem: str) -> str:
    where = "on this machine or in RAY_ADDRESS" if address == "auto" else f"at {address}"
    return (
        f"launch.engine 'ray': no cluster answers {where} ({problem}): start one (`ray start --head`, and `ray start "
        '--address=…` on the others), set launch.ray_address, or set launch.engine = "processes"'
    )


def check_prefect_url(ray: Any, url: str) -> None:
    """Refuse a loopback address of Prefect where the cluster has other hosts, whose task runs must reach it."""
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
            f"{url or 'its own embedded server'}: start a server that they reach and set PREFECT_API_URL to it"
        )
