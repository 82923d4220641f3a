"""Prefect's broker in memory, which hands on one message at a time and repeats those that a busy database refused.

The server loads this module by its name in PREFECT_SERVER_EVENTS_MESSAGING_BROKER. Prefect's own consumer handles two
messages side by side, and loses one that fails four times, without a pause between the tries. The event that a run is
suspended may then be handled before its last heartbeat, or never, and the automation for silent runs
(`flows.operate.automations`) calls a run crashed that waits for an approval.
"""

import logging
from typing import Any

import sqlalchemy.exc
from prefect.server.utilities.messaging import Message, MessageHandler
from prefect.server.utilities.messaging.memory import Consumer as _MemoryConsumer
from prefect.server.utilities.messaging.memory import Publisher, break_topic, ephemeral_subscription

from nautile.common.retry import Backoff, retry_async

__all__ = ["Consumer", "Publisher", "break_topic", "ephemeral_subscription"]  # what Prefect looks for in a broker

logger = logging.getLogger(__name__)

BACKOFF = Backoff(give_up_s=120.0, first_s=0.1, longest_s=5.0)


class Consumer(_MemoryConsumer):
    """Handles the messages of a topic in the order of their arrival."""

    def __init__(self, topic: str, **options: Any) -> None:
        super().__init__(topic, **options | {"concurrency": 1})

    async def run(self, handler: MessageHandler) -> None:
        """Handle messages until cancelled. One that a locked database refuses is tried again for two minutes."""

        async def handle(message: Message) -> None:
            await retry_async(
                lambda: handler(message),
                BACKOFF,
                should_retry=lambda error: isinstance(error, sqlalchemy.exc.OperationalError),
                before_pause=lambda error, attempt, pause_s: logger.debug("attempt %d: %s", attempt, error),
            )

        await super().run(handle)
