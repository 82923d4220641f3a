"""Which parameters a policy trains: all of them, or parts by name; splits the tree so that the rest can be shared.

A name is a path in the tree of parameters, whole or from its beginning: `embedding`, `blocks.attention` (that layer in
every block), `blocks.7` (all of the last of eight), `blocks.7.attention.q_proj`. Parameters of blocks are stacked, so a
leaf of which only some blocks train is two arrays, one on either side. The frozen side is one set of arrays for the
policy and its reference.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from common.errors import ConfigError
from configs.model import ModelConfig
from model.layers.common import Params
from model.nautile import shapes

BLOCKS = "blocks"


class ParameterSubset:
    """Splits parameters into (trained, frozen) trees and joins them. Raises `ConfigError` for an unknown name."""

    def __init__(self, model: ModelConfig, names: Sequence[str]) -> None:
        self._model = model
        leaves = flatten_dict(shapes(model), sep=".")
        self._chosen: dict[str, tuple[int, ...] | None] = {}  # None: the whole leaf
        for name in names or sorted({path.partition(".")[0] for path in leaves}):
            matches = _matches(name, leaves, model.blocks)
            if not matches:
                parts = sorted({path.rpartition(".")[0] or path for path in leaves})
                raise ConfigError(
                    f"policy.train: no parameter {name!r}; there are {', '.join(parts)}, the parameters in them, and "
                    f"{BLOCKS}.0 to {BLOCKS}.{model.blocks - 1} with the same names inside"
                )
            for path, rows in matches.items():
                before = self._chosen.get(path, ())
                self._chosen[path] = None if rows is None or before is None else tuple(sorted({*before, *rows}))
        for path, rows in self._chosen.items():
            if rows == tuple(range(model.blocks)):
                self._chosen[path] = None

    def split(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen). Leaves are the given arrays themselves, except where only some blocks of a leaf train."""
        trained, frozen = {}, {}
        for path, leaf in flatten_dict(params, sep=".").items():
            rows = self._chosen.get(path, ())
            if rows is None:
                trained[path] = leaf
            elif not rows:
                frozen[path] = leaf
            else:
                trained[path], frozen[path] = leaf[np.array(rows)], leaf[self._others(rows)]
        return unflatten_dict(trained, sep="."), unflatten_dict(frozen, sep=".")

    def join(self, trained: Params, frozen: Params) -> Params:
        """The whole tree, as `split` was given it."""
        trained_leaves, frozen_leaves = (flatten_dict(tree, sep=".") for tree in (trained, frozen))
        whole = {}
        for path in sorted({*trained_leaves, *frozen_leaves}):
            rows = self._chosen.get(path, ())
            if rows and path in frozen_leaves:
                order = np.argsort(np.concatenate([np.array(rows), self._others(rows)]))
                whole[path] = jnp.concatenate([trained_leaves[path], frozen_leaves[path]])[order]
            else:
                whole[path] = trained_leaves.get(path, frozen_leaves.get(path))
        return unflatten_dict(whole, sep=".")

    def _others(self, rows: tuple[int, ...]) -> np.ndarray:
        return np.array([row for row in range(self._model.blocks) if row not in rows])


def _matches(name: str, leaves: Mapping[str, Any], blocks: int) -> dict[str, tuple[int, ...] | None]:
    """The leaves that `name` selects, and which blocks of each (None: all of it); {} for an unknown name."""
    first, _, rest = name.partition(".")
    index, _, inside = rest.partition(".")
    rows: tuple[int, ...] | None = None
    if first == BLOCKS and index.isdigit():
        if int(index) >= blocks:
            return {}
        rows, name = (int(index),), ".".join(filter(None, (BLOCKS, inside)))
    return {path: rows for path in leaves if path == name or path.startswith(f"{name}.")}
