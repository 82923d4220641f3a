"""What a tuning leaves in its work folder, without a model."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nautile.data.label_set import LabelSet
from nautile.uses.labelled.rows import LabelledRow
from nautile.uses.tune.tuner import LabelTuner


def test_the_bias_of_an_arm_is_on_disk_before_the_arm_counts_as_fitted(tmp_path, monkeypatch):
    # A power failure otherwise leaves an arm that is not fitted again, and an empty file beside it.
    row = LabelledRow("text", "a", "text", 1)
    tuner = LabelTuner.__new__(LabelTuner)
    splits = SimpleNamespace(train=[row])
    tuner.run = SimpleNamespace(work=tmp_path, params={}, splits=splits, config=SimpleNamespace(longest=128))
    tuner.label_set = LabelSet(form="label", method="verbalised", labels=("a", "b"))
    tuner.validation, tuner.test = [row], [row]
    monkeypatch.setattr(tuner, "_likelihoods", lambda *arguments: np.array([[1.0, 3.0]]), raising=False)
    sync, synced = os.fsync, []

    def record(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    tuner._fit("verbalised", 0, 0)
    assert np.load(tmp_path / "bias-0-0.npy").tolist() == [1.0, 3.0]
    assert any(path.name.startswith(".bias-0-0.npy") for path in synced)
    assert [path.name for path in tmp_path.iterdir()] == ["bias-0-0.npy"]
