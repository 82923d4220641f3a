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

from common.environment import cpu_field

logger = logging.getLogger(__name__)

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


def keep_on_every_process() -> None:
    """Let a process of several keep what it compiles, on CPU, also if it is not the first.

    JAX writes from the first alone. On accelerators the others find what that has written; on CPU each process has keys
    of its own, so the others would compile everything at every start.
    """
    if jax.default_backend() == "cpu":
        compiler._cache_write = _keep  # there is no option for it


def _keep(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any) -> None:
    if callbacks or seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
        return
    try:
        executables.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:
        logger.warning("the compiled program %s cannot be kept (%s); the next start compiles it again", name, error)
