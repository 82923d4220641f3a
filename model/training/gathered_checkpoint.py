"""Checkpoints for hosts without a shared disk: the first host gathers and saves the whole state, and broadcasts it.

The files are those of `TrainCheckpoints`, so either class resumes from the other's. The first host needs memory for the
whole state (4.5 GB for 371 M parameters with Adam), which crosses the network at each save and once at a resume.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nautile.model.processes import arrays_of_first, on_first
from nautile.model.sharding import whole_on_hosts
from nautile.model.training.checkpoint import TrainCheckpoints


class GatheredCheckpoints:
    """`TrainCheckpoints` that all processes call together; only the first process uses its `folder`."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        # Orbax would wait for all processes at its barriers; it is told that there is one.
        first_only = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="first-host")
        self._first = TrainCheckpoints(folder, keep, identity, first_only) if jax.process_index() == 0 else None

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Start saving `state` and `extra` as `step`; return once the state is copied."""
        gathered = whole_on_hosts(state, self._mesh)
        if self._first:
            self._first.save(step, gathered, extra)

    def wait(self) -> None:
        """Wait until the last save is on the first host's disk."""
        if self._first:
            self._first.wait()

    def latest(self) -> int | None:
        """The newest intact step; None if nothing was ever saved."""
        return on_first(lambda: self._first.latest() if self._first else None)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Load the state saved as `step`, with the shapes, types and shardings of `like`."""
        # The other processes contribute zeros of the same shapes to the broadcast.
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        extra: dict[str, Any] = {}
        if self._first:
            state, extra = self._first.restore(step, state)

        def shard(full: np.ndarray, target: Any) -> jax.Array:
            return jax.make_array_from_callback(full.shape, target.sharding, lambda index: full[index])

        return jax.tree.map(shard, arrays_of_first(state), like), on_first(lambda: extra)

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        if self._first:
            self._first.close()


def open_checkpoints(
    folder: Path, keep: int, identity: dict[str, Any], mesh: jax.sharding.Mesh, *, shared_disk: bool
) -> TrainCheckpoints | GatheredCheckpoints:
    """The checkpoints of a run; `shared_disk` says whether all its processes see the same `folder`."""
    if shared_disk:
        return TrainCheckpoints(folder, keep, identity)
    return GatheredCheckpoints(folder, keep, identity, mesh)
