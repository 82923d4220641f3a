"""What the process of `nautile deploy` does beside its runs, with stand-ins of Prefect's parts."""

import asyncio

import httpx
import pytest
from prefect.runner import Runner

from flows.operate import serving

REQUEST = httpx.Request("POST", "http://127.0.0.1:9/api/deployments/get_scheduled_flow_runs")


class Poller:
    """Prefect's loop for scheduled runs, whose requests have these results."""

    def __init__(self, *results):
        self.results = [*results]

    async def _get_scheduled_flow_runs(self):
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def refused(status):
    return httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(status, request=REQUEST))


def test_a_server_that_is_away_does_not_end_the_polling():
    poller = Poller(httpx.ConnectError("away"), refused(503), ["run"], refused(404))
    serving.poll_for_ever(poller)
    assert [asyncio.run(poller._get_scheduled_flow_runs()) for _ in range(3)] == [[], [], ["run"]]
    with pytest.raises(httpx.HTTPStatusError):  # a mistake, which waiting does not mend
        asyncio.run(poller._get_scheduled_flow_runs())


class Watch:
    def __init__(self, done):
        self.is_done = done

    def done(self):
        return self.is_done


class Observer:
    """Prefect's watch for cancelled runs: a subscription to events, and a loop that follows it."""

    def __init__(self, subscription, loop):
        self._consumer_task, self._polling_task, self.looks = subscription, loop, 0

    async def _check_for_cancelled_flow_runs(self):
        self.looks += 1


@pytest.mark.parametrize(
    ("subscription", "loop", "looks"),
    [
        (Watch(False), None, 0),
        (Watch(True), Watch(False), 0),
        (Watch(True), None, 1),  # closed by a server that ended in order: Prefect starts no loop then
        (Watch(True), Watch(True), 1),
        (None, Watch(True), 1),
    ],
)
def test_cancelled_runs_are_looked_for_where_prefects_own_watch_has_ended(subscription, loop, looks):
    runner = type("Stub", (), {"_cancelling_observer": Observer(subscription, loop)})()
    asyncio.run(serving._find_cancelled(runner))
    assert runner._cancelling_observer.looks == looks


def test_the_parts_of_prefect_that_are_used_are_there():
    """Private ones: another version of Prefect fails this test."""
    from prefect._internal.observers import FlowRunCancellingObserver
    from prefect.runner._scheduled_run_poller import ScheduledRunPoller

    assert hasattr(Runner(), "_cancelling_observer")
    assert callable(FlowRunCancellingObserver._check_for_cancelled_flow_runs)
    observer = FlowRunCancellingObserver(on_cancelling=lambda flow_run_id: None)
    assert (observer._consumer_task, observer._polling_task) == (None, None)
    assert callable(ScheduledRunPoller._get_scheduled_flow_runs)
