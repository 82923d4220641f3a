"""Cancelling runs of one process: each ends its own stages, and no run undoes the cancellation of another."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from nautile.common.processes import thread_beside
from nautile.tasks.engine.child_process import cancelling, pause
from nautile.tasks.engine.errors import StageCancelled


class Run:
    """A run in a thread of its own, with a stage in another, as a flow starts it."""

    def __init__(self, pool):
        self._pool, self.may_end, self.begun = pool, threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.flow = pool.submit(copy_context().run, self._flow)
        assert self.begun.wait(30)

    def _flow(self):
        try:
            with cancelling():
                self.stage = self._pool.submit(copy_context().run, pause, 60.0)
                self.begun.set()
                self.may_end.wait(30)
                if self.error:
                    raise self.error
        except BaseException as error:
            return error
        return None

    def cancel(self):
        self.error = KeyboardInterrupt()
        self.may_end.set()
        assert self.flow.result(30) is self.error


@pytest.fixture
def pool():
    with ThreadPoolExecutor(12) as threads:
        yield threads


def test_a_second_run_neither_clears_nor_hears_the_cancellation_of_the_first(pool):
    first = Run(pool)
    second = Run(pool)
    first.cancel()
    third = Run(pool)  # begins after it, while the stage of the first may not have looked yet
    with pytest.raises(StageCancelled):
        first.stage.result(30)
    assert not second.stage.done()
    assert not third.stage.done()
    for run in (second, third):
        run.cancel()
        with pytest.raises(StageCancelled):
            run.stage.result(30)


def test_a_stage_that_looks_late_is_cancelled_all_the_same(pool):
    context = None

    def cancelled():
        nonlocal context
        with cancelling():
            context = copy_context()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancelled()
    with cancelling():
        pause(0.0)  # a new run is not
        with pytest.raises(StageCancelled):
            context.run(pause, 0.0)


def test_a_thread_beside_a_run_belongs_to_it():
    cancelled_in = []

    def work(stop):
        try:
            pause(30.0)
        except StageCancelled as error:
            cancelled_in.append(error)

    def cancelled():
        with cancelling():
            beside.append(thread_beside("beside", work))
            beside[0].__enter__()
            raise KeyboardInterrupt

    beside = []
    with pytest.raises(KeyboardInterrupt):
        cancelled()
    beside[0].__exit__(None, None, None)
    assert len(cancelled_in) == 1


def test_a_stage_outside_a_run_is_not_cancelled_with_an_earlier_one():
    def cancelled():
        with cancelling():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancelled()
    pause(0.0)
