"""What the process of `nautile deploy` does beside its runs, with stand-ins of Prefect's parts."""

import asyncio
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from prefect._internal.observers import FlowRunCancellingObserver
from prefect.client.schemas.objects import StateType
from prefect.runner import Runner

from nautile.flows.operate import serving

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


@pytest.mark.parametrize("value", [None, "of another form", {}, {"limits": {"host": 1}, "schedules": {}}], ids=str)
def test_a_server_that_was_reset_is_told_of_the_deployments_again(monkeypatch, value):
    """One with a new database answers that no run is due, whatever is asked of it."""

    class Server:
        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def read_variable_by_name(self, name):
            return None if value is None else SimpleNamespace(value=value)

    declared = []

    async def declare_all():
        declared.append("all")

    monkeypatch.setattr(serving, "get_client", Server)
    asyncio.run(serving.if_forgotten("toy", declare_all))
    assert declared == (["all"] if value is None else [])


class CancellingRuns:
    """A client of a server where these runs are to be cancelled."""

    def __init__(self, *runs):
        self.runs = runs

    async def read_flow_runs(self, flow_run_filter):
        asked = flow_run_filter.id.any_ if flow_run_filter.state.type.any_ == [StateType.CANCELLING] else []
        return [SimpleNamespace(id=run) for run in self.runs if run in asked]


def test_a_cancelled_run_is_ended_once_though_the_event_of_it_was_missed_or_comes_too():
    """A subscription that connects again after the server's restart misses what happened before."""
    missed, noticed, elsewhere = uuid4(), uuid4(), uuid4()
    ended = []
    observer = FlowRunCancellingObserver(on_cancelling=ended.append)
    observer._client = CancellingRuns(missed, noticed, elsewhere)
    observer._in_flight_flow_run_ids = {missed, noticed}
    runner = SimpleNamespace(_cancelling_observer=observer)
    serving.tell_once(observer)
    observer.on_cancelling(noticed)  # as for an event
    for _ in range(2):
        asyncio.run(serving._find_cancelled(runner))
    observer.on_cancelling(missed)
    assert ended == [noticed, missed]
    # The retry of a run has its id again.
    observer.remove_in_flight_flow_run_id(missed)
    observer._in_flight_flow_run_ids = {missed}
    asyncio.run(serving._find_cancelled(runner))
    assert ended == [noticed, missed, missed]


def test_the_parts_of_prefect_that_are_used_are_there():
    """Private ones: another version of Prefect fails this test."""
    from prefect.runner._scheduled_run_poller import ScheduledRunPoller

    assert hasattr(Runner(), "_cancelling_observer")
    assert callable(FlowRunCancellingObserver._check_for_cancelled_flow_runs)
    assert callable(ScheduledRunPoller._get_scheduled_flow_runs)
