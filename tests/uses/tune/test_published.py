"""A tuned checkpoint that is published: its card has the tuning's scores, its folder is a classifier."""

import json
import re
import shutil

import pytest

from nautile.data.label_set import HEAD, read_label_set
from nautile.flows.operate.publish import write_model
from nautile.store.artifacts import Store
from nautile.store.manifest import stage_key
from nautile.uses.tune.stage import tune
from tests.support.samples.labelled import labelled_records, write_checkpoint, write_records
from tests.uses.tune.test_stage import job, report_of

pytestmark = pytest.mark.slow


def stored(root, records, **fields):
    """A store with a checkpoint tuned on a file, its checkpoint and the tuning's report."""
    table = write_records(root / "secret-rows.jsonl", records)
    done = job(root, write_checkpoint(root / "start"), table, shots=[0], seeds=2, **fields)
    tune.work(done)
    store = Store(root / "store")
    store.prepare()
    key = stage_key("tune", 1, {"name": "toy"}, {})
    about = {"stage": "tune", "version": 1, "inputs": {}, "execution": "t1", "outputs": ("checkpoint", "tuning")}
    for kind in about["outputs"]:
        folder = store.staging(key) / kind
        shutil.copytree(done.output(kind), folder)
        store.publish(kind, key, folder, config=done.section, facts={}, **about)
    return store, store.find("checkpoint", key), report_of(done)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("published"), labelled_records(240), baselines=["majority", "tfidf"])


def card_of(store, artifact, folder, out, format_="transformers"):
    return (write_model(store, artifact, folder, out, "me/topics", format_) / "README.md").read_text()


def test_the_card_has_task_data_scores_and_the_call(published, tmp_path):
    store, artifact, report = published
    card = card_of(store, artifact, artifact.path, tmp_path / "out")
    own = next(arm for arm in report["arms"] if arm["arm"] == "head")
    assert "pipeline_tag: text-classification\n" in card
    assert "a local file (jsonl)" in card
    assert "secret-rows" not in card  # the names of the operator's files stay here
    values = [100 * own["accuracy"][name] for name in ("value", "low", "high")]
    assert re.search(r"\*\*Accuracy\*\* on (\d+) test rows: {:.1f} \[{:.1f}, {:.1f}\] %".format(*values), card)
    assert f"**Calibration error**: {100 * own['ece']:.1f} points" in card
    assert "logistic regression on TF-IDF" in card
    assert "the most frequent label" in card
    threshold = report["chosen"]["threshold"]
    assert f"below a probability of {threshold:.4f} the answer is no label" in card
    assert f"{100 * own['coverage']:.0f} % of the test rows are above it" in card
    assert f"| train | {report['rows']['train']} |" in card
    assert 'pipeline("text-classification", "me/topics", trust_remote_code=True)' in card
    assert f"value: {round(values[0], 2):g}" in card or f"value: {round(values[0], 2)}" in card


def test_scores_that_are_not_recorded_are_not_claimed(published, tmp_path):
    """As of a head that was imported: its folder has no tuning."""
    store, artifact, _ = published
    card = card_of(store, None, shutil.copytree(artifact.path, tmp_path / "copy"), tmp_path / "out")
    assert "The rows that it was tuned on, and its scores on them, are not recorded." in card
    assert "**Accuracy**" not in card
    assert "**Threshold**: below a probability of" in card


def test_the_published_files_hold_the_classifier(published, tmp_path):
    store, artifact, _ = published
    card_of(store, artifact, artifact.path, tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["architectures"] == ["NautileForSequenceClassification"]
    labels = read_label_set(artifact.path)
    assert settings["classifier"]["threshold"] == labels.threshold
    assert (artifact.path / HEAD).exists()
    modes = {path.name: path.stat().st_mode & 0o044 for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {(artifact.path / HEAD).stat().st_mode & 0o044}


def test_the_card_of_several_labels_has_the_threshold_of_each(tmp_path):
    rows = [{"text": row["text"], "labels": [row["label"]]} for row in labelled_records(120)]
    store, artifact, _ = stored(tmp_path, rows, multi_label=True)
    card = card_of(store, artifact, artifact.path, tmp_path / "out")
    assert re.search(r"\*\*Whole set of labels right\*\* on \d+ test rows: ", card)
    first, second = read_label_set(artifact.path).thresholds
    assert f"`animal` {first:.4f}, `plant` {second:.4f}. `pipeline` does not apply them." in card
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["problem_type"] == "multi_label_classification"
    assert settings["classifier"]["thresholds"] == [first, second]
