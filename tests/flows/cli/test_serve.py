"""`nautile serve` for the operator: refusals at the start, API keys, a kill, and a graceful shutdown."""

import signal
import socket
import sys

import httpx
import openai
import pytest

from nautile.flows.cli import main as cli
from nautile.model.weights.files import load_weights, save_weights
from tests.support.processes.serving import MODEL, NAME, TOKENIZER, save_checkpoint, serving

KEY = "an-open-secret"
LONG = {"model": NAME, "prompt": "xy", "max_tokens": 100, "temperature": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def mismatched(checkpoint, tmp_path_factory):
    """A checkpoint whose tokenizer has more ids than the model has embedding rows."""
    folder = tmp_path_factory.mktemp("mismatched")
    save_weights(folder, load_weights(checkpoint)[0], MODEL, TOKENIZER.model_copy(update={"ranks": 300}))
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "no artifact 'nothing'"),
        ([], "no checkpoint in"),
        (["/"], "is not a checkpoint folder"),
        (["MISMATCHED"], "a tokenizer of 305 ids with a model of 261 embedding rows"),
        (["CHECKPOINT", "--slots", "0"], "--slots"),
        (["CHECKPOINT", "--port", "TAKEN"], "cannot listen there"),
        (["CHECKPOINT", "--host", "192.0.2.1", "--port", "0"], "cannot listen there"),
        (["CHECKPOINT", "--key-env", "NOT_SET"], "--key-env NOT_SET: this environment variable is not set"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    checkpoint, mismatched, options, message, tmp_path, monkeypatch, capsys
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {
            "CHECKPOINT": str(checkpoint),
            "MISMATCHED": str(mismatched),
            "TAKEN": str(taken.getsockname()[1]),
        }
        monkeypatch.setenv("NAUTILE_STORE", str(tmp_path / "store"))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["nautile", "serve", *(values.get(option, option) for option in options)])
        with pytest.raises(SystemExit) as ending:
            cli.main()
    out, err = capsys.readouterr()
    assert ending.value.code == 2
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.heavy
def test_keys_a_kill_and_a_graceful_shutdown(checkpoint, tmp_path):
    options = (checkpoint, tmp_path / "store", "--key-env", "SERVING_KEY")
    with serving(*options, SERVING_KEY=KEY) as server:
        for key in ("wrong", f"{KEY}x"):
            with pytest.raises(openai.AuthenticationError):
                server.client(key).completions.create(**LONG)
            with pytest.raises(openai.AuthenticationError):
                server.client(key).models.list()
        assert httpx.post(f"{server.root}/tokenize", json={"prompt": "x"}).status_code == 401
        assert server.client(KEY).models.list().data[0].id == NAME

        # kill -9: the client gets an error, and the port is free for the next server.
        stream = server.client(KEY).completions.create(**LONG, n=64, stream=True)
        next(stream)
        server.process.kill()
        with pytest.raises(Exception, match=r"peer closed|incomplete|reset|closed|disconnected|Connection"):
            list(stream)
        port = server.port

    with serving(*options, port=port, SERVING_KEY=KEY) as server:
        assert server.port == port
        stream = server.client(KEY).completions.create(**LONG, n=64, stream=True)
        chunks = [next(stream)]
        server.process.send_signal(signal.SIGTERM)
        chunks += stream
        assert sum(chunk.choices[0].finish_reason == "length" for chunk in chunks) == 64
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.root}/health")
    log = (tmp_path / "store.log").read_text()
    assert KEY not in log
    assert "Traceback" not in log
