"""Trained ranks: any text comes back, numbers are split as configured, and a file from elsewhere is checked."""

import base64
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.configs.model import ModelConfig, TokenizerConfig, TrainedRanks, refuse_other_shape
from nautile.data import bpe_training
from nautile.data.bpe_training import train_ranks
from nautile.data.tokenizer import RANKS_FILE, read_tokenizer, save_tokenizer, tokenizer_for
from tests.support.samples.own_tokenizer import TEXTS, own_tokenizer

DIGITS = (1, 2, 3)
ANY = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=100)
LIKE_THE_SAMPLE = st.text(alphabet="countweahrid 0123456789,.='\r\n é漢字", max_size=60)


@pytest.fixture(scope="module")
def trained():
    """Digits in a token -> our tokenizer of 400 ranks, and the library's own."""
    return {n: (tokenizer_for(own_tokenizer(400, n)), bpe_training._trained(TEXTS, 400, n)) for n in DIGITS}


@given(text=ANY | LIKE_THE_SAMPLE, digits=st.sampled_from(DIGITS))
@example(text="weathering 1234567, that's 27.\r\n  \n ", digits=1)
def test_any_text_comes_back_with_the_ids_that_the_library_gives(trained, text, digits):
    ours, theirs = trained[digits]
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert theirs.encode(text).ids == ids
    assert not set(ids) & set(ours.specials.values())


@pytest.mark.parametrize("digits", DIGITS)
def test_a_token_has_at_most_so_many_digits(trained, digits):
    ours, _ = trained[digits]
    tokens = [ours.decode_bytes([rank]) for rank in range(400)]
    assert max(len(run) for token in tokens for run in re.findall(rb"\d+", token)) == digits


def test_the_same_texts_give_the_same_ranks_and_the_specials_follow_them():
    assert train_ranks(TEXTS, 400, 3) == train_ranks(iter(TEXTS), 400, 3)
    config = own_tokenizer(400)
    assert config.special_ids == (400, 401, 402, 403, 404)
    cut = tokenizer_for(TokenizerConfig(ranks=400))
    assert tokenizer_for(config).fingerprint != cut.fingerprint
    assert tokenizer_for(own_tokenizer(400, 2)).fingerprint != tokenizer_for(config).fingerprint


def test_bytes_alone_are_a_vocabulary_and_what_a_sample_is_too_small_for_is_refused():
    bytes_alone = tokenizer_for(TokenizerConfig(ranks=256))
    assert tokenizer_for(own_tokenizer(256)).encode("été") == bytes_alone.encode("été")
    with pytest.raises(ConfigError, match=r"the sample is enough for \d{3} ranks, not 5,000: raise `megabytes`, or"):
        train_ranks(TEXTS[:50], 5000, 3)
    with pytest.raises(ValidationError, match="greater than or equal to 256"):
        TokenizerConfig(ranks=255)
    with pytest.raises(ValidationError, match="cl100k_base has 100,256 ranks; only a trained tokenizer can have more"):
        TokenizerConfig(ranks=200_000)


def test_a_folder_carries_its_ranks_and_only_those_that_it_names(tmp_path):
    config = own_tokenizer(300, digits=1)
    fields = save_tokenizer(tmp_path, config)
    assert read_tokenizer(fields, tmp_path) == config
    assert save_tokenizer(tmp_path / "none", TokenizerConfig(ranks=300)) == {"ranks": 300}
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="300 ranks, and its tokenizer 299"):
        read_tokenizer({**fields, "ranks": 299}, tmp_path)
    path = tmp_path / RANKS_FILE
    path.write_bytes(own_tokenizer(301).trained.content)
    with pytest.raises(ConfigError, match=r"ranks\.tiktoken: is not the file of ranks .* sha256 differs"):
        read_tokenizer(fields, tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"ranks\.tiktoken: the ranks of this .* cannot be read \(No such file"):
        read_tokenizer(fields, tmp_path)


def test_a_tokenizer_to_be_trained_encodes_nothing():
    config = TokenizerConfig.model_validate({"ranks": 300, "train": {"megabytes": {"web": 1}}})
    for use in (lambda: config.fields, lambda: tokenizer_for(config)):
        with pytest.raises(ConfigError, match=r"tokenizer\.train: this tokenizer exists once a run has trained it"):
            use()


def test_a_start_from_a_checkpoint_of_another_training_is_refused(tmp_path):
    own, model = own_tokenizer(300), ModelConfig(vocabulary=305)
    write_json(tmp_path / "config.json", {"model": model.model_dump(mode="json"), "tokenizer": own.fields})
    refuse_other_shape(tmp_path, "checkpoint/1", model, own)
    to_be_trained = TokenizerConfig.model_validate({"ranks": 300, "train": {"megabytes": {"web": 1}}})
    refuse_other_shape(tmp_path, "checkpoint/1", model, to_be_trained)  # compared when it is
    for other in (TokenizerConfig(ranks=300), own_tokenizer(300, digits=1)):
        with pytest.raises(ConfigError, match=r"pretrain\.start: checkpoint/1 has tokenizer\.trained"):
            refuse_other_shape(tmp_path, "checkpoint/1", model, other)


BYTES = [base64.b64encode(bytes([byte])) for byte in range(256)]


@pytest.mark.parametrize(
    "lines",
    [
        [b"%s %d" % (token, rank) for rank, token in enumerate([*BYTES[1:], b"YWI="])],
        [b"%s %d" % (token, rank + 1) for rank, token in enumerate(BYTES)],
        [b"%s %d" % (token, rank) for rank, token in enumerate([*BYTES, BYTES[0]])],
        [b"%s %d" % (token, rank) for rank, token in enumerate([*BYTES, base64.b64encode(b"a" * 129)])],
        [b"!? 0"],
        [b"YQ=="],
        [],
    ],
    ids=["a byte is missing", "from one", "twice", "too long", "no base64", "no rank", "empty"],
)
def test_ranks_from_elsewhere_that_are_no_vocabulary_are_refused(lines):
    ranks = TrainedRanks(b"\n".join(lines), 3)
    with pytest.raises(ConfigError, match=r"is no vocabulary of bytes|not a token in base64 and its rank"):
        tokenizer_for(TokenizerConfig.of_trained(len(lines), ranks))
