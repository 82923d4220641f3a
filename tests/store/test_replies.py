"""Paid replies in the store: out of reach of garbage collection unless named, and on every machine of a remote."""

import asyncio
import shutil

import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.data.endpoints.chat_types import ChatReply
from nautile.data.endpoints.reply_cache import ReplyCache
from nautile.data.endpoints.reply_source import ReplySource
from nautile.store.artifacts import Store
from nautile.store.garbage import collect, find_garbage
from nautile.store.mirror import MirroredStore

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


def test_two_copies_of_a_folder_do_not_go_on_with_one_file(store, tmp_path):
    """Of two files of one name the remote keeps the longer one, and the replies of the other would be paid again."""
    keep(store, 1)
    shutil.copytree(store.root, tmp_path / "copy")
    copy = Store(tmp_path / "copy")
    keep(store, 2)
    keep(copy, 3)

    def names(opened):
        return {path.name for path in (opened.root / "replies").rglob("*.jsonl") if path.stat().st_size}

    assert len(names(store)) == 1
    assert len(names(copy)) == 2
    assert names(store) < names(copy)


@pytest.mark.slow
def test_what_the_original_of_a_copied_folder_pays_for_is_found_on_the_copy(machine):
    a = machine("a")
    keep(a, 1)
    a.push_replies()
    b = MirroredStore(a.root.with_name("b"), a.url)
    shutil.copytree(a.root, b.root)
    keep(a, 2)
    a.push_replies()
    b.pull_replies([MODEL])
    opened = cache(b, "another")
    assert [opened.reply(f"{number:064x}") is not None for number in (1, 2)] == [True, True]


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
