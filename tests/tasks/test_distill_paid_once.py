"""A distillation in a store, run in every way that must not pay again: the teacher counts what it was asked."""

import os

import pytest

from configs.distill import IndexConfig
from store.catalog import Catalog
from store.garbage import collect, find_garbage
from tasks.distill import distill
from tasks.engine.attempt import run_stage
from tasks.engine.stage import RunContext
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
