"""What the process of `nautile deploy` does beside its runs, with stand-ins of Prefect's parts."""

import asyncio
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.runner.runner import FlowRunCancellingObserver
from prefect.settings import PREFECT_API_URL, temporary_settings

from nautile.flows.operate import deployments
from nautile.flows.operate.deployments import _Runner

REQUEST = httpx.Request("POST", "http://127.0.0.1:9/api/deployments/get_scheduled_flow_runs")


def refused(status):
    return httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(status, request=REQUEST))


def test_a_server_that_is_away_does_not_end_the_polling(monkeypatch):
    results = [httpx.ConnectError("away"), refused(503), ["run"], refused(404)]

    async def answer(client, deployment_ids, scheduled_before=None):
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(PrefectClient, "get_scheduled_flow_runs_for_deployments", answer)
    deployments.poll_for_ever()
    client = PrefectClient("http://127.0.0.1:9/api")
    due = client.get_scheduled_flow_runs_for_deployments
    assert [asyncio.run(due([])) for _ in range(3)] == [[], [], ["run"]]
    with pytest.raises(httpx.HTTPStatusError):  # a mistake, which waiting does not mend
        asyncio.run(due([]))


def test_prefects_runner_asks_by_the_method_that_is_patient_and_tells_of_its_runs(monkeypatch):
    """Another version of Prefect may not: then no run would be found after a restart of the server."""
    asked = []

    async def away(client, deployment_ids, scheduled_before=None):
        asked.append(deployment_ids)
        raise httpx.ConnectError("away")

    monkeypatch.setattr(PrefectClient, "get_scheduled_flow_runs_for_deployments", away)
    deployments.poll_for_ever()
    runner = _Runner(name="toy", pause_on_shutdown=False)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        asyncio.run(runner.start(run_once=True))
    assert asked == [[]]
    assert runner.at_work.ids == set()


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

    monkeypatch.setattr(deployments, "get_client", Server)
    asyncio.run(deployments.if_forgotten("toy", declare_all))
    assert declared == (["all"] if value is None else [])


class CancellingRuns:
    """A client of a server where these runs are to be cancelled."""

    def __init__(self, *runs):
        self.runs = runs

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def read_flow_runs(self, flow_run_filter):
        asked = flow_run_filter.id.any_ if flow_run_filter.state.type.any_ == [StateType.CANCELLING] else []
        return [SimpleNamespace(id=run) for run in self.runs if run in asked]


def test_a_cancelled_run_is_ended_once_though_the_event_of_it_was_missed_or_comes_too(monkeypatch):
    """A subscription that connects again after the server's restart misses what happened before."""
    missed, noticed, elsewhere = uuid4(), uuid4(), uuid4()
    ended = []
    observer = FlowRunCancellingObserver(on_cancelling=ended.append)
    at_work = deployments.RunsAtWork()
    at_work.learn_from(observer)
    monkeypatch.setattr(deployments, "get_client", lambda: CancellingRuns(missed, noticed, elsewhere))
    for run in (missed, noticed):
        observer.add_in_flight_flow_run_id(run)
    observer.on_cancelling(noticed)  # as for an event
    for _ in range(2):
        asyncio.run(at_work.find_cancelled())
    observer.on_cancelling(missed)
    assert ended == [noticed, missed]
    # The retry of a run has its id again.
    observer.remove_in_flight_flow_run_id(missed)
    observer.add_in_flight_flow_run_id(missed)
    asyncio.run(at_work.find_cancelled())
    assert ended == [noticed, missed, missed]


def test_the_process_of_a_run_that_the_server_ended_a_minute_ago_is_killed(monkeypatch):
    """Stopped, it neither works nor ends, and its run's tasks and slot would wait for it for ever."""
    now = datetime.now(UTC)
    runs = {uuid4(): ended for ended in (now - deployments.LINGER * 2, now)}  # the second may end by itself yet

    class Server(CancellingRuns):
        async def read_flow_runs(self, flow_run_filter):
            assert StateType.RUNNING not in flow_run_filter.state.type.any_
            states = {run: SimpleNamespace(timestamp=ended) for run, ended in runs.items()}
            return [SimpleNamespace(id=run, state=states[run]) for run in self.runs if run in flow_run_filter.id.any_]

    monkeypatch.setattr(deployments, "get_client", lambda: Server(*runs))
    at_work = deployments.RunsAtWork()
    assert asyncio.run(at_work.kill_ended()) == []
    at_work.ids = set(runs)
    hung, ending = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env=os.environ | {"PREFECT__FLOW_RUN_ID": str(run)},
        )
        for run in runs
    ]
    try:
        hung.send_signal(signal.SIGSTOP)
        assert asyncio.run(at_work.kill_ended()) == [next(iter(runs))]
        assert hung.wait(60) == -signal.SIGKILL
        assert ending.poll() is None
    finally:
        hung.kill()
        ending.kill()
        ending.wait()
