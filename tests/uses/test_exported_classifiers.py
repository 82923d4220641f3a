"""Tuned checkpoints in real torch and transformers: the probabilities and the entities of the commands."""

import json
import shutil

import jax
import numpy as np
import pytest

from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.label_set import HEAD, Head, LabelSet, save_head, write_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.model.exports.transformers.export import export_transformers
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from nautile.uses.labelled.predictor import LabelPredictor
from nautile.uses.labelled.token_head import TokenTagger
from tests.model.conftest import tiny_config
from tests.model.exports.test_with_torch import OLDEST, PYTHON, in_torch

TOKENIZER = TokenizerConfig(ranks=256)
# With white space, characters of several bytes and spelled markers; empty; longer than is read, cut inside a character.
TEXTS = ["A cat.", "", " \x1c padded \u2003\n", "Ünï😀cødé 漢字", "<|im_end|> <|think_start|>", "x y " * 40, "😀" * 30]
CLASSES = ("a", "a cat", "dogs")
TUNED = {
    "mean": LabelSet(
        form="label", method="head", labels=CLASSES, pooling="mean", temperature=1.5, threshold=0.4, longest=30,
    ),
    "last": LabelSet(form="label", method="head", labels=CLASSES[:2], pooling="last", longest=5000),
    "several": LabelSet(
        form="label", method="head", labels=CLASSES, multi_label=True, thresholds=(0.2, 0.5, 0.9), temperature=2,
    ),
    "verbalised": LabelSet(
        form="label", method="verbalised", labels=CLASSES, instructions="Which?", bias=(-9.0, -16.0, -19.0),
        temperature=5, longest=30,
    ),
    "lora": LabelSet(form="label", method="lora", labels=CLASSES, temperature=9, longest=30),
}  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.heavy,
    pytest.mark.timeout(600),  # importing torch takes half a minute of a busy machine
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no environment with torch: `make torch` makes it"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("classifiers")


@pytest.fixture(scope="module")
def tuned(root):
    """Exports of a checkpoint tuned in each way, and the probabilities that the command computes."""
    config = tiny_config(vocabulary=TOKENIZER.vocabulary, context=256, blocks=1)
    draw = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: leaf + 0.05 * draw.normal(size=leaf.shape), initialise(config, 0))
    expected = {}
    for name, labels in TUNED.items():
        folder = root / "classifiers" / name
        save_weights(folder / "checkpoint", params, config, TOKENIZER)
        write_label_set(folder / "checkpoint", labels)
        if labels.method == "head":
            count = len(labels.labels)
            head = Head(draw.normal(size=(config.width, count)).astype(np.float32), np.zeros(count, np.float32))
            save_head(folder / "checkpoint" / HEAD, head)
        export_transformers(folder / "checkpoint", folder / "export")
        expected[name] = LabelPredictor(folder / "checkpoint", 4).probabilities(TEXTS)
    return expected


@pytest.fixture(scope="module")
def entities(root, tuned):
    """An export with a head for the tokens of a text, and the entities that our side finds."""
    folder = root / "tagger"
    shutil.copytree(root / "classifiers" / "mean" / "checkpoint", folder / "checkpoint")
    labels = LabelSet(form="entities", method="head", labels=("city", "name"), longest=300, temperature=2)
    write_label_set(folder / "checkpoint", labels)
    weight_DC = np.random.default_rng(5).normal(size=(tiny_config().width, 5)).astype(np.float32)
    save_head(folder / "checkpoint" / HEAD, Head(weight_DC, np.zeros(5, np.float32)))
    export_transformers(folder / "checkpoint", folder / "export")
    return TokenTagger(folder / "checkpoint", 4).entities(TEXTS)


@pytest.fixture(scope="module", params=["newest", "oldest"])
def of_version(request, root, tuned, entities):
    (root / "texts.json").write_text(json.dumps(TEXTS))
    path = [OLDEST] if request.param == "oldest" else []
    in_torch("-m", "tests.support.processes.classifier_run", root, request.param, folder=root, path=path)
    return json.loads((root / f"{request.param}.json").read_text())


@pytest.mark.parametrize("name", TUNED)
def test_a_tuned_model_gives_the_probabilities_of_the_command(of_version, tuned, name):
    """From the plain text, one at a time and in padded batches, and again after it was saved."""
    result = of_version["classifiers"][name]
    assert result["labels"] == list(TUNED[name].labels)
    for way, shares in result["shares"].items():
        np.testing.assert_allclose(shares, tuned[name], atol=1e-5, err_msg=way)
    assert np.ptp(tuned[name], axis=0).max() > 0.005  # so that a text is told from another
    assert result["losses"][0] > 0
    assert result["losses"][1] == 0
    assert result["finite"]
    # It is still the language model that it was.
    prompt = encode_prompt(tokenizer_for(TOKENIZER), "2 + 2")
    assert result["asked"] == prompt
    assert result["replied"] in (len(prompt) + 1, len(prompt) + 2)
    assert ["no pairs" in result["refused"][0], "max_length 3" in result["refused"][1]] == [True, True]


def test_a_head_on_tokens_finds_the_entities_that_ours_finds(of_version, entities):
    assert [[tuple(part) for part in found] for found in of_version["entities"]] == entities
    assert {kind for found in entities for *_, kind in found} == {"city", "name"}
    assert max(end - start for found in entities for start, end, _ in found) > 1
