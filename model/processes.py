"""What the processes of a computation (`jax.distributed`) do together: broadcast, gather rows, stop at SIGTERM.

All processes must call these functions together and in the same order. With a single process nothing is sent.
"""

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from nautile.common.errors import ConfigError, Retryable

Value = TypeVar("Value")
SMALLEST, LARGEST = 2**12, 2**26  # bytes of one message
BARRIER_TIMEOUT_MS = 24 * 3600 * 1000  # for the slowest process; JAX's heartbeat, not this, detects one that died
_barriers = itertools.count()


def on_first(compute: Callable[[], Value]) -> Value:
    """Call `compute` on the first process only, and return its result, which must be JSON data, on all.

    A `ConfigError` or `Retryable` of the first process is raised on all, so that none waits for one that has ended.
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
        # The others wait for this message: without it they would hang until JAX gives up on the first.
        kind = "retry" if isinstance(error, Retryable) else "refuse"
        _bytes_of_first(json.dumps({"kind": kind, "error": str(error)}).encode())
        raise
    _bytes_of_first(json.dumps({"value": value}).encode())
    return value


def arrays_of_first(tree: Any) -> Any:
    """Broadcast the first process's arrays to all. The other processes pass arrays of the same shapes."""
    _barrier()
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(leaf))), tree)


def rows_of_each(tree: Any) -> Any:
    """Concatenate the arrays of all processes by rows, in process order. All processes pass the same shapes."""
    if jax.process_count() == 1:
        return tree
    _barrier()
    return jax.tree.map(np.asarray, multihost_utils.process_allgather(tree, tiled=True))


def share_of(count: int) -> slice:
    """This process's slice of `count` items that all processes list in the same order; sizes differ by at most one."""
    index, processes = jax.process_index(), jax.process_count()
    return slice(count * index // processes, count * (index + 1) // processes)


def _barrier() -> None:
    """Wait for all processes. An exchange on CPU times out after 30 s, and a judge on one process may take longer."""
    # Imported only here: it loads tensorstore, and a single process, as that of `nautile chat`, meets nobody.
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    get_barrier_sync_fn()(key=f"meeting-{next(_barriers)}", timeout_ms=BARRIER_TIMEOUT_MS)


def _bytes_of_first(data: bytes) -> bytes:
    """Broadcast the first process's bytes to all; the data of the others is ignored."""
    size, pieces = int(arrays_of_first(np.int32(len(data)))), []
    for start in range(0, size, LARGEST):
        # Lengths are powers of two, because each length is a program to compile.
        length = max(SMALLEST, 1 << (min(LARGEST, size - start) - 1).bit_length())
        piece = np.frombuffer(data[start : start + length].ljust(length), np.uint8)
        pieces.append(arrays_of_first(piece).astype(np.uint8).tobytes())
    return b"".join(pieces)[:size]


StopRequested = Callable[[int], bool]


@contextmanager
def termination() -> Iterator[StopRequested]:
    """Yield `stop_requested(done)`, which SIGTERM makes true, in every process after the same number of steps done.

    A preempted machine or a cancelled stage so saves a checkpoint before it exits. Of several processes one may get the
    signal before the others: JAX's preemption service chooses a step that all of them have yet to reach. Call
    `stop_requested` after every step. Outside the main thread, which alone can handle signals, it is always false.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda _: received.is_set()
        return

    def handle(_signal: int, _frame: FrameType | None) -> None:
        received.set()

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield lambda _: received.is_set()
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def joint_termination() -> Iterator[StopRequested]:
    """`termination` if there are several processes; with a single one SIGTERM is not handled and ends it as usual."""
    if jax.process_count() == 1:
        yield lambda _: False
        return
    with termination() as stop_requested:
        yield stop_requested
