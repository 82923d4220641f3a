"""Compiles one block of the model, and its embedding and head, separately for a chip that need not be present.

In the whole model the blocks are the body of a scan, of which the compiler's cost model counts one iteration. A block
alone is two programs, as in the scan: the forward pass, which writes the residuals that the backward pass needs besides
its inputs, and the backward pass, which recomputes everything else. Results are cached on disk.
"""

import gzip
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from nautile.common.files import parse_json, sha256_of, write_atomically
from nautile.configs.base import fingerprint
from nautile.configs.model import ModelConfig
from nautile.model.capacity.topology import Topology, compiler_of, devices
from nautile.model.layers.common import compute_dtype
from nautile.model.loss import LOSS_CHUNK, weighted_loss
from nautile.model.nautile import run_blocks, shapes

_BUILD = 2  # version of the cache: increase it when the programs below change
_MODEL = Path(__file__).parents[1]


class Setting(NamedTuple):
    """The fields of a model that change its speed but not its results."""

    mixing: Literal["chunked", "fused", "reference"]
    chunk: int
    remat: Literal["none", "block", "layer", "dots"]

    def __str__(self) -> str:
        return f"{self.mixing}/{self.chunk}/{self.remat}"

    @classmethod
    def of(cls, model: ModelConfig) -> "Setting":
        return cls(model.mixing, model.chunk, model.remat)


def compiled_block(
    model: ModelConfig, rows: int, length: int, topology: Topology, folder: Path, notify: Callable[[str], object]
) -> dict[str, Any]:
    """Compile one block for `rows` rows on one chip, or read the result from the cache in `folder`.

    Returns {"forward": program, "backward": program}. A program has its optimised `text`, `temporaries` in bytes, XLA's
    `analysis` and the `seconds` of its compilation; the forward pass also has the block's `residual_bytes`. A program
    that does not fit has a message `refused` instead of its text. Raises ConfigError without a compiler.
    """
    single = model.model_copy(update={"blocks": 1})
    identity = _identity(single, rows, length, topology)
    programs = {name: _read_cached(folder, {**identity, "part": name}) for name in ("forward", "backward")}
    # Both programs come from one tracing, which is left out if neither has to be compiled.
    if None in programs.values():
        traced = _trace_block(single, rows, length, topology)
        for name, function, arguments in (
            ("forward", traced.forward, traced.arguments),
            ("backward", traced.backward, (traced.arguments, traced.residuals, traced.arguments[1])),
        ):
            if programs[name] is None:
                notify(f"compiling for {topology.name}: {Setting.of(single)}, the {name} pass of one block")
                more = {"residual_bytes": traced.residual_bytes} if name == "forward" else {}
                programs[name] = _write_cached(folder, {**identity, "part": name}, _compile(function, arguments) | more)
    return programs


def compiled_head(
    model: ModelConfig, rows: int, length: int, topology: Topology, folder: Path, notify: Callable[[str], object]
) -> dict[str, Any]:
    """Compile embedding, head and loss with their gradients, as `compiled_block` does."""
    # The settings of the blocks do not matter here, so one cached program serves all of them.
    plain = model.model_copy(update={"mixing": "chunked", "chunk": 32, "remat": "block", "blocks": 1})
    identity = {**_identity(plain, rows, length, topology), "part": "head", "loss_chunk": LOSS_CHUNK}
    program = _read_cached(folder, identity)
    if program is None:
        notify(f"compiling for {topology.name}: embedding, head and loss")
        program = _write_cached(folder, identity, _compile_head(plain, rows, length, topology))
    return program


def _identity(model: ModelConfig, rows: int, length: int, topology: Topology) -> dict[str, Any]:
    """The cache key: everything that determines a compilation."""
    assert topology.chip is not None  # checked by `model.capacity.speed.compare`
    package, target = compiler_of(topology.chip)
    sources = [*sorted((_MODEL / "layers").rglob("*.py")), _MODEL / "nautile.py", _MODEL / "loss.py"]
    return {
        "build": _BUILD,
        "target": target,
        "model": model.model_dump(mode="json"),
        "rows": rows,
        "length": length,
        "versions": {name: version(name) for name in ("jax", "jaxlib", package)},
        "sources": [sha256_of(path) for path in sources],
    }


def _path(folder: Path, identity: dict[str, Any]) -> Path:
    return folder / f"{fingerprint(identity)[:32]}.json.gz"


def _read_cached(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The cached result of a compilation; None if there is none or its file is damaged."""
    try:
        return parse_json(gzip.decompress(_path(folder, identity).read_bytes()))
    except (OSError, EOFError):
        return None


def _write_cached(folder: Path, identity: dict[str, Any], program: dict[str, Any]) -> dict[str, Any]:
    write_atomically(_path(folder, identity), gzip.compress(json.dumps(program).encode(), mtime=0))
    return program


class _TracedBlock(NamedTuple):
    """The two functions of a block and their argument shapes; `residuals` is written by the first for the second."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    arguments: tuple[Any, ...]
    residuals: list[Any]
    residual_bytes: int


def _trace_block(model: ModelConfig, rows: int, length: int, topology: Topology) -> _TracedBlock:
    """Split a block and its gradient into a forward and a backward function."""
    place = _placing(topology)
    blocks = place(shapes(model)["blocks"])
    x_BLD = place(jax.ShapeDtypeStruct((rows, length, model.width), compute_dtype(model)))
    times_BL = place(jax.ShapeDtypeStruct((rows, length), jnp.int32))
    arguments = (blocks, x_BLD, times_BL, times_BL)

    def both(blocks: Any, x_BLD: Any, segments_BL: Any, positions_BL: Any) -> tuple[Any, Any]:
        def run(blocks: Any, x_BLD: Any) -> Any:
            return run_blocks(blocks, model, x_BLD, segments_BL, positions_BL)[0]

        return jax.vjp(run, blocks, x_BLD)

    # The backward pass needs a list of arrays. Some are unchanged inputs of the block (`sources` has their index), the
    # others are written by the forward pass (`sources` has None).
    traced, kinds = jax.make_jaxpr(both, return_shape=True)(*arguments)
    leaves, pull_tree = jax.tree.flatten(kinds[1])
    inputs = {id(variable): index for index, variable in enumerate(traced.jaxpr.invars)}
    sources = [inputs.get(id(variable)) for variable in traced.jaxpr.outvars[-len(leaves) :]]
    written = [index for index, source in enumerate(sources) if source is None]

    def forward(*arguments: Any) -> tuple[Any, list[Any]]:
        y_BLD, pull = both(*arguments)
        leaves = jax.tree.leaves(pull)
        return y_BLD, [leaves[index] for index in written]

    def backward(arguments: Any, residuals: list[Any], d_out_BLD: Any) -> Any:
        inputs, written_arrays = jax.tree.leaves(arguments), iter(residuals)
        leaves = [next(written_arrays) if index is None else inputs[index] for index in sources]
        return jax.tree.unflatten(pull_tree, leaves)(d_out_BLD)

    residuals = place([leaves[index] for index in written])  # includes the block's input, which the scan stacks
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in residuals)
    return _TracedBlock(forward, backward, arguments, residuals, size)


def _compile_head(model: ModelConfig, rows: int, length: int, topology: Topology) -> dict[str, Any]:
    place = _placing(topology)
    kinds = shapes(model)
    # A model without blocks, whose forward pass is the embedding.
    no_blocks = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((0, *leaf.shape[1:]), leaf.dtype), kinds["blocks"])
    params = place({**kinds, "blocks": no_blocks})
    integers = place(jax.ShapeDtypeStruct((rows, length), jnp.int32))
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), integers)
    batch["weights"] = place(jax.ShapeDtypeStruct((rows, length), jnp.float32))

    def gradient(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda params: weighted_loss(params, model, batch).loss)(params)

    return _compile(gradient, (params, batch))


def _placing(topology: Topology) -> Callable[[Any], Any]:
    """A function that places every shape of a tree on the first chip of a topology."""
    chip = SingleDeviceSharding(devices(topology)[0])
    return lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=chip), tree)


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        executable = jax.jit(function).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": str(error).splitlines()[0], "seconds": time.perf_counter() - started}
    analysis, memory = executable.cost_analysis() or {}, executable.memory_analysis()
    if memory is None:
        raise RuntimeError("the compiler does not tell how much memory the program needs")
    return {
        "text": executable.as_text(),
        "temporaries": memory.temp_size_in_bytes,
        "analysis": {name: float(value) for name, value in analysis.items() if "{" not in name},
        "seconds": time.perf_counter() - started,
    }
