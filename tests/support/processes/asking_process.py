"""A process that sends N requests and prints the index of each reply, to be killed by a test.

    python asking_process.py CONFIG CACHE N [MOMENT]

CONFIG is the JSON of an `EndpointConfig`. With a MOMENT it kills itself, as kill -9 does, at that moment of its first
batch job.
"""

import os
import signal
import sys
from pathlib import Path

from nautile.common.events import silent
from nautile.configs.endpoint import EndpointConfig
from nautile.data.endpoints.chat_types import ChatRequest
from nautile.data.endpoints.pool import EndpointPool


def requests(count: int) -> list[ChatRequest]:
    """Requests 0 to `count` - 1, each with its number as its text."""
    return [ChatRequest("fake", ({"role": "user", "content": str(index)},), 20) for index in range(count)]


def config(url: str, **fields: object) -> EndpointConfig:
    """The endpoint that they are sent to."""
    return EndpointConfig(kind="openai", model="fake", url=url, **{"concurrency": 4, **fields})


def die_at(moment: str) -> None:
    """Kill this process when a batch job reaches the moment."""
    from nautile.data.endpoints import batch as batches
    from nautile.data.endpoints import mistral_client, openai_client
    from nautile.data.endpoints.reply_cache import ReplyCache

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def dying_after(method, count: int = 1):
        calls = []

        async def call(*arguments: object, **named: object) -> object:
            result = await method(*arguments, **named)
            calls.append(1)
            return die() if len(calls) == count else result

        return call

    batches.LINGER_S = 0.05
    for vendor in (openai_client.OpenAIClient, mistral_client.MistralClient):
        if moment == "before upload":
            vendor.upload = die
        if moment == "after upload":
            vendor.upload = dying_after(vendor.upload)
        if moment == "after create":
            vendor.create = dying_after(vendor.create)
        if moment == "while polling":
            vendor.status = dying_after(vendor.status)
    if moment == "amid replies":
        batches.GROUP = 2
        ReplyCache.record = dying_after(ReplyCache.record, 5)


def main() -> None:
    """Send the requests and print the indices of their replies."""
    section, cache, count, *moment = sys.argv[1:]
    if moment:
        die_at(*moment)
    with EndpointPool({"fake": EndpointConfig.model_validate_json(section)}, Path(cache), silent) as pool:

        def print_index(index: int, _: object) -> None:
            sys.stdout.write(f"{index}\n")
            sys.stdout.flush()

        pool.ask(requests(int(count)), print_index)


if __name__ == "__main__":
    main()
