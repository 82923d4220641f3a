"""The table of chips: memory, peak FLOP/s, bandwidth and price of each; topologies of them, and devices to compile for.

Call `enable_compilers()` before JAX is first used in a process: libtpu reads its settings when it is loaded.
"""

import importlib.machinery
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError
from nautile.common.text import first_line

GIB = 2**30
AHEAD = Path(sys.prefix) / "ahead"  # where `make ahead` installs the compilers, hidden from every other process

# The description of a GPU that XLA needs to compile for it; the numbers are NVIDIA's for the H100 SXM.
_H100 = """
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

# Run on the CPU; let several processes load libtpu; and keep libtpu from looking for the services of a TPU host.
_SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Core:
    """The TensorCores of a TPU chip, for which the compiler estimates cycles.

    clock: cycles per second. matrix_side: side of a matrix unit. lanes: elementwise float32 operations per cycle, all
    cores together.
    """

    clock: float
    matrix_side: int
    lanes: int


@dataclass(frozen=True)
class Chip:
    """A kind of chip.

    memory: bytes that a program may use. peak: dense bfloat16 FLOP/s; None: unknown. per_host: chips of one host.
    bandwidth: bytes/s of the memory. core: None if the compiler estimates no cycles. price: dollars an hour by the list
    that `priced` names with its date; None: it is not rented out.
    """

    name: str
    memory: int
    peak: float | None
    per_host: int
    bandwidth: float
    core: Core | None = None
    price: float | None = None
    priced: str = ""


# TPU memory is what the compiler lets a program use; the runtime has the rest. Each chip is one JAX device.
# Peaks and bandwidths: docs.cloud.google.com/tpu/docs/v4, v5e, v5p and v6e; NVIDIA's data sheets of A100 (SXM, 80 GB),
# H100 and H200 (SXM), RTX 4090 (summed in float32) and DGX Spark, without sparsity.
# Clocks: peak / (2 side² matrix units), with the units that those pages give (8 in v4 and v5p, 4 in v5e). They give two
# for v6e in one place and four in another; with four, the compiler's cycles for a product of two 4096² matrices come to
# 87 % of the peak, against 88 % for v4.
# Prices: recorded without access to the lists' present state; RunPod's from deploybase.ai, one page of which calls the
# same figures spot prices. Other clouds ask up to twice as much for a GPU: one's own is `launch.dollars_per_chip_hour`.
# Lanes: 8 x 128 with 4 arithmetic units each in a core (the same book, of a v5p), two cores in v4 and v5p.
_GOOGLE, _RUNPOD = "Google Cloud's list, recorded 2026-11", "RunPod's list, 2026-03"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", int(30.75 * GIB), 275e12, 4, 1.2e12, Core(1.05e9, 128, 8192), 3.22, _GOOGLE),
        Chip("v5e", int(15.75 * GIB), 197e12, 4, 819e9, Core(1.5e9, 128, 4096), 1.2, _GOOGLE),
        Chip("v5p", int(94.75 * GIB), 459e12, 4, 2765e9, Core(1.75e9, 128, 8192), 4.2, _GOOGLE),
        Chip("v6e", int(31.25 * GIB), 918e12, 4, 1638e9, Core(1.75e9, 256, 4096), 2.7, _GOOGLE),
        Chip("a100", 80 * 10**9, 312e12, 8, 2.04e12, None, 1.39, _RUNPOD),
        Chip("h100", 80 * 10**9, 989e12, 8, 3.35e12, None, 2.69, _RUNPOD),
        Chip("h200", 141 * 10**9, 989e12, 8, 4.8e12, None, 3.59, _RUNPOD),
        Chip("rtx4090", 24 * 10**9, 165.2e12, 8, 1.008e12, None, 0.34, _RUNPOD),
        # Compiled as for an H100, in the memory that host and GPU share. NVIDIA gives its peak only for 4-bit numbers.
        Chip("spark", 128 * 10**9, None, 1, 273e9),
    )
}
GPUS = ("a100", "h100", "h200", "rtx4090", "spark")  # the compiler compiles for an H100 in place of the others


# JAX's names of these chips, matched as prefixes in this order: the longer of two alike comes first.
_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip by JAX's name of the device; None if it is not in the table."""
    return next((CHIPS[chip] for kind, chip in _DEVICE_KINDS.items() if device_kind.startswith(kind)), None)


@dataclass(frozen=True)
class Topology:
    """A number of chips of one kind, under the name that the operator types: v4:2x4x4, v5e:8x8, h100:8, or local."""

    name: str
    chips: int
    chip: Chip | None  # None: the devices of this process

    @property
    def hosts(self) -> int:
        return 1 if self.chip is None else max(1, self.chips // self.chip.per_host)


_SHAPE = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){0,2}")


def parse_topology(name: str) -> Topology:
    """Parse a topology's name. Raises ConfigError if it is unknown."""
    if name == "local":
        import jax

        return Topology(name, len(jax.devices()), None)
    kind, _, shape = name.partition(":")
    if kind not in CHIPS or not _SHAPE.fullmatch(shape):
        raise ConfigError(
            f"topology {name!r}: name a chip and a shape, as v4:2x4x4, v5e:8x8 or h100:8, or use local; the chips are "
            f"{', '.join(CHIPS)}"
        )
    return Topology(name, math.prod(map(int, shape.split("x"))), CHIPS[kind])


_CORES_A_CHIP = {"v4": 2, "v5p": 2}  # slices of these are named by cores: a v4-64 has 32 chips, a v5e-8 has 8


def parse_device(name: str) -> Topology:
    """Parse `--device`: a chip (h100), a slice by Google's name (v5e-8, v4-64), or a topology (h100:8, v4:2x4x4).

    Raises ConfigError if it is unknown.
    """
    kind, _, size = name.partition("-")
    if name in CHIPS:
        return Topology(f"{name}:1", 1, CHIPS[name])
    if kind in CHIPS and kind not in GPUS and re.fullmatch(r"[1-9]\d{0,4}", size):
        chips, rest = divmod(int(size), _CORES_A_CHIP.get(kind, 1))
        if chips and not rest:
            return Topology(name, chips, CHIPS[kind])
    kind, _, shape = name.partition(":")
    if kind in CHIPS and _SHAPE.fullmatch(shape):
        return parse_topology(name)
    raise ConfigError(f"--device {name!r}: give one of {', '.join(CHIPS)}, or several as h100:8, v5e-8 or v4-64")


def enable_compilers() -> None:
    """Make the compilers for other chips importable in this process, which itself runs on the CPU."""
    os.environ.update(_SETTINGS)
    if AHEAD.is_dir() and str(AHEAD) not in sys.path:
        sys.path.append(str(AHEAD))


def compiler_of(chip: Chip) -> tuple[str, str]:
    """The package with the compiler for a chip, and the chip that the compiler targets."""
    return ("jax-cuda12-plugin", "h100") if chip.name in GPUS else ("libtpu", chip.name)


def compiler_installed(package: str) -> bool:
    """Whether a process that calls `enable_compilers` can import a compiler's package."""
    return importlib.machinery.PathFinder.find_spec(package, [*sys.path, str(AHEAD)]) is not None


def check_compiler(name: str, chip: Chip) -> None:
    """Raise ConfigError if the compiler for the chips of topology `name` is not installed; nothing is imported."""
    package = "jax_plugins.xla_cuda12" if chip.name in GPUS else "libtpu"
    if not compiler_installed(package.partition(".")[0]):
        raise ConfigError(f"{name}: its compiler ({package}) is not installed: run `make ahead`")


def devices(topology: Topology) -> list[Any]:
    """The JAX devices of a topology, to compile for. Raises ConfigError if that is not possible here."""
    import jax
    from jax.experimental import topologies

    if topology.chip is None:
        return jax.devices()
    check_compiler(topology.name, topology.chip)
    if topology.chip.name in GPUS:
        settings = {"platform": "cuda", "topology": f"1x1x{topology.chips}", "target_config": _H100}
    else:
        settings = {"platform": "tpu", "topology_name": topology.name}
        settings |= {"chip_config_name": "megacore"} if topology.chip.name in ("v4", "v5p") else {}
    try:
        description = topologies.get_topology_desc(**({"topology_name": "h100"} | settings))
    except Exception as error:  # the plugins raise JaxRuntimeError, NotImplementedError, KeyError, ...
        raise ConfigError(f"{topology.name}: its compiler does not know this topology ({first_line(error)})") from None
    return list(description.devices)
