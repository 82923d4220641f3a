"""Select the parameters that a policy trains (`policy.train`), and split the parameter tree into trained and frozen.

A name is a path in the parameter tree or a prefix of one: `embedding`, `blocks.attention` (that layer of every block),
`blocks.7` (the whole last block of eight), `blocks.7.attention.q_proj`. Parameters of blocks are stacked along the
first axis, so a leaf that trains in some blocks only becomes two arrays, one in each tree. The policy and its reference
share the frozen arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from nautile.common.errors import ConfigError
from nautile.configs.model import ModelConfig
from nautile.model.layers.common import Params
from nautile.model.nautile import shapes

BLOCKS = "blocks"


class ParameterSubset:
    """Splits parameters into (trained, frozen) trees and joins them. Raises `ConfigError` for an unknown name."""

    def __init__(self, model: ModelConfig, names: Sequence[str]) -> None:
        self._model = model
        leaves = flatten_dict(shapes(model), sep=".")
        # Path of a trained leaf -> the blocks of it that train; None: the whole leaf.
        self._trained_blocks: dict[str, tuple[int, ...] | None] = {}
        for name in names or sorted({path.partition(".")[0] for path in leaves}):
            matches = _matches(name, leaves, model.blocks)
            if not matches:
                parts = sorted({path.rpartition(".")[0] or path for path in leaves})
                raise ConfigError(
                    f"policy.train: no parameter {name!r}; there are {', '.join(parts)}, the parameters in them, and "
                    f"{BLOCKS}.0 to {BLOCKS}.{model.blocks - 1} with the same names inside"
                )
            for path, blocks in matches.items():
                # Two names may select blocks of one leaf: it trains in all of them.
                earlier_blocks = self._trained_blocks.get(path, ())
                merged = None if blocks is None or earlier_blocks is None else tuple(sorted({*earlier_blocks, *blocks}))
                self._trained_blocks[path] = merged
        for path, blocks in self._trained_blocks.items():
            # All blocks by number are the whole leaf, which is then passed on without a copy.
            if blocks == tuple(range(model.blocks)):
                self._trained_blocks[path] = None

    def split(self, params: Params) -> tuple[Params, Params]:
        """Split a parameter tree into (trained, frozen); arrays are copied only where some blocks of a leaf train."""
        trained, frozen = {}, {}
        for path, leaf in flatten_dict(params, sep=".").items():
            blocks = self._trained_blocks.get(path, ())
            if blocks is None:
                trained[path] = leaf
            elif not blocks:
                frozen[path] = leaf
            else:
                trained[path], frozen[path] = leaf[np.array(blocks)], leaf[self._frozen_blocks(blocks)]
        return unflatten_dict(trained, sep="."), unflatten_dict(frozen, sep=".")

    def join(self, trained: Params, frozen: Params) -> Params:
        """Join the two trees of `split` into the whole parameter tree."""
        trained_leaves, frozen_leaves = (flatten_dict(tree, sep=".") for tree in (trained, frozen))
        whole = {}
        for path in sorted({*trained_leaves, *frozen_leaves}):
            blocks = self._trained_blocks.get(path, ())
            if blocks and path in frozen_leaves:
                # The concatenation has the trained blocks first: restore the order of the blocks.
                order = np.argsort(np.concatenate([np.array(blocks), self._frozen_blocks(blocks)]))
                whole[path] = jnp.concatenate([trained_leaves[path], frozen_leaves[path]])[order]
            else:
                whole[path] = trained_leaves.get(path, frozen_leaves.get(path))
        return unflatten_dict(whole, sep=".")

    def _frozen_blocks(self, trained: tuple[int, ...]) -> np.ndarray:
        return np.array([block for block in range(self._model.blocks) if block not in trained])


def _matches(name: str, leaves: Mapping[str, Any], block_count: int) -> dict[str, tuple[int, ...] | None]:
    """The leaves that `name` selects, with the blocks of each (None: all of them); {} for an unknown name."""
    first, _, remainder = name.partition(".")
    index, _, inner_path = remainder.partition(".")
    blocks: tuple[int, ...] | None = None
    if first == BLOCKS and index.isdigit():
        if int(index) >= block_count:
            return {}
        blocks, name = (int(index),), ".".join(filter(None, (BLOCKS, inner_path)))
    return {path: blocks for path in leaves if path == name or path.startswith(f"{name}.")}
