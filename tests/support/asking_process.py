"""A process that asks an endpoint and tells of each reply, to be killed: `python asking_process.py URL CACHE N`."""

import sys
from pathlib import Path

from configs.emit import silent
from configs.schema import EndpointConfig
from data.endpoints import ChatRequest, EndpointPool


def requests(count: int) -> list[ChatRequest]:
    """Requests 0 to `count` - 1, each with its number as its text."""
    return [ChatRequest("fake", ({"role": "user", "content": str(index)},), 20) for index in range(count)]


def config(url: str) -> EndpointConfig:
    """The endpoint they go to."""
    return EndpointConfig(kind="openai", model="fake", url=url, concurrency=4)


if __name__ == "__main__":
    url, cache, count = sys.argv[1:]
    with EndpointPool({"fake": config(url)}, Path(cache), silent) as pool:

        def tell(index: int, _: object) -> None:
            sys.stdout.write(f"{index}\n")
            sys.stdout.flush()

        pool.ask(requests(int(count)), tell)
