"""What a tuning leaves in its work folder, without a model."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.data.label_set import LabelSet
from nautile.uses.labelled.config import TuneConfig
from nautile.uses.labelled.rows import LabelledRow
from nautile.uses.tune.tuner import LabelTuner, class_weights, row_weights


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


def test_rows_count_by_the_weight_of_their_label():
    targets = np.array([0, 0, 0, 1])
    assert row_weights(targets, "balanced") == pytest.approx([4 / 6, 4 / 6, 4 / 6, 2])
    assert row_weights(targets, [1.0, 5.0]) == [1.0, 1.0, 1.0, 5.0]
    config = TuneConfig.model_validate({"data": "rows.csv", "class_weights": {"rare": 3}})
    assert class_weights(config, ("common", "rare")) == [1.0, 3.0]
    with pytest.raises(ConfigError, match="class_weights: no training row has the label 'rare'; there are a, b"):
        class_weights(config, ("a", "b"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"multi_label": True, "method": "lora"}, "several labels need form 'label' and method 'head'"),
        ({"multi_label": True, "accuracy": 0.9}, "with tune.multi_label the model has none"),
        ({"label_threshold": 0.5}, "label_threshold is for tune.multi_label"),
        ({"class_weights": "balanced", "method": "verbalised"}, "method 'verbalised' trains nothing"),
        ({"class_weights": "balanced", "method": "lora", "form": "chat"}, "form 'chat', which has no classes"),
        ({"class_weights": {"a": 0}}, "greater than 0"),
    ],
)
def test_weights_and_several_labels_where_they_have_no_sense(fields, message):
    with pytest.raises(ValidationError, match=message):
        TuneConfig.model_validate({"data": "rows.csv", **fields})
