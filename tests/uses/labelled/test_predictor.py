"""Folders that give no labels are refused before their weights are read."""

import pytest

from nautile.common.errors import ConfigError
from nautile.data.label_set import LabelSet, write_label_set
from nautile.uses.labelled.predictor import LabelPredictor


def test_a_checkpoint_that_was_not_tuned_for_labels_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no labels\.json, so it cannot classify"):
        LabelPredictor(tmp_path, 4)
    write_label_set(tmp_path, LabelSet(form="chat", method="full"))
    with pytest.raises(ConfigError, match="was tuned for chat, so it cannot classify"):
        LabelPredictor(tmp_path, 4)
