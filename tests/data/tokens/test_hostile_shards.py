"""A tokens artifact made to harm: an index that points elsewhere, counts that no file has, nesting without end."""

import json
import shutil

import pytest

from common.errors import ConfigError
from data.tokens.shards import read_index, verify_shards


@pytest.fixture
def artifact(web_tokens, tmp_path):
    return shutil.copytree(web_tokens, tmp_path / "tokens")


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
    with pytest.raises(ConfigError, match=r"index\.json is damaged \(no shard of ours is called"):
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


def test_a_whole_one_is_read(artifact):
    verify_shards(artifact, read_index(artifact))
