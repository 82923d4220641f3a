"""The stage `pretrain` as two processes that the launcher starts."""

import json

import numpy as np
import pytest

from nautile.configs.operation import LaunchConfig
from nautile.model.weights.files import load_weights
from nautile.store.artifacts import Store
from nautile.store.catalog import Catalog
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext
from nautile.tasks.pretrain import pretrain
from tests.support.processes.pod import pod_settings
from tests.support.processes.training import MODEL, write_tokens
from tests.support.samples.stage_store import key_of


@pytest.fixture
def inputs(tmp_path):
    """Two token sources, published."""
    store, artifacts = Store(tmp_path / "store"), {}
    for seed, name in enumerate(("web", "synth")):
        folder = write_tokens(store.staging(key_of(name)) / "output" / "tokens", seed)
        fields = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
        artifacts[name] = store.publish("tokens", key_of(name), folder, **fields).id
    return artifacts


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_two_processes_train_and_publish_together(inputs, tmp_path, monkeypatch):
    """That they compute what a single process does: tests/model/training/test_pod.py."""
    parts = {
        "pretrain": pod_settings(2, sample_every=6).model_dump(mode="json"),
        "model": MODEL.model_dump(mode="json"),
    }
    store = Store(tmp_path / "store")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    context = RunContext("r2", str(store.root), launch=LaunchConfig(processes=2))
    checkpoint = store.get(run_stage(pretrain, parts, inputs, context)["checkpoint"])
    load_weights(checkpoint.path)
    facts = checkpoint.manifest["facts"]
    assert facts["devices"] == "4 x cpu"
    assert facts["train_loss"] < np.log(MODEL.vocabulary)
    catalog = Catalog(store)
    catalog.ingest()
    steps = catalog.query(
        "SELECT execution, count(*) AS n, count(DISTINCT step) AS steps FROM metrics "
        "WHERE name = 'loss' AND source IS NULL GROUP BY execution"
    )
    assert [(row["n"], row["steps"]) for row in steps] == [(12, 12)], json.dumps(steps)
