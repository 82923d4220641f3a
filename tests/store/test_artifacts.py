"""Publishing, finding, replacing, verifying and locking in one process."""

import hashlib
import os
import threading

import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import read_json, write_json
from nautile.store import artifacts
from nautile.store.artifacts import Store
from nautile.store.mirror import open_store
from tests.support.samples.stage_store import filled, flip_byte, key_of, published


def test_a_label_in_the_command_that_rebuilds_an_artifact_is_a_word():
    message = artifacts.damage_message("tokens/1", ["a.txt"], "align; touch x")
    assert "`nautile run CONFIG --only 'align; touch x' --force`" in message
    assert "`nautile run CONFIG --from 'align; touch x' --force`" in message


def test_find_returns_the_artifact_with_its_manifest(store):
    tokens = published(store, "tokens", "one")
    checkpoint = published(
        store, "checkpoint", "two", inputs={"web": tokens.id}, facts={"steps": 5}, run="r1", label="x"
    )
    result = store.find("checkpoint", key_of("two"))
    assert result == checkpoint
    assert result.id == f"checkpoint/{key_of('two')[:12]}"
    manifest = result.manifest
    assert manifest["inputs"] == {"web": tokens.full_id}
    assert manifest["input_executions"] == {"web": tokens.execution}
    assert manifest["files"].keys() == {"a.txt", "deep/b.txt"}
    assert (manifest["stage"], manifest["version"], manifest["facts"], manifest["run"]) == (
        "toy",
        1,
        {"steps": 5},
        "r1",
    )
    assert manifest["config"] == {"word": "two"}
    assert (result.path / "deep/b.txt").read_text() == "b"
    assert not (store.root / "staging" / key_of("two") / "output/checkpoint").exists()
    assert store.verify(result) == []


@pytest.mark.parametrize("description", [None, {"layout": 2}, {"format": 1}, []])
def test_a_store_of_another_layout_is_refused_and_unchanged(store, description):
    published(store, "tokens", "one")
    if description is None:
        (store.root / "store.json").unlink()
    else:
        write_json(store.root / "store.json", description)
    before = sorted((store.root / "artifacts").rglob("*"))
    for use in (lambda: open_store(store.root), store.prepare, lambda: published(store, "tokens", "one")):
        with pytest.raises(ConfigError, match=r"reads layout 1: use the version that .* or a new .*`nautile store add"):
            use()
    assert sorted((store.root / "artifacts").rglob("*")) == before
    assert read_json(store.root / "store.json") == description


def test_a_folder_with_nothing_but_copied_replies_is_a_new_store(tmp_path):
    filled(tmp_path / "replies", {"model/old.jsonl": "{}"})
    store = open_store(tmp_path)
    store.prepare()
    assert read_json(tmp_path / "store.json") == {"layout": 1}
    assert open_store(tmp_path).list() == []


def test_get_takes_any_unambiguous_prefix(store):
    tokens = published(store, "tokens", "one")
    published(store, "exemplars", "one")
    for name in (tokens.id, tokens.full_id, f"tokens/{tokens.key[:3]}"):
        assert store.get(name) == tokens
    with pytest.raises(ConfigError, match=r"is ambiguous .*give more digits, or the kind"):
        store.get(tokens.key[:12])
    for unknown in (
        "tokens/ffff",
        "tokens/",
        "",
        "documents/" + tokens.key,
        f"{tokens.id}.1",
        f"{tokens.id}.x",
        "../tokens/*",
    ):
        with pytest.raises(ConfigError, match=r"no artifact .* `nautile artifacts` lists"):
            store.get(unknown)


def test_a_second_publication_of_a_key_is_discarded(store):
    first = published(store, "tokens", "one", {"a.txt": "first"})
    second = published(store, "tokens", "one", {"a.txt": "second"})
    assert second == first
    assert (first.path / "a.txt").read_text() == "first"
    assert os.listdir(store.root / "staging" / first.key / "output") == []


def test_superseding_keeps_the_old_artifact_with_its_lineage(store):
    old_input = published(store, "tokens", "in")
    old = published(store, "checkpoint", "one", {"a.txt": "first"}, inputs={"web": old_input})
    new_input = published(store, "tokens", "in", {"a.txt": "other"}, supersede=True)
    new = published(store, "checkpoint", "one", {"a.txt": "second"}, inputs={"web": new_input}, supersede=True)
    third = published(store, "checkpoint", "one", {"a.txt": "third"}, inputs={"web": new_input}, supersede=True)
    assert store.find("checkpoint", old.key) == third
    texts = {a.id: (a.path / "a.txt").read_text() for a in store.list("checkpoint", superseded=True)}
    assert texts == {third.id: "third", f"{old.id}.1": "first", f"{old.id}.2": "second"}
    first = store.get(f"{old.id}.1")
    assert first.manifest == old.manifest
    assert first.manifest["input_executions"]["web"] == old_input.execution != new_input.execution
    assert store.list("checkpoint") == [third]
    assert new.execution != third.execution


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip_byte(folder / "deep/b.txt"), "deep/b.txt (its digest differs)"),
        (lambda folder: (folder / "a.txt").unlink(), "a.txt (missing)"),
        (lambda folder: (folder / "a.txt").write_text("longer than it was"), "a.txt (18 bytes, not 3)"),
        (lambda folder: (folder / "deep/c.txt").write_text("c"), "deep/c.txt (not in the manifest)"),
        (lambda folder: flip_byte(folder / "manifest.json", 40), "manifest.json"),
    ],
)
def test_damage_is_named_with_the_command_that_helps(store, damage, message):
    artifact = published(store, "tokens", "one", label="ingest:web")
    store.check(artifact)
    damage(artifact.path)
    assert store.verify(artifact) == [message]
    with pytest.raises(ConfigError) as refused:
        store.check(store.get(artifact.id))
    assert f"{artifact.id} is damaged: {message}." in str(refused.value)
    assert "--force" in str(refused.value)
    if message != "manifest.json":
        assert "`nautile run CONFIG --only ingest:web --force`" in str(refused.value)
        assert "`nautile run CONFIG --from ingest:web --force`" in str(refused.value)


def test_find_refuses_a_manifest_that_cannot_be_read(store):
    artifact = published(store, "tokens", "one")
    other = published(store, "tokens", "two")
    (artifact.path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"damaged: manifest.json.*--only ingest --force"):
        store.find("tokens", artifact.key, label="ingest")
    assert store.list() == [other]


def test_hidden_files_and_leftovers_of_interrupted_writes_are_ignored(store):
    folder = filled(
        store.staging(key_of("one")) / "output/tokens", {"a.txt": "a", ".a.txt.tmp": "hal", "b/.x.1.tmp": ""}
    )
    given = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
    artifact = store.publish("tokens", key_of("one"), folder, **given)
    assert artifact.manifest["files"].keys() == {"a.txt"}
    (artifact.path / ".DS_Store").write_text("")
    assert store.verify(artifact) == []


def test_publication_reads_no_file_whose_digest_is_known_and_verify_reads_it(store, monkeypatch):
    read, file_digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: read.append(file.name) or file_digest(file, name))
    folder = filled(store.staging(key_of("one")) / "output/tokens", {"a.bin": "a", "b.bin": "b", "index.json": "{}"})
    given = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
    digests = {"a.bin": key_of("a"), "b.bin": key_of("not b"), "gone.bin": key_of("gone")}
    artifact = store.publish("tokens", key_of("one"), folder, **given, digests=digests)
    assert read == [str(folder / "index.json")]
    assert artifact.manifest["files"]["a.bin"] == {"bytes": 1, "sha256": key_of("a")}
    store.check(artifact)
    assert len(read) == 1
    assert store.verify(artifact) == ["b.bin (its digest differs)"]
    with pytest.raises(ConfigError, match=r"b\.bin"):
        store.check(artifact)  # which trusts the digest no more


def test_a_folder_that_cannot_be_an_artifact_is_refused(store, tmp_path):
    given = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no file"):
        store.publish("tokens", key_of("one"), empty, **given)
    (empty / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="plain files only"):
        store.publish("tokens", key_of("one"), empty, **given)
    with pytest.raises(ValueError, match="not a kind and a key"):
        store.publish("../tokens", key_of("one"), empty, **given)
    with pytest.raises(ConfigError, match="no artifact 'tokens/0123'"):
        store.publish("report", key_of("one"), empty, **{**given, "inputs": {"x": "tokens/0123"}})
    assert store.list() == []


def test_a_publication_interrupted_before_its_rename_can_be_repeated(store, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nautile.store.artifacts._rename", killed)
        with pytest.raises(KeyboardInterrupt):
            published(store, "tokens", "one")
    assert store.list() == []
    again = published(store, "tokens", "one")
    assert store.verify(again) == []


def test_the_root_comes_from_the_argument_the_environment_or_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NAUTILE_STORE", raising=False)
    assert open_store().root == tmp_path / ".nautile"
    monkeypatch.setenv("NAUTILE_STORE", "elsewhere")
    assert open_store().root == tmp_path / "elsewhere"
    monkeypatch.setenv("NAUTILE_STORE", f"file://{tmp_path}/with%20space")
    assert open_store().root == tmp_path / "with space"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for url in ("s3://bucket/store", "gs://bucket"):
        assert (open_store(url).location, open_store(url).root.parent) == (url, tmp_path / "cache" / "nautile")
    with pytest.raises(ConfigError, match="NAUTILE_STORE"):
        open_store("file://host/path")


def test_a_store_that_cannot_be_written_raises_one_clear_message(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file/deeper", "/proc/nautile"):
        with pytest.raises(ConfigError, match=r"the store .* cannot be written .* NAUTILE_STORE"):
            Store(root).prepare()
    with pytest.raises(ConfigError, match="cannot be written"):
        Store(tmp_path / "file").staging(key_of("one"))
    with pytest.raises(ConfigError, match="cannot be written"):
        Store(tmp_path / "file").lock(key_of("one")).try_acquire()


def test_a_lock_excludes_others_until_it_is_released(store):
    lock, other = store.lock(key_of("x")), store.lock(key_of("x"))
    with lock:
        assert not other.try_acquire()
        assert other.held_elsewhere()
        acquired = threading.Event()

        def wait_for_it():
            other.acquire(wait=lambda _: None)
            acquired.set()

        waiter = threading.Thread(target=wait_for_it)
        waiter.start()
        assert not acquired.is_set()
    assert acquired.wait(60)
    waiter.join()
    other.release()
    assert not lock.held_elsewhere()


def test_files_that_a_library_made_for_its_owner_alone_have_the_mode_of_all_others(store):
    folder = filled(store.staging(key_of("in")) / "output" / "tokens", {"a.bin": "a", "deep/b.txt": "b"})
    (folder / "a.bin").chmod(0o600)
    fields = {"stage": "toy", "version": 1, "config": {}, "inputs": {}, "facts": {}}
    artifact = store.publish("tokens", key_of("in"), folder, **fields)
    modes = {path.stat().st_mode for path in artifact.folder.rglob("*") if path.is_file()}
    assert modes == {(artifact.folder / "manifest.json").stat().st_mode}
    assert store.verify(artifact) == []
