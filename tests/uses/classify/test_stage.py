"""Classification as a stage: a tuned head and labels by likelihood, abstention, a run that was killed, the command."""

import csv
import json
import statistics

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.common.events import silent
from nautile.configs.keys import with_local_files
from nautile.data.label_set import HEAD, LabelSet, save_head, write_label_set
from nautile.data.table import read_table
from nautile.data.tokenizer import tokenizer_for
from nautile.model.weights.files import load_weights
from nautile.tasks.engine.job import Job
from nautile.uses.classify import stage
from nautile.uses.classify.stage import ROWS, TextClassifier, classify
from nautile.uses.labelled import predictor
from nautile.uses.labelled.config import ClassifyConfig
from nautile.uses.labelled.predictor import LabelPredictor, fit_head, readable, text_features
from tests.flows.cli.test_chat import nautile  # noqa: F401 - a fixture
from tests.support.samples.labelled import MODEL, TOKENIZER, labelled_records, write_checkpoint, write_records

LABELS = ("animal", "plant")
RECORDS = labelled_records(12)


@pytest.fixture(scope="module")
def untuned(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("untuned") / "checkpoint")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A checkpoint with a head that was fitted on the records."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tuned") / "checkpoint")
    labels = LabelSet(form="label", method="head", labels=LABELS, pooling="mean", temperature=1.0, threshold=0.5)
    write_label_set(folder, labels)
    params, model, _ = load_weights(folder)
    texts = [record["text"] for record in RECORDS]
    features = text_features(params, model, tokenizer_for(TOKENIZER), labels, texts, 4)
    targets = np.array([LABELS.index(record["label"]) for record in RECORDS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor, "INVERSE_PENALTY", 100.0)  # so few rows are fitted exactly
        save_head(folder / HEAD, fit_head(features, targets, 2))
    return folder


@pytest.fixture
def table(tmp_path):
    return write_records(tmp_path / "texts.jsonl", [*RECORDS[:5], {"text": " ", "label": "plant"}, *RECORDS[5:]])


def job(checkpoint, table, staging, emit=silent, **changes):
    config = ClassifyConfig(texts={"reader": "jsonl", "path": str(table)}, rows_at_once=4, **changes)
    section = with_local_files({"classify": config.model_dump(mode="json")})
    return Job("classify", "k" * 64, "e", section, {"checkpoint": checkpoint}, staging, emit)


def results(done):
    """The rows and the summary of a job."""
    out = done.output("labelled")
    return read_table(out / ROWS).rows, json.loads((out / "summary.json").read_text())


class Killed(Exception):
    pass


def test_a_tuned_head_labels_and_abstains(tuned, table, tmp_path):
    done = job(tuned, table, tmp_path / "a", gold_column="label")
    classify.work(done)
    rows, summary = results(done)
    assert [row["number"] for row in rows] == list(range(1, 14))
    without = rows.pop(5)
    assert (without["label"], without["probability"], without["abstained"]) == (None, None, None)
    assert [row["likeliest"] for row in rows] == [record["label"] for record in RECORDS]
    assert summary["accuracy"]["value"] == summary["accuracy_covered"] == 1.0
    assert summary["labelled"] == {"animal": 6, "plant": 6}
    assert (summary["abstained"], summary["no_text"]) == (0, 1)
    card = (done.output("labelled") / "card.md").read_text()
    assert "accuracy 1.000 [0.757, 1.000]" in card
    # Between two rows, because the same row's probability may differ by rounding in another run.
    median = statistics.median(row["probability"] for row in rows)
    done = job(tuned, table, tmp_path / "b", threshold=median)
    classify.work(done)
    abstaining, summary = results(done)
    assert [row["label"] is None for row in abstaining if not row["reason"]] == [
        row["probability"] < median for row in rows
    ]
    assert 0 < summary["abstained"] == sum(bool(row["abstained"]) for row in abstaining)


def test_a_killed_run_leaves_the_rows_of_one_that_was_not(tuned, table, tmp_path, monkeypatch):
    """Its last chunk was written in part: that chunk is computed again, and the rows it has are not repeated."""
    monkeypatch.setattr(stage, "CHUNK", 4)
    whole = job(tuned, table, tmp_path / "whole")
    classify.work(whole)

    def kill(kind, **fields):
        if kind == "progress" and fields["done"] == 8:
            raise Killed

    with pytest.raises(Killed):
        classify.work(job(tuned, table, tmp_path / "parts", kill))
    kept = tmp_path / "parts" / "scratch" / "rows.jsonl"
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    kept.write_bytes(b"".join(lines[:6]) + lines[6][:9])
    asked = []
    predict = LabelPredictor.probabilities
    monkeypatch.setattr(
        LabelPredictor, "probabilities", lambda self, texts: asked.extend(texts) or predict(self, texts)
    )
    again = job(tuned, table, tmp_path / "parts")
    classify.work(again)
    assert len(asked) == 3 + 5  # of the second chunk, whose sixth row has no text, and what follows
    assert (again.output("labelled") / ROWS).read_bytes() == (whole.output("labelled") / ROWS).read_bytes()


@pytest.mark.slow
def test_labels_by_likelihood_need_no_tuning(untuned, table, tmp_path):
    done = job(untuned, table, tmp_path / "zero", labels=("cat", "tree", "stone"), longest=20, instructions="What?")
    classify.work(done)
    rows, summary = results(done)
    assert set(summary["labelled"]) == {"cat", "tree", "stone"}
    assert all(1 / 3 <= row["probability"] <= 1 for row in rows if not row["reason"])
    assert "are not calibrated" in (done.output("labelled") / "card.md").read_text()


def test_unknown_labels_are_refused(tuned, untuned, table, tmp_path):
    with pytest.raises(ConfigError, match="'stone' is unknown to this checkpoint, which was tuned for animal, plant"):
        classify.work(job(tuned, table, tmp_path / "a", labels=("animal", "stone")))
    records = [*RECORDS[:2], {"text": "a cat", "label": "pet"}]
    with pytest.raises(ConfigError, match="row 3: the label 'pet' in column 'label' is unknown"):
        classify.work(job(tuned, write_records(table, records), tmp_path / "b", gold_column="label"))
    with pytest.raises(ConfigError, match="nautile tune"):
        TextClassifier(untuned, ClassifyConfig(texts={"reader": "jsonl", "path": "t.jsonl"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--labels: required"),
        (("--labels", "one"), "at least two different labels"),
        (("--labels", "a,b,a"), "at least two different labels"),
        (("--labels", "a,b", "--text", "body"), "no column 'body'; there are text, label"),
        (("--labels", "a,b", "--out", "rows.txt"), "tables are written as"),
        (
            ("--labels", "a,b", "--gold", "label"),
            "row 1: the label 'animal' in column 'label' is unknown;",
        ),
    ],
)
def test_bad_input_is_one_message(nautile, untuned, table, arguments, message):  # noqa: F811
    [added] = json.loads(nautile("store", "add", untuned, "--json")[1])
    code, out, err = nautile("classify", added["id"], table, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.heavy
def test_the_command_writes_the_table_with_the_labels(nautile, untuned, table, tmp_path):  # noqa: F811
    [added] = json.loads(nautile("store", "add", untuned, "--json")[1])
    options = ("--labels", "animal, plant", "--longest", 20, "--gold", "label", "--out", tmp_path / "out.csv", "--json")
    code, out, err = nautile("classify", added["id"], table, *options)
    assert code == 0, err
    facts = json.loads(out)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = "text,given_label,row,label,probability,abstained,likeliest,cut,refused"
    assert list(rows[0]) == columns.split(",")
    assert sum(row["label"] == row["given_label"] for row in rows) == round(12 * facts["accuracy"]["value"])
    assert rows[5]["refused"] == "no_text"


def test_a_text_of_which_only_the_beginning_was_read_is_marked(tuned, tmp_path):
    """Longer than the context has room for; spaces around a text do not count."""
    longest = readable(LabelPredictor(tuned, 4).labels, MODEL)
    texts = ["oak", "o" * longest, " " * 300 + "oak", "o" * (longest + 1)]
    done = job(tuned, write_records(tmp_path / "texts.jsonl", [{"text": text} for text in texts]), tmp_path / "a")
    classify.work(done)
    rows, summary = results(done)
    assert [row["cut"] for row in rows] == [0, 0, 0, 1]
    assert (summary["cut"], summary["cut_tokens"]) == (1, 1)
    assert (
        "of 1 texts only the beginning was read, 1 tokens were cut" in (done.output("labelled") / "card.md").read_text()
    )
