"""XLA's compilation cache on disk: compiling the step of a small model takes 14 s of CPU, reading it back 0.5 s."""

import hashlib
import os
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

WORTH_KEEPING_S = 0.2


def enable_compile_cache(folder: Path) -> None:
    """Keep what this process compiles from now on in `folder`, in a part of it for this kind of machine.

    An operator's own `JAX_COMPILATION_CACHE_DIR` wins. A file cut short by a kill is noticed and compiled again.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder / _machine()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    compilation_cache.reset_cache()  # it decides at the first compilation whether there is a cache at all


def _machine() -> str:
    """Code for the CPU uses the instructions of the one it was compiled on; another may not have them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
