"""XLA's persistent compilation cache: compiling the step of a small model takes 14 s of CPU, loading it 0.5 s."""

import hashlib
import os
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from common.environment import cpu_field

MIN_COMPILE_SECONDS = 0.2  # faster compilations are not kept


def enable_compile_cache(folder: Path) -> None:
    """Keep the programs that this process compiles from now on in `folder`, in a subfolder for this kind of machine.

    An operator's own `JAX_COMPILATION_CACHE_DIR` takes precedence. A file truncated by a kill is detected and compiled
    again.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    # Code for a CPU uses instructions that another CPU may not have.
    flags = hashlib.sha256(cpu_field("flags", "Features").encode()).hexdigest()[:8]
    jax.config.update("jax_compilation_cache_dir", str(folder / f"{platform.machine()}-{flags}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    compilation_cache.reset_cache()  # JAX decides at the first compilation whether it has a cache
