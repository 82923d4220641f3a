"""The page in Chromium: offline on loopback, its replies are `nautile chat`'s, its tokenizer is ours, text is text."""

import base64
import functools
import http.server
import shutil
import threading

import pytest

from common.errors import ConfigError, Retryable
from configs.model import TokenizerConfig
from data.tokenizer import tokenizer_for
from flows.cli.chat import Chat, ChatSettings, answer_as_json
from model.exports.web.folder import export_web, fetched_runtime
from tests.model.exports.onnx.conftest import exports, weights  # noqa: F401 - fixtures
from tests.support.browser import chromium, watch

pytestmark = pytest.mark.slow
QUESTIONS = ["2 + 2", "<|im_end|><img src=x onerror=alert(1)> don't"]
TEXTS = [
    "Don't 12345  stop…\n\n  x\r\n",
    "trailing   ",
    "IT'S él 漢字 🙂 \u00a0\u0085 a1b22",
    "<|im_end|> \ufeff'ſ",
    "",
]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Python's own file server, as `nautile export` names it."""

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def page_folder(exports, tmp_path_factory):  # noqa: F811
    if not shutil.which("npm"):
        pytest.skip("no npm to fetch the runtime with")
    out = tmp_path_factory.mktemp("web") / "page"
    export_web(exports["checkpoint"], out)
    return out


def test_the_page_answers_as_the_command_does(page_folder, exports):  # noqa: F811
    handler = functools.partial(QuietHandler, directory=page_folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chat = Chat(exports["checkpoint"], ChatSettings(temperature=0))
    expected = [answer_as_json(chat, question) for question in QUESTIONS]
    with chromium() as context:
        violations = watch(context)
        page = context.new_page()
        page.on("pageerror", lambda error: violations.append(str(error)))
        page.on("console", lambda message: violations.append(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        page.locator("#question:enabled").wait_for()
        for question, reply in zip(QUESTIONS, expected, strict=True):
            page.locator("#question").fill(question)
            page.locator("#ask").click()
            page.locator("body[data-finished]").wait_for()
            assert page.locator("#thinking").text_content() == reply["thinking"]
            assert page.locator("#answer").text_content() == (reply["answer"] or "")
            status = page.locator("#status").text_content()
            assert status.startswith(f"{reply['tokens']} tokens, ")
            assert "MiB" in status
            assert (page.locator("body").get_attribute("data-finished") == "yes") == reply["finished"]
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
    server.shutdown()
    assert not [line for line in violations if "favicon" not in line]


def test_the_runtime_is_the_pinned_one_or_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    archive = tmp_path / "nautile" / "onnxruntime-web-1.30.0.tgz"
    with pytest.raises(ConfigError, match=f"npm is missing.*{archive}"):
        fetched_runtime()
    archive.parent.mkdir()
    archive.write_bytes(b"another")  # not taken: its digest differs
    with pytest.raises(ConfigError, match="npm is missing"):
        fetched_runtime()
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\necho another > "$6/onnxruntime-web-1.30.0.tgz"\n')
    npm.chmod(0o755)
    with pytest.raises(ConfigError, match="npm gave another file"):
        fetched_runtime()
    npm.write_text("#!/bin/sh\necho no network >&2; exit 1\n")
    with pytest.raises(Retryable, match="no network"):
        fetched_runtime()
