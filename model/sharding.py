"""Sharding on a mesh (data, fsdp): an explicit sharding of every array, and constraints on arrays inside a program.

Shardings are explicit because `jit` may replicate an array that has none: `jax.jit(tx.init)(params)` puts full moments
on every device. Rows of a batch are split over both axes. A parameter is split over fsdp along its longest divisible
axis, but never along the axis of the blocks, over which `lax.scan` iterates. Vectors (norms, biases, per-head scales)
and arrays with no divisible axis are replicated: 0.12 % of the published model on 32 chips.

The functions that work inside a jitted program (`split_rows`, `everywhere`, `on_each_device`) read the ambient mesh,
which `OnMesh` sets, and do nothing on a single device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nautile.common.errors import ConfigError
from nautile.model.layers.common import Params

ROWS = PartitionSpec(("data", "fsdp"))  # split by rows over all devices
WHOLE = PartitionSpec()  # replicated on every device


def make_mesh(fsdp: int, devices: Sequence[Any] | None = None, part: str = "pretrain") -> Mesh:
    """The mesh [data, fsdp] over all devices. Raises `ConfigError` if `<part>.fsdp` does not divide their number."""
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) % fsdp:
        raise ConfigError(f"{part}.fsdp {fsdp} does not divide the {len(devices)} devices of this run")
    # fsdp is the inner axis: devices that are listed next to each other, mostly of one host, hold the shards of a copy.
    return Mesh(np.asarray(devices).reshape(-1, fsdp), ("data", "fsdp"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, WHOLE)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is the rows of a batch."""
    return NamedSharding(mesh, ROWS)


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this pytree path has the leading axis of the blocks."""
    return str(getattr(path[0], "key", path[0])) == "blocks"


def parameter_shardings(shapes: Params, mesh: Mesh) -> Params:
    """The sharding of every parameter; `shapes` is a tree of arrays or `ShapeDtypeStruct`s."""
    size = mesh.shape["fsdp"]

    def rule(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        first = int(is_stacked(path))  # skips the axis of the blocks
        axes = [axis for axis in range(first, leaf.ndim) if leaf.shape[axis] % size == 0]
        if leaf.ndim - first < 2 or not axes:
            return replicated(mesh)
        longest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, "fsdp"))

    return jax.tree_util.tree_map_with_path(rule, shapes)


class OnMesh:
    """Wraps a jitted function so that it is called and lowered with `mesh` as the ambient mesh."""

    def __init__(self, mesh: Mesh, jitted: Any) -> None:
        self._mesh, self._jitted = mesh, jitted

    def __call__(self, *arguments: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._jitted.lower(*arguments)


def put_rows(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global arrays, split by rows over the devices, from this process's own rows of a batch."""
    sharding = row_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in batch.items()}


def put_shared_rows(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global arrays, split by rows over the devices, from a full batch that every process holds."""
    sharding = row_sharding(mesh)
    return {name: jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for name, a in batch.items()}


def own_mesh(mesh: Mesh, process: int) -> Mesh:
    """The mesh of one process's devices, with parameters split over as many of them as `mesh` allows."""
    devices = [device for device in mesh.devices.flat if device.process_index == process]
    # A process may have fewer devices than `mesh` splits parameters over: then the largest number that divides both.
    return make_mesh(math.gcd(mesh.shape["fsdp"], len(devices)), devices)


def whole_on_hosts(tree: Any, mesh: Mesh) -> Any:
    """Gather sharded arrays into the host memory of every process. All processes must call this together.

    With a single process the tree is returned as it is, still on its devices.
    """
    if jax.process_count() == 1:
        return tree
    gather = jax.jit(_identity, out_shardings=replicated(mesh))
    return jax.tree.map(lambda leaf: np.asarray(gather(leaf)), tree)


def on_mesh(tree: Any, shardings: Any) -> Any:
    """Put arrays on the devices of a mesh; those that are there already are not copied.

    Where several processes have one mesh, they are copied by a program: Orbax cannot save what `jax.device_put` makes
    there, which is saved as it is if a stage has nothing to train on.
    """
    there = jax.device_put(tree, shardings)
    return there if jax.process_count() == 1 else jax.jit(_identity, out_shardings=shardings)(there)


def _identity(array: Any) -> Any:
    # At module level, so that gathering compiles once per shape and not at each call.
    return array


def split_rows(rows: Array) -> Array:
    """Constrain an array to be split by rows; XLA might otherwise follow the weights and split its width."""
    return jax.lax.with_sharding_constraint(rows, ROWS) if _several_devices() else rows


def everywhere(array: Array) -> Array:
    """Constrain a small array to be replicated on every device, so that it can be indexed by rows."""
    return jax.lax.with_sharding_constraint(array, WHOLE) if _several_devices() else array


def on_each_device(function: Callable[..., Any], specs: tuple[Any, ...]) -> Callable[..., Any]:
    """Make every device run `function` on its own rows. `specs` has ROWS or WHOLE for each array of each argument.

    For functions that XLA cannot partition: Pallas kernels, whose replication JAX cannot check either. Every result is
    split by rows.
    """
    if not _several_devices():
        return function
    return jax.shard_map(function, in_specs=specs, out_specs=ROWS, check_vma=False)


def _several_devices() -> bool:
    """Whether the program is being traced for a mesh of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1
