"""The rows of bench/peers.py that need no environment of peers, on few documents and few chats."""

import pytest

from bench import peers
from tests.support.servers.fake_openai import own_process


def rounds_of(side, folder, count=1):
    """What a side tells of its rounds: (work, more figures)."""
    told = []
    side(folder, iter([None] * count), lambda work, **more: told.append((work, more)))
    return told


def test_near_copies_are_found_and_nothing_else(tmp_path):
    peers.write_copies(tmp_path / "copies" / "documents.parquet", 300, 100)
    [(documents, figures)] = rounds_of(peers.duplicates_ours, tmp_path)
    assert documents == 400
    assert 90 <= figures["dropped"] <= 100


@pytest.mark.heavy
@pytest.mark.parametrize("side", [peers.chats_ours, peers.chats_peer])
def test_each_round_asks_the_server_for_every_chat(tmp_path, monkeypatch, side):
    monkeypatch.setattr(peers, "CHATS", 40)
    with own_process(faults=peers.FAULTS) as server:
        (tmp_path / "server").write_text(server.url)
        assert rounds_of(side, tmp_path, 2) == [(40, {"answered": 40})] * 2
        assert server.counts()["answered"] == 80
