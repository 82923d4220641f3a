"""What a forced rerun replaces gets back the bytes that it lost, where the rerun has made the same."""

import pytest

from store.artifacts import Store
from tests.support.stage_store import flip_byte, published

FILES = {"a.txt": "first", "deep/b.txt": "second", "c.txt": "third"}


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    store.prepare()
    return store


def replaced(store, artifact, files):
    published(store, "tokens", "one", files, supersede=True)
    return store.get(f"{artifact.id}.1")


def test_flipped_and_missing_files_come_back_with_their_lineage(store):
    artifact = published(store, "tokens", "one", FILES)
    flip_byte(artifact.path / "a.txt")
    (artifact.path / "deep/b.txt").unlink()
    old = replaced(store, artifact, FILES)
    assert store.verify(old) == []
    assert old.manifest == artifact.manifest
    assert old.execution != store.get(artifact.id).execution
    flip_byte(old.path / "a.txt")
    assert store.verify(store.get(artifact.id)) == [], "they share no bytes"


def test_what_was_made_otherwise_is_not_passed_off_as_the_old(store):
    artifact = published(store, "tokens", "one", FILES)
    flip_byte(artifact.path / "a.txt")
    flip_byte(artifact.path / "c.txt")
    old = replaced(store, artifact, {**FILES, "a.txt": "other"})
    assert store.verify(old) == ["a.txt (its digest differs)"]


def test_a_whole_one_is_left_as_it_is(store):
    artifact = published(store, "tokens", "one", FILES)
    inodes = {name: (artifact.path / name).stat().st_ino for name in FILES}
    old = replaced(store, artifact, FILES)
    assert {name: (old.path / name).stat().st_ino for name in FILES} == inodes
