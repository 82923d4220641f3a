"""The threads that start programs, and that what they compile counts as compiled by the caller."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax

from nautile.model.program_thread import COMPILING, program_threads, working_seconds
from nautile.model.sharding import make_mesh


def test_programs_are_started_by_two_threads_each_always_the_same():
    """XLA runs what one thread starts one after the other."""
    threads = program_threads(make_mesh(1), "cpu")
    first, second = ([thread(threading.get_ident) for _ in range(2)] for thread in threads)
    assert len({*first}) == len({*second}) == 1
    assert len({threading.get_ident(), *first, *second}) == 3


def test_accelerators_and_several_devices_have_none():
    assert program_threads(None, "tpu") == []
    assert program_threads(make_mesh(1, 2 * make_mesh(1).devices.ravel().tolist()), "cpu") == []


def test_compilation_stops_the_clock_of_the_caller():
    with ThreadPoolExecutor(1) as caller:  # its own: the test's has compiled within the last 1,000 s
        before, now = caller.submit(working_seconds).result(), time.time()
        span = (jax.monitoring.record_event_time_span, f"{COMPILING}test", now - 900, now - 600)
        caller.submit(program_threads(None, "cpu")[0], *span).result()
        assert round(before - caller.submit(working_seconds).result(), -2) == 300
