"""A key that a server repeats in its replies, its errors and its batch results is in nothing that is written."""

import logging

import pytest

from nautile.common.retry import Backoff
from nautile.configs.endpoint import BatchConfig, EndpointConfig
from nautile.data.endpoints import batch as batches
from nautile.data.endpoints import circuit_breaker
from nautile.data.endpoints.chat_types import ChatRequest
from nautile.data.endpoints.pool import EndpointPool
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from tests.support.servers.fake_openai import FakeOpenAI

KEY = "sk-planted-3141592653589793"


@pytest.mark.parametrize(("kind", "mode"), [("openai", "live"), ("mistral", "batch")])
def test_a_planted_key_is_in_no_file_no_row_and_no_log(tmp_path, monkeypatch, caplog, kind, mode):
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(first_s=0.01))
    monkeypatch.setattr(batches, "LINGER_S", 0.02)
    monkeypatch.setenv("PLANTED_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    store = Store(tmp_path / "store")
    writer = EventWriter(store.root / "events" / "one.jsonl", "e1", stage="distill", live=tmp_path / "live.json")
    faults = {0: "500", 2: "400", 3: "cut"}

    def reply(body):
        # Faults go by arrival: at most one of these gets the status that is not tried again.
        return f"you said {KEY}" if body["messages"][0]["content"] in "145" else "nothing"

    with FakeOpenAI(key=KEY, reply=reply, faults=faults.get, fault_message=f"no, {KEY}") as server:
        server.batches.row_fault = lambda text, times: {"0": "500", "2": "400"}.get(text) if times == 1 else None
        batch = BatchConfig(poll_s=0.02)
        fields = {"url": server.url, "key_variable": "PLANTED_KEY", "mode": mode, "batch": batch, "timeout_s": 5.0}
        config = EndpointConfig(kind=kind, model="fake", **fields)
        requests = [ChatRequest("t", ({"role": "user", "content": str(i)},), 20) for i in range(6)]
        with EndpointPool({"t": config}, tmp_path / "replies", writer) as pool:
            pool.check()
            outcomes = pool.ask(requests)
        monkeypatch.setenv("PLANTED_KEY", f"{KEY}-of-another")
        with EndpointPool({"t": config}, tmp_path / "refused.jsonl", writer) as pool:
            outcomes += pool.ask(requests[:2])
    writer.close()
    catalog = Catalog(store)
    catalog.ingest()
    rows = catalog.query("SELECT * FROM calls")
    assert {row["status"] for row in rows} >= {"ok", "400", "500", "leaked_key"}
    assert any("[key]" in (row["error"] or "") for row in rows), "the server did repeat it"
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(path.name.startswith("catalog") for path in written)
    assert not [path for path, content in written.items() if b"you said" in content], "the reply is not kept"
    assert not [path for path, content in written.items() if KEY.encode() in content]
    assert KEY not in repr(rows) + repr(outcomes)
    # What the SDK's own HTTP client says at DEBUG is not ours; our loggers and every warning must not show it.
    ours = [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith(("nautile.data.", "nautile.store.")) or r.levelno > logging.INFO
    ]
    assert KEY not in "\n".join(ours)
