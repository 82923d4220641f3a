"""Activations on a mesh: rows of a batch go over all its devices, and a kernel runs on each device's rows alone.

The mesh is the ambient one (`jax.set_mesh` around the lowering of a step). Without it, or on one device, these
functions leave things as they are, so the model is written once.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

ROWS = PartitionSpec(("data", "fsdp"))
WHOLE = PartitionSpec()


def split_rows(rows: Array) -> Array:
    """The same array, its first axis kept over the devices: else XLA may follow the weights and split the width."""
    return jax.lax.with_sharding_constraint(rows, ROWS) if _several_devices() else rows


def everywhere(array: Array) -> Array:
    """The same array, whole on every device: for what is few and is then handed out by rows."""
    return jax.lax.with_sharding_constraint(array, WHOLE) if _several_devices() else array


def on_each_device(function: Callable[..., Any], places: tuple[PartitionSpec, ...]) -> Callable[..., Any]:
    """`function`, run by every device on its own rows; `places` says of each argument whether it is ROWS or WHOLE.

    For what XLA does not partition by itself (a Pallas kernel, of which JAX cannot check what varies where). All
    results have rows.
    """
    if not _several_devices():
        return function
    return jax.shard_map(function, in_specs=places, out_specs=ROWS, check_vma=False)


def _several_devices() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1
