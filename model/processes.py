"""What the processes of one computation (`jax.distributed`) tell each other: data of the first one, or of each.

All processes must call these functions together and in the same order. With a single process nothing is sent.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint.multihost import get_barrier_sync_fn

from common.errors import ConfigError, Retryable

Value = TypeVar("Value")
SMALLEST, LARGEST = 2**12, 2**26  # bytes sent at a time
LONGEST_WAIT_MS = 24 * 3600 * 1000  # for the slowest process; one that dies is noticed by JAX's heartbeat, not by this
_meetings = itertools.count()


def on_first(compute: Callable[[], Value]) -> Value:
    """What `compute` returns on the first process, the only one that calls it; the others get it as JSON data.

    A `ConfigError` or `Retryable` of the first process is raised in all, so that none waits for another that has ended.
    """
    if jax.process_count() == 1:
        return compute()
    if jax.process_index():
        answer = json.loads(_bytes_of_first(b""))
        if "error" in answer:
            raise {"retry": Retryable, "refuse": ConfigError}[answer["kind"]](answer["error"])
        return answer["value"]
    try:
        value = compute()
    except (ConfigError, Retryable) as error:
        kind = "retry" if isinstance(error, Retryable) else "refuse"
        _bytes_of_first(json.dumps({"kind": kind, "error": str(error)}).encode())
        raise
    _bytes_of_first(json.dumps({"value": value}).encode())
    return value


def arrays_of_first(tree: Any) -> Any:
    """The arrays that the first process has, in the memory of all. The others give arrays of the same shapes."""
    _meet()
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(leaf))), tree)


def rows_of_each(tree: Any) -> Any:
    """The arrays of all processes one below the other, in the order of the processes; all give the same shapes."""
    if jax.process_count() == 1:
        return tree
    _meet()
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree, tiled=True))


def share_of(count: int) -> slice:
    """This process's part of `count` things that all processes know in the same order; parts differ by one at most."""
    index, processes = jax.process_index(), jax.process_count()
    return slice(count * index // processes, count * (index + 1) // processes)


def _meet() -> None:
    """Wait for all processes: at the first exchange devices on CPU give up after 30 s, and a judge may take longer."""
    get_barrier_sync_fn()(key=f"meeting-{next(_meetings)}", timeout_ms=LONGEST_WAIT_MS)


def _bytes_of_first(data: bytes) -> bytes:
    size, pieces = int(arrays_of_first(np.int32(len(data)))), []
    for start in range(0, size, LARGEST):
        # Lengths are powers of two: each of them is a program to compile.
        length = max(SMALLEST, 1 << (min(LARGEST, size - start) - 1).bit_length())
        piece = np.frombuffer(data[start : start + length].ljust(length), np.uint8)
        pieces.append(arrays_of_first(piece).astype(np.uint8).tobytes())
    return b"".join(pieces)[:size]
