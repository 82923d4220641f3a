"""Speeds leave out compilation: a clock that stands still meanwhile, and no longer where traces are nested."""

import time
from concurrent.futures import ThreadPoolExecutor

import jax

from nautile.model.program_thread import COMPILING, working_seconds


def compiled(start, end):
    jax.monitoring.record_event_time_span(f"{COMPILING}test", start, end)


def test_the_clock_leaves_out_compilation_once():
    # In threads of its own: the test's has compiled within the last 1,000 s, for the tests before it.
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as other:
        before, now = thread.submit(working_seconds).result(), time.time()
        thread.submit(compiled, now - 900, now - 600).result()  # inside the next
        thread.submit(compiled, now - 1000, now - 500).result()
        thread.submit(compiled, now - 500, now - 400).result()
        thread.submit(jax.monitoring.record_event_time_span, "/jax/another", now - 400, now).result()
        other.submit(compiled, now - 300, now).result()
        assert round(before - thread.submit(working_seconds).result(), -2) == 600


def test_jax_reports_what_it_compiles():
    """The event's name is JAX's own: a version that renames it fails here."""
    before, began = working_seconds(), time.perf_counter()
    jax.jit(lambda x: x * 3 + 1)(2.0)
    assert working_seconds() - before < time.perf_counter() - began
