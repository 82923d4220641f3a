"""The tune stage: every method on labels, what a killed run keeps, the other forms, and rows that are refused."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.configs.keys import with_local_files
from nautile.data.label_set import read_label_set
from nautile.model.weights.files import load_weights
from nautile.tasks.engine.job import Job
from nautile.uses.classify.stage import classify
from nautile.uses.labelled.config import ClassifyConfig, TuneConfig
from nautile.uses.labelled.predictor import LabelPredictor
from nautile.uses.tune import tuner
from nautile.uses.tune.stage import tune
from tests.support.samples.labelled import labelled_records, write_checkpoint, write_records

TRAINED = {
    "instructions": "?",
    "epochs": 10,
    "batch_rows": 16,
    "optimizer": {"learning_rate": 0.02, "final_learning_rate": 0.0},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("rows") / "rows.jsonl", labelled_records(120))


def job(staging, checkpoint, table, events=None, **fields):
    defaults = {"data": str(table), "longest": 12, "shots": [4, 0], "seeds": 2, "baselines": []}
    config = TuneConfig.model_validate({**defaults, **fields})
    section = with_local_files({"tune": config.model_dump(mode="json")})
    seen = [] if events is None else events
    return Job("tune", "k" * 64, "e", section, {"checkpoint": checkpoint}, staging, lambda *e, **f: seen.append((e, f)))


def report_of(done):
    return json.loads((done.output("tuning") / "tuning.json").read_text())


@pytest.mark.slow
def test_a_head_with_its_baselines(tmp_path, checkpoint, table):
    done = job(tmp_path, checkpoint, table, baselines=["majority", "tfidf"])
    tune.work(done)
    report = report_of(done)
    assert report["labels"] == ["animal", "plant"]
    scores = {(arm["arm"], arm["shots"]): arm for arm in report["arms"]}
    assert set(scores) == {(name, shots) for name in ("head", "majority", "tfidf") for shots in (4, 0)}
    assert scores["tfidf", 0]["accuracy"]["value"] > 0.9 > 0.7 > scores["majority", 0]["accuracy"]["value"]
    assert [lead["over"] for lead in report["leads"]] == ["majority", "tfidf"]
    assert np.sum(report["confusion"]) == report["rows"]["test"]
    rows = pq.read_table(done.output("tuning") / "rows.parquet")
    predictor = LabelPredictor(done.output("checkpoint"), 4)
    probabilities = predictor.probabilities(rows["text"].to_pylist())
    np.testing.assert_allclose(probabilities.max(axis=1), rows["probability"].to_numpy(), atol=1e-4)
    assert predictor.labels.threshold == report["chosen"]["threshold"]
    card = (done.output("tuning") / "card.md").read_text()
    assert "TF-IDF + logistic regression" in card
    assert "What it may not be used for" in card


@pytest.mark.slow
def test_a_head_for_several_labels_of_a_text_and_its_answers(tmp_path, checkpoint):
    """A text names animals, plants, both or neither; the classifier gives what the report says."""
    animals, plants = labelled_records(240)[::2], labelled_records(240)[1::2]
    records = []
    for i in range(120):
        named = [r for r, is_in in ((animals[i], i % 2), (plants[i], i % 3 != 1)) if is_in]
        text = " ".join([r["text"] for r in named] or [f"{i} stone"])
        records.append({"text": text, "labels": [r["label"] for r in named]})
    table = write_records(tmp_path / "rows.jsonl", records)
    fields = {"multi_label": True, "shots": [0], "seeds": 1, "class_weights": "balanced"}
    done = job(tmp_path / "a", checkpoint, table, baselines=["majority", "tfidf"], **fields)
    tune.work(done)
    report = report_of(done)
    scores = {arm["arm"]: arm for arm in report["arms"]}
    assert scores["tfidf"]["micro_f1"]["value"] > 0.9 > scores["majority"]["micro_f1"]["value"]
    assert [part["label"] for part in report["recall"]] == ["animal", "plant"]
    labels = read_label_set(done.output("checkpoint"))
    assert (labels.multi_label, labels.threshold, len(labels.thresholds)) == (True, None, 2)
    card = (done.output("tuning") / "card.md").read_text()
    assert "Whole set right" in card
    assert "From the probability" in card
    assert "rows counted by label" in card
    section = {"texts": {"reader": "jsonl", "path": str(table)}, "gold_column": "labels", "rows_at_once": 16}
    section = with_local_files({"classify": ClassifyConfig.model_validate(section).model_dump(mode="json")})
    asked = Job("classify", "k" * 64, "e", section, {"checkpoint": done.output("checkpoint")}, tmp_path / "b", silent)
    classify.work(asked)
    rows = pq.read_table(asked.output("labelled") / "rows.parquet").to_pylist()
    for row in rows:
        shares = row["probabilities"]
        given = [label for label, t in zip(labels.labels, labels.thresholds, strict=True) if shares[label] >= t]
        assert row["labels"] == given
    summary = json.loads((asked.output("labelled") / "summary.json").read_text())
    assert summary["labelled"] == {label: sum(label in row["labels"] for row in rows) for label in labels.labels}
    assert summary["abstained"] == sum(not row["labels"] for row in rows)
    assert 0 <= summary["micro_f1"]["low"] <= summary["micro_f1"]["value"] <= 1
    assert [part["label"] for part in summary["recall"]] == ["animal", "plant"]


@pytest.mark.heavy
def test_all_weights_learn_the_labels_and_what_is_done_is_kept(tmp_path, checkpoint, table, monkeypatch):
    real, calls = tuner.fine_tune, []

    def counted(*arguments):
        calls.append(arguments[4])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(tuner, "fine_tune", counted)
    events = []
    done = job(tmp_path, checkpoint, table, events, method="full", shots=[0], **TRAINED)
    with pytest.raises(KeyboardInterrupt):
        tune.work(done)
    tune.work(done)
    assert calls == [0, 1, 1]
    assert not list(done.scratch.glob("states-*"))
    report = report_of(done)
    assert report["arms"][0]["accuracy"]["value"] > 0.9
    assert report["arms"][0]["ece"] < 0.2
    predictor = LabelPredictor(done.output("checkpoint"), 4)
    assert predictor.labels.labels[int(predictor.probabilities(["7 oak"]).argmax())] == "plant"
    assert {"loss, all shots, seed 0", "loss, all shots, seed 1"} <= {f.get("name") for _, f in events}


def test_the_learning_rate_is_chosen_by_the_validation_rows_alone(tmp_path, checkpoint, table, monkeypatch):
    """The trained weights are stood for by their rate, so that nothing is trained; a killed search repeats no rate."""
    sharpness, trained, asked = {0.1: 0.5, 0.01: 5.0, 0.001: 0.1}, [], []

    def fine_tune(params, model, rows, settings, seed, folder, identity, emit):
        if len(trained) == 1:
            trained.append("killed")
            raise KeyboardInterrupt
        trained.append((settings.optimizer.learning_rate, seed))
        folder.mkdir(parents=True)
        return settings.optimizer.learning_rate, [0.0]

    def likelihoods(self, params, labels, rows):
        asked.append(len(rows))
        wrong = np.arange(len(rows)) % 7 == 0  # so that a sharper answer is not better without end
        return np.eye(2)[(self.targets(rows) + wrong) % 2] * sharpness[params] + 1e-3

    monkeypatch.setattr(tuner, "fine_tune", fine_tune)
    monkeypatch.setattr(tuner.LabelTuner, "_likelihoods", likelihoods)
    monkeypatch.setattr(tuner, "save_weights", lambda *_: None)
    done = job(tmp_path, checkpoint, table, method="full", shots=[4], learning_rates=list(sharpness), **TRAINED)
    with pytest.raises(KeyboardInterrupt):
        tune.work(done)
    tune.work(done)
    report = report_of(done)
    losses = report["learning_rates"]["4"]
    best = float(min(losses, key=losses.__getitem__))
    assert trained == [(0.1, 0), "killed", (0.01, 0), (0.001, 0), (best, 0), (best, 1)]
    counts = report["rows"]
    assert asked == [counts["validation"]] * 3 + [counts["validation"], counts["test"]] * 2
    assert any(f"Learning rate at 4 shots: {best:g}" in note for note in report["notes"])


@pytest.mark.slow
def test_labels_by_likelihood_with_and_without_examples(tmp_path, checkpoint, table):
    done = job(tmp_path, checkpoint, table, method="verbalised", shots=[0, 1], longest=8, most_asked=8)
    tune.work(done)
    report = report_of(done)
    assert [arm["shots"] for arm in report["arms"]] == [0, 1]
    labels = read_label_set(done.output("checkpoint"))
    assert labels.instructions.count("Label: ") == 2
    probabilities = LabelPredictor(done.output("checkpoint"), 4).probabilities(
        pq.read_table(done.output("tuning") / "rows.parquet")["text"].to_pylist()
    )
    shown = pq.read_table(done.output("tuning") / "rows.parquet")["probability"].to_numpy()
    np.testing.assert_allclose(probabilities.max(axis=1), shown, atol=1e-4)


@pytest.mark.heavy
def test_entities_are_learnt_as_json_by_adapters(tmp_path, checkpoint):
    records = [
        {"text": f"{i} {word}", "entities": [{"text": word, "label": "X"}]}
        for i in range(20)
        for word in ("cat", "oak")
    ]
    table = write_records(tmp_path / "rows.jsonl", records)
    done = job(tmp_path, checkpoint, table, form="entities", method="lora", shots=[0], seeds=1, longest=10, **TRAINED)
    tune.work(done)
    report = report_of(done)
    assert report["arms"][0]["loss"] < report["before"]["test"]
    assert report["arms"][0]["spans"][0]["rows"] == report["rows"]["test"]
    assert read_label_set(done.output("checkpoint")).labels == ("X",)
    load_weights(done.output("checkpoint"))


@pytest.mark.heavy
def test_shares_of_people_beside_uniform_and_mean(tmp_path, checkpoint):
    records = [
        {"prompt": f"{i} {who}", "options": ["yes", "no"], "shares": [0.9, 0.1] if who == "cat" else [0.7, 0.3]}
        for i in range(20)
        for who in ("cat", "oak")
    ]
    table = write_records(tmp_path / "rows.jsonl", records)
    fields = {"form": "opinions", "method": "full", "shots": [0], "seeds": 1, "learning_rates": [1e-6, 0.02], **TRAINED}
    done = job(tmp_path, checkpoint, table, **fields)
    tune.work(done)
    report = report_of(done)
    assert report["learning_rates"]["0"]["0.02"] < report["learning_rates"]["0"]["1e-06"]
    assert report["arms"][0]["loss"] < report["before"]["test"]
    assert report["baselines"]["mean_human"] < report["baselines"]["uniform"]
    assert report["unit"] == "nats per question (KL)"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "new", "label": "once"}], "occur once, such as 'once' in row 121"),
        ([{"text": " ", "label": "plant"}], "row 121: the text in column 'text' is empty"),
    ],
)
def test_rows_that_are_refused_before_the_weights_are_read(tmp_path, records, message):
    table = write_records(tmp_path / "rows.jsonl", labelled_records(120) + records)
    with pytest.raises(ConfigError, match=message):
        tune.work(job(tmp_path, tmp_path / "no checkpoint", table))


def test_a_file_that_changed_after_the_key_was_taken(tmp_path):
    table = write_records(tmp_path / "rows.jsonl", labelled_records(120))
    late = job(tmp_path, tmp_path / "no checkpoint", table)
    write_records(table, labelled_records(60))
    with pytest.raises(ConfigError, match="has changed since its digest was taken"):
        tune.work(late)
