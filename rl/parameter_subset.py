"""Which parameters a policy trains: all of them, or parts by name; and the tree taken apart so that the rest is shared.

A name is a path in the tree of parameters, whole or from its beginning: `embedding`, `blocks.attention` (that layer in
every block), `blocks.7` (all of the last of eight), `blocks.7.attention.q_proj`. Parameters of blocks are stacked, so a
leaf of which only some blocks train lies in two arrays, one on either side. What is frozen is one set of arrays for
the policy and its reference.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from common.errors import ConfigError
from configs.model import ModelConfig
from model.layers.common import Params
from model.nautile import shapes
from model.weights.files import flatten, unflatten

BLOCKS = "blocks"


class ParameterSubset:
    """Takes parameters apart into (trained, frozen) trees, and puts them together. Raises `ConfigError` for a name."""

    def __init__(self, model: ModelConfig, names: Sequence[str]) -> None:
        self._model = model
        leaves = flatten(shapes(model))
        self._chosen: dict[str, tuple[int, ...] | None] = {}  # None: the whole leaf
        for name in names or _tops(leaves):
            found = _matches(name, leaves, model.blocks)
            if not found:
                parts = sorted({path.rpartition(".")[0] or path for path in leaves})
                raise ConfigError(
                    f"policy.train: no parameter {name!r}; there are {', '.join(parts)}, what they hold, and "
                    f"{BLOCKS}.0 to {BLOCKS}.{model.blocks - 1} with the same within"
                )
            for path, rows in found.items():
                before = self._chosen.get(path, ())
                self._chosen[path] = None if rows is None or before is None else tuple(sorted({*before, *rows}))
        for path, rows in self._chosen.items():
            if rows == tuple(range(model.blocks)):
                self._chosen[path] = None

    def part(self, params: Params) -> tuple[Params, Params]:
        """(trained, frozen): leaves are the given arrays themselves, but where only some blocks of one train."""
        trained, frozen = {}, {}
        for path, leaf in flatten(params).items():
            rows = self._chosen.get(path, ())
            if rows is None:
                trained[path] = leaf
            elif not rows:
                frozen[path] = leaf
            else:
                trained[path], frozen[path] = leaf[np.array(rows)], leaf[self._others(rows)]
        return unflatten(trained), unflatten(frozen)

    def join(self, trained: Params, frozen: Params) -> Params:
        """The whole tree, as `part` was given it."""
        moving, still = flatten(trained), flatten(frozen)
        whole = {}
        for path in sorted({*moving, *still}):
            rows = self._chosen.get(path, ())
            if rows and path in still:
                places = np.argsort(np.concatenate([np.array(rows), self._others(rows)]))
                whole[path] = jnp.concatenate([moving[path], still[path]])[places]
            else:
                whole[path] = moving.get(path, still.get(path))
        return unflatten(whole)

    def _others(self, rows: tuple[int, ...]) -> np.ndarray:
        return np.array([row for row in range(self._model.blocks) if row not in rows])


def _matches(name: str, leaves: Mapping[str, Any], blocks: int) -> dict[str, tuple[int, ...] | None]:
    """The leaves under a name, and which blocks of each it means."""
    first, _, rest = name.partition(".")
    index, _, inside = rest.partition(".")
    rows: tuple[int, ...] | None = None
    if first == BLOCKS and index.isdigit():
        if int(index) >= blocks:
            return {}
        rows, name = (int(index),), ".".join(filter(None, (BLOCKS, inside)))
    return {path: rows for path in leaves if path == name or path.startswith(f"{name}.")}


def _tops(leaves: Mapping[str, Any]) -> list[str]:
    return sorted({path.partition(".")[0] for path in leaves})
