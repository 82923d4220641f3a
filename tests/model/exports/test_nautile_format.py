"""Export and reloading: the same bits, and a tokenizer file with which `tokenizers` gives the same ids as we do."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from configs.model import TokenizerConfig
from data.tokenizer import tokenizer_for
from model.exports.nautile_format import export_nautile
from model.exports.tokenizer_files import byte_letters, tokenizer_json
from model.nautile import initialise
from model.weights.files import load_weights, save_weights
from tests.model.conftest import tiny_config

TOKENIZER = TokenizerConfig(ranks=600)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    config = tiny_config(vocabulary=TOKENIZER.vocabulary)
    save_weights(folder, initialise(config, 0), config, TOKENIZER)
    return folder


def test_an_export_reads_back_bit_for_bit(checkpoint, tmp_path):
    written = export_nautile(checkpoint, tmp_path / "out")
    assert [path.name for path in written] == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "weights.safetensors",
    ]
    for name in ("weights.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert load_weights(tmp_path / "out")[1:] == load_weights(checkpoint)[1:]


def test_the_settings_show_the_training_prompt(checkpoint, tmp_path):
    export_nautile(checkpoint, tmp_path)
    settings_of = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings_of["prompt"].startswith("<|im_start|>user\n{query}\n<|im_end|>")
    assert settings_of["prompt"].endswith("<|think_start|>")
    assert settings_of["model_max_length"] == 64


def test_an_occupied_folder_is_refused_and_unchanged(checkpoint, tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ConfigError, match="already holds something"):
        export_nautile(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_missing_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        export_nautile(Path(tmp_path / "nowhere"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def both():
    ours = tokenizer_for(TokenizerConfig(ranks=5000))
    return ours, tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(ours)))


@settings(max_examples=150)
@given(text=st.text(alphabet=st.sampled_from("aAtesr'd 019.,;\n\r\t é漢🙂\u00a0"), max_size=40))
@example(text="  \n\n  don't  \r\n 12345 ")
@example(text="trailing   ")
@example(text="a \n b\n")
def test_the_hub_library_gives_the_same_ids(both, text):
    ours, theirs = both
    assert theirs.encode(text).ids == ours.encode(text)


def test_the_hub_library_reads_the_specials_and_decodes(both):
    ours, theirs = both
    ids = [ours.im_start, *ours.encode("user\nhello world"), ours.im_end]
    assert theirs.encode("<|im_start|>user\nhello world<|im_end|>").ids == ids
    assert theirs.decode(ids, skip_special_tokens=True) == "user\nhello world"


@pytest.mark.slow
def test_the_whole_tokenizer_has_the_specials_at_their_ids():
    """There are gaps before them, which the library does not keep by itself."""
    ours = tokenizer_for(TokenizerConfig())
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(ours)))
    assert {name: theirs.token_to_id(name) for name in ours.specials} == ours.specials
    assert theirs.encode("<|im_end|>").ids == [ours.im_end]


def test_every_byte_has_its_own_printable_letter():
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert letters[ord(" ")] == "Ġ"
    assert letters[ord("a")] == "a"
    assert np.all([not letter.isspace() for letter in letters])
