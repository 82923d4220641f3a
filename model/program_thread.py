"""Threads that start programs, because on CPU XLA runs the programs that one thread starts one after the other.

Those of two threads run side by side, so two cores are kept busy by programs that do not divide over them. On an
accelerator the device's queue is the limit, and nothing is gained.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.sharding import Mesh

from model.compile_time import counted_for_caller

CPU_THREADS = 2


class ProgramThread:
    """`start(function, *arguments)` calls a jitted function in this thread and returns what it does, still computing.

    What is compiled meanwhile counts as compiled by the caller (`model.compile_time`).
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="programs")

    def start(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._executor.submit(counted_for_caller(function), *arguments).result()


def program_threads(mesh: Mesh | None, platform: str) -> list[ProgramThread]:
    """Two threads where a single CPU device computes, else none: several devices run programs together."""
    if platform != "cpu" or (mesh is not None and mesh.size > 1):
        return []
    return [ProgramThread() for _ in range(CPU_THREADS)]
