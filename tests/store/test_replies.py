"""Paid replies in the store: out of reach of garbage collection unless named, and on every machine of a remote."""

import asyncio

import pytest

from common.errors import ConfigError
from common.events import silent
from data.endpoints.chat_types import ChatReply
from data.endpoints.reply_cache import ReplyCache
from data.endpoints.reply_source import ReplySource
from store.garbage import collect, find_garbage

MODEL = "openai/gpt-oss-20b"


def cache(store, execution="e"):
    return ReplyCache(ReplySource(store.root / "replies", execution), MODEL, silent)


def keep(store, *numbers):
    """Add replies, as a stage does."""

    async def record():
        opened = cache(store)
        for number in numbers:
            await opened.record(None, ChatReply("text", "stop", 3, 4, 0.5, False, f"{number:064x}"))
        opened.close()

    asyncio.run(record())


def test_replies_are_removed_by_the_name_of_their_model_alone(store):
    keep(store, 1, 2)
    assert find_garbage(store, stale_days=0) == []
    opened = cache(store)
    with pytest.raises(ConfigError, match=f"a run is using '{MODEL}' now"):
        find_garbage(store, replies=[MODEL])
    opened.close()
    with pytest.raises(ConfigError, match="has no replies of a model 'other'"):
        find_garbage(store, replies=["other"])
    (item,) = find_garbage(store, replies=[MODEL])
    assert item.reason == f"paid replies of {MODEL}, named"
    assert item.bytes > 200
    collect(store, [item])
    assert not item.path.exists()


@pytest.mark.slow
def test_replies_of_one_machine_are_found_on_another_which_keeps_its_own_apart(machine):
    a, b = machine("a"), machine("b")
    keep(a, 1, 2)
    assert (a.push_replies(), a.push_replies()) == (1, 0)
    keep(b, 3)
    b.push_all()
    b.pull_replies([MODEL])
    a.pull_replies([MODEL])
    for store in (a, b):
        opened = cache(store, "another")
        assert [opened.reply(f"{number:064x}") is not None for number in (1, 2, 3, 4)] == [True, True, True, False]
        opened.close()
    keep(a, 4)
    assert a.push_replies() == 1, "its own file has grown; what it fetched is not sent"
    b.pull_replies([MODEL])
    assert cache(b).reply(f"{4:064x}") is not None
    items = find_garbage(a, replies=[MODEL])
    assert len(items) == 2, "here and at the remote"
    collect(a, items)
    assert a.remote.names("replies") == {}
