"""Export and reloading: the same bits, and a tokenizer file with which `tokenizers` gives the same ids as we do."""

import json
import os
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
from nautile.data.label_set import HEAD, LABELS, Head, LabelSet, read_label_set, save_head, write_label_set
from nautile.data.tokenizer import tokenizer_for
from nautile.flows.cli.tables import how_to_try
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


@settings(max_examples=50)
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
def test_a_head_that_does_not_fit_is_refused_before_anything_is_written(classifier, tmp_path, format_):
    with pytest.raises(ConfigError, match=r"head.safetensors: cannot be read as the head of a classifier"):
        FORMATS[format_](classifier, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_goes_to_transformers_and_back(classifier, tmp_path):
    draw = np.random.default_rng(0)
    head = Head(draw.normal(size=(tiny_config().width, 2)).astype(np.float32), np.array([1, 2], np.float32))
    save_head(classifier / HEAD, head)
    exported = tmp_path / "exported"
    names = {path.name for path in FORMATS["transformers"](classifier, exported)}
    assert {LABELS, "tokenization_nautile.py"} <= names
    assert HEAD not in names  # it is among the tensors, as every program for transformers expects
    assert "pipeline('text-classification'" in how_to_try("transformers", exported)
    settings = json.loads((exported / "config.json").read_text())
    assert settings["id2label"] == {"0": "yes", "1": "no"}
    import_weights(exported, tmp_path / "back", tiny_config(), TOKENIZER)
    for name in (HEAD, LABELS, "weights.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (classifier / name).read_bytes()
    (exported / "digests.json").unlink()  # as after a training that saved the model elsewhere
    write_label_set(exported, LabelSet(form="label", method="head", labels=("yes", "no", "perhaps")))
    with pytest.raises(ConfigError, match=r"`score.weight` has shape \(2, \d+\), and model and labels.json need \(3"):
        import_weights(exported, tmp_path / "other", tiny_config(), TOKENIZER)
    (exported / LABELS).unlink()
    with pytest.raises(ConfigError, match=r"holds the head of a classifier .* no labels.json beside it: copy"):
        import_weights(exported, tmp_path / "other", tiny_config(), TOKENIZER)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("format_", ["nautile", "transformers"])
def test_exported_files_are_as_readable_as_any_new_file(classifier, tmp_path, format_):
    save_head(classifier / HEAD, Head(np.zeros((tiny_config().width, 2), np.float32), np.zeros(2, np.float32)))
    earlier = os.umask(0o027)
    try:
        files = FORMATS[format_](classifier, tmp_path / "out")
    finally:
        os.umask(earlier)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: "0o640" for path in files}


def test_labels_of_a_model_that_writes_them_go_there_and_back(classifier, tmp_path):
    """Tuned as a whole or with LoRA, the weights hold the tuning, and the labels say how to ask."""
    (classifier / HEAD).unlink()
    tuned = LabelSet(form="label", method="lora", labels=("yes", "no"), instructions="Is it?", temperature=1.5)
    write_label_set(classifier, tuned)
    FORMATS["transformers"](classifier, tmp_path / "exported")
    import_weights(tmp_path / "exported", tmp_path / "back", tiny_config(), TOKENIZER)
    assert read_label_set(tmp_path / "back") == tuned
