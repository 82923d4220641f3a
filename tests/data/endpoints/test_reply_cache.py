"""The reply cache on disk: what is recorded survives, whatever happened to the file."""

import asyncio
import json
import os

import pytest

from common.errors import ConfigError
from common.events import silent
from data.endpoints.budget import Usage
from data.endpoints.chat_types import ChatReply
from data.endpoints.reply_cache import ReplyCache


def reply(number, text="text"):
    return ChatReply(text, "stop", 3, 4, 0.5, False, f"{number:064x}")


def keep(path, *replies, emit=silent):
    """Record replies all at once, each with an event."""

    async def record():
        cache = ReplyCache(path, emit)
        await asyncio.gather(*(cache.record({"tag": reply.digest}, reply, Usage(0.25, 7)) for reply in replies))
        return cache

    return asyncio.run(record())


def test_replies_are_found_again_and_their_cost_is_counted(tmp_path):
    path = tmp_path / "deep" / "replies.jsonl"
    first = keep(path, *(reply(i, f"text {i}\u2028\n") for i in range(50)))
    first.close()
    again = ReplyCache(path, silent)
    assert len(again) == 50
    assert again.total.dollars == pytest.approx(12.5)
    assert again.total.tokens == 350
    result = again.reply(f"{7:064x}")
    assert (result.text, result.cached, result.tokens_out) == ("text 7\u2028\n", True, 4)
    assert again.reply(f"{99:064x}") is None


def test_the_reply_is_on_disk_before_its_event_is_emitted_and_before_the_call_returns(tmp_path):
    path = tmp_path / "replies.jsonl"

    def emit(kind, **fields):
        assert fields["tag"] in path.read_text()

    cache = keep(path, reply(1), reply(2), emit=emit)
    assert cache.reply(f"{1:064x}") is not None


@pytest.mark.parametrize("cut", range(2, 160, 13))
def test_a_torn_last_line_is_skipped_and_the_next_reply_is_whole(tmp_path, cut):
    path = tmp_path / "replies.jsonl"
    keep(path, reply(1), reply(2)).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    cache = keep(path, reply(3))
    assert cache.reply(f"{1:064x}") is not None
    assert cache.reply(f"{2:064x}") is None
    cache.close()
    assert len(ReplyCache(path, silent)) == 2


def test_lines_that_are_no_replies_are_skipped(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.write_bytes(b'\x00\x00\x00\n[]\n{"digest": "zz"}\nnot json\n')
    assert len(ReplyCache(path, silent)) == 0


def test_a_listener_that_cannot_write_stops_the_caller(tmp_path):
    def full(kind, **fields):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        keep(tmp_path / "replies.jsonl", reply(1), emit=full)


def test_a_disk_that_fills_up_within_a_line_damages_no_later_one(tmp_path, monkeypatch):
    path, write = tmp_path / "replies.jsonl", os.write

    def short(descriptor, content):
        if b"number 2" in content:
            write(descriptor, content[:40])
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    async def record():
        cache = ReplyCache(path, silent)
        await cache.record(None, reply(1))
        with monkeypatch.context() as full:
            full.setattr(os, "write", short)
            with pytest.raises(OSError, match="No space"):
                await cache.record(None, reply(2, "number 2"))
        await cache.record(None, reply(3))
        return cache

    cache = asyncio.run(record())
    for opened in (cache, ReplyCache(path, silent)):
        assert opened.reply(f"{1:064x}").text == opened.reply(f"{3:064x}").text == "text"
        assert opened.reply(f"{2:064x}") is None
        opened.close()


@pytest.mark.parametrize("text", ['ends in "', "ends in \\", '"}', '\\"}', "", "\n"])
def test_the_fast_scan_of_a_line_reads_what_a_parse_does(tmp_path, text):
    path = tmp_path / "replies.jsonl"
    keep(path, reply(1, text), reply(2)).close()
    again = ReplyCache(path, silent)
    assert again.reply(f"{1:064x}").text == text
    assert again.total == Usage(0.5, 14)


def test_files_of_an_earlier_format_are_read(tmp_path):
    row = {"digest": f"{5:064x}", "text": "old", "finish": "stop", "tokens_in": 3, "tokens_out": 4, "latency_s": 0.5}
    (tmp_path / "replies.jsonl").write_text(json.dumps({**row, "dollars": None}) + "\n")
    cache = ReplyCache(tmp_path / "replies.jsonl", silent)
    assert cache.reply(f"{5:064x}").text == "old"
    assert cache.total == Usage(0.0, 7)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        ReplyCache(tmp_path / "file" / "replies.jsonl", silent)


def test_an_event_alone_writes_no_reply(tmp_path):
    events = []

    async def record():
        cache = ReplyCache(tmp_path / "replies.jsonl", lambda kind, **fields: events.append(fields))
        await cache.record({"status": "500"})

    asyncio.run(record())
    assert events == [{"status": "500"}]
    assert (tmp_path / "replies.jsonl").read_bytes() == b""


def test_a_reply_is_one_line_of_json(tmp_path):
    keep(tmp_path / "replies.jsonl", reply(1, "a\nb\u2028c"))
    (line,) = (tmp_path / "replies.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "a\nb\u2028c"
