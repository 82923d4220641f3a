"""The mixing kernels for TPU (Mosaic): grid [batch, groups of heads, chunks], the chunks in order, the state in VMEM.

A grid step holds one chunk of P heads, where P·H lanes fill whole registers (P = 2 for H = 64). Going back, the index
maps count the chunks down. Repeating over M and summing over it are products with a matrix of zeros and ones, exact at
the highest precision: strides across lanes are what a TPU cannot do.

Letters, beside those of `tile`: N chunks, G groups of heads, P heads in a group, F = P·H, W = P·J.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model.kernels.tile import Block, Folding, Gradient, Head, TileState, backward, forward
from model.kernels.wide import Shapes, WideOperands, WideState

LANES = 128


def run_forward(
    shapes: Shapes, operands: WideOperands, state: WideState, interpret: bool
) -> tuple[Array, Array, WideState, WideState]:
    """Readouts [B, L, K·H] twice, the states before each chunk, and the last state."""
    group = _group(shapes)
    call = _call(partial(_forward_kernel, shapes, group), shapes, group, interpret, reverse=False)
    small, big = call.small, call.big
    outs = [
        (big(shapes.head_dim * group), (shapes.batch, shapes.length, shapes.heads * shapes.head_dim), operands.keys.dtype),
    ] * 2 + [call.before(WideState), call.state()]  # fmt: skip
    raise NotImplementedError
