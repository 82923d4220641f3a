"""Connect to a running Ray cluster, and check that it has the hosts for a stage of several processes.

Two effects of `ray.init` are prevented: it would start a local cluster if there is none, and it replaces the SIGTERM
handler of the process.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from nautile.common.errors import ConfigError
from nautile.common.text import first_line
from nautile.configs.operation import LaunchConfig

CONNECT_S = 10.0


@contextmanager
def connected(launch: LaunchConfig) -> Iterator[None]:
    """Connect to the cluster for the length of the block. Raises `ConfigError` if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address_of(launch)
    _check_reachable(address)
    try:
        import ray  # an optional extra, which most installations do not have
    except ImportError as error:
        raise ConfigError(
            "launch.engine 'ray' needs Ray, which is not installed: pip install 'nautile[ray]' on every host, or set "
            'launch.engine = "processes"'
        ) from error
    if ray.is_initialized():
        yield
        return

    # Only the main thread can set signal handlers.
    in_main_thread = threading.current_thread() is threading.main_thread()
    # Kept for `tasks.engine.multihost`, whose handler asks the hosts to save.
    handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        ray.init(
            address, namespace="nautile", log_to_driver=False, configure_logging=False, logging_level=logging.ERROR
        )
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(_unreachable(address, connection_problem(error))) from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()  # this also ends the tasks and actors that this process still has there


def address_of(launch: LaunchConfig) -> str:
    """The address at which the cluster is expected."""
    return launch.ray_address or os.environ.get("RAY_ADDRESS") or "auto"


def connection_problem(error: BaseException) -> str:
    """Why the connection failed. Ray reports a missing token only deep in the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        if "Authentication" in f"{type(cause).__name__} {cause}":
            return (
                "it needs a token: copy the head's to ~/.ray/auth_token or to the file that RAY_AUTH_TOKEN_PATH names"
            )
        cause = cause.__cause__ or cause.__context__
    return first_line(error)


def check_hosts(launch: LaunchConfig, stage: str) -> None:
    """Raise `ConfigError` if no cluster answers, or it does not have the hosts for the processes of `stage`."""
    with connected(launch):
        from ray.util.tpu import get_num_ready_tpu_slices

        bundle = host_bundle(launch)
        if launch.tpu_slice:
            version, _, topology = launch.tpu_slice.partition(":")
            count, needed, unit = get_num_ready_tpu_slices(topology, version), 1, f"slices {launch.tpu_slice}"
            field = f"launch.tpu_slice of {stage}"
        else:
            count, needed = len(nodes_with(bundle)), launch.processes
            unit = "hosts with " + ", ".join(f"{name} = {amount:g}" for name, amount in bundle.items())
            field = f"launch.processes = {needed} of {stage}"
        if count < needed:
            raise ConfigError(
                f"{field}: the Ray cluster at {address_of(launch)} has {count} {unit}; start what is missing "
                "(`ray start --address=…` on each host)"
            )
        # Without `host_resources` Ray would place the processes on CPUs and leave the accelerators unused.
        unused = {name for node in nodes_with(bundle) for name in ("GPU", "TPU") if node["Resources"].get(name)}
        if unused and not launch.host_resources and not launch.tpu_slice:
            name = sorted(unused)[0]
            raise ConfigError(
                f"launch.host_resources: hosts of the Ray cluster have {name}s, which {stage} would not get: set for "
                f"example host_resources = {{{name} = 8}}, or {{CPU = 1}} to do without"
            )


def host_bundle(launch: LaunchConfig) -> dict[str, float]:
    """The resources that each host needs, by Ray's names. Raises `ConfigError` for an invalid `launch.tpu_slice`."""
    bundle = {"CPU": 1.0, **launch.host_resources}
    if not launch.tpu_slice:
        return bundle
    from ray.util.tpu import get_tpu_worker_resources

    version, _, topology = launch.tpu_slice.partition(":")
    try:
        hosts, bundle = get_tpu_worker_resources(topology, version, bundle)
    except ValueError as error:
        raise ConfigError(f"launch.tpu_slice {launch.tpu_slice!r}: {error}") from None
    if hosts != launch.processes:
        raise ConfigError(
            f"launch.processes = {launch.processes}, but a slice {launch.tpu_slice} has {hosts} hosts: set "
            f"launch.processes = {hosts}"
        )
    return bundle


def nodes_with(bundle: dict[str, float]) -> list[dict[str, Any]]:
    """The live nodes whose total resources, used or not, include these."""
    import ray

    live_nodes = [node for node in ray.nodes() if node["Alive"]]
    return [node for node in live_nodes if all(node["Resources"].get(name, 0) >= bundle[name] for name in bundle)]


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` for an address where nothing listens. Ray itself would wait for minutes and print."""
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
    place = "on this machine or in RAY_ADDRESS" if address == "auto" else f"at {address}"
    return (
        f"launch.engine 'ray': no cluster answers {place} ({problem}): start one (`ray start --head`, and `ray start "
        '--address=…` on the others), set launch.ray_address, or set launch.engine = "processes"'
    )
