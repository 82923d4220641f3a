"""Unfinished work at the remote: sent with each checkpoint, taken up by another machine, gone once it is published."""

import json
import os
import re
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from nautile.common.errors import ConfigError, Retryable
from nautile.model.training.checkpoint import TrainCheckpoints
from nautile.store.garbage import collect, find_garbage
from nautile.store.staging_mirror import SNAPSHOT, StagingMirror, upload_note
from tests.support.samples.stage_store import filled, key_of, published

pytestmark = pytest.mark.slow
KEY = key_of("x")
STEP = "scratch/checkpoints/steps"


def mirror(store):
    return StagingMirror(store.remote, store.root / "staging" / KEY)


def contents(store):
    folder = store.root / "staging" / KEY
    files = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    return {name: text for name, text in files.items() if name not in ("sent.json", "uploads.json")}


def begun(store):
    own = {"request.json": "a's", "live.json": "{}", "scratch/.x.tmp": "half", f"{STEP}/2.orbax-tmp-1/state": "half"}
    work = {
        "execution.json": "{}",
        "output/rows.jsonl": "1\n",
        f"{STEP}/1/state": "one",
        f"{STEP}/1/digests.json": "{}",
    }
    filled(store.root / "staging" / KEY, own | work)
    return work


def test_another_machine_goes_on_from_the_last_checkpoint(pair):
    a, b = pair
    work = begun(a)
    first = mirror(a)
    assert first.push()
    assert not first.push()  # nothing new
    second = mirror(b)
    assert second.pull()
    assert contents(b) == work
    assert not second.pull()  # it has that step
    assert not second.push()

    folder = b.root / "staging" / KEY
    (folder / f"{STEP}/1").rename(folder / f"{STEP}/2")
    (folder / "output/rows.jsonl").write_text("1\n2\n")
    assert second.push()
    assert not [name for name in b.remote.names(f"staging/{KEY}") if name.startswith(f"{STEP}/1/")]
    assert mirror(a).pull()  # which came back with an older step
    assert contents(a) == contents(b)


def test_a_collection_of_garbage_during_a_download_leaves_it_alone_until_it_is_old(pair, monkeypatch):
    a, b = pair
    work = begun(a)
    mirror(a).push()
    download = b.remote.get

    def download_after_a_collection(name, target):
        collect(b, find_garbage(b))
        return download(name, target)

    monkeypatch.setattr(b.remote, "get", download_after_a_collection)
    assert mirror(b).pull()
    assert contents(b) == work
    leftover = filled(b.root / "staging" / ".pull-1", {"a.txt": "of a process that was killed"})
    assert find_garbage(b) == []
    for path in (leftover, *leftover.rglob("*")):
        os.utime(path, (time.time() - 2 * 3600,) * 2)
    assert [item.path for item in find_garbage(b)] == [leftover]


def test_what_is_fetched_is_on_disk_before_it_takes_the_place_of_the_folder(pair, monkeypatch):
    a, b = pair
    begun(a)
    mirror(a).push()
    fsync, rename, synced, unsynced = os.fsync, Path.rename, set(), []

    def record_sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(path, target):
        if path.name.startswith(".pull-"):
            # A power cut after this could leave a marker whose results are empty.
            unsynced.extend(entry for entry in (path, *path.rglob("*")) if entry.stat().st_ino not in synced)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "rename", record_rename)
    assert mirror(b).pull()
    assert unsynced == []


def test_finished_items_are_sent_with_what_they_wrote_and_what_they_used_up_is_dropped(pair):
    a, b = pair
    folder = filled(
        a.root / "staging" / KEY,
        {
            "fan_outs/cut/list.json": "{}",
            "fan_outs/cut/done/1": "{}",
            "fan_outs/cut/items/2/live.json": "{}",
            "fan_outs/lease.json": "{}",
            "scratch/files/1/ids": "ids",
            "scratch/files/.2.partial-x/ids": "half",
            "output/tokens/1.bin": "one",
        },
    )
    first = mirror(a)
    assert first.push()
    sent = a.remote.names(f"staging/{KEY}").keys() - {SNAPSHOT}
    assert sent == {"fan_outs/cut/list.json", "fan_outs/cut/done/1", "scratch/files/1/ids", "output/tokens/1.bin"}
    filled(folder, {"output/tokens/1.bin": "one and two"})
    assert not first.push()  # nothing was finished
    assert first.push(changes=True)
    assert not first.push(changes=True)
    assert mirror(b).pull()
    assert contents(b)["output/tokens/1.bin"] == "one and two"
    filled(folder, {"fan_outs/pack/done/1": "{}"})
    (folder / "scratch/files/1/ids").unlink()
    assert mirror(a).push()  # another process of the machine
    assert "scratch/files/1/ids" not in a.remote.names(f"staging/{KEY}")
    assert mirror(b).pull()
    assert "fan_outs/pack/done/1" in contents(b)


def test_a_file_that_is_used_up_while_it_is_sent_has_its_result_in_the_snapshot(pair, monkeypatch):
    a, b = pair
    folder = filled(a.root / "staging" / KEY, {"fan_outs/cut/done/1": "{}", "scratch/files/1/ids": "ids"})
    put, calls = a.remote.put, []

    def use_up(source, name):
        calls.append(name)
        if len(calls) == 1:
            filled(folder, {"output/1.bin": "one", "fan_outs/pack/done/1": "{}"})
            (folder / "scratch/files/1/ids").unlink()
        put(source, name)

    monkeypatch.setattr(a.remote, "put", use_up)
    assert mirror(a).push()
    assert mirror(b).pull()
    assert sorted(contents(b)) == ["fan_outs/cut/done/1", "fan_outs/pack/done/1", "output/1.bin"]


def test_a_file_that_is_moved_as_it_is_opened_for_the_upload_may_be_tried_again(pair, monkeypatch):
    """The attempt takes the file between the check that it is there and its first byte; the bucket is not missing."""
    a, _ = pair
    file = filled(a.root / "staging" / KEY, {"ids": "ids"}) / "ids"
    filesystem = a.remote._filesystem[0]
    put_file = filesystem.put_file

    def move_first(source, name):
        file.unlink()
        put_file(source, name)

    monkeypatch.setattr(filesystem, "put_file", move_first)
    with pytest.raises(Retryable, match="was moved by another run"):
        a.remote.put(file, "staging/ids")


def test_a_snapshot_that_was_not_finished_is_not_used(pair, monkeypatch):
    a, b = pair
    begun(a)
    put = a.remote.put

    def cut(source, name):
        if "/steps/" in name:
            raise Retryable("cut")
        put(source, name)

    monkeypatch.setattr(a.remote, "put", cut)
    with pytest.raises(Retryable, match="cut"):
        mirror(a).push()
    assert not mirror(b).pull()
    monkeypatch.setattr(a.remote, "put", put)
    mirror(a).push()
    a.remote.delete([f"staging/{KEY}/{STEP}/1/state"])
    assert not mirror(b).pull()
    hostile = {"id": "x", "progress": [9, 1], "files": {"../../climbed": 1}}
    a.remote.write(f"staging/{KEY}/{SNAPSHOT}", json.dumps(hostile).encode())
    assert not mirror(b).pull()
    assert [path.name for path in (b.root / "staging").iterdir()] == []


def test_what_concerns_the_machine_that_sent_it_alone_is_not_taken_over(pair):
    """As that of another version: with its publication.json this machine would publish as the other one."""
    a, b = pair
    work = begun(a)
    assert mirror(a).push()
    (name,) = (name for name in a.remote.names(f"staging/{KEY}") if name.endswith(SNAPSHOT))
    snapshot = json.loads(a.remote.read(f"staging/{KEY}/{name}", 10**6))
    for own in ("publication.json", "uploads.json", "fan_outs/lease.json", "fan_outs/cut/items/1/log.txt"):
        snapshot["files"][own] = [2, 0]
        a.remote.write(f"staging/{KEY}/{own}", b"{}")
    a.remote.write(f"staging/{KEY}/{name}", json.dumps(snapshot).encode())
    assert mirror(b).pull()
    assert contents(b) == work


def test_a_snapshot_without_files_leaves_an_empty_folder(pair):
    _, b = pair
    content = {"id": "1", "progress": [0, 0], "files": {}}
    b.remote.write(f"staging/{KEY}/{SNAPSHOT}", json.dumps(content).encode())
    assert mirror(b).pull()
    assert contents(b) == {}


def test_what_has_no_checkpoint_is_not_sent_and_what_is_published_is_removed(pair):
    a, _ = pair
    folder = filled(a.root / "staging" / KEY, {"execution.json": "{}", "scratch/half.bin": "x"})
    with a.mirrored_staging(KEY):
        pass
    assert a.remote.names("staging") == {}
    begun(a)
    with a.mirrored_staging(KEY):
        pass  # sent at the end, if not before
    assert SNAPSHOT in a.remote.names(f"staging/{KEY}")
    with a.mirrored_staging(KEY):
        a.discard(folder)
    assert a.remote.names("staging") == {}


def test_a_machine_that_has_lost_its_lease_leaves_the_work_of_its_successor_alone(pair):
    a, b = pair
    begun(a)
    leased = True

    def check():
        if not leased:
            raise Retryable("taken over by b")

    with a.mirrored_staging(KEY, check=check):
        second = mirror(b)
        filled(b.root / "staging" / KEY, {f"{STEP}/9/state": "nine"})
        assert second.push()
        sent = a.remote.read(f"staging/{KEY}/{SNAPSHOT}", 2**16)
        leased = False
    assert a.remote.read(f"staging/{KEY}/{SNAPSHOT}", 2**16) == sent
    assert f"{STEP}/9/state" in a.remote.names(f"staging/{KEY}")


def test_what_could_not_be_sent_stays_at_the_remote_until_it_is_old(pair):
    a, _ = pair
    begun(a)
    mirror(a).push()

    def publish():
        with a.mirrored_staging(KEY):
            a.discard(a.root / "staging" / KEY)
            published(a, "tokens", "x")
            a.discard(a.root / "staging" / KEY)
            raise Retryable("cut")

    with pytest.raises(Retryable, match="cut"):
        publish()
    assert SNAPSHOT in a.remote.names(f"staging/{KEY}")
    a.push_all()
    assert find_garbage(a) == []
    (item,) = find_garbage(a, stale_days=-1)
    assert (item.path.name, item.reason) == (KEY, "its outputs are published")
    collect(a, [item])
    assert a.remote.names("staging") == {}


def test_unfinished_work_that_is_named_is_removed_at_the_remote_too(pair):
    a, _ = pair
    begun(a)
    mirror(a).push()
    assert find_garbage(a, stale_days=-1) == []
    collect(a, find_garbage(a, unfinished=[KEY[:12]]))
    assert a.remote.names("staging") == {}
    assert not (a.root / "staging" / KEY).exists()


def test_the_checkpoints_of_a_training_are_intact_on_the_other_machine(pair):
    def checkpoints(store):
        return TrainCheckpoints(store.root / "staging" / KEY / "scratch/checkpoints", keep=2, identity={"seed": 1})

    a, b = pair
    state = {"weights": jnp.arange(10.0)}
    first = checkpoints(a)
    for step in (1, 2, 3):
        first.save(step, state, {"tokens": step})
    first.close()
    assert mirror(a).push()
    assert mirror(b).pull()
    second = checkpoints(b)
    assert second.latest() == 3
    restored, extra = second.restore(3, state)
    second.close()
    assert restored["weights"].tolist() == state["weights"].tolist()
    assert extra == {"tokens": 3}


def test_work_that_cannot_be_sent_is_said_with_the_reason_and_the_age_of_the_last_upload(pair, monkeypatch, caplog):
    a, _ = pair
    folder = a.root / "staging" / KEY
    assert upload_note(folder) == ""
    begun(a)
    mirror(a).push()
    assert re.fullmatch(r"uploaded \d.* ago", upload_note(folder))
    monkeypatch.setattr("nautile.store.staging_mirror.PUSH_EVERY_S", 0.01)

    def refuse(*_):
        raise ConfigError("the store refuses (PermissionError: 403)")

    with monkeypatch.context() as patch:
        patch.setattr(a.remote, "put", refuse)
        filled(folder, {f"{STEP}/2/state": "two"})
        sender = mirror(a)
        sender.start()
        while not upload_note(folder).startswith("NOT"):
            time.sleep(0.01)
        sender.stop(published=False)
    assert re.fullmatch(
        r"NOT uploaded \(last: .* ago\): the store refuses \(PermissionError: 403\)", upload_note(folder)
    )
    assert caplog.text.count("unfinished work cannot be sent: the store refuses") == 1
    mirror(a).push()
    assert upload_note(folder).startswith("uploaded ")
    assert not [name for name in a.remote.names("staging") if "uploads" in name]


def test_ctrl_c_waits_for_an_upload_that_hangs_only_so_long(pair, monkeypatch):
    a, _ = pair
    begun(a)
    hanging, hangs = threading.Event(), threading.Event()

    def hang(*_):
        hangs.set()
        hanging.wait()

    monkeypatch.setattr(a.remote, "put", hang)
    monkeypatch.setattr("nautile.store.mirror.STOP_S", 0.05)
    monkeypatch.setattr("nautile.store.staging_mirror.PUSH_EVERY_S", 0.01)

    def work():
        with a.mirrored_staging(KEY):
            hangs.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    hanging.set()
