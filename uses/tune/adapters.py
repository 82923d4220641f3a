"""LoRA adapters: two narrow trained matrices for each frozen matrix of the blocks (Hu et al., arXiv:2106.09685).

The weight is W + alpha/rank · A·B. B starts at zero, so the tuned model starts equal to the frozen one.
"""

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from nautile.model.layers.common import Params
from nautile.model.training.optimizer import is_stacked, matrix_axes


def new_adapters(params: Params, rank: int, seed: int) -> Params:
    """{"blocks": {layer: {matrix: {"a": [..., in, rank], "b": [..., rank, out]}}}} for every matrix of the blocks."""
    key = jax.random.key(seed)
    adapters = {}
    for number, (path, leaf) in enumerate(sorted(flatten_dict(params).items())):
        if not is_stacked(path) or matrix_axes(path, leaf) is None:
            continue
        *stacking, inputs, outputs = leaf.shape
        narrow = min(rank, inputs, outputs)
        normal = jax.random.normal(jax.random.fold_in(key, number), (*stacking, inputs, narrow))
        adapters[(*path, "a")] = normal * inputs**-0.5
        adapters[(*path, "b")] = jnp.zeros((*stacking, narrow, outputs))
    return unflatten_dict(adapters)


def merge_adapters(params: Params, adapters: Params, scale: float) -> Params:
    """Merge adapters into the parameters: W + scale · A·B, with `scale` = alpha / rank."""
    flat, parts = flatten_dict(params), flatten_dict(adapters)
    for *path, name in parts:
        if name == "a":
            place = tuple(path)
            flat[place] = flat[place] + scale * (parts[(*place, "a")] @ parts[(*place, "b")])
    return unflatten_dict(flat)
