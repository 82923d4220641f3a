"""Where every array of a training run lives: a mesh (data, fsdp), and an explicit sharding for each leaf.

Explicit, because on a mesh `jit` is free to replicate what it is not told about: `jax.jit(tx.init)(params)` gives whole
moments on every device. Rows of a batch go over both axes; a parameter goes over fsdp along its longest axis that
divides, never the axis of the blocks, which `lax.scan` walks. Vectors (norms, biases, per-head scales) and what divides
along no axis are replicated: with the published shapes 0.12 % of the model on 32 chips.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common.errors import ConfigError
from model.layers.common import Params
from model.training.optimizer import is_stacked


def make_mesh(fsdp: int, devices: Sequence[Any] | None = None, part: str = "pretrain") -> Mesh:
    """The mesh [data, fsdp] over all devices. Raises `ConfigError` where `<part>.fsdp` does not divide their number."""
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) % fsdp:
        raise ConfigError(f"{part}.fsdp {fsdp} does not divide the {len(devices)} devices of this run")
    return Mesh(np.asarray(devices).reshape(-1, fsdp), ("data", "fsdp"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def row_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is the rows of a batch."""
    return NamedSharding(mesh, ROWS)


def parameter_shardings(shapes: Params, mesh: Mesh) -> Params:
    """The sharding of every parameter, in the shape of the tree of arrays or `ShapeDtypeStruct`s given."""
    size = mesh.shape["fsdp"]

    def rule(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        first = int(is_stacked(path))
        axes = [axis for axis in range(first, leaf.ndim) if leaf.shape[axis] % size == 0]
        if leaf.ndim - first < 2 or not axes:
            return replicated(mesh)
        longest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, "fsdp"))

    return jax.tree_util.tree_map_with_path(rule, shapes)


def optimizer_shardings(tx: optax.GradientTransformation, shapes: Params, shardings: Params, mesh: Mesh) -> Any:
    """Shardings of `tx`'s state: a moment lies as its parameter does, counts and the like are replicated.

    A moment is known by its path in the state, which ends in the path of its parameter.
    """
    known = {_keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)}

    def rule(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = _keys(path)
        ends = (keys[start:] for start in range(len(keys)))
        found = next((known[end] for end in ends if end in known), None)
        return replicated(mesh) if found is None or leaf.ndim == 0 else found

    return jax.tree_util.tree_map_with_path(rule, jax.eval_shape(tx.init, shapes))


class OnMesh:
    """A jitted function that is called and lowered with `mesh` as the ambient one, which `model.sharding` reads."""

    def __init__(self, mesh: Mesh, jitted: Any) -> None:
        self._mesh, self._jitted = mesh, jitted

    def __call__(self, *arguments: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._jitted.lower(*arguments)


def put_rows(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a global batch as global arrays, split over the devices by rows."""
    sharding = row_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, array) for name, array in batch.items()}


def gathered(tree: Any, mesh: Mesh) -> Any:
    """The same arrays, whole in the memory of every process; all processes must call this."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda leaf: np.asarray(jax.jit(lambda a: a, out_shardings=replicated(mesh))(leaf)), tree)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)


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
