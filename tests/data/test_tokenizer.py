"""The tokenizer against tiktoken's own cl100k_base, the cut ranks, and where the rank file comes from."""

import functools
import hashlib
import os
import re
import subprocess
import sys

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from nautile.configs.model import CHAT_SPECIALS, TokenizerConfig
from nautile.data import tokenizer as module
from nautile.data.tokenizer import tokenizer_for

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200)
TRICKY = st.one_of(
    TEXTS, st.lists(st.sampled_from([*CHAT_SPECIALS, "a", "\n", " ", "é", "漢"]), max_size=8).map("".join)
)


@given(text=TRICKY, ranks=st.sampled_from([256, 300, 2000, 100_256]))
def test_any_text_comes_back_whole_and_never_holds_a_special(text, ranks):
    tok = tokenizer_for(TokenizerConfig(ranks=ranks))
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert not set(ids) & set(tok.specials.values())
    assert tok.encode_array(text).tolist() == ids
    assert tok.byte_lengths[ids].sum() == len(text.encode())


@functools.lru_cache
def reference() -> tiktoken.Encoding:
    """cl100k_base as tiktoken itself defines it, but for where the ranks come from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda url, expected_hash: module._ranks())
        return tiktoken.Encoding(**openai_public.cl100k_base())


@given(text=TEXTS)
def test_whole_it_is_cl100k(text):
    whole = tokenizer_for(TokenizerConfig())
    assert whole.encode(text) == reference().encode_ordinary(text)
    assert whole.end_of_text == reference().eot_token


@given(
    st.lists(st.sampled_from([*"   \n\r\t\u00a0\x1c\u2028\x85ab1!\u00e9\u4e2d", "'s", "\r\n"]), max_size=16).map(
        "".join
    )
)
def test_parts_apart_from_long_white_space_have_the_ids_of_the_whole(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LONG_SPACE", re.compile(module._LONG_SPACE.pattern.replace("1000", "3")))
        parts = list(module.apart_from_space(text))
    assert "".join(parts) == text
    whole = tokenizer_for(TokenizerConfig())
    assert [id_ for part in parts for id_ in whole.encode(part)] == whole.encode(text)


@pytest.mark.parametrize("text", [f"a{' ' * 1_000_000}b", "a\ud800b"], ids=["a million spaces", "half a pair"])
def test_what_the_library_does_not_encode_is_encoded_in_both_forms(text):
    tok = tokenizer_for(TokenizerConfig(ranks=256))
    ids = tok.encode_array(text).tolist()
    assert ids == tok.encode(text)
    assert tok.decode(ids) == text.replace("\ud800", "\ufffd")


@pytest.mark.parametrize("ranks", [256, 300, 2000, 20_000])
def test_a_prefix_of_the_ranks_is_a_bpe_of_its_own(ranks):
    """Each kept token is a merge of two kept ones of lower rank, so cutting never leaves an orphan."""
    kept = {token for token, rank in module._ranks().items() if rank < ranks}
    whole = module._ranks()
    for token in kept:
        if len(token) > 1:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            assert any(a in kept and b in kept and max(whole[a], whole[b]) < whole[token] for a, b in halves)


@given(text=TEXTS, ranks=st.sampled_from([300, 2000]))
def test_a_cut_encoding_only_splits_whole_tokens_further(text, ranks):
    cut, whole = tokenizer_for(TokenizerConfig(ranks=ranks)), tokenizer_for(TokenizerConfig())

    def ends(tok):
        lengths = [tok.byte_lengths[i] for i in tok.encode(text)]
        return {int(sum(lengths[: n + 1])) for n in range(len(lengths))}

    assert all(i < ranks for i in cut.encode(text))
    assert ends(whole) <= ends(cut)


def test_vocabularies_and_specials():
    whole, cut = tokenizer_for(TokenizerConfig()), tokenizer_for(TokenizerConfig(ranks=2000))
    assert whole.vocabulary == 100_281
    assert [whole.im_start, whole.im_end, whole.think_start, whole.think_end] == [100_277, 100_278, 100_279, 100_280]
    assert whole.end_of_text == 100_257
    assert cut.vocabulary == 2005
    assert sorted(cut.specials.values()) == list(range(2000, 2005))
    assert whole.fingerprint != cut.fingerprint
    assert cut is tokenizer_for(TokenizerConfig(ranks=2000))


def test_decoding_names_specials_or_leaves_them_out_and_refuses_strangers(tokenizer):
    ids = [*tokenizer.encode("hi"), tokenizer.im_end]
    assert tokenizer.decode(ids) == "hi<|im_end|>"
    assert tokenizer.decode(ids, specials=False) == "hi"
    with pytest.raises(ValueError, match="no token of a vocabulary of 305 has the id 305"):
        tokenizer.decode([305])
    with pytest.raises(ValueError, match="100256"):
        tokenizer_for(TokenizerConfig()).decode([100_256])


def test_batches_keep_their_order(tokenizer):
    texts = [f"text number {n} " * (n % 5) for n in range(23)]
    expected = [tokenizer.encode(text) for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=3)] == expected


def test_a_damaged_cache_is_ignored(monkeypatch, tmp_path):
    name = hashlib.sha1(module.RANKS_URL.encode()).hexdigest()
    (tmp_path / name).write_bytes(b"not the ranks")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert hashlib.sha256(module._rank_file()).hexdigest() == module.RANKS_SHA256
    assert (tmp_path / name).read_bytes() == b"not the ranks"
    # Another user of the machine may put a pipe into the cache that all share, or a file without an end.
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        (tmp_path / name).unlink()
        make(tmp_path / name)
        assert hashlib.sha256(module._rank_file()).hexdigest() == module.RANKS_SHA256


def test_the_network_is_not_touched_when_the_package_is_there(tmp_path):
    """With every socket refused and no cache, a fresh process still has the tokenizer."""
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = refuse; socket.getaddrinfo = refuse\n"
        "from nautile.data.tokenizer import tokenizer_for; from nautile.configs.model import TokenizerConfig\n"
        "assert tokenizer_for(TokenizerConfig(ranks=400)).encode('ab')\n"
    )
    env = {"TIKTOKEN_CACHE_DIR": str(tmp_path), "PATH": "", "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=60)
    assert not list(tmp_path.iterdir())


@given(ranks=st.sampled_from([256, 300, 2000, 100_256]), padding=st.integers(-3, 200))
def test_ids_without_a_token_are_those_that_cannot_be_decoded(ranks, padding):
    """Behind the last id, and in the whole tokenizer the gaps between its special tokens."""
    config = TokenizerConfig(ranks=ranks)
    rows = config.vocabulary + padding
    unused = {number for first, end in config.unused_ids(rows) for number in range(first, end)}
    tok = tokenizer_for(config)
    for number in range(ranks - 1, rows):
        assert (tok.first_unused([0, number]) == number) == (number in unused)
        if number in unused:
            with pytest.raises(
                ValueError, match=f"no token of a vocabulary of {config.vocabulary} has the id {number}"
            ):
                tok.decode([number])
        else:
            tok.decode([number])
    assert unused <= set(range(ranks, rows))


def test_the_published_model_has_39_rows_without_a_token():
    assert TokenizerConfig().unused_ids(100_300) == ((100_256, 100_257), (100_258, 100_277), (100_281, 100_300))
