"""Units on an existing Ray cluster through `prefect-ray`: each a Prefect task run in a worker process of the cluster.

The worker runs the unit in a child process, as a thread here would, over the same staging folder. A worker that dies
takes its child along, and Ray hands the unit to another. Two things RayTaskRunner would do are prevented: it starts a
cluster of its own where it finds none, and `ray.init` takes the SIGTERM handler away from the run.
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
from tasks.engine.executors import Executor
from tasks.engine.prefect_executor import TaskCrew

LOST_WORKERS = 4  # per unit, before it counts as failed
CONNECT_S = 10.0
ABSENT = (
    "launch.engine 'ray' needs Ray, which is not installed: pip install 'nautile[ray]' on every host, or set "
    'launch.engine = "processes"'
)


@contextmanager
def ray_crew(launch: LaunchConfig) -> Iterator[Executor]:
    """Connected to the cluster for the length of the block. Raises `ConfigError` if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    wanted = launch.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_listens(wanted)
    try:
        import ray
        from prefect_ray import RayTaskRunner
        from prefect_ray.context import remote_options
    except ImportError as error:
        raise ConfigError(ABSENT) from error
    mine = not ray.is_initialized()
    if mine:
        _connect(ray, wanted)
    try:
        check_api(ray, PREFECT_API_URL.value() or "")

        def capacity() -> int:
            return launch.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

        options = {"num_cpus": 1, "max_retries": LOST_WORKERS, "scheduling_strategy": "SPREAD"}
        with RayTaskRunner() as runner, remote_options(**options):
            yield TaskCrew(runner, capacity, (ray.exceptions.RayError,))
    finally:
        if mine:
            ray.shutdown()  # the cluster ends what this run still has there


def _connect(ray: Any, wanted: str) -> None:
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        ray.init(wanted, namespace="nautile", log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(_unreachable(wanted, _why(error))) from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, handler)


def _why(error: BaseException) -> str:
    """Ray says of a token that it misses only deep in the chain of what it raises."""
    found: BaseException | None = error
    while found is not None:
        if "Authentication" in f"{type(found).__name__} {found}":
            return "it asks for a token: put the head's at ~/.ray/auth_token or where RAY_AUTH_TOKEN_PATH says"
        found = found.__cause__ or found.__context__
    return str(error).splitlines()[0]


def _check_listens(address: str) -> None:
    """Ray itself would wait for minutes, and write to the terminal."""
    if address in ("auto", "local"):
        if address == "local":
            raise ConfigError("launch.ray_address 'local' would start a cluster; engine 'ray' is for one that exists")
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"launch.ray_address: {address!r} is no address:port (as `ray start` prints it)")
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(_unreachable(address, error.strerror or str(error))) from error


def _unreachable(address: str, why: str) -> str:
    where = "on this machine or in RAY_ADDRESS" if address == "auto" else f"at {address}"
    return (
        f"launch.engine 'ray': no cluster answers {where} ({why}): start one (`ray start --head`, and `ray start "
        '--address=…` on the others), set launch.ray_address, or set launch.engine = "processes"'
    )


def check_api(ray: Any, url: str) -> None:
    """Task runs on other hosts report to Prefect: at a loopback address they would find nobody."""
    host = urlsplit(url).hostname or ""
    others = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]} - {ray.util.get_node_ip_address()}
    if others and (not host or host == "localhost" or (_is_ip(host) and ip_address(host).is_loopback)):
        raise ConfigError(
            f"launch.engine 'ray': the cluster has {len(others)} other hosts, which cannot reach Prefect at "
            f"{url or 'its own embedded server'}: start a server that they reach and set PREFECT_API_URL to it"
        )


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
