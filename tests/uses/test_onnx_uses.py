"""Labels and documents by an ONNX export: those of the checkpoint that it was made from."""

import json
import shutil

import numpy as np
import pytest

from nautile.data.label_set import HEAD, Head, LabelSet, save_head, write_label_set
from nautile.model.exports.onnx.folder import export_onnx
from nautile.model.weights.files import save_weights
from nautile.uses.extract.stage import Extractor
from nautile.uses.labelled.config import ExtractConfig
from nautile.uses.labelled.predictor import LabelPredictor
from nautile.uses.labelled.token_head import TokenTagger
from tests.flows.cli.test_chat import nautile  # noqa: F401 - a fixture
from tests.model.exports.onnx.conftest import MODEL, TOKENIZER, exports, weights  # noqa: F401 - fixtures
from tests.support.samples.labelled import labelled_records, write_records

TEXTS = [record["text"] for record in labelled_records(7)] + ["x " * 40]
LABELS = ("animal", "plant", "a")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, weights):  # noqa: F811
    """A checkpoint with a head, and its export."""
    root = tmp_path_factory.mktemp("tuned")
    save_weights(root / "checkpoint", weights, MODEL, TOKENIZER)
    labels = LabelSet(form="label", method="head", labels=LABELS, pooling="mean", temperature=1.5, threshold=0.4)
    write_label_set(root / "checkpoint", labels)
    draw = np.random.default_rng(3)
    head = Head(draw.normal(size=(MODEL.width, 3)).astype(np.float32), np.zeros(3, np.float32))
    save_head(root / "checkpoint" / HEAD, head)
    export_onnx(root / "checkpoint", root / "export")
    return root / "checkpoint", root / "export"


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_head_gives_the_probabilities_of_the_checkpoint(tuned, pooling):
    labels = LabelSet(form="label", method="head", labels=LABELS, pooling=pooling, longest=30)
    expected, given = (LabelPredictor(folder, 4, labels).probabilities(TEXTS) for folder in tuned)
    np.testing.assert_allclose(given, expected, atol=2e-5)
    assert len(set(expected.argmax(axis=1).tolist())) > 1


@pytest.mark.slow
def test_a_head_on_tokens_finds_the_entities_of_the_checkpoint(tuned, tmp_path):
    checkpoint, _ = (shutil.copytree(folder, tmp_path / folder.name) for folder in tuned)
    write_label_set(checkpoint, LabelSet(form="entities", method="head", labels=("city",), longest=200))
    export_onnx(checkpoint, tmp_path / "tagger")
    expected, given = (TokenTagger(folder, 4).entities(TEXTS) for folder in (checkpoint, tmp_path / "tagger"))
    assert given == expected
    assert any(expected)


@pytest.mark.heavy
def test_likelihoods_of_labels_are_those_of_the_checkpoint(exports):  # noqa: F811
    """Of labels of different lengths, in more batches than one."""
    labels = LabelSet(form="label", method="verbalised", labels=LABELS, longest=30, instructions="What is it?")
    folders = exports["checkpoint"], exports[32]
    expected, given = (LabelPredictor(folder, 2, labels).probabilities(TEXTS) for folder in folders)
    np.testing.assert_allclose(given, expected, atol=2e-5)


@pytest.mark.heavy
def test_documents_are_those_of_the_checkpoint(exports, tmp_path):  # noqa: F811
    what = {"type": "string", "minLength": 2, "maxLength": 9, "x-span": True}
    properties = {"what": what, "sure": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["what", "sure"], "additionalProperties": False}
    config = ExtractConfig(
        texts={"reader": "jsonl", "path": "t.jsonl"}, json_schema=json.dumps(schema), instructions="What?", slots=4,
        max_tokens=60,
    )  # fmt: skip
    parts = exports["checkpoint"], exports[32]
    rows = [Extractor(folder, config, schema).run(TEXTS, tmp_path / f"{i}.jsonl") for i, folder in enumerate(parts)]
    assert rows[1] == rows[0]
    assert {row["reason"] for row in rows[0]} == {None}


@pytest.mark.heavy
def test_the_command_takes_an_export_of_the_store(nautile, tuned, tmp_path):  # noqa: F811
    """And says in one message that a folder is an export, and how an export comes into the store."""
    _, export = tuned
    table = write_records(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    code, _, err = nautile("classify", export, table)
    assert code == 2
    assert "is an ONNX export: add `--runtime onnx`" in err
    code, _, err = nautile("classify", export, table, "--runtime", "onnx")
    assert code == 2
    assert f"add it with `nautile store add {export} --kind export`" in err
    assert len(err.strip().splitlines()) == 1
    code, out, err = nautile("store", "add", export, "--kind", "export", "--json")
    assert code == 0, err
    added = json.loads(out)[0]["id"]
    code, out, err = nautile("classify", added, table, "--runtime", "onnx", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["rows"] == len(TEXTS)
    assert set(facts["labels"]) == set(LABELS)
