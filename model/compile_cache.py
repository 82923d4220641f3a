"""XLA's persistent compilation cache: compiling the step of a small model takes 14 s of CPU, loading it 0.5 s."""

import hashlib
import logging
import os
import platform
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache as executables
from jax._src import compiler
from jax.experimental.compilation_cache import compilation_cache

from nautile.common.environment import cpu_field

logger = logging.getLogger(__name__)

MIN_COMPILE_SECONDS = 0.2  # programs that compile faster are not cached


def enable_compile_cache(folder: Path) -> None:
    """Cache the programs that this process compiles in `folder`, in a subfolder for this kind of CPU.

    The environment variable `JAX_COMPILATION_CACHE_DIR` takes precedence. JAX detects a file truncated by a kill and
    compiles the program again.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    # Programs compiled for one CPU may use instructions that another lacks.
    flags = hashlib.sha256(cpu_field("flags", "Features").encode()).hexdigest()[:8]
    jax.config.update("jax_compilation_cache_dir", str(folder / f"{platform.machine()}-{flags}"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    compilation_cache.reset_cache()  # JAX decides at the first compilation whether it has a cache


def keep_on_every_process() -> None:
    """Let every process of a multi-process computation on CPU write to the cache, not only the first.

    JAX writes from the first process alone. On accelerators the others read its entries; on CPU each process has its
    own keys, so the others would compile everything at every start.
    """
    if jax.default_backend() == "cpu":
        compiler._cache_write = _write  # JAX has no option for this


def _write(
    cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any, host_callbacks: Any
) -> None:
    # As JAX does: a program that calls back into Python holds addresses of this process.
    least_s = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]  # added at run time
    if host_callbacks or compile_time_secs < least_s:
        return
    try:
        executables.put_executable_and_time(cache_key, module_name, executable, backend, int(compile_time_secs))
    except Exception as error:
        logger.warning(
            "the compiled program %s cannot be cached (%s); the next start compiles it again", module_name, error
        )
