"""Connect to a running Ray cluster, and run the processes of one stage there as actors, one per host.

Two effects of `ray.init` are prevented: it would start a local cluster if there is none, and it replaces the SIGTERM
handler of the process.

Each actor runs `tasks.engine.child_main` as a child process in its own session and holds its standard input open, so
the child ends with its actor, and the actors end with the process that created them, for whatever reason. (With a URL
as the store the child is `tasks.engine.remote_child`, and the hosts need not share a disk.) The hosts are those of a
placement group: distinct ones with `launch.host_resources`, or all hosts of a TPU slice (`launch.tpu_slice`).
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from nautile.common.errors import ConfigError, Retryable
from nautile.common.processes import free_port, module_command
from nautile.common.text import first_line
from nautile.configs.operation import LaunchConfig
from nautile.configs.plugins import PLUGINS
from nautile.tasks.engine.child_process import STOP, check_same_commit, child_environment, host_environment

logger = logging.getLogger("nautile.tasks.engine.multihost")

CONNECT_S = 10.0
PLACE_S = 300.0  # how long to wait for hosts, before it counts as an outage
POLL_S = 0.5
UNREACHABLE_S = 30.0  # without a reply from an actor, before its host counts as lost
END_S = 5.0
_WORKER_ID = "ray.io/tpu-worker-id"  # label of a node: its rank within its slice
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # all others go to Ray's `resources`


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
            address,
            namespace="nautile",
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            # Workers have the environment of their host.
            runtime_env={"env_vars": {PLUGINS: os.environ[PLUGINS]}} if PLUGINS in os.environ else None,
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


class Node(NamedTuple):
    """A node of the cluster, as reported by its actor."""

    id: str
    address: str
    free_port: int


class HostActor:
    """The Ray actor that runs the process of one host as a child, until either of them ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._lines: list[bytes] = []
        self._changed = threading.Condition()

    def node(self) -> Node:
        import ray

        address = ray.util.get_node_ip_address()
        return Node(ray.get_runtime_context().get_node_id(), address, free_port(address))

    def start(self, request: dict[str, Any], path: str, settings: dict[str, str]) -> str:
        """Start the child. Returns why this host cannot take part, or an empty text."""
        try:
            check_same_commit(request)
        except ConfigError as error:
            return str(error)
        # With a URL the child fetches its request; otherwise it reads it from the shared disk, which must be there.
        if "url" in request:
            command = ["nautile.tasks.engine.remote_child", request["url"], request["key"]]
        elif Path(path).exists():
            command = [request["child"], path]
        else:
            return (
                f"host {socket.gethostname()} has no {path}: the store (NAUTILE_STORE) must lie on a file system that "
                "all hosts share, under the same path"
            )
        self._process = subprocess.Popen(
            module_command(*command),
            env=child_environment(request.get("url", request["store"])) | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader.start()
        return ""

    def poll(self, stop: bool) -> tuple[list[bytes], int | None]:
        """Return the lines printed since the last call, and the exit code once the child has ended.

        Waits up to `POLL_S` for a line. With `stop` the child is told to save and exit.
        """
        assert self._process
        assert self._process.stdin
        if stop:
            with suppress(OSError):
                self._process.stdin.write(STOP)
                self._process.stdin.flush()
        with self._changed:
            if not self._lines:
                self._changed.wait(POLL_S)
        code = self._process.poll()
        if code is not None:
            # The process has ended, but its last lines may still be in the pipe.
            self._reader.join(POLL_S)
        with self._changed:
            lines, self._lines = self._lines, []
        return lines, code

    def end(self) -> None:
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        assert self._process
        for line in self._process.stdout or ():
            with self._changed:
                self._lines.append(line)
                self._changed.notify()
        with self._changed:
            self._changed.notify()


class RayHost:
    """The launcher's handle of one host's actor; a `Host` of `tasks.engine.multihost`."""

    def __init__(self, host: int, actor: Any, address: str) -> None:
        self.host = host
        self.problem = ""  # why the host counts as lost
        self._actor, self._address = actor, address
        self._code: int | None = None
        self._stop = False
        self._answered_at = time.monotonic()
        threading.Thread(target=self._follow, daemon=True).start()

    def poll(self) -> int | None:
        return self._code

    def answered_since(self, moment: float) -> bool:
        """Whether the actor has answered after `moment`, or its process has ended."""
        return self._code is not None or self._answered_at > moment

    def stop(self) -> None:
        self._stop = True

    def end(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            if not self.problem:
                ray.get(self._actor.end.remote(), timeout=END_S)
        ray.kill(self._actor)

    def _follow(self) -> None:
        """Print the lines of its process with the host's number, until it ends or cannot be reached."""
        import ray

        while self._code is None and not self.problem:
            # Taken once: a second SIGTERM from the launcher is sent again, an old one is not repeated.
            stop, self._stop = self._stop, False
            try:
                lines, code = ray.get(self._actor.poll.remote(stop), timeout=UNREACHABLE_S)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                if time.monotonic() - self._answered_at > UNREACHABLE_S:
                    self.problem = f"its node {self._address} could not be reached for {UNREACHABLE_S:g} s"
                # The actor may not have got it.
                self._stop |= stop
                time.sleep(POLL_S)
            except ray.exceptions.RayError as error:
                self.problem = f"Ray's actor on the node {self._address} died: {_reason(error)}"
            else:
                self._answered_at = time.monotonic()
                for line in lines:
                    print_line(self.host, line)
                self._code = code


def _reason(error: Exception) -> str:
    """The cause of an actor's death: the last line of Ray's message, after its table of ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1]


def print_line(host: int, line: bytes) -> None:
    """Print a line of a host's process with the host's number."""
    sys.stdout.buffer.write(f"[host {host}] ".encode() + line.rstrip(b"\n") + b"\n")
    sys.stdout.buffer.flush()


def start_actors(request: dict[str, Any], path: Path) -> list[RayHost]:
    """Reserve the hosts and start the stage's process on each. Needs a connection to the cluster.

    Raises `ConfigError` for a host with another commit or without the store, `Retryable` if hosts are missing.
    """
    import ray

    launch = LaunchConfig.model_validate(request["launch"])
    try:
        actors = reserve(launch)
        # Process 0 is JAX's coordinator.
        _, node = actors[0]
        settings = request["launch"] | {"coordinator": f"{node.address}:{node.free_port}"}
        results = [
            actor.start.remote(request, str(path), host_environment(settings, rank))
            for rank, (actor, _) in enumerate(actors)
        ]
        if refusals := list(filter(None, ray.get(results, timeout=PLACE_S))):
            raise ConfigError(refusals[0])
    except ray.exceptions.RayError as error:
        raise Retryable(f"a host of the Ray cluster was lost before all could start: {_reason(error)}") from error
    return [RayHost(rank, actor, node.address) for rank, (actor, node) in enumerate(actors)]


def reserve(launch: LaunchConfig) -> list[tuple[Any, Node]]:
    """Create a placement group and an actor on each of its hosts. Returns (actor, node) by rank.

    Raises `Retryable` if the cluster does not provide the hosts in time, `ConfigError` for a bad `launch.tpu_slice`.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import slice_placement_group

    bundle = host_bundle(launch)
    hosts = f"{launch.processes} hosts with " + ", ".join(f"{name} = {amount:g}" for name, amount in bundle.items())
    logger.info("requesting %s from the Ray cluster at %s", hosts, address_of(launch))
    if launch.tpu_slice:
        version, _, topology = launch.tpu_slice.partition(":")
        try:
            group = slice_placement_group(
                topology, version, bundle, strategy="STRICT_SPREAD", head_reservation_timeout_s=PLACE_S
            ).placement_group
        except TimeoutError:
            group = None
        except RuntimeError as error:
            raise ConfigError(f"launch.tpu_slice {launch.tpu_slice}: {error}") from None
    else:
        group = placement_group([bundle] * launch.processes, strategy="STRICT_SPREAD")
    if group is None or not group.wait(PLACE_S):
        raise Retryable(
            f"launch.processes: the Ray cluster at {address_of(launch)} did not provide {hosts} within {PLACE_S:g} s; "
            f"{len(nodes_with(bundle))} of its nodes have these resources, free or not"
        )
    # One actor per bundle of the placement group.
    options = {_OPTIONS[name]: amount for name, amount in bundle.items() if name in _OPTIONS}
    resources = {name: amount for name, amount in bundle.items() if name not in _OPTIONS}
    actors = [
        ray.remote(HostActor)
        .options(
            **options,
            resources=resources,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
        for index in range(launch.processes)
    ]
    # The actors start only where their bundle is; each then reports its node, and a port that is free there.
    nodes = [actor.node.remote() for actor in actors]  # type: ignore[attr-defined]  # Ray declares no remote methods
    pairs = list(zip(actors, ray.get(nodes, timeout=PLACE_S), strict=True))
    if launch.tpu_slice:
        # JAX's ranks must follow the numbers that the slice gives its hosts.
        worker_ids = {node["NodeID"]: int(node["Labels"].get(_WORKER_ID, 0)) for node in ray.nodes()}
        pairs.sort(key=lambda pair: worker_ids[pair[1].id])
    return pairs
