"""What garbage collection removes, and what it must never remove."""

import os
import time
from pathlib import Path

import pytest

from nautile.common.errors import ConfigError
from nautile.common.files import write_json
from nautile.configs.operation import RetentionConfig
from nautile.store.garbage import collect, find_garbage, unfinished_work
from tests.support.samples.stage_store import filled, key_of, published


def reasons(store, **options):
    """Path -> why it is garbage."""
    return {item.path.relative_to(store.root).as_posix(): item.reason for item in find_garbage(store, **options)}


def staged(store, word, *, execution="e1", done=("tokens",)):
    folder = filled(store.staging(key_of(word)), {"scratch/half.bin": "x" * 100})
    write_json(folder / "execution.json", {"execution": execution})
    if done:
        write_json(folder / "done.json", {"outputs": list(done)})
    return folder


def test_a_store_in_use_has_no_garbage(store):
    published(store, "tokens", "one")
    store.discard(store.staging(key_of("one")))
    staged(store, "under way", done=())
    assert reasons(store) == {}


def test_staging_that_is_published_or_long_untouched_is_removed(store):
    published(store, "tokens", "made", execution="e1")
    finished = staged(store, "made")
    half = staged(store, "half", done=("tokens", "exemplars"))
    published(store, "tokens", "half", execution="e1")
    old = staged(store, "old", done=())
    for path in (old, *old.rglob("*")):
        os.utime(path, (time.time() - 30 * 86400,) * 2)
    (store.root / "staging/.trash-1").mkdir()
    items = find_garbage(store)
    assert {item.path for item in items} == {finished, old, store.root / "staging/.trash-1"}
    assert next(item for item in items if item.path == old).reason == "unfinished, untouched for 30 days"
    assert next(item for item in items if item.path == old).bytes > 100
    with store.lock(key_of("old")):
        assert old not in {item.path for item in find_garbage(store)}
        assert old not in {item.path for item in collect(store, items)}
    assert not finished.exists()
    assert half.exists()
    assert old.exists()
    collect(store, find_garbage(store))
    assert sorted(path.name for path in (store.root / "staging").iterdir()) == [key_of("half")]
    assert key_of("half") in str(find_garbage(store, stale_days=-1)[0].path)


def test_unfinished_work_with_checkpoints_is_removed_by_name_alone(store):
    folder = filled(store.staging(key_of("begun")), {"scratch/checkpoints/12/weights.bin": "x"})
    plain = filled(store.staging(key_of("plain")), {"scratch/half.bin": "x"})
    for path in (folder, *folder.rglob("*"), plain, *plain.rglob("*")):
        os.utime(path, (time.time() - 400 * 86400,) * 2)
    assert list(reasons(store)) == [f"staging/{key_of('plain')}"]
    assert {item.path: held for item, held in unfinished_work(store)} == {folder: True, plain: False}
    with pytest.raises(ConfigError, match="no unfinished work has a key that begins with 'ffff'"):
        find_garbage(store, unfinished=["ffff"])
    named = find_garbage(store, stale_days=1000, unfinished=[key_of("begun")[:12]])
    with store.lock(key_of("begun")):
        assert collect(store, named) == []
    assert collect(store, named) == named
    assert not folder.exists()
    assert plain.exists()


def test_superseded_artifacts_are_removed_unless_another_was_made_from_them(store):
    published(store, "tokens", "a", {"a.txt": "1"})
    first = store.list("tokens")[0]
    base = published(store, "checkpoint", "base", inputs={"web": first})
    published(store, "tokens", "a", {"a.txt": "2"}, supersede=True)
    published(store, "tokens", "a", {"a.txt": "3"}, supersede=True)
    assert reasons(store) == {f"artifacts/tokens/{first.key}.2": "superseded, and no live artifact was made from it"}
    published(store, "checkpoint", "base", {"w": "2"}, inputs={"web": store.list("tokens")[0]}, supersede=True)
    unneeded = {f"artifacts/tokens/{first.key}.{n}" for n in (1, 2)} | {f"artifacts/checkpoint/{base.key}.1"}
    assert reasons(store).keys() == unneeded
    removed = collect(store, find_garbage(store))
    assert {item.path.relative_to(store.root).as_posix() for item in removed} == unneeded
    assert reasons(store) == {}
    assert {artifact.id for artifact in store.list(superseded=True)} == {first.id, base.id}


def test_leftovers_are_removed_but_never_a_live_artifact(store):
    live = published(store, "tokens", "one")
    (live.path / "manifest.json").write_text("{")
    old = published(store, "report", "two")
    published(store, "report", "two", {"a.txt": "new"}, supersede=True)
    (old.path.with_name(f"{old.key}.1") / "manifest.json").write_text("{")
    leftover = filled(store.root / "artifacts/tokens" / key_of("rest"), {"a.txt": "no manifest"})
    records = filled(store.root / "verified", {f"tokens-{key_of('gone')}.json": "{}", f"tokens-{live.key}.json": "{}"})
    collect(store, find_garbage(store))
    assert live.path.exists()
    assert not leftover.exists()
    assert len(store.list("report", superseded=True)) == 1
    assert [path.name for path in records.iterdir()] == [f"tokens-{live.key}.json"]


def test_of_a_link_only_the_link_is_counted_and_removed(store, tmp_path):
    """Where it leads to is not the store's: another folder of this machine, in a store that was unpacked here."""
    elsewhere = tmp_path / "elsewhere"
    inner = elsewhere / key_of("docker")
    inner.mkdir(parents=True)
    (inner / "kept").write_bytes(b"x" * 10**6)
    store.artifacts.mkdir(parents=True, exist_ok=True)
    store.staging_root.mkdir(parents=True, exist_ok=True)
    (store.artifacts / "linked").symlink_to(elsewhere)
    places = [store.artifacts / "tokens" / key_of("a"), store.staging_root / "odd", store.staging_root / key_of("b")]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(inner)
    garbage = find_garbage(store, stale_days=0, unfinished=[key_of("b")])
    assert sum(item.bytes for item in garbage) < 10**4
    assert sorted(item.path for item in collect(store, garbage)) == sorted(places)
    assert not any(place.is_symlink() for place in places)
    assert find_garbage(store, stale_days=0) == []
    assert (inner / "kept").stat().st_size == 10**6


def test_what_another_process_is_removing_ends_no_collection(store, monkeypatch):
    folders = [store.root / "staging" / name for name in (".trash-1", ".pull-1", key_of("begun"))]
    for folder in folders:
        filled(folder, {"a.txt": "", "b.txt": "text"})
    lstat = Path.lstat

    def lstat_after_a_removal(path):
        if path.name == "a.txt":
            path.unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", lstat_after_a_removal)
    assert [(item.path, item.bytes) for item in find_garbage(store)] == [(folders[0], 4)]


def test_what_a_run_has_replaced_or_continued_since_it_was_found_stays(store):
    old = published(store, "tokens", "one", facts={"rows": 1})
    half = staged(store, "half", done=())
    for path in (half, *half.rglob("*")):
        os.utime(path, (time.time() - 30 * 86400,) * 2)
    items = find_garbage(store, rules=RetentionConfig(days=0))
    assert {item.path for item in items} >= {old.folder, half}
    new = published(store, "tokens", "one", {"a.txt": "new"}, supersede=True)
    (half / "scratch/more.bin").write_text("more")
    removed = collect(store, items)
    assert not {item.path for item in removed} & {old.folder, half}
    assert store.find("tokens", old.key) == new
    assert half.exists()
