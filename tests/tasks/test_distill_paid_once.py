"""A distillation in a store, run in every way that must not pay again: the teacher counts what it was asked."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from nautile.configs.distill import IndexConfig
from nautile.store.catalog import Catalog
from nautile.store.garbage import collect, find_garbage
from nautile.tasks.distill import distill
from nautile.tasks.engine import attempt
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from tests.support.samples.exemplar_index import index_exemplars
from tests.support.samples.stage_store import key_of
from tests.support.servers.fake_openai import FakeOpenAI

PROMPTS = int(os.environ.get("NAUTILE_TEST_PROMPTS", "60"))  # 1000 in a measurement
PRICES = {"dollars_per_million_in": 1.0, "dollars_per_million_out": 2.0}


@pytest.fixture
def retrieval(store, tmp_path):
    """The id of an index of eight exemplars."""
    folder = index_exemplars(tmp_path)
    return store.publish(
        "retrieval", key_of("index"), folder, stage="index", version=1, config={}, inputs={}, facts={}
    ).id


@pytest.mark.slow
def test_a_distillation_is_paid_for_once(store, retrieval):
    def run(server, run_id, force=True, ask_again=False, endpoint=None, **config):
        section = {
            "row_length": 128,
            "tokenizer": {"ranks": 400},
            "index": IndexConfig().model_dump(mode="json"),
            "distill": {"prompts": PROMPTS, "teachers": [{"endpoint": "t"}], **config},
            "endpoints": {"t": {"kind": "openai", "model": "fake", "url": server.url, **PRICES, **(endpoint or {})}},
        }
        context = RunContext(run_id, str(store.root), force, label="distill", ask_again=ask_again)
        return store.get(run_stage(distill, section, {"retrieval": retrieval}, context)["documents"])

    with FakeOpenAI(per_million=(1.0, 2.0)) as server, FakeOpenAI() as moved:
        first = run(server, "first", force=False)
        run(server, "the same", force=False)
        collect(store, find_garbage(store, stale_days=0))
        operated = {"concurrency": 3, "dollars_per_million_out": 9.0, "url": moved.url, "timeout_s": 33.0}
        forced = run(moved, "forced", endpoint=operated, budget_dollars=1e-9, max_rejected_share=0.9)
        less = run(server, "another key", prompts=PROMPTS - 9)
        assert (server.answered, moved.answered) == (PROMPTS, 0)
        assert first.manifest["facts"]["dollars"] == pytest.approx(server.dollars, rel=1e-3)
        for reused in (forced, less):
            facts = reused.manifest["facts"]
            assert (facts["dollars"], facts["budget_exhausted"]) == (0.0, False)
            assert facts["replies_reused"] == facts["prompts"]
        (row,) = Catalog(store).query("SELECT sum(dollars) AS paid, count(*) FILTER (NOT cached) AS sent FROM calls")
        assert (row["paid"], row["sent"]) == (pytest.approx(server.dollars), PROMPTS)
        if PROMPTS < 100:
            run(server, "again", ask_again=True)
            assert server.answered == 2 * PROMPTS


@pytest.mark.heavy
def test_two_hosts_with_two_configurations_that_start_together_pay_once(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "MIRROR_REPLIES_EVERY_S", 1.0)
    folder = index_exemplars(tmp_path)

    def run(store, prompts):
        source = shutil.copytree(folder, store.staging(key_of("index")) / "output")
        fields = {"stage": "index", "version": 1, "config": {}, "inputs": {}, "facts": {}}
        retrieval = store.publish("retrieval", key_of("index"), source, **fields)
        section = {
            "row_length": 128,
            "tokenizer": {"ranks": 400},
            "index": IndexConfig().model_dump(mode="json"),
            "distill": {"prompts": prompts, "teachers": [{"endpoint": "t"}]},
            "endpoints": {"t": {"kind": "openai", "model": "fake", "url": server.url, **PRICES}},
        }
        context = RunContext(f"{prompts} prompts", str(store.root), label="distill")
        return store.get(run_stage(distill, section, {"retrieval": retrieval.id}, context)["documents"])

    with FakeOpenAI(per_million=(1.0, 2.0), delay_s=0.1) as server, ThreadPoolExecutor(2) as hosts:
        made = list(hosts.map(run, (machine("a"), machine("b")), (20, 16)))
        assert server.answered == 20
    paid = sum(artifact.manifest["facts"]["dollars"] for artifact in made)
    assert paid == pytest.approx(server.dollars, rel=1e-3)
