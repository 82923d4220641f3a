"""The page in Chromium: offline on loopback, its replies are `nautile chat`'s, its tokenizer is ours, text is text."""

import base64
import shutil

import numpy as np
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.model import TokenizerConfig
from nautile.data.label_set import HEAD, Head, LabelSet, save_head, write_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.model.exports.web.folder import export_web, fetch_runtime
from nautile.model.weights.files import DIGESTS, verified_digests
from nautile.uses.labelled.predictor import LabelPredictor
from tests.model.exports.onnx.conftest import MODEL, exports, weights  # noqa: F401 - fixtures
from tests.support.pages.page_check import both_replies, opened_page

pytestmark = pytest.mark.slow
QUESTIONS = ["2 + 2", "<|im_end|><img src=x onerror=alert(1)> don't"]
TEXTS = [
    "Don't 12345  stop…\n\n  x\r\n",
    "trailing   ",
    "IT'S él 漢字 🙂 \u00a0\u0085 a1b22",
    "<|im_end|> \ufeff'ſ",
    "",
]


LABELS = ("animal", "<b>plant</b>", "other")
CLASSIFIERS = {
    "head": LabelSet(
        form="label", method="head", labels=LABELS, pooling="mean", temperature=2, threshold=0.6, longest=30,
    ),
    "verbalised": LabelSet(
        form="label", method="verbalised", labels=LABELS, bias=(-40.0, -80.0, -30.0), temperature=9, longest=30,
        instructions="Which?",
    ),
}  # fmt: skip
CLASSIFIED = ["A cat.", "  \x1c padded \u2003\n", "Ünï😀cødé 漢字", "<|im_end|> x", "x y " * 40, "😀" * 30, "oak"]


@pytest.fixture(scope="module")
def page_folder(exports, tmp_path_factory):  # noqa: F811
    if not shutil.which("npm"):
        pytest.skip("no npm to fetch the runtime with")
    out = tmp_path_factory.mktemp("web") / "page"
    export_web(exports["checkpoint"], out)
    return out


def test_the_page_answers_as_the_command_does(page_folder, exports):  # noqa: F811
    for command, page in both_replies(exports["checkpoint"], page_folder, QUESTIONS):
        assert page == command


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
            abstains = labels.threshold is not None and expected_C.max() < labels.threshold
            likeliest = LABELS[int(expected_C.argmax())]
            assert page.locator("#answer").text_content() == ("no label" if abstains else likeliest)
            outcomes.add(abstains)
    assert not violations
    assert labels.threshold is None or outcomes == {True, False}


def test_every_file_of_the_page_has_its_digest(page_folder):
    listed = verified_digests(page_folder)
    assert set(listed) == {path.name for path in page_folder.iterdir()} - {DIGESTS}


def test_the_page_encodes_text_as_the_tokenizer_does(page_folder):
    with opened_page(page_folder) as (page, violations):
        merging = tokenizer_for(TokenizerConfig(ranks=5000))
        tokens = [base64.b64encode(merging.decode_bytes([rank])).decode() for rank in range(5000)]
        ids = page.evaluate(
            """async ([tokens, texts]) => {
              const { Tokenizer } = await import("./tokenizer.mjs");
              const tokenizer = new Tokenizer(tokens);
              return texts.map((text) => tokenizer.encode(text));
            }""",
            [tokens, TEXTS],
        )
        assert ids == [merging.encode(text) for text in TEXTS]
    assert not violations


def test_the_runtime_is_the_pinned_one_or_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    archive = tmp_path / "nautile" / "onnxruntime-web-1.30.0.tgz"
    with pytest.raises(ConfigError, match=f"npm.*is not installed.*{archive}"):
        fetch_runtime()
    archive.parent.mkdir()
    archive.write_bytes(b"another")  # not taken: its digest differs
    with pytest.raises(ConfigError, match=r"npm.*is not installed"):
        fetch_runtime()
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\necho another > "$6/onnxruntime-web-1.30.0.tgz"\n')
    npm.chmod(0o755)
    with pytest.raises(ConfigError, match="the file that npm downloaded is not"):
        fetch_runtime()
    npm.write_text("#!/bin/sh\necho no network >&2; exit 1\n")
    with pytest.raises(Retryable, match="no network"):
        fetch_runtime()
