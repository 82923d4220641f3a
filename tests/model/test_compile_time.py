"""Speeds leave out compilation: a clock that stands still meanwhile, and no longer where traces are nested."""

import threading
import time

import jax

from model.compile_time import COMPILING, working_seconds


def compiled(start, end):
    jax.monitoring.record_event_time_span(f"{COMPILING}test", start, end)


def test_the_clock_leaves_out_compilation_once():
    before, now = working_seconds(), time.time()
    compiled(now - 900, now - 600)  # inside the next
    compiled(now - 1000, now - 500)
    compiled(now - 500, now - 400)
    jax.monitoring.record_event_time_span("/jax/another", now - 400, now)
    other = threading.Thread(target=compiled, args=(now - 300, now))
    other.start()
    other.join()
    assert round(before - working_seconds(), -2) == 600


def test_jax_reports_what_it_compiles():
    """The event's name is JAX's own: a version that renames it fails here."""
    before, began = working_seconds(), time.perf_counter()
    jax.jit(lambda x: x * 3 + 1)(2.0)
    assert working_seconds() - before < time.perf_counter() - began
