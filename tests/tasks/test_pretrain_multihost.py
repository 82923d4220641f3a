"""The stage `pretrain` as two processes, started by the launcher, against one process with as many devices."""

import json

import pytest

from configs.operation import LaunchConfig
from model.weights.files import load_weights
from store.artifacts import Store
from store.catalog import Catalog
from tasks.engine.attempt import run_stage
from tasks.engine.stage import RunContext
from tasks.pretrain import pretrain
from tests.support.pod import pod_settings
from tests.support.stage_store import key_of
from tests.support.training import MODEL, write_tokens


@pytest.fixture
def inputs(tmp_path):
    """Two token sources, published."""
    store, artifacts = Store(tmp_path / "store"), {}
    for seed, name in enumerate(("web", "synth")):
        folder = write_tokens(store.staging(key_of(name)) / "output" / "tokens", seed)
        fields = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
        artifacts[name] = store.publish("tokens", key_of(name), folder, **fields).id
    return artifacts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_publish_what_one_does(inputs, tmp_path, monkeypatch):
    parts = {
        "pretrain": pod_settings(2, sample_every=6).model_dump(mode="json"),
        "model": MODEL.model_dump(mode="json"),
        "seed": 0,
    }
    facts = {}
    for processes, devices in ((2, 2), (1, 4)):
        store = Store(tmp_path / "store")
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(devices))
        launch = LaunchConfig(processes=processes)
        context = RunContext(f"r{processes}", str(store.root), force=processes == 1, launch=launch)
        checkpoint = store.get(run_stage(pretrain, parts, inputs, context)["checkpoint"])
        load_weights(checkpoint.path)
        facts[processes] = checkpoint.manifest["facts"]
    assert facts[2]["devices"] == facts[1]["devices"] == "4 x cpu"
    assert facts[2]["train_loss"] == pytest.approx(facts[1]["train_loss"], rel=1e-5)
    assert facts[2]["targets"] == facts[1]["targets"]
    catalog = Catalog(store)
    catalog.ingest()
    steps = catalog.query(
        "SELECT execution, count(*) AS n, count(DISTINCT step) AS steps FROM metrics "
        "WHERE name = 'loss' AND source IS NULL GROUP BY execution"
    )
    assert [(row["n"], row["steps"]) for row in steps] == [(12, 12), (12, 12)], json.dumps(steps)
