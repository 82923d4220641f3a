"""The reply cache on disk: what is recorded survives, whatever happened to the file."""

import asyncio
import errno
import json

import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.data.endpoints import reply_cache
from nautile.data.endpoints.budget import Usage
from nautile.data.endpoints.chat_types import ChatReply
from nautile.data.endpoints.reply_cache import ReplyCache, RequestLocks
from nautile.data.endpoints.reply_source import ReplySource


def reply(number, text="text"):
    return ChatReply(text, "stop", 3, 4, 0.5, False, f"{number:064x}")


def opened(folder, emit=silent, **source):
    """The cache of the replies of model "m" under `folder`."""
    return ReplyCache(ReplySource(folder, **source), "m", emit)


def shard(folder):
    """The only file of replies."""
    (path,) = (folder / "m").glob("*.jsonl")
    return path


def old_file(folder, content):
    (folder / "m").mkdir()
    (folder / "m" / "host-0.jsonl").write_bytes(content)


def keep(folder, *replies, emit=silent):
    """Record replies all at once, each with an event."""

    async def record():
        cache = opened(folder, emit)
        await asyncio.gather(*(cache.record({"tag": reply.digest}, reply, Usage(0.25, 7)) for reply in replies))
        return cache

    return asyncio.run(record())


def test_replies_are_found_again_and_their_cost_is_counted(tmp_path):
    folder = tmp_path / "deep"
    first = keep(folder, *(reply(i, f"text {i}\u2028\n") for i in range(50)))
    first.close()
    again = opened(folder)
    assert len(again) == 50
    assert again.total.dollars == pytest.approx(12.5)
    assert again.total.tokens == 350
    result = again.reply(f"{7:064x}")
    assert (result.text, result.cached, result.tokens_out) == ("text 7\u2028\n", True, 4)
    assert again.reply(f"{99:064x}") is None


def test_the_reply_is_on_disk_before_its_event_is_emitted_and_before_the_call_returns(tmp_path):
    def emit(kind, **fields):
        assert fields["tag"] in shard(tmp_path).read_text()

    cache = keep(tmp_path, reply(1), reply(2), emit=emit)
    assert cache.reply(f"{1:064x}") is not None


def test_lines_that_are_no_replies_are_skipped(tmp_path):
    old_file(tmp_path, b'\x00\x00\x00\n[]\n{"digest": "zz"}\nnot json\n')
    assert len(opened(tmp_path)) == 0


def test_a_listener_that_cannot_write_stops_the_caller(tmp_path):
    def full(kind, **fields):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        keep(tmp_path, reply(1), emit=full)


@pytest.mark.parametrize("text", ['ends in "', "ends in \\", '"}', '\\"}', "", "\n"])
def test_the_fast_scan_of_a_line_reads_what_a_parse_does(tmp_path, text):
    keep(tmp_path, reply(1, text), reply(2)).close()
    again = opened(tmp_path)
    assert again.reply(f"{1:064x}").text == text
    assert again.total == Usage(0.5, 14)


def test_files_of_an_earlier_format_are_read(tmp_path):
    row = {"digest": f"{5:064x}", "text": "old", "finish": "stop", "tokens_in": 3, "tokens_out": 4, "latency_s": 0.5}
    old_file(tmp_path, json.dumps({**row, "dollars": None}).encode() + b"\n")
    cache = opened(tmp_path)
    assert cache.reply(f"{5:064x}").text == "old"
    assert cache.total == Usage(0.0, 7)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        opened(tmp_path / "file")


def test_an_event_alone_writes_no_reply(tmp_path):
    events = []

    async def record():
        cache = opened(tmp_path, lambda kind, **fields: events.append(fields))
        await cache.record({"status": "500"})

    asyncio.run(record())
    assert events == [{"status": "500"}]
    assert shard(tmp_path).read_bytes() == b""


def test_several_processes_write_and_each_finds_the_replies_of_the_others(tmp_path):
    async def record():
        first, second = opened(tmp_path, execution="a"), opened(tmp_path, execution="b")
        await first.record(None, reply(1), Usage(0.25, 7))
        await second.record(None, reply(2), Usage(0.5, 7))
        assert second.reply(f"{1:064x}") is None
        first.refresh()
        second.refresh()
        for cache, own, other in ((first, 1, 2), (second, 2, 1)):
            assert not cache.reply(f"{own:064x}").reused
            assert cache.reply(f"{other:064x}").reused, "another execution paid for it"
        assert (first.total.dollars, second.total.dollars) == (0.25, 0.5)
        first.close()
        second.close()

    asyncio.run(record())
    assert len(list((tmp_path / "m").glob("*.jsonl"))) == 2
    keep(tmp_path, reply(3)).close()
    assert len(list((tmp_path / "m").glob("*.jsonl"))) == 2, "a file that nobody writes any more is continued"
    again = opened(tmp_path, execution="a")
    assert (len(again), again.total.dollars) == (3, 0.25)


def test_asking_again_uses_the_executions_own_replies_alone(tmp_path):
    keep(tmp_path, reply(1), reply(2)).close()

    async def record():
        cache = opened(tmp_path, execution="b", ask_again=True)
        assert len(cache) == 0
        await cache.record(None, reply(1, "another"), Usage(0.5, 7))
        cache.close()
        again = opened(tmp_path, execution="b", ask_again=True)
        assert (len(again), again.reply(f"{1:064x}").text) == (1, "another")
        again.close()

    asyncio.run(record())


def test_a_full_file_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr(reply_cache, "SHARD_BYTES", 500)

    async def record():
        cache = opened(tmp_path)
        for number in range(12):
            await cache.record(None, reply(number))
        assert all(cache.reply(f"{number:064x}") for number in range(12))
        cache.close()

    asyncio.run(record())
    assert len(list((tmp_path / "m").glob("*.jsonl"))) > 3
    assert len(opened(tmp_path)) == 12


@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "..", ".", "", "ä b", "../../x"])
def test_every_model_has_a_folder_of_its_own_below_the_replies(tmp_path, model):
    cache = ReplyCache(ReplySource(tmp_path / "replies"), model, silent)
    assert cache.folder.resolve().parent == (tmp_path / "replies").resolve()
    cache.close()


def test_a_lock_on_a_request_excludes_others_until_its_holder_is_gone(tmp_path):
    first, second = RequestLocks(tmp_path / "locks"), RequestLocks(tmp_path / "locks")
    digests = [f"{number:016x}" + "0" * 48 for number in range(0, 64, 4)]
    assert all(map(first.acquire, [*digests, *digests])), "its own lock does not exclude it"
    assert not any(map(second.acquire, digests))
    first.release(digests[0])
    assert [second.acquire(digest) for digest in digests[:2]] == [True, False]
    first.close()
    assert all(map(second.acquire, digests))


def test_a_file_system_without_locks_is_named_and_survived(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.fcntl", unsupported)
    monkeypatch.setattr("fcntl.flock", unsupported)
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.locks.acquire("0" * 64)
    assert second.locks.acquire("0" * 64)
    first.locks.release("0" * 64)
    assert "No locks available" in caplog.text
    assert len(list((tmp_path / "m").glob("*.jsonl"))) == 2, "no file has two writers"


def test_a_reply_that_was_damaged_inside_its_line_is_asked_for_again(tmp_path, caplog):
    """Its beginning and its end are whole, as after a crash of the machine amid a write of several blocks."""
    keep(tmp_path, reply(1, "x" * 100), reply(2)).close()
    content = shard(tmp_path).read_bytes()
    shard(tmp_path).write_bytes(content.replace(b"x" * 50, b"\0" * 50, 1))
    cache = opened(tmp_path)
    assert cache.reply(f"{1:064x}") is None
    assert cache.reply(f"{2:064x}").text == "text"
    assert "damaged" in caplog.text
    cache.close()
