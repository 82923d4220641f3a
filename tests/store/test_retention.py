"""Which live artifacts the rules retire, and that lineage and reuse never break by it."""

import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.files import write_json
from configs.operation import RetentionConfig
from store.artifacts import Store
from store.catalog import Catalog
from store.garbage import collect, find_garbage
from tests.support.stage_store import key_of, published


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    return store


@pytest.fixture
def made(store, monkeypatch):
    """`made(word, days=3, reads=[…])` publishes an artifact that is three days old."""

    def make(word, kind="checkpoint", days=0.0, reads=(), **fields):
        moment = (datetime.now(UTC) - timedelta(days=days)).isoformat()
        monkeypatch.setattr("store.artifacts.now", lambda: moment)
        inputs = {f"in{i}": one for i, one in enumerate(reads)}
        artifact = published(store, kind, word, inputs=inputs, execution=key_of(word)[:32], **fields)
        store.discard(store.root / "staging" / artifact.key)
        return artifact

    return make


def retired(store, **rules):
    found = find_garbage(store, rules=RetentionConfig(**rules))
    return {item.artifact.manifest["config"]["word"] for item in found}


def test_without_rules_no_live_artifact_goes(store, made):
    made("old", days=1000)
    assert retired(store) == set()
    assert retired(store, kinds=("report",)) == set()


def test_the_newest_of_each_label_stay_with_all_they_were_made_from(store, made):
    text = made("text", "tokens", days=90, label="ingest")
    unused = made("unused", "tokens", days=80, label="ingest")
    spare = made("spare", "tokens", days=70, label="ingest")
    runs = [made(f"run{i}", days=60 - i, reads=[text], label="align") for i in range(4)]
    made("other", days=300, reads=[unused], label="reason")
    made("score", "evaluation", days=50, reads=[runs[1]], label="evaluate:align")
    assert retired(store, newest=1) == {"run0", "run2"}
    assert retired(store, newest=2) == {"run0"}
    assert retired(store, newest=1, days=58.5) == {"run0"}
    assert retired(store, days=65) == {"other", "unused", "spare"}
    assert retired(store, days=0, kinds=("evaluation",)) == {"run0", "run2", "run3", "other", "unused", "spare"}
    assert retired(store, days=0, pins=(runs[2].id,)) >= {"run0", "run1", "run3", "score", "spare"}
    assert spare.id in {a.id for a in store.list()}
    with pytest.raises(ConfigError, match="no artifact 'checkpoint/ffff'"):
        find_garbage(store, rules=RetentionConfig(newest=1, pins=("checkpoint/ffff",)))


def test_what_one_execution_published_stays_or_goes_together(store, made):
    made("both", "checkpoint", days=9, outputs=("checkpoint", "rollouts"))
    made("both", "rollouts", days=9, outputs=("checkpoint", "rollouts"))
    rollouts = store.list("rollouts")[0]
    made("reads", "report", days=1, reads=[rollouts])
    assert retired(store, days=5) == set()
    assert retired(store, days=0) == {"both", "reads"}
    assert retired(store, days=0, kinds=("checkpoint",)) == {"reads"}


def test_what_unfinished_or_running_work_reads_stays(store, made):
    text = made("text", "tokens", days=90)
    base = made("base", days=80, reads=[text])
    busy = made("busy", days=70)
    write_json(
        store.staging(key_of("next")) / "execution.json", {"execution": "e", "inputs": {"x": base.manifest["digest"]}}
    )
    with store.lock(busy.key):
        assert retired(store, days=1) == set()
    assert retired(store, days=1) == {"busy"}


def test_a_dry_run_says_what_goes_and_what_it_frees(store, made):
    from flows.cli import inspect

    old, new = made("old", days=9), made("new", days=1)
    Catalog(store).ingest()
    rows = inspect.garbage(store, 7.0, True, RetentionConfig(days=5))
    assert rows == inspect.garbage(store, 7.0, True, RetentionConfig(days=5))
    assert [(row["path"], row["why"]) for row in rows] == [
        (f"artifacts/checkpoint/{old.key}", "retired by the rules, 9 days old")
    ]
    assert rows[0]["bytes"] > old.bytes
    assert inspect.garbage(store, 7.0, False, RetentionConfig(days=5)) == rows
    assert [artifact.id for artifact in store.list()] == [new.id]
    assert [row["id"] for row in Catalog(store).query("SELECT id FROM artifacts")] == [new.id]


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 3), st.none() | st.floats(0, 40))
def test_no_rule_breaks_a_lineage(tmp_path_factory, seed, newest, days):
    rng = random.Random(seed)
    store = Store(tmp_path_factory.mktemp("kept") / "store")
    store.prepare()
    artifacts = []
    for index in range(8):
        reads = rng.sample(artifacts, min(len(artifacts), rng.randrange(3)))
        inputs = {f"in{i}": one for i, one in enumerate(reads)}
        word = f"{rng.randrange(9)}"
        options = {"label": rng.choice("abc"), "supersede": True, "execution": f"e{index}"}
        artifacts.append(published(store, "tokens", word, {"a.txt": str(index)}, inputs=inputs, **options))
        artifacts = store.list()
    rules = RetentionConfig(newest=newest, days=None if days is None else days / 1e6)
    collect(store, find_garbage(store, rules=rules))
    left = store.list(superseded=True)
    there = {(a.kind, a.key, a.execution) for a in left}
    for artifact in left:
        for name, full_id in artifact.manifest["inputs"].items():
            assert (*full_id.split("/"), artifact.manifest["input_executions"][name]) in there
    assert find_garbage(store, rules=RetentionConfig(newest=newest)) == [] or days is not None
