"""Shard files: what is written is read back, in few bytes; a damaged or foreign one is refused by name."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nautile.common.errors import ConfigError
from nautile.configs.model import TokenizerConfig
from nautile.data.records import WebRecord
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.shards import (
    ConcatPacker,
    FirstFitPacker,
    ShardIndex,
    read_index,
    verify_shards,
    write_index,
    write_shard,
)
from tests.support.samples.shards import Shard

ROW = 16


def written(tmp_path, packed, form, ranks=300):
    config = TokenizerConfig(ranks=ranks)
    entry = write_shard(tmp_path, 0, "train", packed, config.vocabulary)
    index = ShardIndex(config, tokenizer_for(config).fingerprint, ROW, form, (entry,))
    write_index(tmp_path, index)
    return Shard(tmp_path / entry.file, entry, read_index(tmp_path))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), ranks=st.sampled_from([300, 100_256]))
def test_chat_rows_come_back(tmp_path_factory, lengths, ranks):
    packer = FirstFitPacker(ROW)
    for number, length in enumerate(lengths):
        packer.add(np.full(length, number + 256 * (ranks > 300), np.uint32), prompt=length // 3)
    packed = packer.finish()
    shard = written(tmp_path_factory.mktemp("shard"), packed, "synth", ranks)
    rows = [shard.row(number) for number in range(packed.rows)]
    assert np.concatenate([ids for ids, _ in rows]).tolist() == packed.tokens.tolist()
    assert np.concatenate([pieces for _, pieces in rows]).tolist() == packed.lengths.tolist()
    assert shard.prompts.tolist() == packed.prompts.tolist()
    assert all(shard.following(number, end_of_text=300) is None for number in range(packed.rows))


def test_a_document_cut_by_a_row_knows_what_follows(tmp_path):
    packer = ConcatPacker(ROW)
    end = 300
    packer.add(np.array([*range(20), end], np.uint32))  # cut after 16
    packer.add(np.array([*range(100, 110), end], np.uint32))  # ends exactly with the second row
    packer.add(np.array([200, end], np.uint32))
    shard = written(tmp_path, packer.finish(), "web")
    assert [shard.following(row, end) for row in range(3)] == [16, None, None]
    assert [shard.row(row)[1].tolist() for row in range(3)] == [[16], [5, 11], [2]]
    assert shard.prompts is None


def test_at_most_2_1_bytes_a_token(make_tokens):
    """Documents of about 60 tokens, the paper's 371M row length and the small one; 4.1 with the whole vocabulary."""
    rng = np.random.default_rng(0)
    records = [WebRecord(" ".join(rng.choice(["the", "of", "and", "in"], 60)) + f" {n}") for n in range(400)]
    for row_length in (256, 1024):
        index = make_tokens(records, row_length=row_length, rows_per_shard=64)[1].index
        assert 2 < index.total("bytes") / index.total("tokens") <= 2.1
    whole = make_tokens(records, tokenizer=TokenizerConfig(), row_length=1024)[1].index
    assert 4 < whole.total("bytes") / whole.total("tokens") <= 4.1


@pytest.fixture
def artifact(web_tokens, tmp_path):
    return shutil.copytree(web_tokens, tmp_path / "tokens")


def test_one_flipped_byte_is_found_by_name(artifact):
    index = read_index(artifact)
    verify_shards(artifact, index)
    victim = artifact / index.shards[1].file
    content = bytearray(victim.read_bytes())
    content[7] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ConfigError, match=r"shard shards/train-00000-00001\.bin is damaged"):
        verify_shards(artifact, read_index(artifact))


def test_missing_short_and_foreign_are_refused_by_name(artifact):
    victim = artifact / "shards" / "train-00000-00000.bin"
    content = victim.read_bytes()
    victim.write_bytes(content[:-1])
    with pytest.raises(
        ConfigError, match=rf"train-00000-00000\.bin has {len(content) - 1} bytes instead of {len(content)}"
    ):
        read_index(artifact)
    victim.unlink()
    with pytest.raises(ConfigError, match=r"train-00000-00000\.bin is missing; build it again"):
        read_index(artifact)
    plain = json.loads((artifact / "index.json").read_text())
    (artifact / "index.json").write_text(json.dumps({**plain, "format": "other-9"}))
    with pytest.raises(ConfigError, match="format 'other-9'"):
        read_index(artifact)
    (artifact / "index.json").write_text(json.dumps({**plain, "fingerprint": "0"}))
    with pytest.raises(ConfigError, match="other token ids"):
        read_index(artifact)
    for damage in ('{"format": "nau', "[]", "{}", '{"format": "nautile-tokens-1"}'):
        (artifact / "index.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"index\.json is damaged"):
            read_index(artifact)
    (artifact / "index.json").unlink()
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        read_index(artifact)


def change_first(folder, **fields):
    plain = json.loads((folder / "index.json").read_text())
    plain["shards"][0] |= fields
    (folder / "index.json").write_text(json.dumps(plain))
    return plain["shards"][0]


@pytest.mark.parametrize(
    "file",
    [
        "../outside.bin",
        "shards/../../outside.bin",
        "/etc/passwd",
        "shards/train-00000-00000.bin/../../../outside.bin",
        "shards/train-00000-00000.bin\n",
        "shards\\train-00000-00000.bin",
        "index.json",
        "",
        7,
        ["shards/train-00000-00000.bin"],
    ],
)
def test_a_shard_lies_where_shards_lie(artifact, file):
    secret = artifact.parent / "outside.bin"
    shutil.copyfile(artifact / "shards" / "train-00000-00000.bin", secret)
    change_first(artifact, file=file)
    with pytest.raises(ConfigError, match=r"index\.json is damaged \(no shard is called"):
        read_index(artifact)


def test_a_link_is_no_shard(artifact):
    inside = artifact / "shards" / "train-00000-00000.bin"
    inside.rename(artifact.parent / "outside.bin")
    inside.symlink_to(artifact.parent / "outside.bin")
    with pytest.raises(ConfigError, match=r"train-00000-00000\.bin is missing"):
        read_index(artifact)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 10**15},
        {"rows": 10**15},
        {"pieces": -1},
        {"rows": 1.5},
        {"rows": True},
        {"tokens": "10"},
        {"bytes": -1},
        {"rows": 0, "pieces": 0},
    ],
)
def test_counts_are_those_of_the_bytes(artifact, fields):
    change_first(artifact, **fields)
    with pytest.raises(ConfigError, match=r"index\.json is damaged \(shards/train-00000-00000\.bin"):
        read_index(artifact)


@pytest.mark.parametrize("content", ["[" * 10_000_000, '{"shards":' * 1_000_000])
def test_nesting_without_end_is_refused(artifact, content):
    (artifact / "index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        read_index(artifact)


def test_the_share_of_targets_is_known_where_prompts_were_counted(synth_tokens, web_tokens, tmp_path):
    index = read_index(synth_tokens)
    assert (index.trained_share("all"), read_index(web_tokens).trained_share("all")) == (1.0, 1.0)
    assert 0 < index.trained_share("replies") < 1
    damaged = shutil.copytree(synth_tokens, tmp_path / "damaged")
    for count in (-1, None):
        change_first(damaged, prompt_tokens=count)
        with pytest.raises(ConfigError, match=r"index\.json is damaged"):
            read_index(damaged)
