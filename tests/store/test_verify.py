"""Which files are read to verify an artifact, and which are trusted."""

import os

import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import sha256_of
from nautile.store import manifest as verification
from nautile.store.artifacts import Store
from tests.support.samples.stage_store import flip_byte, published


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that were digested."""
    names = []

    def counting(path, **options):
        names.append(path.name)
        return sha256_of(path, **options)

    monkeypatch.setattr(verification, "sha256_of", counting)
    return names


def forget():
    """Begin as a new process, which has digested nothing."""
    verification._verified_stamps.clear()


def test_a_process_reads_each_file_once(tmp_path, hashed):
    store = Store(tmp_path)
    artifact = published(store, "tokens", "one")
    store.check(artifact)
    assert hashed == []  # this process wrote the digests itself
    forget()
    store.check(artifact)
    store.check(artifact)
    assert sorted(hashed) == ["a.txt", "b.txt"]


def test_a_write_that_restores_the_modification_time_is_noticed(tmp_path):
    store = Store(tmp_path)
    artifact = published(store, "tokens", "one")
    path = artifact.path / "a.txt"
    before = path.stat()
    flip_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"a.txt"):
        store.check(artifact)


def test_files_of_a_mebibyte_are_remembered_for_other_processes_until_they_change(tmp_path, hashed):
    store = Store(tmp_path)
    artifact = published(
        store, "tokens", "one", {"a.txt": "a" * 2**20, "b.txt": "b" * (2**20 - 1), "c.txt": "c" * 2**20}
    )
    forget()
    store.check(artifact)
    assert hashed == ["b.txt"]
    assert len(list((store.root / "verified").iterdir())) == 1
    forget()
    flip_byte(artifact.path / "a.txt")
    with pytest.raises(ConfigError, match=r"a.txt"):
        store.check(artifact)


def test_a_file_that_cannot_be_read_is_reported_as_damaged(tmp_path, monkeypatch):
    store = Store(tmp_path)
    artifact = published(store, "tokens", "one")

    def broken(path, **_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verification, "sha256_of", broken)
    assert store.verify(artifact) == [
        "a.txt (cannot be read: Input/output error)",
        "deep/b.txt (cannot be read: Input/output error)",
    ]
