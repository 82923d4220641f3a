"""Threads that start XLA programs, so that two run at a time on CPU.

On CPU XLA runs the programs started by one thread one after the other, and those of two threads at the same time: two
cores stay busy with programs that do not divide over them. On an accelerator this gains nothing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.sharding import Mesh

from nautile.model.compile_time import counted_for_caller

CPU_THREADS = 2


class ProgramThread:
    """Calls jitted functions in a thread of its own; `start` returns their arrays, which may still be computing.

    Compilations in the thread count as the caller's (`model.compile_time`).
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="programs")

    def start(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._executor.submit(counted_for_caller(function), *arguments).result()


def program_threads(mesh: Mesh | None, platform: str) -> list[ProgramThread]:
    """Two threads for a single CPU device, else none: on several devices programs already run concurrently."""
    if platform != "cpu" or (mesh is not None and mesh.size > 1):
        return []
    return [ProgramThread() for _ in range(CPU_THREADS)]
