"""Digests of local inputs: a changed file is noticed, an unchanged one is read once."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from nautile.common import files
from nautile.common.errors import ConfigError
from nautile.common.files import FileContent, content_digests


def settle(path: Path) -> None:
    """Date the last change of a file's content back; its ctime is now, so `SETTLED_S` has to be 0 beside it."""
    os.utime(path, (1_000_000_000, 1_000_000_000))


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the files that are read, in order."""
    names: list[str] = []
    digest = files.sha256_of

    def counted(path: Path) -> str:
        names.append(path.name)
        return digest(path)

    monkeypatch.setattr(files, "sha256_of", counted)
    monkeypatch.setattr(files, "SETTLED_S", -1.0)
    return names


def test_files_folders_and_globs_in_order(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "b/deep/3.txt", "a.txt", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("b/1.txt", "b/2.txt", "b/deep/3.txt")}
    folder = [FileContent(name.removeprefix("b/"), len(name), digest) for name, digest in expected.items()]
    assert content_digests([tmp_path / "b"]) == folder
    assert content_digests([f"{tmp_path}/b/*.txt"]) == folder[:2]
    assert [f.name for f in content_digests([f"{tmp_path}/*/**/*.txt"])] == ["b/1.txt", "b/2.txt", "b/deep/3.txt"]
    assert [f.name for f in content_digests([tmp_path / "odd[1].txt", tmp_path / "a.txt"])] == ["odd[1].txt", "a.txt"]


def test_a_moved_corpus_has_the_same_digests(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "part.jsonl").write_text("{}")
    before = content_digests([f"{tmp_path}/here/*.jsonl"])
    (tmp_path / "here").rename(tmp_path / "there")
    assert content_digests([f"{tmp_path}/there/*.jsonl"]) == before


def test_a_remembered_file_is_not_read_again(tmp_path, reads):
    first, second, memory = tmp_path / "first", tmp_path / "second", tmp_path / "memory.json"
    first.write_text("ALPHA")
    second.write_text("other")
    digests = content_digests([first, second], memory)
    assert reads == ["first", "second"]
    assert content_digests([first, second], memory) == digests
    assert reads == ["first", "second"]
    first.write_text("BETA!")
    assert content_digests([first, second], memory)[0].sha256 == hashlib.sha256(b"BETA!").hexdigest()
    assert reads == ["first", "second", "first"]


def test_a_change_at_equal_size_with_its_mtime_restored_is_noticed_by_ctime(tmp_path, reads):
    path, memory = tmp_path / "corpus", tmp_path / "memory.json"
    path.write_text("ALPHA")
    settle(path)
    content_digests([path], memory)
    path.write_text("OMEGA")
    settle(path)
    assert content_digests([path], memory)[0].sha256 == hashlib.sha256(b"OMEGA").hexdigest()


def test_a_file_that_was_just_written_is_not_remembered(tmp_path):
    """Another write in the same tick of the clock would leave the same times."""
    path, memory = tmp_path / "corpus", tmp_path / "memory.json"
    path.write_text("ALPHA")
    content_digests([path], memory)
    assert not memory.exists()


def test_a_damaged_memory_is_replaced_and_forgets_files_that_are_gone(tmp_path, reads):
    path, gone, memory = tmp_path / "corpus", tmp_path / "gone", tmp_path / "memory.json"
    path.write_text("ALPHA")
    gone.write_text("-")
    memory.write_text("{")
    content_digests([path, gone], memory)
    gone.unlink()
    path.write_text("BETA")
    content_digests([path], memory)
    assert "gone" not in memory.read_text()
    content_digests([path], memory)
    assert reads == ["corpus", "gone", "corpus"]
    entries = json.loads(memory.read_text())
    (stamp,) = entries.values()
    for damaged in (5, None, {"a": 1}, [*stamp[:-1], 5]):
        memory.write_text(json.dumps(dict.fromkeys(entries, damaged)))
        content_digests([path], memory)
    assert len(reads) == 3 + 4


def test_what_cannot_be_digested_is_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no file matches"):
        content_digests([f"{tmp_path}/*.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no file matches"):
        content_digests([tmp_path / "empty"])
    path = tmp_path / "growing"
    path.write_text("a")

    def grows(path: Path) -> str:
        with path.open("a") as file:
            file.write("b")
        return "0" * 64

    monkeypatch.setattr(files, "sha256_of", grows)
    with pytest.raises(ConfigError, match="growing: changed while it was read"):
        content_digests([path])
