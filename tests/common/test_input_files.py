"""Files and folders from outside: only regular files are opened, and no folder is walked without end."""

import os
from pathlib import Path

import pytest

from nautile.common import input_files
from nautile.common.errors import ConfigError
from nautile.common.files import content_digests, read_bounded_json, read_bounded_text, read_json, sha256_of
from nautile.common.input_files import matching_paths, open_regular


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: os.mkfifo(path), "a FIFO"),
        (lambda path: path.mkdir(), "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
    ],
)
@pytest.mark.parametrize("read", [open_regular, sha256_of, read_bounded_text, lambda path: content_digests([path])])
def test_only_regular_files_are_opened(tmp_path, make, kind, read):
    path = tmp_path / "outside.jsonl"
    make(path)
    message = "no file matches" if kind == "a folder" and read.__name__ == "<lambda>" else f"is {kind}, not a regular"
    with pytest.raises(ConfigError, match=rf"{message}"):
        read(path)


def test_a_link_to_a_file_is_followed_unless_links_are_refused(tmp_path):
    (tmp_path / "blob").write_text("content")
    (tmp_path / "link").symlink_to("blob")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"
    with pytest.raises(ConfigError, match="link: is a link, not a regular file; put the file itself there"):
        open_regular(tmp_path / "link", follow_links=False)


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.jsonl", "/*/**/*.jsonl"])
def test_two_links_to_a_folder_above_are_refused_by_name(tmp_path, pattern):
    """Each doubles the number of paths at every level: 2^40 of them before the system refuses the next."""
    inner = tmp_path / "corpus" / "inner"
    inner.mkdir(parents=True)
    (inner / "a.jsonl").write_text("{}")
    for name in ("first", "second"):
        (inner / name).symlink_to(tmp_path / "corpus")
    with pytest.raises(ConfigError, match=r"(first|second)(/inner)?: is the same folder as one above it"):
        matching_paths(f"{tmp_path}/corpus{pattern}")


def test_folders_linked_without_a_loop_are_bounded_by_their_number(tmp_path, monkeypatch):
    monkeypatch.setattr(input_files, "MOST_PATHS", 1000)
    for level in range(12):
        (tmp_path / f"{level}").mkdir()
        for name in "ab":
            (tmp_path / f"{level}" / name).symlink_to(tmp_path / f"{level + 1}")
    (tmp_path / "12").mkdir()
    with pytest.raises(ConfigError, match="has over 1,000 files and folders"):
        matching_paths(str(tmp_path / "0"))
    assert matching_paths(str(tmp_path / "9" / "*.jsonl")) == []


def test_a_linked_folder_and_linked_files_are_read_as_caches_of_datasets_have_them(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "one").write_text("{}")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "part.jsonl").symlink_to("../blobs/one")
    (tmp_path / "current").symlink_to("snapshot")
    assert matching_paths(f"{tmp_path}/current/*.jsonl") == [f"{tmp_path}/current/part.jsonl"]
    assert [file.name for file in content_digests([tmp_path / "current"])] == ["part.jsonl"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), r"b\.jsonl: is a folder that the pattern of files matches"),
        (lambda path: os.mkfifo(path), r"b\.jsonl: is a FIFO"),
        (lambda path: path.symlink_to("gone"), r"b\.jsonl: is a link to nothing"),
        (lambda path: path.symlink_to(path), r"b\.jsonl: is a link to nothing"),
    ],
)
def test_what_a_glob_matches_beside_files_is_refused_and_not_left_out(tmp_path, make, message):
    (tmp_path / "a.jsonl").write_text("{}")
    make(tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match=message):
        matching_paths(f"{tmp_path}/*.jsonl")


def test_folders_beside_files_are_no_matches_of_a_glob_of_anything(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "inner").mkdir()
    assert matching_paths(f"{tmp_path}/*") == [f"{tmp_path}/a.jsonl"]


def test_a_file_of_ours_that_is_none_is_as_if_it_were_missing(tmp_path):
    """In a store that others write to as well."""
    os.mkfifo(tmp_path / "live.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    assert [read_json(tmp_path / f"{name}.json") for name in ("live", "folder", "zero", "gone")] == [None] * 4


def test_a_text_of_windows_has_no_byte_order_mark(tmp_path):
    (tmp_path / "run.toml").write_bytes(b'\xef\xbb\xbfname = "a"\n')
    assert read_bounded_text(tmp_path / "run.toml") == 'name = "a"\n'
    (tmp_path / "run.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_bounded_json(tmp_path / "run.json") == {"a": 1}


def test_odd_names_are_read_as_any_other(tmp_path):
    names = ["line\nbreak.jsonl", "odd[1].jsonl", "-rf.jsonl", "ünï.jsonl", os.fsdecode(b"\xff\xfe.jsonl")]
    for name in names:
        (tmp_path / name).write_text("{}")
    assert [Path(path).name for path in matching_paths(f"{tmp_path}/*.jsonl")] == sorted(names)
