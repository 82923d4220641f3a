"""A store with a remote, seen from two machines: through a socket, to an S3-compatible server."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import s3fs

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.store import remote as remotes
from nautile.store.catalog import Catalog
from nautile.store.events import EventWriter
from nautile.store.garbage import collect, find_garbage
from nautile.store.manifest import ABSENT, MIRRORED
from nautile.store.mirror import open_store
from tests.support.samples.stage_store import flip_byte, key_of, manifest_of, published
from tests.support.servers.object_store import CuttingProxy

pytestmark = pytest.mark.slow


def objects(store):
    """The file system, the base path, and the names of the objects at the remote."""
    filesystem, base = s3fs.S3FileSystem(use_listings_cache=False), store.url.removeprefix("s3://")
    return filesystem, base, sorted(name.removeprefix(f"{base}/") for name in filesystem.find(base))


def send(store, *artifacts):
    return [artifact.id for artifact in store.push(artifacts or store.list(superseded=True))]


def test_a_second_machine_sees_reads_and_queries_what_the_first_published(pair):
    a, b = pair
    tokens = published(a, "tokens", "in", {"a.txt": "one", "deep/b.txt": "two"})
    base = published(a, "checkpoint", "out", {"w.bin": "w" * 5000}, inputs={"web": tokens})
    emit = EventWriter(a.root / "events" / "child.jsonl", base.execution, stage="toy")
    emit("metric", name="loss", step=1, value=0.5)
    assert [artifact.id for artifact in a.push_all()] == [tokens.id, base.id]
    assert a.push_all() == []

    b.refresh(events=True)
    assert [artifact.id for artifact in b.list()] == [tokens.id, base.id]
    assert {row["id"] for row in Catalog(b).lineage(base.id)} == {tokens.id, base.id}
    assert Catalog(b).query("SELECT value FROM metrics") == [{"value": 0.5}]
    result = b.find("checkpoint", base.key)
    assert result.manifest == base.manifest
    assert not (result.folder / "w.bin").exists()
    b.check(result)
    assert not (result.folder / "w.bin").exists()
    assert (result.path / "w.bin").read_text() == "w" * 5000
    assert (b.get(tokens.id).path / "deep/b.txt").read_text() == "two"
    assert b.verify(result) == []
    assert (result.folder / MIRRORED).exists()
    assert not (result.folder / ABSENT).exists()
    assert Catalog(b).rebuild()["artifacts"] == 2
    assert open_store(b.root).url == b.url


def test_the_manifest_is_sent_last(pair, monkeypatch):
    a, b = pair
    artifact = published(a, "tokens", "in", {f"{i}.txt": str(i) for i in range(5)})
    put, sent = a.remote.put, []

    def put_some(source, name):
        if len(sent) == 3:
            raise Retryable("connection cut")
        sent.append(name)
        put(source, name)

    monkeypatch.setattr(a.remote, "put", put_some)
    monkeypatch.setattr(a.remote, "map", lambda function, items: [function(item) for item in items])
    with pytest.raises(Retryable, match="cut"):
        send(a)
    assert len([name for name in objects(a)[2] if name.startswith("payload/")]) == 3
    b.refresh()
    assert b.list() == []
    sent.clear()
    assert send(a) == [artifact.id]
    assert len(sent) == 2  # the three that were there were not sent again
    b.refresh()
    assert b.verify(b.get(artifact.id)) == []


@pytest.mark.parametrize("harm", ["flip", "short", "long", "gone"])
def test_damage_at_the_remote_is_refused_by_name_and_not_stored(pair, harm):
    a, b = pair
    artifact = published(a, "tokens", "in", {"a.txt": "abc", "b.txt": "b"})
    a.push_all()
    filesystem, base, _ = objects(a)
    name = f"{base}/payload/tokens/{artifact.key}/{artifact.execution}/a.txt"
    if harm == "gone":
        filesystem.rm_file(name)
    else:
        filesystem.pipe_file(name, {"flip": b"abd", "short": b"ab", "long": b"abcd"}[harm])
    b.refresh()
    result = b.get(artifact.id)
    words = {"flip": "its digest differs", "short": "2 bytes, not 3", "long": "4 bytes, not 3", "gone": "missing"}[harm]
    with pytest.raises(ConfigError, match=rf"{artifact.id} at s3://.* is damaged: a\.txt \({words}\)"):
        _ = result.path
    assert not (result.folder / "a.txt").exists()
    assert b.verify(result) == [f"a.txt ({words}) at the remote"]
    if harm != "flip":
        with pytest.raises(ConfigError, match="is damaged"):
            b.check(result)
    assert send(a) == []
    a.push([a.get(artifact.id)], again=True)
    assert (result.path / "a.txt").read_text() == "abc"


def test_fetching_repairs_a_damaged_copy(pair):
    a, _ = pair
    artifact = published(a, "tokens", "in", {"a.txt": "abc", "b.txt": "b"})
    a.push_all()
    flip_byte(artifact.folder / "a.txt")
    with pytest.raises(ConfigError, match=f"nautile store fetch {artifact.id}"):
        a.check(artifact)
    a.fetch(artifact)
    assert a.verify(artifact) == []
    (artifact.folder / "b.txt").unlink()
    a.fetch(artifact)
    a.check(artifact)


def test_the_newest_version_is_the_live_one_on_every_machine(pair):
    a, b = pair
    first = published(a, "tokens", "in", {"a.txt": "first"})
    reader = published(a, "checkpoint", "out", inputs={"web": first})
    a.push_all()
    b.refresh()
    published(b, "tokens", "in", {"a.txt": "second"}, supersede=True)
    b.push_all()
    a.refresh()
    assert (a.find("tokens", first.key).path / "a.txt").read_text() == "second"
    assert (a.get(f"{first.id}.1").path / "a.txt").read_text() == "first"
    assert {row["execution"] for row in Catalog(a).lineage(reader.id)} == {reader.execution, first.execution}
    published(a, "tokens", "in", {"a.txt": "third"}, supersede=True)
    third = machine_of(a, "c")
    third.refresh()
    b.refresh()
    a.push_all()
    third.refresh()
    assert [artifact.superseded for artifact in third.list("tokens", superseded=True)] == [1, 2, 0]
    assert (third.find("tokens", first.key).path / "a.txt").read_text() == "third"
    assert (third.get(f"{first.id}.1").path / "a.txt").read_text() == "first"


def machine_of(store, name):
    os.environ["NAUTILE_STORE_CACHE"] = str(store.root.with_name(name))
    return open_store(store.url)


def test_hostile_names_at_the_remote_reach_no_file(pair, tmp_path, caplog):
    a, b = pair
    filesystem, base, _ = objects(a)
    file = {"bytes": 3, "sha256": key_of("x")}
    hostile = {
        "climbs": manifest_of(files={"../../../../climbed": file}, execution="climbs"),
        "other": manifest_of(files={"a.txt": file}, execution="another"),
        "deep": json.loads("[" * 300 + "]" * 300),
    }
    for execution, manifest in hostile.items():
        filesystem.pipe_file(f"{base}/manifests/tokens/{key_of('x')}/{execution}.json", json.dumps(manifest).encode())
    filesystem.pipe_file(f"{base}/manifests/tokens/../../x.json", b"{}")
    filesystem.pipe_file(f"{base}/manifests/tokens/{key_of('x')}/huge.json", b" " * (33 * 2**20))
    filesystem.pipe_file(f"{base}/events/..climbed.jsonl", b"{}\n")
    filesystem.pipe_file(f"{base}/events/deep/er.jsonl", b"{}\n")
    b.refresh(events=True)
    assert b.list() == []
    assert not list(tmp_path.rglob("*climbed*"))
    kept = {path.relative_to(b.root).as_posix() for path in b.root.rglob("*") if path.is_file()}
    assert {name for name in kept if not name.startswith("locks/")} == {"remote.json", "store.json"}
    assert caplog.text.count("is damaged and not used") == 4
    assert caplog.text.count("is not an event file") == 2


def test_a_broken_connection_is_one_message_and_the_next_push_continues(pair, object_store_address, monkeypatch):
    a, b = pair
    artifact = published(a, "tokens", "in", {f"{i}.bin": str(i) * 50000 for i in range(8)})
    monkeypatch.setattr(remotes, "BACKOFF", Backoff(attempts=1))
    proxy = CuttingProxy(object_store_address, 150_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Retryable, match=f"the store {a.url} cannot be reached"):
        open_store(a.root).push([artifact])
    proxy.restore()
    s3fs.S3FileSystem.clear_instance_cache()
    assert send(open_store(a.root), artifact) == [artifact.id]
    proxy.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store_address)
    s3fs.S3FileSystem.clear_instance_cache()
    b.refresh()
    assert b.verify(b.get(artifact.id)) == []


def test_wrong_urls_and_buckets_are_explained_in_one_message(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("NAUTILE_STORE_CACHE", str(tmp_path / "lost"))
    with pytest.raises(ConfigError, match=r"the store s3://nautile-no-such-bucket/x refuses .* check the bucket"):
        open_store("s3://nautile-no-such-bucket/x").refresh()
    machine("a")
    with pytest.raises(ConfigError, match="is the cache of s3://"):
        open_store("s3://another/x")
    for bad in ("memory://x", "http://host/x", "nosuch://x/y", "s3://", "simplecache::s3://b/x"):
        with pytest.raises(ConfigError, match="NAUTILE_STORE"):
            open_store(bad)
    with pytest.raises(ConfigError, match="Credentials come from the environment") as error:
        open_store("s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(error.value)


def test_removal_includes_the_remote_and_other_machines_forget(pair):
    a, b = pair
    first = published(a, "tokens", "in", {"a.txt": "first"})
    a.push_all()
    published(a, "tokens", "in", {"a.txt": "second"}, supersede=True)
    a.push_all()
    b.refresh()
    assert len(b.list(superseded=True)) == 2
    removed = collect(a, find_garbage(a))
    assert [item.path.name for item in removed] == [f"{first.key}.1"]
    # An empty object in place of the manifest: nobody can publish under that id again.
    left = [name for name in objects(a)[2] if first.execution in name]
    assert left == [f"manifests/tokens/{first.key}/{first.execution}.json"]
    assert a.remote.read(left[0], 10) == b""
    assert a.unusable_manifests() == []
    b.refresh()
    assert [artifact.superseded for artifact in b.list(superseded=True)] == [0]
    filesystem, base, _ = objects(a)
    filesystem.pipe_file(f"{base}/payload/tokens/{key_of('half')}/e9/a.bin", b"half")
    assert find_garbage(a) == []
    leftovers = find_garbage(a, stale_days=-1)
    assert [item.bytes for item in leftovers if item.remote] == [4]
    with b.lease(key_of("half"), time.sleep, print):
        collected = collect(a, leftovers)
    assert [item for item in collected if item.remote] == [], "another machine works on the key"
    collect(a, leftovers)
    assert not [name for name in objects(a)[2] if "/e9/" in name]


def test_a_version_that_another_process_adds_during_a_refresh_stays(pair, monkeypatch):
    a, b = pair
    artifact = published(a, "tokens", "in")
    names, other = b.remote.names, open_store(b.root)

    def list_before_another(folder):
        listing = names(folder)
        if folder == "manifests" and not other.list():
            a.push_all()
            other.refresh()
        return listing

    monkeypatch.setattr(b.remote, "names", list_before_another)
    b.refresh()
    assert [known.id for known in b.list()] == [artifact.id]


def test_a_marker_that_changes_while_it_is_read_belongs_to_the_same_version(pair, monkeypatch):
    a, b = pair
    artifact, read = published(a, "tokens", "in"), Path.read_text
    a.push_all()
    b.refresh()

    def read_after_a_fetch(path, **options):
        if path.name == ABSENT:
            path.rename(path.with_name(MIRRORED))
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", read_after_a_fetch)
    b.refresh()
    assert [known.id for known in b.list()] == [artifact.id]


def test_a_refusal_is_no_damage_whatever_the_url_is_called(pair, monkeypatch):
    a, b = pair
    published(a, "tokens", "in")
    a.push_all()
    read = b.remote.read

    def refuse(name, limit):
        if name.startswith("manifests/"):
            raise ConfigError("the store s3://bytes/run refuses (PermissionError)")
        return read(name, limit)

    monkeypatch.setattr(b.remote, "read", refuse)
    with pytest.raises(ConfigError, match="refuses"):
        b.refresh()


def test_a_folder_that_was_moved_is_no_object_that_is_missing(pair, tmp_path):
    a, _ = pair
    a.refresh()
    assert a.remote.get("store.json", tmp_path / "store.json")
    assert not a.remote.get("none.json", tmp_path / "none.json")
    with pytest.raises(Retryable, match="moved by another run"):
        a.remote.get("store.json", tmp_path / "gone" / "store.json")


def test_of_two_uploads_of_a_growing_event_file_the_shorter_never_ends_last(pair, monkeypatch):
    a, _ = pair
    path = a.root / "events" / "child.jsonl"
    path.write_bytes(b"1\n")
    put, lock, begun, waited_for = a.remote.put, threading.Lock(), threading.Event(), threading.Event()

    class Lock:
        def __enter__(self):
            if not lock.acquire(blocking=False):
                waited_for.set()
                lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def put_slowly_at_first(source, name):
        if begun.is_set():
            put(source, name)
            waited_for.set()
            return
        content = source.read_bytes()
        begun.set()
        waited_for.wait()
        a.remote.write(name, content)

    monkeypatch.setattr("nautile.store.mirror._sending_events", Lock(), raising=False)
    monkeypatch.setattr(a.remote, "put", put_slowly_at_first)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(a.push_events)
        begun.wait()
        path.write_bytes(b"1\n2\n")
        second = pool.submit(a.push_events)
        assert (first.result(), second.result()) == (1, 1)
    assert a.remote.read("events/child.jsonl", 100) == b"1\n2\n"


def test_a_version_that_is_replaced_while_it_is_fetched_leaves_its_successor_intact(pair, monkeypatch):
    a, b = pair
    first = published(a, "tokens", "in", {"a.txt": "one", "b.txt": "two"})
    a.push_all()
    b.refresh()
    old = b.find("tokens", first.key)
    download, other = b.remote.get, open_store(b.root)

    def replace_then_download(name, target):
        if name.endswith("/b.txt") and not other.list(superseded=True)[0].superseded:
            published(other, "tokens", "in", {"a.txt": "ONE", "b.txt": "TWO"}, supersede=True)
        return download(name, target)

    monkeypatch.setattr(b.remote, "get", replace_then_download)
    monkeypatch.setattr(b.remote, "map", lambda function, items: [function(item) for item in items])
    with pytest.raises(Retryable, match="moved by another run while it was fetched"):
        b.fetch(old)
    live = b.find("tokens", first.key)
    assert {name: (live.folder / name).read_text() for name in ("a.txt", "b.txt")} == {"a.txt": "ONE", "b.txt": "TWO"}
    assert b.verify(live) == []
    assert not list(live.folder.rglob(".*.tmp"))


def test_a_version_that_is_replaced_while_it_is_sent_is_not_published_with_the_files_of_its_successor(
    pair, monkeypatch
):
    a, b = pair
    old = published(a, "tokens", "in", {"a.txt": "one", "b.txt": "two"})
    upload, other = a.remote.put, open_store(a.root)

    def replace_then_upload(source, name):
        if name.endswith(f"{old.execution}/b.txt") and len(other.list(superseded=True)) == 1:
            published(other, "tokens", "in", {"a.txt": "ONE", "b.txt": "TWO"}, supersede=True)
        upload(source, name)

    monkeypatch.setattr(a.remote, "put", replace_then_upload)
    monkeypatch.setattr(a.remote, "map", lambda function, items: [function(item) for item in items])
    with pytest.raises(Retryable, match="moved by another run while it was sent"):
        a.push([old])
    assert not a.is_mirrored(a.find("tokens", old.key))
    a.push_all()
    b.refresh()
    assert [b.verify(artifact) for artifact in b.list(superseded=True)] == [[], []]
