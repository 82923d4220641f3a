"""An ONNX export as a folder: its example, its digests, what is refused."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.data.chat_template import encode_prompt
from nautile.data.tokenizer import tokenizer_for
from nautile.model.decoding.generate import Generator
from nautile.model.decoding.sampling import Sampling
from nautile.model.exports.onnx.folder import add_measurement, check_digests, export_onnx
from nautile.model.nautile import initialise
from nautile.model.weights.files import save_weights
from tests.model.conftest import tiny_config
from tests.model.exports.onnx.conftest import MODEL, TOKENIZER


@pytest.mark.slow
def test_the_example_runs_alone_and_writes_our_greedy_reply(exports, weights):
    """Without this project: in isolated mode Python does not look into the current folder."""
    script = exports[32] / "chat.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, "-I", script, "2 + 2"], cwd=exports[32], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    tokenizer = tokenizer_for(TOKENIZER)
    prompt = encode_prompt(tokenizer, "2 + 2")
    stops = (tokenizer.im_end, tokenizer.end_of_text)
    sampling = Sampling(MODEL.context - len(prompt), temperature=0, stop_ids=stops)
    [expected] = Generator(MODEL, sampling, 1, len(prompt))(weights, [prompt], [(0,)])
    # The example decodes each token by itself; bytes that are no character by themselves are replaced.
    assert done.stdout.decode()[:-1] == "".join(tokenizer.decode([token]) for token in expected.ids)


@pytest.mark.slow
def test_every_file_has_a_digest_and_a_changed_one_is_refused(exports, tmp_path):
    out = tmp_path / "copy"
    export_onnx(exports["checkpoint"], out, 4)
    listed = json.loads((out / "digests.json").read_text())["sha256"]
    assert set(listed) == {path.name for path in out.iterdir()} - {"digests.json", "README.md"}
    assert check_digests(out)["bits"] == 4
    add_measurement(out, "first")
    add_measurement(out, "second")
    assert (out / "README.md").read_text().endswith("## Measured\n\n- first\n- second\n")
    check_digests(out)
    content = bytearray((out / "weights.bin").read_bytes())
    content[-1] ^= 1
    (out / "weights.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"weights\.bin: is not as it was exported"):
        check_digests(out)
    (out / "step.onnx").unlink()
    with pytest.raises(ConfigError, match=r"step\.onnx: is missing"):
        check_digests(out)


@pytest.mark.parametrize("table", [None, [], {}, {"bits": 8}, {"bits": "8", "weights_sha256": "0"}, {"bits": 7}])
def test_a_config_that_does_not_describe_an_export_is_refused(exports, tmp_path, table):
    """Also where its digest is right."""
    out = tmp_path / "copy"
    shutil.copytree(exports[4], out)
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "onnx": table}))
    digests = json.loads((out / "digests.json").read_text())["sha256"]
    digests["config.json"] = hashlib.sha256((out / "config.json").read_bytes()).hexdigest()
    (out / "digests.json").write_text(json.dumps({"sha256": digests}))
    with pytest.raises(ConfigError, match=r"config\.json: `onnx` lacks"):
        check_digests(out)
    (out / "digests.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"digests\.json"):
        check_digests(out)


def test_the_same_checkpoint_gives_the_same_bytes(exports, tmp_path):
    export_onnx(exports["checkpoint"], tmp_path / "again", 8)
    for path in exports[8].iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_what_cannot_be_exported_is_refused_before_anything_is_written(exports, tmp_path):
    with pytest.raises(ConfigError, match="--bits 16"):
        export_onnx(exports["checkpoint"], tmp_path / "out", 16)
    with pytest.raises(ConfigError, match="already holds something"):
        export_onnx(exports["checkpoint"], exports[32], 8)
    narrow = tiny_config(vocabulary=TOKENIZER.vocabulary)
    save_weights(tmp_path / "narrow", initialise(narrow, 0), narrow, TOKENIZER)
    with pytest.raises(ConfigError, match=r"a multiple of 16, and this model has width/attention_heads = 8"):
        export_onnx(tmp_path / "narrow", tmp_path / "out")
    save_weights(tmp_path / "other", initialise(narrow, 0), narrow, TokenizerConfig(ranks=300))
    with pytest.raises(ConfigError, match="the checkpoint belongs to another tokenizer"):
        export_onnx(tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out").exists()
