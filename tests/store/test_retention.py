"""Which live artifacts retention rules let go; lineage and reuse stay whole."""

import random
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.configs.operation import RetentionConfig
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.garbage import collect, find_garbage
from nautile.store.manifest import host
from tests.support.samples.stage_store import key_of, published


@pytest.fixture
def publish(store, monkeypatch):
    """`publish(word, days=3, reads=[…])` publishes an artifact that is three days old."""

    def publish(word, kind="checkpoint", days=0.0, reads=(), **fields):
        moment = (datetime.now(UTC) - timedelta(days=days)).isoformat()
        monkeypatch.setattr("nautile.store.artifacts.now", lambda: moment)
        inputs = {f"in{i}": artifact for i, artifact in enumerate(reads)}
        artifact = published(store, kind, word, inputs=inputs, execution=key_of(word)[:32], **fields)
        store.discard(store.root / "staging" / artifact.key)
        return artifact

    return publish


def retired(store, **rules):
    """The words of the live artifacts that the rules let go."""
    garbage = find_garbage(store, rules=RetentionConfig(**rules))
    return {item.artifact.manifest["config"]["word"] for item in garbage}


def test_the_newest_of_each_label_stay_with_everything_they_were_made_from(store, publish):
    text = publish("text", "tokens", days=90, label="ingest")
    unused = publish("unused", "tokens", days=80, label="ingest")
    spare = publish("spare", "tokens", days=70, label="ingest")
    runs = [publish(f"run{i}", days=60 - i, reads=[text], label="align") for i in range(4)]
    publish("other", days=300, reads=[unused], label="reason")
    publish("score", "evaluation", days=50, reads=[runs[1]], label="evaluate:align")
    assert retired(store, newest=1) == {"run0", "run2"}
    assert retired(store, newest=2) == {"run0"}
    assert retired(store, newest=1, days=58.5) == {"run0"}
    assert retired(store, days=65) == {"other", "unused", "spare"}
    assert retired(store, days=0, kinds=("evaluation",)) == {"run0", "run2", "run3", "other", "unused", "spare"}
    assert retired(store, days=0, pins=(runs[2].id,)) >= {"run0", "run1", "run3", "score", "spare"}
    assert spare.id in {a.id for a in store.list()}
    with pytest.raises(ConfigError, match="no artifact 'checkpoint/ffff'"):
        find_garbage(store, rules=RetentionConfig(newest=1, pins=("checkpoint/ffff",)))


def test_artifacts_of_one_execution_stay_or_go_together(store, publish):
    publish("both", "checkpoint", days=9, outputs=("checkpoint", "rollouts"))
    publish("both", "rollouts", days=9, outputs=("checkpoint", "rollouts"))
    rollouts = store.list("rollouts")[0]
    publish("reads", "report", days=1, reads=[rollouts])
    assert retired(store, days=5) == set()
    assert retired(store, days=0) == {"both", "reads"}
    assert retired(store, days=0, kinds=("checkpoint",)) == {"reads"}


def test_inputs_of_unfinished_work_and_locked_keys_stay(store, publish):
    text = publish("text", "tokens", days=90)
    base = publish("base", days=80, reads=[text])
    busy = publish("busy", days=70)
    write_json(
        store.staging(key_of("next")) / "execution.json", {"execution": "e", "inputs": {"x": base.manifest["digest"]}}
    )
    with store.lock(busy.key):
        assert retired(store, days=1) == set()
    assert retired(store, days=1) == {"busy"}


PLAN = {"id": "p", "run": "r1", "state": "running", "started": "2026-01-02T03:04:05+00:00", "host": host()}


def planned(store, *artifacts, reads=(), **fields):
    """A run that plans to make these artifacts, and to read others."""
    steps = [{"label": "x", "stage": "x", "key": artifact.key, "inputs": [], "after": []} for artifact in artifacts]
    steps += [{"label": "y", "stage": "y", "key": "0" * 64, "inputs": [other.full_id], "after": []} for other in reads]
    emit = EventWriter(store.root / "events" / f"plan-{len(list(store.root.rglob('*.jsonl')))}.jsonl", "")
    emit("plan", **PLAN | {"steps": steps} | fields)
    emit.close()


def test_what_a_run_plans_that_has_not_ended_stays(store, publish, monkeypatch):
    text = publish("text", "tokens", days=90, label="ingest")
    old = publish("old", days=80, reads=[text], label="pretrain")
    start = publish("start", days=70, label="tune")
    for index in range(2):
        publish(f"new{index}", days=3, label="pretrain")
        publish(f"newer{index}", days=3, label="tune")
        publish(f"text{index}", "tokens", days=3, label="ingest")
    rules = {"newest": 2}
    assert retired(store, **rules) == {"text", "old", "start"}
    # At work, or waiting for a slot: its process lives.
    planned(store, old, reads=[start])
    with store.run_lock("r1"):
        assert retired(store, **rules) == set()
    assert retired(store, **rules) == {"text", "old", "start"}, "its process was killed"
    planned(store, old, reads=[start], host="another")
    assert retired(store, **rules) == set(), "what another machine does is not known"
    # Waiting for an approval: without a process.
    planned(store, old, state="suspended", ended="2026-01-02T03:04:06+00:00")
    assert retired(store, **rules) == {"start"}
    monkeypatch.setattr("nautile.store.garbage.STALE_DAYS", -1.0)
    assert retired(store, **rules) == {"text", "old", "start"}, "long ago, and nobody is asked any more"
    store.questions.mkdir()
    write_json(store.questions / "r1.json", {"run": "r1"})
    assert retired(store, **rules) == {"start"}, "it waits for an answer, however long"
    planned(store, old, reads=[start], id="later", state="done", started="2026-01-03T03:04:05+00:00")
    assert retired(store, **rules) == {"text", "old", "start"}


def test_what_a_run_begins_to_need_during_a_collection_stays(store, publish, monkeypatch):
    monkeypatch.setattr("nautile.store.garbage.ASK_AGAIN_S", -1.0)
    old, older = publish("old", days=8), publish("older", days=9)
    items = find_garbage(store, rules=RetentionConfig(days=5))
    assert len(items) == 2
    planned(store, old)
    with store.run_lock("r1"):
        assert [item.artifact for item in collect(store, items)] == [older]
    assert store.list() == [old]


def test_a_replaced_version_that_unfinished_work_reads_stays(store, publish):
    old = publish("text", "tokens", days=3)
    published(store, "tokens", "text", {"a.txt": "new"}, supersede=True)
    assert len(find_garbage(store)) == 1
    record = {"execution": "e", "inputs": {"x": old.manifest["digest"]}}
    write_json(store.staging(key_of("next")) / "execution.json", record)
    assert find_garbage(store) == []


def test_a_dry_run_lists_what_would_be_removed_and_frees_nothing(store, publish):
    from nautile.flows.cli import inspect

    old, new = publish("old", days=9), publish("new", days=1)
    Catalog(store).ingest()
    rows = inspect.garbage(store, 7.0, True, RetentionConfig(days=5), (), ())
    assert rows == inspect.garbage(store, 7.0, True, RetentionConfig(days=5), (), ())
    assert [(row["path"], row["why"]) for row in rows] == [
        (f"artifacts/checkpoint/{old.key}", "retired by the rules, 9 days old")
    ]
    assert rows[0]["bytes"] > old.bytes
    assert inspect.garbage(store, 7.0, False, RetentionConfig(days=5), (), ()) == rows
    assert [artifact.id for artifact in store.list()] == [new.id]
    assert [row["id"] for row in Catalog(store).query("SELECT id FROM artifacts")] == [new.id]


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 3), st.none() | st.floats(0, 40))
def test_no_rule_breaks_a_lineage(tmp_path_factory, seed, newest, days):
    rng = random.Random(seed)
    store = Store(tmp_path_factory.mktemp("kept") / "store")
    store.prepare()
    artifacts = []
    for index in range(8):
        word = f"{rng.randrange(9)}"
        others = [artifact for artifact in artifacts if artifact.key != key_of(word)]  # no key is its own input
        reads = rng.sample(others, min(len(others), rng.randrange(3)))
        inputs = {f"in{i}": artifact for i, artifact in enumerate(reads)}
        options = {"label": rng.choice("abc"), "supersede": True, "execution": f"e{index}"}
        artifacts.append(published(store, "tokens", word, {"a.txt": str(index)}, inputs=inputs, **options))
        artifacts = store.list()
    rules = RetentionConfig(newest=newest, days=None if days is None else days / 1e6)
    collect(store, find_garbage(store, rules=rules))
    left = store.list(superseded=True)
    present = {(a.kind, a.key, a.execution) for a in left}
    for artifact in left:
        for name, full_id in artifact.manifest["inputs"].items():
            assert (*full_id.split("/"), artifact.manifest["input_executions"][name]) in present
    assert find_garbage(store, rules=RetentionConfig(newest=newest)) == [] or days is not None
