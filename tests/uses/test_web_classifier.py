"""The page of a tuned checkpoint in Chromium: probabilities of `nautile classify`, no label below the threshold."""

import shutil

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.data.label_set import HEAD, Head, LabelSet, save_head, write_label_set
from nautile.model.exports.web.folder import export_web
from nautile.uses.labelled.predictor import LabelPredictor
from tests.model.exports.onnx.conftest import MODEL, exports, weights  # noqa: F401 - fixtures
from tests.support.pages.page_check import opened_page

pytestmark = pytest.mark.heavy
LABELS = ("animal", "<b>plant</b>", "other")
CLASSIFIERS = {
    "head": LabelSet(
        form="label", method="head", labels=LABELS, pooling="mean", temperature=2, threshold=0.6, longest=30,
    ),
    "several": LabelSet(
        form="label", method="head", labels=LABELS, multi_label=True, thresholds=(0.55, 0.6, 0.65), temperature=2,
    ),
    "verbalised": LabelSet(
        form="label", method="verbalised", labels=LABELS, bias=(-40.0, -80.0, -30.0), temperature=9, longest=30,
        instructions="Which?",
    ),
}  # fmt: skip
CLASSIFIED = ["A cat.", "  \x1c padded \u2003\n", "Ünï😀cødé 漢字", "<|im_end|> x", "x y " * 40, "😀" * 30, "oak"]


@pytest.mark.parametrize("method", CLASSIFIERS)
def test_the_page_of_a_classifier_gives_the_probabilities_of_the_command(method, exports, tmp_path):  # noqa: F811
    if not shutil.which("npm"):
        pytest.skip("no npm to fetch the runtime with")
    labels = CLASSIFIERS[method]
    checkpoint = shutil.copytree(exports["checkpoint"], tmp_path / "checkpoint")
    write_label_set(checkpoint, labels)
    if labels.method == "head":
        weight_DC = np.random.default_rng(3).normal(size=(MODEL.width, 3)).astype(np.float32)
        save_head(checkpoint / HEAD, Head(weight_DC, np.zeros(3, np.float32)))
    expected_NC = LabelPredictor(checkpoint, 4).probabilities(CLASSIFIED)
    names = {path.name for path in export_web(checkpoint, tmp_path / "page")}
    assert {"classifier.mjs", "index.html"} <= names
    assert not {"page.mjs", "step.onnx"} & names
    outcomes = set()
    with opened_page(tmp_path / "page") as (page, violations):
        for text, expected_C in zip(CLASSIFIED, expected_NC, strict=True):
            page.locator("#question").fill(text)
            page.locator("#ask").click()
            page.locator("body[data-finished]").wait_for()
            rows = page.locator("#labels tr").evaluate_all(
                "rows => rows.map((row) => [row.cells[0].textContent, Number(row.dataset.probability)])"
            )
            shares = dict(rows)
            np.testing.assert_allclose([shares[label] for label in LABELS], expected_C, atol=2e-5)
            order = [int(label) for label in np.argsort(-expected_C)]
            if labels.thresholds:
                given = [LABELS[label] for label in order if expected_C[label] >= labels.thresholds[label]]
            else:
                given = [] if expected_C.max() < (labels.threshold or 0) else [LABELS[order[0]]]
            assert page.locator("#answer").text_content() == (", ".join(given) or "no label")
            outcomes.add(len(given))
    assert not violations
    assert labels.method != "head" or {0, 1} <= outcomes
    assert not labels.thresholds or max(outcomes) > 1


def test_a_head_on_tokens_has_no_page(exports, tmp_path):  # noqa: F811
    checkpoint = shutil.copytree(exports["checkpoint"], tmp_path / "checkpoint")
    write_label_set(checkpoint, LabelSet(form="entities", method="head", labels=("city",)))
    with pytest.raises(ConfigError, match="labels the tokens of a text, for which there is no page"):
        export_web(checkpoint, tmp_path / "page")
    assert not (tmp_path / "page").exists()
