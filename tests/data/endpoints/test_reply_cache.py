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
        ledger = ReplyCache(path, emit)
        await asyncio.gather(*(ledger.record({"tag": one.digest}, one, Usage(0.25, 7)) for one in replies))
        return ledger

    return asyncio.run(record())


def test_replies_are_found_again_and_their_cost_is_counted(tmp_path):
    path = tmp_path / "deep" / "replies.jsonl"
    first = keep(path, *(reply(i, f"text {i}\u2028\n") for i in range(50)))
    first.close()
    again = ReplyCache(path, silent)
    assert len(again) == 50
    assert again.total.dollars == pytest.approx(12.5)
    assert again.total.tokens == 350
    found = again.reply(f"{7:064x}")
    assert (found.text, found.cached, found.tokens_out) == ("text 7\u2028\n", True, 4)
    assert again.reply(f"{99:064x}") is None


def test_the_reply_is_on_disk_before_the_event_is_told_and_before_the_call_returns(tmp_path):
    path = tmp_path / "replies.jsonl"

    def emit(kind, **fields):
        assert fields["tag"] in path.read_text()

    ledger = keep(path, reply(1), reply(2), emit=emit)
    assert ledger.reply(f"{1:064x}") is not None


@pytest.mark.parametrize("cut", range(2, 160, 13))
def test_a_torn_last_line_is_passed_over_and_written_on_after(tmp_path, cut):
    path = tmp_path / "replies.jsonl"
    keep(path, reply(1), reply(2)).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    ledger = keep(path, reply(3))
    assert ledger.reply(f"{1:064x}") is not None
    assert ledger.reply(f"{2:064x}") is None
    ledger.close()
    assert len(ReplyCache(path, silent)) == 2


def test_lines_that_are_no_replies_are_passed_over(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.write_bytes(b'\x00\x00\x00\n[]\n{"digest": "zz"}\nnot json\n')
    assert len(ReplyCache(path, silent)) == 0


def test_a_listener_that_cannot_write_stops_the_caller(tmp_path):
    def full(kind, **fields):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        keep(tmp_path / "replies.jsonl", reply(1), emit=full)


def test_a_disk_that_fills_up_amid_a_line_spoils_no_later_one(tmp_path, monkeypatch):
    path, write = tmp_path / "replies.jsonl", os.write

    def short(descriptor, content):
        if b"number 2" in content:
            write(descriptor, content[:40])
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    async def record():
        ledger = ReplyCache(path, silent)
        await ledger.record(None, reply(1))
        with monkeypatch.context() as full:
            full.setattr(os, "write", short)
            with pytest.raises(OSError, match="No space"):
                await ledger.record(None, reply(2, "number 2"))
        await ledger.record(None, reply(3))
        return ledger

    ledger = asyncio.run(record())
    for one in (ledger, ReplyCache(path, silent)):
        assert one.reply(f"{1:064x}").text == one.reply(f"{3:064x}").text == "text"
        assert one.reply(f"{2:064x}") is None
        one.close()


@pytest.mark.parametrize("text", ['ends in "', "ends in \\", '"}', '\\"}', "", "\n"])
def test_the_quick_look_at_a_line_reads_what_a_parse_does(tmp_path, text):
    path = tmp_path / "replies.jsonl"
    keep(path, reply(1, text), reply(2)).close()
    again = ReplyCache(path, silent)
    assert again.reply(f"{1:064x}").text == text
    assert again.total == Usage(0.5, 14)


def test_files_of_an_earlier_form_are_read(tmp_path):
    row = {"digest": f"{5:064x}", "text": "old", "finish": "stop", "tokens_in": 3, "tokens_out": 4, "latency_s": 0.5}
    (tmp_path / "replies.jsonl").write_text(json.dumps({**row, "dollars": None}) + "\n")
    ledger = ReplyCache(tmp_path / "replies.jsonl", silent)
    assert ledger.reply(f"{5:064x}").text == "old"
    assert ledger.total == Usage(0.0, 7)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        ReplyCache(tmp_path / "file" / "replies.jsonl", silent)


def test_an_event_alone_writes_no_reply(tmp_path):
    told = []

    async def record():
        ledger = ReplyCache(tmp_path / "replies.jsonl", lambda kind, **fields: told.append(fields))
        await ledger.record({"status": "500"})

    asyncio.run(record())
    assert told == [{"status": "500"}]
    assert (tmp_path / "replies.jsonl").read_bytes() == b""


def test_a_reply_is_one_line_of_json(tmp_path):
    keep(tmp_path / "replies.jsonl", reply(1, "a\nb\u2028c"))
    (line,) = (tmp_path / "replies.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "a\nb\u2028c"
