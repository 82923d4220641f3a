"""`nautile chat`, `export` and `import` with a small random checkpoint."""

import io
import json
import sys
from datetime import datetime

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from nautile.common.text import visible
from nautile.configs.model import TokenizerConfig
from nautile.flows.cli import main as cli
from nautile.flows.cli.chat import ChatAnswer, converse, heading
from nautile.flows.cli.terminal import console_for
from nautile.flows.named import add_model
from nautile.model.nautile import initialise
from nautile.model.weights.author_shapes import author_shapes
from nautile.model.weights.files import load_weights, save_weights
from nautile.store.artifacts import Store
from tests.model.conftest import tiny_config

TOKENIZER = TokenizerConfig(ranks=256)
MODEL = tiny_config(vocabulary=TOKENIZER.vocabulary)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    params = initialise(MODEL, 0)
    # Scaled up so that greedy and sampled replies differ.
    save_weights(folder, jax.tree.map(lambda leaf: leaf * 1.5, params), MODEL, TOKENIZER)
    return folder


@pytest.fixture
def nautile(tmp_path, monkeypatch, capsys):
    """Run a command over an empty store; returns exit code, standard output, standard error."""

    def call(*arguments, stdin=""):
        monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
        monkeypatch.setattr(sys, "argv", ["nautile", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ending:
            cli.main()
        out, err = capsys.readouterr()
        return ending.value.code or 0, out, err

    return call


def reply(nautile, checkpoint, *options, prompt="2 + 2"):
    code, out, err = nautile("chat", checkpoint, "--prompt", prompt, "--max-tokens", 24, "--json", *options)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_the_streamed_text_is_the_reply(nautile, checkpoint):
    options = ("--thinking-budget", 6)
    whole = reply(nautile, checkpoint, *options)
    code, out, _ = nautile("chat", checkpoint, "--prompt", "2 + 2", "--max-tokens", 24, *options)
    assert code == 0
    # Control characters are replaced on their way to a terminal.
    assert "".join(out.split()) == "".join(visible(whole["thinking"] + whole["answer"]).split())
    _, answer, _ = nautile("chat", checkpoint, "--prompt", "2 + 2", "--max-tokens", 24, "--hide-thinking", *options)
    assert 0 < len(answer.strip()) < len(out.strip())


@pytest.mark.slow
def test_questions_are_read_until_standard_input_ends(nautile, checkpoint, tmp_path):
    """A question that is too long is refused, and the next one answered, by the newest checkpoint, which is named."""
    newest = add_model(Store(tmp_path / "store"), checkpoint, "checkpoint").id
    code, out, err = nautile("chat", "--max-tokens", 8, stdin=f"2 + 2\n\n{'long ' * 40}\n3 + 3\n")
    assert code == 0
    assert err.startswith(f"{newest}, made by ")
    assert out.count("tokens long in the chat template, and there is room for 56") == 1
    assert len([line for line in out.splitlines() if line.strip()]) >= 3


def test_on_a_terminal_there_are_commands(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    asked = []
    monkeypatch.setattr("nautile.flows.cli.chat.stream_answer", lambda chat, query, *_: asked.append(query))
    monkeypatch.setattr(sys, "stdin", Terminal("/help\n2 + 2\n/what\n/exit\n3 + 3\n"))
    converse(None, console_for(), True, "checkpoint/0123456789ab")
    out = capsys.readouterr().out
    assert asked == ["2 + 2"]
    assert out.startswith("checkpoint/0123456789ab. Each question is answered without the previous ones.")
    assert out.count("/exit  end the chat") == 2
    assert "no command /what" in out
    monkeypatch.setattr(sys, "stdin", io.StringIO("/exit\n"))
    converse(None, console_for(), True, "checkpoint/0123456789ab")
    assert asked == ["2 + 2", "/exit"]  # in a pipe everything is a question


def test_while_the_first_training_runs_the_message_names_the_command_that_makes_a_model_of_it(nautile, tmp_path):
    _, _, before = nautile("chat")
    _, _, of_stage = nautile("chat", "pretrain")
    Store(tmp_path / "store").staging_files("a" * 64).saved_steps.joinpath("100").mkdir(parents=True)
    for earlier, words in ((before, ["chat"]), (of_stage, ["chat", "pretrain"])):
        code, _, err = nautile(*words)
        assert code == 2
        assert err.strip() == f"{earlier.strip()}; `nautile store snapshot CONFIG` makes one of what is trained so far"


def test_a_conversation_names_its_checkpoint_its_step_and_when_it_was_made(tmp_path):
    assert heading(tmp_path, "somewhere") == "somewhere"
    made = datetime(2026, 11, 22, 13, 5).astimezone()
    manifest = {"created": made.isoformat(), "stage": "reason", "label": "reason", "run": "r" * 36}
    snapshot = {**manifest, "stage": "snapshot", "label": "snapshot", "run": "snapshot-1234", "facts": {"steps": 400}}
    for written, by in (
        (manifest, "made by reason of run rrrrrrrr"),
        (snapshot, "saved after 400 steps of an unfinished pretraining"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(written))
        expected = f"checkpoint/0123456789ab, {by} on 2026-11-22 at 13:05"
        assert heading(tmp_path, "checkpoint/0123456789ab") == expected


def test_the_speed_is_that_of_writing_and_a_reply_at_once_has_none():
    """A first token waits for the compilation, and 40 tokens that come together in 19 ms are no 2,118 a second."""
    assert ChatAnswer("?", tokens=44, seconds=22.0, first_seconds=20.0, first_tokens=4).speed() == ", 20 tokens/s"
    assert ChatAnswer("?", tokens=40, seconds=0.019, first_seconds=0.019, first_tokens=40).speed() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "no artifact 'nothing'"),
        ([], "no checkpoint in"),
        (["/"], "is not a checkpoint folder"),
        (["CHECKPOINT", "--max-tokens", 64], "max_tokens 64 leaves no room for a question in a context of 64"),
        (["CHECKPOINT", "--prompt", "long " * 40], "there is room for"),
        (["CHECKPOINT", "--prompt", "x", "--top-p", 2], "top_p"),
        (["CHECKPOINT", "--json"], "--json needs --prompt"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(nautile, checkpoint, options, message):
    code, out, err = nautile("chat", *(checkpoint if option == "CHECKPOINT" else option for option in options))
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_an_export_reads_back_bit_for_bit_and_can_chat(nautile, checkpoint, tmp_path):
    code, out, err = nautile("export", checkpoint, tmp_path / "out", "--json")
    assert code == 0, err
    names = {path.rsplit("/", 1)[-1] for path in json.loads(out)}
    assert names == {"weights.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    original, exported = load_weights(checkpoint), load_weights(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, original[0], exported[0])
    assert original[1:] == exported[1:]
    assert reply(nautile, tmp_path / "out")["thinking"] == reply(nautile, checkpoint)["thinking"]
    code, _, err = nautile("export", checkpoint, tmp_path / "hub", "--format", "transformers")
    assert code == 0, err
    code, _, err = nautile("import", tmp_path / "hub", tmp_path / "back")
    assert code == 0, err
    assert (tmp_path / "back" / "weights.safetensors").read_bytes() == (checkpoint / "weights.safetensors").read_bytes()
    code, _, err = nautile("export", checkpoint, tmp_path / "other", "--format", "gguf")
    assert (code, "--format gguf: not one of nautile" in err) == (2, True)
    code, _, err = nautile("export", checkpoint, tmp_path / "out")
    assert (code, "already holds something" in err) == (2, True)


@pytest.mark.slow
def test_the_authors_weights_become_a_checkpoint(nautile, tmp_path):
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) * 0.1 for name, shape in author_shapes(MODEL)}
    save_file(weights, tmp_path / "theirs.safetensors")
    (tmp_path / "small.toml").write_text(small_config(), encoding="utf-8")
    options = (tmp_path / "theirs.safetensors", tmp_path / "ours", "--config", tmp_path / "small.toml")
    code, _, err = nautile("import", *options)
    assert (code, "so set --context" in err) == (2, True)
    code, _, err = nautile("import", *options, "--context", MODEL.context, "--sca-epsilon", 1e-6)
    assert code == 0, err
    model = load_weights(tmp_path / "ours")[1]
    assert (model.decay, model.context, model.sca_norm_epsilon) == ("window", MODEL.context, 1e-6)
    assert reply(nautile, tmp_path / "ours")["tokens"] >= 1
    code, _, err = nautile("import", tmp_path / "small.toml", tmp_path / "again")
    assert (code, "cannot be read as safetensors" in err) == (2, True)
    assert not (tmp_path / "again").exists()


def small_config() -> str:
    """The local configuration with this test's model."""
    model = "\n".join(f"{name} = {json.dumps(value)}" for name, value in MODEL.model_dump(mode="json").items())
    return f'extends = "local"\nname = "small"\n[tokenizer]\nranks = 256\n[ingest]\nrow_length = 32\n[model]\n{model}\n'


def test_the_bits_of_an_export_are_those_of_a_format_that_takes_them(nautile, checkpoint, tmp_path):
    code, _, err = nautile("export", checkpoint, tmp_path / "out", "--bits", 8)
    assert (code, "--bits 8: only for --format onnx or web, not nautile" in err) == (2, True)
    code, _, err = nautile("export", checkpoint, tmp_path / "out", "--format", "onnx", "--bits", 8)
    assert (code, "heads of a multiple of 16" in err) == (2, True)  # this checkpoint's have 8
    assert not (tmp_path / "out").exists()
