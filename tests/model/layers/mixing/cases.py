"""Operands of every size for the tests of the mixing operator, and the float64 reference they are compared with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from nautile.model.layers.mixing.chunked import MixState, Operands
from nautile.model.layers.mixing.operator import mix

NAMES = ("keys", "gates", "decay", "phase_scale", "grid", "weights", "q_re", "q_im", "state re", "state im", "state z")


PER_TOKEN = (0, 1, 6, 7)  # the operands with an axis L: keys, gates and both parts of the queries


def draw(batch=2, length=33, heads=4, head_dim=3, samples=2, queries=2, seed=0) -> dict:
    """Random float64 numpy arrays: `operands` (8), `state` (3) and `cotangents` of all outputs (5)."""
    rng = np.random.default_rng(seed)
    full, query = (batch, heads, head_dim, samples), (batch, length, queries, head_dim, samples)
    operands = [
        rng.normal(size=(batch, length, heads, head_dim)),
        np.log1p(np.exp(rng.normal(size=(batch, length, heads)))),
        np.geomspace(0.001, 0.3, heads),
        rng.normal(size=heads),
        rng.uniform(0.001, 3, (heads, head_dim, samples)),
        rng.uniform(0.2, 1, (heads, head_dim, samples)),
        rng.normal(size=query),
        rng.normal(size=query),
    ]
    state = MixState(rng.normal(size=full), rng.normal(size=full), rng.uniform(0.5, 2, (batch, heads)))
    out = (batch, length, heads, head_dim)
    cotangents = [rng.normal(size=shape) for shape in (out, out, full, full, (batch, heads))]
    return {"operands": operands, "state": state, "cotangents": cotangents}


def documents(batch: int, length: int) -> np.ndarray:
    """Segments: row 0 is one document; others have several, and padding at the start, in the middle and at the end."""
    segments = np.ones((batch, length), np.int32)
    for row in range(1, batch):
        cuts = np.random.default_rng(row).integers(0, length + 1, 4 + row)
        segments[row] = 1 + np.searchsorted(np.sort(cuts), np.arange(length), side="right")
        segments[row, : length // 8] = 0
        segments[row, length - length // 6 :] = 0
        segments[row, length // 2 : length // 2 + length // 9] = 0
    return segments


def value_and_gradients(form, case, segments=None, dtype=np.float32, operands_dtype=None):
    """The five outputs and the eleven gradients of `form(operands, segments, state)` as float64 numpy."""

    def cast(tree, kind=dtype):
        return jax.tree.map(lambda array: jnp.asarray(array, kind), tree)

    segments = None if segments is None else jnp.asarray(segments)
    outs, gradients = _compiled(form)(
        cast(case["operands"], operands_dtype or dtype), cast(case["state"]), cast(case["cotangents"]), segments
    )
    return jax.tree.map(
        lambda array: np.asarray(array, np.float64), ([*outs[:2], *outs[2]], [*gradients[0], *gradients[1]])
    )


@functools.cache
def _compiled(form):
    @jax.jit
    def both(operands, state, cotangents, segments):
        outs, back = jax.vjp(lambda operands, state: form(Operands(*operands), segments, state), operands, state)
        flat, tree = jax.tree.flatten(outs)
        weighted = [c.astype(out.dtype) for out, c in zip(flat, cotangents, strict=True)]
        return outs, back(jax.tree.unflatten(tree, weighted))

    return both


def _reference(operands, segments, state):
    return mix(operands, segments, state, form="reference")


def exact(case, segments=None):
    """The reference in float64. Rows are padded to one of two lengths, so that many lengths share a program."""
    batch, length = case["operands"][1].shape[:2]
    longer = next(size for size in (48, 1024) if size >= length)

    def filled(array):
        return np.pad(array, [(0, 0), (0, longer - length)] + [(0, 0)] * (array.ndim - 2))

    operands = [filled(array) if i in PER_TOKEN else array for i, array in enumerate(case["operands"])]
    cotangents = [filled(array) if i < 2 else array for i, array in enumerate(case["cotangents"])]
    segments = filled(np.ones((batch, length), np.int32) if segments is None else segments)
    with jax.enable_x64(True):
        wider = {**case, "operands": operands, "cotangents": cotangents}
        outs, gradients = value_and_gradients(_reference, wider, segments, np.float64)
    cut = [array[:, :length] if i in PER_TOKEN else array for i, array in enumerate(gradients)]
    return [out[:, :length] for out in outs[:2]] + outs[2:], cut


def largest_error(result, expected) -> tuple[float, str]:
    """The largest error of any output or gradient, relative to that array's largest entry, and the array's name."""
    names = ("out re", "out im", "last re", "last im", "last z", *(f"gradient of {name}" for name in NAMES))
    errors = []
    for name, ours, theirs in zip(names, [*result[0], *result[1]], [*expected[0], *expected[1]], strict=True):
        assert ours.shape == theirs.shape, name
        assert np.isfinite(ours).all(), f"{name} is not finite"
        errors.append((float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30)), name))
    return max(errors)
