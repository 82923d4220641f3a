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
    store, made = Store(tmp_path / "store"), {}
    for seed, name in enumerate(("web", "synth")):
        folder = write_tokens(store.staging(key_of(name)) / "output" / "tokens", seed)
        given = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
        made[name] = store.publish("tokens", key_of(name), folder, **given).id
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_publish_what_one_does(inputs, tmp_path, monkeypatch):
    parts = {"pretrain": pod_settings(4).model_dump(mode="json"), "model": MODEL.model_dump(mode="json"), "seed": 0}
    found = {}
    for processes, devices in ((2, 4), (1, 8)):
        store = Store(tmp_path / "store")
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(devices))
        launch = LaunchConfig(processes=processes)
        context = RunContext(f"r{processes}", str(store.root), force=processes == 1, launch=launch)
        made = store.get(run_stage(pretrain, parts, inputs, context)["checkpoint"])
        load_weights(made.path)
        found[processes] = made.manifest["facts"]
    two, one = found[2], found[1]
    assert two["devices"] == one["devices"] == "8 x cpu"
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    assert two["targets"] == one["targets"]
    catalog = Catalog(store)
    catalog.ingest()
    steps = catalog.query(
        "SELECT execution, count(*) AS n, count(DISTINCT step) AS steps FROM metrics "
        "WHERE name = 'loss' AND source IS NULL GROUP BY execution"
    )
    assert [(row["n"], row["steps"]) for row in steps] == [(12, 12), (12, 12)], json.dumps(steps)
