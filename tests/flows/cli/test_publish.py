"""`nautile publish` against a Hub on loopback: what is written, shown, asked, sent; snippets run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from huggingface_hub import constants

from nautile.common.files import write_json
from nautile.configs.model import TokenizerConfig
from nautile.flows.cli import main as cli
from nautile.model.nautile import initialise
from nautile.model.weights.files import load_weights, save_weights
from nautile.store.artifacts import Store
from nautile.store.manifest import stage_key
from tests.model.conftest import tiny_config
from tests.support.servers.upload_hub import UploadHub
from tests.support.stages.toy_cli import environment

TOKEN, READER = "hf_writerwriterwriter", "hf_readerreaderreader"
TOKENIZER = TokenizerConfig(ranks=600)
TORCH = Path(os.environ.get("TORCH_PYTHON", Path(sys.prefix) / "torch" / "bin" / "python"))


@pytest.fixture(scope="module")
def made(build_once):
    """A store with a checkpoint that was trained on distilled documents, without an evaluation."""

    def build(folder: Path) -> None:
        store = Store(folder / "store")
        store.prepare()
        key = stage_key("distill", 1, {"name": "toy"}, {})
        about = {"stage": "distill", "version": 1, "inputs": {}, "execution": "d1", "outputs": ("documents", "tokens")}
        texts = store.staging(key) / "documents"
        texts.mkdir()
        document = {"query": "why?", "synthetic_reasoning": "so", "synthetic_answer": "because"}
        (texts / "documents-00000.jsonl").write_text((json.dumps(document) + "\n") * 3)
        facts = {"documents": 3, "prompts": 4, "teachers": {}}
        store.publish("documents", key, texts, config={}, facts=facts, **about)
        rows = store.staging(key) / "tokens"
        rows.mkdir()
        (rows / "rows.u4").write_bytes(bytes(8))
        tokens = store.publish("tokens", key, rows, config={}, facts={"source": "distilled"}, **about)
        key = stage_key("pretrain", 1, {"name": "toy"}, {})
        weights = store.staging(key) / "checkpoint"
        model = tiny_config(vocabulary=TOKENIZER.vocabulary, context=128, attention_heads=2)
        save_weights(weights, initialise(model, 0), model, TOKENIZER)
        inputs = {"distilled": tokens}
        store.publish("checkpoint", key, weights, stage="pretrain", version=1, config={}, inputs=inputs, facts={})
        write_json(folder / "made.json", {"checkpoint": f"checkpoint/{key}"})

    return build_once("publication", build)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with UploadHub({TOKEN: {"me"}, READER: set()}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def publish(made, hub, monkeypatch, capsys, tmp_path):
    """Run the command in an empty folder; returns exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, token=TOKEN, checkpoint=None):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        else:
            monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("NAUTILE_STORE", str(made / "store"))
        monkeypatch.setenv("COLUMNS", "200")
        name = checkpoint or json.loads((made / "made.json").read_text())["checkpoint"]
        monkeypatch.setattr(sys, "argv", ["nautile", "publish", name, *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call


@pytest.mark.slow
def test_a_dry_run_asks_nobody_and_keeps_files_only_where_it_is_told(publish, hub, tmp_path):
    options = ("--dry-run", "--dataset", "me/texts")
    code, out, err = publish("me/small", *options, token=None)
    assert (code, err) == (0, "")
    assert out.count("nothing was uploaded or kept: with --out FOLDER the files stay there") == 2
    assert list(tmp_path.iterdir()) == []
    code, out, err = publish("me/small", *options, "--out", "published/me--small", token=None)
    assert (code, err) == (0, "")
    assert "model me/small: not compared with the Hub, private" in out
    assert "README.md" in out
    assert "data/train-00000.parquet" in out
    assert "nothing was uploaded: published/me--small holds what would be published" in out
    card = (tmp_path / "published" / "me--small" / "README.md").read_text()
    assert "This checkpoint has no evaluation in the store" in card
    assert "- me/texts\n" in card
    assert hub.calls == []


@pytest.mark.slow
def test_publishing_twice_sends_once(publish, hub, tmp_path):
    code, out, _ = publish("me/small", "--yes", "--dataset", "me/texts", "--license", "mit")
    assert code == 0
    assert "will be created, private" in out
    assert f"published: {hub.url}/me/small/commit/" in out
    for kind, name, folder in (("model", "me/small", "me--small"), ("dataset", "me/texts", "me--texts")):
        files = hub.repositories[kind, name].files
        written = tmp_path / "published" / folder
        names = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
        assert set(files) == names | {".gitattributes"}
        assert all(files[name] == (written / name).read_bytes() for name in names)
    hub.calls.clear()
    code, out, _ = publish("me/small", "--yes", "--dataset", "me/texts", "--license", "mit")
    assert code == 0
    assert "nothing was uploaded: me/small already has all of these files" in out
    assert "nothing was uploaded: me/texts already has all of these files" in out
    assert set(hub.calls) == {"whoami", "info", "tree"}


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (["small", "--yes"], TOKEN, "'small' is not a repository of the Hub, OWNER/NAME"),
        (["me/small", "--dataset", "a b/c", "--yes"], TOKEN, "'a b/c' is not a repository of the Hub"),
        (["me/small", "--yes"], None, "publishing needs a token: set HF_TOKEN"),
        (["me/small", "--yes"], "hf_unknown", "the Hub refused the token: set HF_TOKEN to a valid token"),
        (["me/small", "--yes"], READER, "the token has no write access there"),
        (["them/small", "--yes"], TOKEN, "the token has no write access there"),
        (["me/small"], TOKEN, "there is no terminal to confirm the upload: pass --yes"),
        (["me/small", "--yes", "--format", "gguf"], TOKEN, "--format gguf: not one of"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_published(publish, hub, arguments, token, message):
    code, out, err = publish(*arguments, token=token)
    assert (code, message in err, len(err.splitlines())) == (2, True, 1), err
    assert "Traceback" not in out + err
    assert not token or token not in out + err
    assert not hub.repositories


def test_a_folder_that_holds_something_else_is_left_as_it_is(publish, hub, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    code, _, err = publish("me/small", "--yes", "--out", "mine")
    assert code == 2
    assert "mine exists with other content (README.md is missing): remove it, or name another folder with --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert not hub.repositories


def test_documents_are_published_of_a_checkpoint_in_the_store_alone(publish, made, hub):
    name = json.loads((made / "made.json").read_text())["checkpoint"]
    folder = made / "elsewhere"
    folder.mkdir(exist_ok=True)
    for file in ("config.json", "weights.safetensors"):
        (folder / file).write_bytes((made / "store" / "artifacts" / name / file).read_bytes())
    code, _, err = publish("me/small", "--yes", "--dataset", "me/texts", checkpoint=str(folder))
    assert code == 2
    assert "no distilled documents that a folder outside the store was trained on" in err
    assert publish("me/small", "--yes", "--json", checkpoint=str(folder))[0] == 0
    assert b"The checkpoint is not in a store" in hub.repositories["model", "me/small"].files["README.md"]


def test_a_question_is_answered_before_anything_is_sent(publish, hub, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda question: next(answers))
    _, out, _ = publish("me/small")
    assert out.endswith("nothing was uploaded\n")
    assert not hub.repositories
    _, out, _ = publish("me/small")
    assert "published: " in out


def run_snippets(hub, tmp_path, kind, repository, languages, python=sys.executable, before=""):
    """Run those snippets of a card in an empty folder, Python's after the lines `before`; their outputs."""
    more = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = environment(tmp_path / "store", **more, PATH=path, HF_HUB_DISABLE_TELEMETRY="1")
    folder = tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    card = hub.repositories[kind, repository].files["README.md"].decode()
    outputs = []
    for language, code in re.findall(r"```(bash|python)\n(.*?)\n```", card, re.DOTALL):
        if language in languages:
            command = ["bash", "-e", "-c", code] if language == "bash" else [str(python), "-c", before + code]
            done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{code}\n{done.stderr}"
            outputs.append(done.stdout)
    return outputs


@pytest.mark.heavy
def test_the_snippets_for_this_project_for_onnxruntime_and_for_documents_run_as_they_stand(publish, hub, tmp_path):
    assert publish("me/small", "--yes", "--dataset", "me/texts", "--onnx", "8")[0] == 0
    card = hub.repositories["model", "me/small"].files["README.md"].decode()
    assert {"library_name: transformers", "- custom_code", "- onnx"} <= set(card.splitlines())
    own, graphs = run_snippets(hub, tmp_path, "model", "me/small", {"bash"})
    assert own.strip()
    assert graphs.strip()
    assert run_snippets(hub, tmp_path, "dataset", "me/texts", {"python"}) == ["3 why?\n"]


@pytest.mark.heavy
def test_the_snippets_of_the_projects_own_format_run_as_they_stand(publish, hub, tmp_path):
    assert publish("me/small", "--yes", "--format", "nautile")[0] == 0
    chat, loaded = run_snippets(hub, tmp_path, "model", "me/small", {"bash", "python"})
    assert chat.strip()
    published = load_weights(tmp_path / "published" / "me--small")[0]
    assert loaded.startswith(f"{sum(leaf.size for leaf in jax.tree.leaves(published))} [")


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.skipif(not TORCH.exists(), reason="there is no environment with torch: `make torch` makes it")
def test_the_snippet_for_transformers_runs_as_it_stands(publish, hub, tmp_path):
    assert publish("me/small", "--yes")[0] == 0
    # The snippet draws at temperature 0.7, and random weights may draw the end at once: so with a fixed seed.
    seed = "import transformers\ntransformers.set_seed(0)\n"
    (reply,) = run_snippets(hub, tmp_path, "model", "me/small", {"python"}, TORCH, seed)
    assert reply.strip()
