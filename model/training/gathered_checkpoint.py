"""Checkpoints of hosts that share no disk: the first one gathers the whole state, keeps it, and gives it back to all.

The files are those of `TrainCheckpoints`, so either kind resumes from the other's. The first host needs memory for the
whole state (4.5 GB for 371 M parameters with Adam), and the network carries it at each save and once at a resume.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from model.processes import arrays_of_first, on_first
from model.sharding import whole_on_hosts
from model.training.checkpoint import TrainCheckpoints


class GatheredCheckpoints:
    """As `TrainCheckpoints`, for all processes to call together; only the first one's `folder` is used."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh
        alone = ocp.options.MultiprocessingOptions(active_processes={0}, barrier_sync_key_prefix="first-host")
        self._own = TrainCheckpoints(folder, keep, identity, alone) if jax.process_index() == 0 else None

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Start to save `state` and `extra` as `step`; return once the state is copied."""
        whole = whole_on_hosts(state, self._mesh)
        if self._own:
            self._own.save(step, whole, extra)

    def wait(self) -> None:
        """Block until the last save is on the first host's disk."""
        if self._own:
            self._own.wait()

    def latest(self) -> int | None:
        """The newest intact step."""
        return on_first(lambda: self._own.latest() if self._own else None)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state saved as `step`, in the shapes, types and shardings of `like`."""
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
        extra: dict[str, Any] = {}
        if self._own:
            state, extra = self._own.restore(step, state)

        def spread(whole: np.ndarray, target: Any) -> jax.Array:
            return jax.make_array_from_callback(whole.shape, target.sharding, lambda index: whole[index])

        return jax.tree.map(spread, arrays_of_first(state), like), on_first(lambda: extra)

    def close(self) -> None:
        """Wait for the last save and end the background threads."""
        if self._own:
            self._own.close()


def open_checkpoints(
    folder: Path, keep: int, identity: dict[str, Any], mesh: jax.sharding.Mesh, *, shared_disk: bool
) -> TrainCheckpoints | GatheredCheckpoints:
    """The checkpoints of a run whose processes see the same `folder`, or, without a `shared_disk`, do not."""
    if shared_disk:
        return TrainCheckpoints(folder, keep, identity)
    return GatheredCheckpoints(folder, keep, identity, mesh)
