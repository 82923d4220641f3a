"""Files that no stage made, brought into the store."""

import os
import socket
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.store.add import add_files
from tests.support.samples.stage_store import filled, flip_byte

NAMES = ("config.json", "weights.bin")


@pytest.fixture
def folder(tmp_path):
    return filled(tmp_path / "theirs", {"config.json": "{}", "weights.bin": "w" * 100, "notes.md": "not of the model"})


def test_the_same_files_are_the_same_artifact_wherever_they_lie(store, folder, tmp_path):
    artifact = add_files(store, "checkpoint", folder, NAMES, {"stand_ins": []})
    assert artifact.manifest["files"].keys() == set(NAMES)
    assert artifact.manifest["facts"] == {"stand_ins": [], "origin": str(folder)}
    assert (artifact.manifest["stage"], artifact.manifest["label"], artifact.manifest["inputs"]) == (
        "add",
        "add:theirs",
        {},
    )
    assert store.verify(artifact) == []
    copy = folder.rename(tmp_path / "elsewhere")
    assert add_files(store, "checkpoint", copy, NAMES, {}) == artifact
    (copy / "weights.bin").write_text("other")
    assert add_files(store, "checkpoint", copy, NAMES, {}).key != artifact.key
    assert len(store.list(superseded=True)) == 2
    assert list((store.root / "staging").iterdir()) == []


def test_a_damaged_one_is_replaced_by_adding_it_again(store, folder):
    artifact = add_files(store, "checkpoint", folder, NAMES, {})
    flip_byte(artifact.path / "weights.bin")
    with pytest.raises(ConfigError, match="`nautile store add FOLDER`"):
        store.check(artifact)
    again = add_files(store, "checkpoint", folder, NAMES, {})
    assert again.key == artifact.key
    assert store.verify(again) == []
    assert len(store.list(superseded=True)) == 2


def test_what_cannot_be_read_or_changes_meanwhile_is_refused(store, folder, monkeypatch):
    with pytest.raises(ConfigError, match=r"more\.bin: cannot be read \(No such file or directory\)"):
        add_files(store, "checkpoint", folder, (*NAMES, "more.bin"), {})

    def copy_another(source, target):
        target.write(b"changed")

    monkeypatch.setattr("shutil.copyfileobj", copy_another)
    with pytest.raises(ConfigError, match=r"config\.json: changed while it was copied"):
        add_files(store, "checkpoint", folder, NAMES, {})
    assert store.list() == []
    assert list((store.root / "staging").iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["link", "link to a file of the folder", "FIFO", "folder", "socket", "link to nothing"]
)
def test_only_regular_files_of_the_folder_itself_are_added(store, folder, tmp_path, kind, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    monkeypatch.chdir(folder)  # the path of a socket must be short
    path = Path("labels.json")
    match kind:
        case "link":
            path.symlink_to(secret)
        case "link to a file of the folder":
            path.symlink_to("config.json")
        case "link to nothing":
            path.symlink_to("gone")
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            socket.socket(socket.AF_UNIX).bind(str(path))
    with pytest.raises(ConfigError, match=rf"labels\.json: is a {kind.split()[0]}, not a regular file"):
        add_files(store, "checkpoint", folder, (*NAMES, "labels.json"), {})
    assert store.list() == []
    assert not any(b"root:x" in file.read_bytes() for file in store.root.rglob("*") if file.is_file())


def test_a_linked_folder_inside_is_refused_and_the_named_folder_may_be_a_link(store, folder, tmp_path):
    (tmp_path / "newest").symlink_to(folder)
    artifact = add_files(store, "checkpoint", tmp_path / "newest", NAMES, {})
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0")
    (folder / "inner").symlink_to(tmp_path / "etc")
    with pytest.raises(ConfigError, match="inner: is a link, not a folder"):
        add_files(store, "checkpoint", folder, (*NAMES, "inner/passwd"), {})
    assert store.list() == [artifact]
