import asyncio
import json

import pytest

from configs.emit import silent
from configs.section import ConfigError
from data.budget import Amount
from data.calls import ChatReply
from data.ledger import Ledger


def reply(number, text="text"):
    return ChatReply(text, "stop", 3, 4, 0.5, False, f"{number:064x}")


def keep(path, *replies, emit=silent):
    """Record replies all at once, each with an event."""

    async def record():
        ledger = Ledger(path, emit)
        await asyncio.gather(*(ledger.record({"tag": one.digest}, one, Amount(0.25, 7)) for one in replies))
        return ledger

    return asyncio.run(record())


def test_replies_are_found_again_and_their_cost_is_counted(tmp_path):
    path = tmp_path / "deep" / "replies.jsonl"
    first = keep(path, *(reply(i, f"text {i}\u2028\n") for i in range(50)))
    first.close()
    again = Ledger(path, silent)
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
    assert len(Ledger(path, silent)) == 2


def test_lines_that_are_no_replies_are_passed_over(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.write_bytes(b'\x00\x00\x00\n[]\n{"digest": "zz"}\nnot json\n')
    assert len(Ledger(path, silent)) == 0


def test_a_listener_that_cannot_write_stops_the_caller(tmp_path):
    def full(kind, **fields):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        keep(tmp_path / "replies.jsonl", reply(1), emit=full)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another folder"):
        Ledger(tmp_path / "file" / "replies.jsonl", silent)


def test_an_event_alone_writes_no_reply(tmp_path):
    told = []

    async def record():
        ledger = Ledger(tmp_path / "replies.jsonl", lambda kind, **fields: told.append(fields))
        await ledger.record({"status": "500"})

    asyncio.run(record())
    assert told == [{"status": "500"}]
    assert (tmp_path / "replies.jsonl").read_bytes() == b""


def test_a_reply_is_one_line_of_json(tmp_path):
    keep(tmp_path / "replies.jsonl", reply(1, "a\nb\u2028c"))
    (line,) = (tmp_path / "replies.jsonl").read_text().splitlines()
    assert json.loads(line)["text"] == "a\nb\u2028c"
