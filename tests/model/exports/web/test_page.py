"""The page in Chromium: offline on loopback, its replies are `nautile chat`'s, its tokenizer is ours, text is text."""

import base64
import shutil

import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.configs.model import TokenizerConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.model.exports.web.folder import export_web, fetch_runtime
from nautile.model.weights.files import DIGESTS, verified_digests
from tests.model.exports.onnx.conftest import exports, weights  # noqa: F401 - fixtures
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


@pytest.fixture(scope="module")
def page_folder(exports, tmp_path_factory):  # noqa: F811
    if not shutil.which("npm"):
        pytest.skip("no npm to fetch the runtime with")
    out = tmp_path_factory.mktemp("web") / "page"
    export_web(exports["checkpoint"], out)
    return out


@pytest.mark.heavy
def test_the_page_answers_as_the_command_does(page_folder, exports):  # noqa: F811
    for command, page in both_replies(exports["checkpoint"], page_folder, QUESTIONS):
        assert page == command


def test_every_file_of_the_page_has_its_digest(page_folder):
    listed = verified_digests(page_folder)
    assert set(listed) == {path.name for path in page_folder.iterdir()} - {DIGESTS}


@pytest.mark.heavy
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
