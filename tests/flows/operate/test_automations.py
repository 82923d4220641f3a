"""When the automation ends a run whose heartbeats stopped: after a real silence, and in no state without a process."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import prefect.states
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.worker import EventsWorker
from prefect.server.utilities.messaging import StopConsumer, create_consumer, create_publisher
from prefect.settings import PREFECT_API_URL, PREFECT_MESSAGING_BROKER, temporary_settings
from sqlalchemy.exc import OperationalError

from nautile.common.processes import free_port
from nautile.flows.operate import automations, message_broker
from nautile.flows.operate.automations import TAG, WITHOUT_PROCESS, silent_runs
from nautile.flows.operate.prefect_server import BROKER
from tests.support.servers.prefect_calls import fetch, request
from tests.support.servers.prefect_server import running_server, start_server
from tests.support.stages.stage_parent import wait_for

OLD = "2026-01-01 00:00"
WITHIN = timedelta(seconds=10)  # the shortest time that Prefect allows
WITH_PROCESS = (StateType.RUNNING, StateType.CANCELLING)


def test_every_state_without_a_process_that_prefect_knows_ends_the_wait():
    """A new version of Prefect with another such state fails this test."""
    makers = [maker for name, maker in vars(prefect.states).items() if name[0].isupper()]
    states = [maker() for maker in makers if getattr(maker, "__module__", "") == "prefect.states" and callable(maker)
              and not isinstance(maker, type)]  # fmt: skip
    names = {state.name for state in states if state.type not in WITH_PROCESS}
    assert {"Suspended", "Paused", "AwaitingConcurrencySlot", "Late", "Crashed"} <= names <= {*WITHOUT_PROCESS}
    assert {f"prefect.flow-run.{name}" for name in WITHOUT_PROCESS} <= silent_runs().trigger.expect
    # Prefect's page would describe a trigger of such events alone as a run that "stays in heartbeat".
    assert not all(event.startswith("prefect.flow-run") for event in silent_runs().trigger.expect)
    for name in ("Running", "Retrying", "Cancelling"):
        assert f"prefect.flow-run.{name}" not in silent_runs().trigger.expect


def event(name: str, run: str, occurred: datetime) -> dict[str, Any]:
    """An event of a run, as the server gets it."""
    return {
        "id": str(uuid4()),
        "occurred": occurred.isoformat(),
        "event": name,
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
        "related": [{"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}],
        "payload": {},
    }


def events(url: str, name: str) -> list[dict[str, Any]]:
    since = (datetime.now(UTC) - timedelta(days=30)).isoformat()
    page = fetch(f"{url}/events/filter", {"filter": {"event": {"name": [name]}, "occurred": {"since": since}}})
    listed = page["events"]
    while page["next_page"]:  # the server gives at most 50 at a time
        page = fetch(page["next_page"])
        listed += page["events"]
    return listed


def counts(home: Path) -> dict[str, int]:
    """By run, for which the automation waits: how many of the events that end the wait have come."""
    with closing(sqlite3.connect(home / "prefect.db", timeout=60)) as database:
        rows = database.execute("SELECT bucketing_key, count FROM automation_bucket").fetchall()
    return {json.loads(key)[0].removeprefix("prefect.flow-run."): count for key, count in rows}


def is_waited_for(url: str, home: Path, run: str, beat: datetime) -> bool:
    """Send a heartbeat; the automation of a server that has just started may not see it yet."""
    request(f"{url}/events", [event("prefect.flow-run.heartbeat", run, beat)]).raise_for_status()
    return run in counts(home)


def declare(url: str) -> None:
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        client.create_automation(silent_runs(WITHIN))


def fired(url: str) -> list[str]:
    """The runs for which the automation has fired."""
    labels = [entry["payload"]["triggering_labels"] for entry in events(url, "prefect.automation.triggered")]
    return [label["prefect.resource.id"].removeprefix("prefect.flow-run.") for label in labels]


@pytest.mark.heavy
def test_a_run_may_wait_for_days_in_every_state_without_a_process(prefect_home, tmp_path):
    """Their time is over before that of the silent run is, so that they would have fired with it."""
    home = tmp_path / "home"
    shutil.copytree(prefect_home, home)
    names = [f"prefect.flow-run.{name}" for name in WITHOUT_PROCESS] + [automations._SUSPENDED]
    waiting = {str(uuid4()): name for name in names}
    working, silent = str(uuid4()), str(uuid4())
    with running_server(home) as url:
        declare(url)
        # A process that works goes on to beat; one that is gone beats no more.
        wait_for(lambda: is_waited_for(url, home, working, datetime.now(UTC) + timedelta(hours=1)))

        def send(name: str, run: str, occurred: datetime) -> None:
            request(f"{url}/events", [event(name, run, occurred)]).raise_for_status()

        # In a burst, each end right after the heartbeat before it: the server handles them in their order.
        begun = datetime.now(UTC) + timedelta(seconds=40)  # a busy server takes seconds for an event
        for run, name in waiting.items():
            send("prefect.flow-run.heartbeat", run, begun)
            send(name, run, begun)
        send("prefect.flow-run.heartbeat", silent, begun)
        wait_for(lambda: silent in counts(home))
        assert {who: count for run, who in waiting.items() if (count := counts(home).get(run, 1)) != 1} == {}
        who = waiting | {working: "working", silent: "silent"}
        assert [who[run] for run in wait_for(lambda: fired(url))] == ["silent"]


@pytest.mark.slow
def test_the_heartbeat_of_a_short_run_is_sent_before_its_end(prefect_url):
    """Else the wait for the next one begins after the end of the run, and the automation fires for nothing."""
    unsent = []

    @flow(name="short")
    def short():
        with automations.sent_before_the_end():
            """Nothing new."""
        unsent.append(EventsWorker.instance()._queue.unfinished_tasks)

    with temporary_settings({PREFECT_API_URL: prefect_url}):
        state = short(return_state=True)
        EventsWorker.drain_all(timeout=10, at_exit=False)
    assert unsent == [0]
    run = f"prefect.flow-run.{state.state_details.flow_run_id}"
    beats = "prefect.flow-run.heartbeat"
    assert wait_for(lambda: run in [event["resource"]["prefect.resource.id"] for event in events(prefect_url, beats)])


@pytest.mark.heavy
def test_a_server_that_was_away_calls_no_run_crashed_when_it_is_back(prefect_home, tmp_path):
    home, port = tmp_path / "home", free_port()
    shutil.copytree(prefect_home, home)
    url = f"http://127.0.0.1:{port}/api"
    # Else the server may remove a wait that ended before its start, without a look at it.
    settings = {"PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER": "P9999D"}
    server = start_server(home, port, settings)
    try:
        declare(url)
        working, silent = str(uuid4()), str(uuid4())
        wait_for(lambda: is_waited_for(url, home, working, datetime.now(UTC) + timedelta(hours=1)))
        server.kill()
        server.wait()
        # While it was away, hours have passed.
        with closing(sqlite3.connect(home / "prefect.db", timeout=60)) as database, database:
            database.execute(
                'UPDATE automation_bucket SET start = ?, "end" = ?', (f"{OLD}:00.000000", f"{OLD}:30.000000")
            )
        server = start_server(home, port, settings)
        # One that falls silent from now on is noticed, so that the automation works.
        wait_for(lambda: is_waited_for(url, home, silent, datetime.now(UTC)))
        assert wait_for(lambda: fired(url)) == [silent]
    finally:
        server.terminate()
        server.wait(60)


LOCKED = OperationalError("UPDATE", {}, sqlite3.OperationalError("database is locked"))
LAST = "4"


@pytest.mark.parametrize("refused", [{}, {"0": 9, "2": 1}], ids=str)
def test_messages_are_handled_one_at_a_time_in_order_and_again_if_the_database_is_locked(monkeypatch, refused):
    """By Prefect's own consumer the second is handled before the first, and one that is refused nine times is lost."""
    monkeypatch.setattr(message_broker, "BACKOFF", replace(message_broker.BACKOFF, first_s=0.001, longest_s=0.001))
    handled, left = [], dict(refused)

    async def handle(message):
        text = message.data.decode()
        if left.get(text):
            left[text] -= 1
            raise LOCKED
        for _ in range(3 if text == "0" else 0):  # the first takes longer
            await asyncio.sleep(0)
        handled.append(text)
        if text == LAST:
            raise StopConsumer(ack=True)

    async def send_and_handle() -> None:
        consumer = create_consumer("letters", name="as the server's services", group="triggers", read_batch_size=1)
        async with create_publisher("letters", deduplicate_by="id") as publisher:
            for text in ("0", "1", "2", "3", LAST):
                await publisher.publish_data(text.encode(), {"id": f"{refused} {text}"})
        await consumer.run(handle)
        await consumer.cleanup()

    with temporary_settings({PREFECT_MESSAGING_BROKER: BROKER}):
        asyncio.run(send_and_handle())
    assert handled == ["0", "1", "2", "3", LAST]
