"""Compile the fused mixing kernels for chips that need not be present: a TPU v4 or an H100.

    python tests/support/processes/compile_kernels.py tpu|gpu      (`make ahead` installs the compilers)

Prints a line of JSON for each dtype: the number of kernel calls, and the bytes of temporaries.
"""

import json
import sys

from nautile.model.capacity import topology

topology.enable_compilers()  # before JAX is used

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nautile.model.layers.mixing.chunked import Operands
from nautile.model.layers.mixing.operator import mix

CHIPS = {"tpu": "v4:2x2x1", "gpu": "h100:1"}
KERNELS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}


def gradients(operands, segments, cotangents):
    outs, back = jax.vjp(lambda *operands: mix(Operands(*operands), segments, form="fused")[:2], *operands)
    return outs, back(cotangents)


def main(device: str) -> None:
    devices = topology.devices(topology.parse_topology(CHIPS[device]))
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("all",)), PartitionSpec())
    batch, length, heads, head_dim, samples = 2, 1024, 16, 64, 2

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for dtype in (jnp.float32, jnp.bfloat16):
        keys, queries = (batch, length, heads, head_dim), (batch, length, heads, head_dim, samples)
        small = [array(shape, jnp.float32) for shape in ((heads,), (heads,), queries[2:], queries[2:])]
        gates = array(keys[:3], jnp.float32)
        operands = [array(keys, dtype), gates, *small, array(queries, dtype), array(queries, dtype)]
        arguments = (operands, array((batch, length), jnp.int32), (array(keys, dtype), array(keys, dtype)))
        compiled = jax.jit(gradients).lower(*arguments).compile()
        report = {
            "dtype": dtype.__name__,
            "kernels": compiled.as_text().count(f'custom_call_target="{KERNELS[device]}"'),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
