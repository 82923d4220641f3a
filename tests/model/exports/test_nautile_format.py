"""Export and reloading: the same bits, and a tokenizer file with which `tokenizers` gives the same ids as we do."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.data.bpe_training import byte_letters
from nautile.data.label_set import HEAD, LABELS, LabelSet, read_label_set, write_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.model.exports.formats import FORMATS, export_nautile
from nautile.model.exports.tokenizer_files import tokenizer_json
from nautile.model.nautile import initialise
from nautile.model.weights.author_import import import_weights
from nautile.model.weights.files import load_weights, save_weights
from tests.model.conftest import tiny_config
from tests.support.samples.own_tokenizer import own_tokenizer

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


@pytest.fixture(scope="module", params=["cl100k_base", "trained"])
def both(request):
    config = TokenizerConfig(ranks=5000) if request.param == "cl100k_base" else own_tokenizer(400, digits=1)
    ours = tokenizer_for(config)
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


@pytest.fixture
def classifier(checkpoint, tmp_path):
    """The checkpoint with a head for two labels."""
    folder = tmp_path / "classifier"
    shutil.copytree(checkpoint, folder)
    write_label_set(folder, LabelSet(form="label", method="head", labels=("yes", "no")))
    (folder / HEAD).write_bytes(b"the head")
    return folder


def test_a_classifier_keeps_its_labels_and_its_head(classifier, tmp_path):
    names = {path.name for path in export_nautile(classifier, tmp_path / "out")}
    assert {LABELS, HEAD} <= names
    assert read_label_set(tmp_path / "out") == read_label_set(classifier)
    assert (tmp_path / "out" / HEAD).read_bytes() == (classifier / HEAD).read_bytes()


@pytest.mark.parametrize("format_", ["transformers", "web"])
def test_a_format_without_a_place_for_the_head_refuses_it(classifier, tmp_path, format_):
    """It would be the model before the tuning, with nothing to show for it."""
    with pytest.raises(ConfigError, match=rf"--format {format_}: .* is a classifier.*use --format nautile or onnx"):
        FORMATS[format_](classifier, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_labels_of_a_model_that_writes_them_go_there_and_back(classifier, tmp_path):
    """Tuned as a whole or with LoRA, the weights hold the tuning, and the labels say how to ask."""
    (classifier / HEAD).unlink()
    tuned = LabelSet(form="label", method="lora", labels=("yes", "no"), instructions="Is it?", temperature=1.5)
    write_label_set(classifier, tuned)
    FORMATS["transformers"](classifier, tmp_path / "exported")
    import_weights(tmp_path / "exported", tmp_path / "back", tiny_config(), TOKENIZER)
    assert read_label_set(tmp_path / "back") == tuned
