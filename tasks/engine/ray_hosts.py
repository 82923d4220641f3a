"""The processes of one stage as Ray actors, one a host: `tasks.engine.multihost` starts and watches them.

Each actor runs `tasks.engine.child_main` as a child process in its own session and holds its standard input open: the
child ends with its actor, and the actors end with the process that made them, however that goes. (With a URL as the
store it runs `tasks.engine.remote_child`, and the hosts need not share a disk.) The hosts are those of a placement
group: different ones that have `launch.host_resources`, or all of a TPU slice (`launch.tpu_slice`).
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, Retryable
from common.processes import free_port
from configs.operation import LaunchConfig
from tasks.engine.child_main import STOP, host_environment
from tasks.engine.child_process import child_environment
from tasks.engine.fanout.work_item import check_same_commit
from tasks.engine.ray_cluster import address_of, host_bundle, nodes_with

logger = logging.getLogger("tasks.engine.multihost")

PLACE_S = 300.0  # that hosts are waited for, before it counts as an outage
POLL_S = 0.5
UNREACHABLE_S = 30.0  # without a reply from an actor, before its host counts as lost
END_S = 5.0
_WORKER_ID = "ray.io/tpu-worker-id"  # the label of a node that counts the hosts of its slice
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # the others are Ray's `resources`


class Node(NamedTuple):
    """A node of the cluster as its actor sees it."""

    id: str
    address: str
    free_port: int


class HostActor:
    """Runs the process of one host as a child, until it ends or the actor does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._lines: list[bytes] = []
        self._changed = threading.Condition()

    def node(self) -> Node:
        """The node that it runs on."""
        import ray

        address = ray.util.get_node_ip_address()
        return Node(ray.get_runtime_context().get_node_id(), address, free_port(address))

    def start(self, request: dict[str, Any], path: str, settings: dict[str, str]) -> str:
        """Start the child; the result is empty, or says why this host cannot take part."""
        try:
            check_same_commit(request)
        except ConfigError as error:
            return str(error)
        if "url" in request:
            work = ["tasks.engine.remote_child", request["url"], request["key"]]
        elif Path(path).exists():
            work = [request["child"], path]
        else:
            return (
                f"host {socket.gethostname()} has no {path}: the store (NAUTILE_STORE) must lie on a file system that "
                "all hosts share, under the same path"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *work],
            env=child_environment(request.get("url", request["store"])) | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader.start()
        return ""

    def poll(self, stop: bool) -> tuple[list[bytes], int | None]:
        """The lines printed since the last call, waited for a moment, and the exit code after the last of them.

        With `stop` the child is asked to save and exit.
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
            self._reader.join(POLL_S)
        with self._changed:
            lines, self._lines = self._lines, []
        return lines, code

    def end(self) -> None:
        """End the child and what it has started at once."""
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
    """One host's actor as the launcher sees it."""

    def __init__(self, host: int, actor: Any, address: str) -> None:
        self.host = host
        self.problem = ""  # why it counts as lost
        self._actor, self._address = actor, address
        self._code: int | None = None
        self._stop = False
        self._answered_at = time.monotonic()
        threading.Thread(target=self._follow, daemon=True).start()

    def poll(self) -> int | None:
        """The exit code of its process, once that has ended."""
        return self._code

    def answered_since(self, moment: float) -> bool:
        """Whether it has been reached after `moment`, or needs not be any more."""
        return self._code is not None or self._answered_at > moment

    def stop(self) -> None:
        """Ask its process to save and exit."""
        self._stop = True

    def end(self) -> None:
        """End its process at once."""
        import ray

        with suppress(ray.exceptions.RayError):
            if not self.problem:
                ray.get(self._actor.end.remote(), timeout=END_S)
        ray.kill(self._actor)

    def _follow(self) -> None:
        """Print the lines of its process with the host's number, until that ends or cannot be reached."""
        import ray

        while self._code is None and not self.problem:
            stop, self._stop = self._stop, False
            try:
                lines, code = ray.get(self._actor.poll.remote(stop), timeout=UNREACHABLE_S)
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                if time.monotonic() - self._answered_at > UNREACHABLE_S:
                    self.problem = f"its node {self._address} could not be reached for {UNREACHABLE_S:g} s"
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
    """The line of an actor's death that says why, without Ray's table of ids around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1]


def print_line(host: int, line: bytes) -> None:
    """Print a line of a host's process with the host's number."""
    sys.stdout.buffer.write(f"[host {host}] ".encode() + line.rstrip(b"\n") + b"\n")
    sys.stdout.buffer.flush()


def start_actors(request: dict[str, Any], path: Path) -> list[RayHost]:
    """Reserve the hosts and start the stage's process on each. Needs a connection to the cluster.

    Raises `ConfigError` for a host that has other code or not the store, `Retryable` if hosts are missing.
    """
    import ray

    launch = LaunchConfig.model_validate(request["launch"])
    try:
        placed = reserve(launch)
        _, node = placed[0]
        settings = request["launch"] | {"coordinator": f"{node.address}:{node.free_port}"}
        started = [
            actor.start.remote(request, str(path), host_environment(settings, rank))
            for rank, (actor, _) in enumerate(placed)
        ]
        if refusals := list(filter(None, ray.get(started, timeout=PLACE_S))):
            raise ConfigError(refusals[0])
    except ray.exceptions.RayError as error:
        raise Retryable(f"a host of the Ray cluster was lost before all could start: {_reason(error)}") from error
    return [RayHost(rank, actor, node.address) for rank, (actor, node) in enumerate(placed)]


def reserve(launch: LaunchConfig) -> list[tuple[Any, Node]]:
    """An actor on each host of a new placement group, with its node; those of a slice in its order."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import slice_placement_group

    bundle = host_bundle(launch)
    wanted = f"{launch.processes} hosts with " + ", ".join(f"{name} = {amount:g}" for name, amount in bundle.items())
    logger.info("the Ray cluster at %s is asked for %s", address_of(launch), wanted)
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
            f"launch.processes: the Ray cluster at {address_of(launch)} has not given {wanted} within {PLACE_S:g} s; "
            f"{len(nodes_with(bundle))} of its nodes are such hosts, free or not"
        )
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
    placed = list(zip(actors, ray.get([actor.node.remote() for actor in actors], timeout=PLACE_S), strict=True))
    if launch.tpu_slice:
        # JAX numbers the processes of a slice as the slice does.
        worker_ids = {node["NodeID"]: int(node["Labels"].get(_WORKER_ID, 0)) for node in ray.nodes()}
        placed.sort(key=lambda pair: worker_ids[pair[1].id])
    return placed
