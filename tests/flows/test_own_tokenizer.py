"""A run with a tokenizer of its own, from its sources to an answer: each folder carries the ranks it was made with."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import tokenizers

from nautile.configs.schema import RunConfig
from nautile.data.tokenizer import RANKS_FILE, tokenizer_for
from nautile.flows.dag import build_dag, pipeline_steps
from nautile.model.weights.files import load_weights
from nautile.store.artifacts import Store
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.stage import RunContext

CHAIN = Path(__file__).parents[1] / "support" / "stages" / "chain.toml"
RANKS = 400
pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with the checkpoint of the chain's pretraining, its evaluation and a report."""
    table = tomllib.loads(CHAIN.read_text(encoding="utf-8"))
    for name in ("distill", "supervise", "align", "reason", "self_distill"):
        del table[name]
    table["pretrain"]["phases"][1]["mixture"] = {"synth": 1.0}
    table["tokenizer"] = {"ranks": RANKS, "train": {"megabytes": {"fineweb_edu": 0.02, "synth": 0.02}, "digits": 1}}
    table["model"]["vocabulary"] = RANKS + 5
    store, made = Store(tmp_path_factory.mktemp("store")), {}
    for step in build_dag(RunConfig.model_validate(table), pipeline_steps):
        inputs = {name: made[f"{need.producer}/{need.kind}"] for name, need in step.needs.items()}
        context = RunContext("r1", str(store.root), label=step.label)
        outputs = run_stage(step.stage, step.section, inputs, context)
        made |= {f"{step.label}/{kind}": artifact_id for kind, artifact_id in outputs.items()}
    return store


@pytest.fixture
def checkpoint(store):
    (artifact,) = store.list("checkpoint")
    return artifact.folder


@pytest.fixture
def call(store, command_line, monkeypatch):
    monkeypatch.setenv("NAUTILE_STORE", str(store.root))

    def run(*arguments) -> str:
        code, out, err = command_line(*map(str, arguments))
        assert code == 0, err
        return out

    return run


def test_tokens_and_checkpoint_carry_it_and_the_report_shows_it(store, checkpoint, call):
    (own,) = store.list("tokenizer")
    ranks = (own.folder / RANKS_FILE).read_bytes()
    for folder in (*(artifact.folder for artifact in store.list("tokens")), checkpoint):
        assert (folder / RANKS_FILE).read_bytes() == ranks
    tokenizer = tokenizer_for(load_weights(checkpoint)[2])
    assert len(tokenizer.encode("12345")) == 5
    assert store.list("evaluation")[0].manifest["facts"]["samples"] > 0
    (report,) = store.list("report")
    page = (report.folder / "report.md").read_text(encoding="utf-8")
    assert "Bytes of text in a token" in page
    assert "| Source | Nats per token | Bits per byte |" in page
    assert "bytes of text in a token" in call("show", own.id)


def test_chat_and_exports_need_nothing_but_the_folder(checkpoint, call, tmp_path, monkeypatch):
    """Also where another folder than the store's holds it, and where an export is read back."""
    monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "another"))
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")

    def answer(of, *options):
        ask = ("--prompt", "12 + 30", "--max-tokens", "12", "--temperature", "0", "--json")
        return {**json.loads(call("chat", of, *ask, *options)), "seconds": None}

    trained, reply = load_weights(folder)[2], answer(folder)
    call("export", folder, tmp_path / "exported")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    assert theirs.encode("What is 12 + 30?").ids == tokenizer_for(trained).encode("What is 12 + 30?")
    assert answer(tmp_path / "exported") == reply
    call("export", folder, tmp_path / "onnx", "--format", "onnx")
    assert answer(tmp_path / "onnx", "--runtime", "onnx") == reply
    call("export", folder, tmp_path / "hub", "--format", "transformers")
    call("import", tmp_path / "hub", tmp_path / "imported")
    assert load_weights(tmp_path / "imported")[2] == trained
    call("store", "add", folder)
    (added,) = Store(tmp_path / "another").list("checkpoint")
    assert load_weights(added.folder)[2] == trained
