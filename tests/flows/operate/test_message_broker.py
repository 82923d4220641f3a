"""The broker of Prefect's server: one message at a time, in order, and none lost to a locked database."""

import asyncio
import sqlite3
from dataclasses import replace

import pytest
from prefect.server.utilities.messaging import StopConsumer, create_consumer, create_publisher
from prefect.settings import PREFECT_MESSAGING_BROKER, temporary_settings
from sqlalchemy.exc import OperationalError

from flows.operate import message_broker
from flows.operate.prefect_server import BROKER

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
