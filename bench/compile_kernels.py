"""Compiles the fused mixing for a TPU v4 or an H100, neither of which need be there.

    python bench/compile_kernels.py tpu|gpu      (libtpu, or jax-cuda12-plugin with nvidia-cuda-nvcc-cu12, installed)

Prints a line of JSON for each dtype: the kernels called, by name, and the bytes of temporaries.
"""

import json
import os
import sys

os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.mixing import mix

# What XLA asks of a GPU that it compiles for; the numbers are NVIDIA's for the H100 SXM.
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  clock_rate_ghz: 1.98 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84942979072
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
TOPOLOGIES = {
    "tpu": {"platform": "tpu", "topology_name": "v4:2x2x1", "chip_config_name": "megacore"},
    "gpu": {"platform": "cuda", "topology_name": "h100", "topology": "1x1x1", "target_config": H100},
}
KERNELS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}


def gradients(operands, segments, cotangents):
    outs, back = jax.vjp(lambda *operands: mix(*operands, segments, form="fused")[:2], *operands)
    return outs, back(cotangents)


def main(device: str) -> None:
    devices = topologies.get_topology_desc(**TOPOLOGIES[device]).devices
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
