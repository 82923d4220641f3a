"""Stages of different runs take turns: a real server, two that want the one place."""

import contextvars
import logging
import threading
import time

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.operate import concurrency

pytestmark = pytest.mark.slow


@pytest.fixture
def server(prefect_url):
    with temporary_settings({PREFECT_API_URL: prefect_url}):
        yield prefect_url


def test_the_second_waits_until_the_first_is_done(server, caplog):
    concurrency.declare(1)
    concurrency.declare(1)  # a second deploy changes nothing
    assert concurrency.is_limited()
    inside, order = threading.Event(), []

    def second():
        with concurrency.permit("second"):
            order.append("second")
            inside.set()

    waiting = threading.Thread(target=contextvars.copy_context().run, args=(second,))
    with caplog.at_level(logging.INFO, "flows.operate.concurrency"), concurrency.permit("first"):
        waiting.start()
        deadline = time.monotonic() + 60
        while "second waits for its permit" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        order.append("first")
        assert not inside.is_set()
    waiting.join(90)
    assert order == ["first", "second"]
