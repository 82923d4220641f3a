"""The bounded cache of files that only the remote has: what it holds, what it removes, and what it refuses."""

import errno
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nautile.common.errors import ConfigError
from nautile.configs.training import PhaseConfig
from nautile.data.tokenizer import tokenizer_for
from nautile.data.tokens.loader import Loader
from nautile.data.tokens.shards import ConcatPacker, ShardIndex, write_index, write_shard
from nautile.store.locks import flock_until
from nautile.store.manifest import ABSENT
from nautile.tasks.engine import remote_child
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.remote_child import CACHE_LOCK, FileCache
from nautile.tasks.engine.stage import RunContext
from tests.support.processes.training import TOKENIZER
from tests.support.samples.stage_store import key_of, published
from tests.support.stages.stage_sums import reader

pytestmark = pytest.mark.slow
ROW = 32


def absent(pair, files, **fields):
    """An artifact with `files` that only the remote has, as machine b sees it."""
    a, b = pair
    a.push([published(a, "tokens", "x", files, **fields)])
    b.refresh()
    return b.get(f"tokens/{key_of('x')}")


def held(store):
    """The files of the cache and their bytes, while none is added or removed by the loader's thread."""
    folder = store.root / "cache" / "files"
    with flock_until(folder / CACHE_LOCK, math.inf, shared=False):
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != CACHE_LOCK}


def content(descriptor):
    return os.pread(descriptor, 1000, 0).decode()


def test_files_are_fetched_when_read_and_the_least_recently_used_go_first(pair):
    artifact = absent(pair, {f"shards/{n}": str(n) * 100 for n in range(5)})
    store, cache = pair[1], FileCache(pair[1], 250)

    def read(number):
        descriptor = cache.open(artifact.folder / f"shards/{number}")
        assert content(descriptor) == str(number) * 100
        os.close(descriptor)

    for number in (0, 1, 0, 2):
        read(number)
    assert cache.fetched_bytes == 300
    assert len(held(store)) == 2
    read(0)  # 1 was removed for 2
    assert cache.fetched_bytes == 300
    assert not store.has_files(artifact)


def test_a_file_in_use_is_not_removed_and_what_a_killed_process_left_is(pair):
    artifact = absent(pair, {f"shards/{n}": str(n) * 100 for n in range(4)})
    store, cache, other = pair[1], FileCache(pair[1], 150), FileCache(pair[1], 150)
    (store.root / "cache" / "files" / f".{key_of('y')}.90.tmp").touch()
    first = cache.open(artifact.folder / "shards/0")
    second = other.open(artifact.folder / "shards/1")  # over the bound: both are in use
    assert sorted(held(store).values()) == [100, 100]
    os.close(second)
    third = other.open(artifact.folder / "shards/2")
    assert content(first) == "0" * 100
    assert len(held(store)) == 2
    again = cache.open(artifact.folder / "shards/0")
    assert cache.fetched_bytes == 100
    for descriptor in (first, third, again):
        os.close(descriptor)


def test_a_file_that_several_want_at_once_is_fetched_once(pair):
    artifact = absent(pair, {"shards/0": "0" * 100})
    caches = [FileCache(pair[1], 1000) for _ in range(8)]
    barrier = threading.Barrier(8)

    def read(cache):
        barrier.wait()
        return content(cache.open(artifact.folder / "shards/0"))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, caches)) == {"0" * 100}
    assert sum(cache.fetched_bytes for cache in caches) == 100


def test_a_damaged_object_is_refused_and_not_kept(pair):
    artifact = absent(pair, {"shards/0": "0" * 100})
    (name,) = [name for name in pair[0].remote.names("payload") if name.endswith("shards/0")]
    pair[0].remote.write(f"payload/{name}", b"1" * 100)
    with pytest.raises(ConfigError, match="its digest differs"):
        FileCache(pair[1], 1000).open(artifact.folder / "shards/0")
    pair[0].remote.delete([f"payload/{name}"])
    with pytest.raises(ConfigError, match="is missing"):
        FileCache(pair[1], 1000).open(artifact.folder / "shards/0")
    with pytest.raises(ConfigError, match="not in the manifest"):
        FileCache(pair[1], 1000).open(artifact.folder / "shards/9")
    assert held(pair[1]) == {}


def test_an_error_of_the_disk_is_named_as_what_it_is(pair, monkeypatch):
    artifact = absent(pair, {"shards/0": "0" * 100})
    for number, expected in ((errno.ENOSPC, ConfigError), (errno.EIO, OSError)):

        def refuse(name, path, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(pair[1].remote, "get", refuse)
        with pytest.raises((ConfigError, OSError)) as raised:
            FileCache(pair[1], 1000).open(artifact.folder / "shards/0")
        assert isinstance(raised.value, expected)
        assert ("cannot be written" in str(raised.value)) == (expected is ConfigError)
    assert held(pair[1]) == {}


def test_a_download_that_could_not_begin_is_tried_again(pair, monkeypatch):
    artifact = absent(pair, {"shards/0": "0" * 100})
    cache = FileCache(pair[1], 1000)

    def fail(*_):
        raise OSError(errno.EIO, "no listing")

    monkeypatch.setattr(cache, "_make_room", fail)
    with pytest.raises(OSError, match="no listing"):
        cache.open(artifact.folder / "shards/0")
    monkeypatch.undo()
    monkeypatch.setattr(remote_child, "sleep", pytest.fail)
    descriptor = cache.open(artifact.folder / "shards/0")
    assert content(descriptor) == "0" * 100
    os.close(descriptor)


def test_a_failed_download_is_removed_while_no_other_begins(pair, monkeypatch):
    artifact = absent(pair, {"shards/0": "0" * 100})
    cache, unlink, free = FileCache(pair[1], 1000), Path.unlink, []

    def fail(*_):
        raise OSError(errno.EIO, "no connection")

    def remove(path, missing_ok=False):
        with flock_until(path.with_name(CACHE_LOCK), -math.inf, shared=False) as acquired:
            free.append(acquired)
        unlink(path, missing_ok)

    monkeypatch.setattr(pair[1].remote, "get", fail)
    monkeypatch.setattr(Path, "unlink", remove)
    with pytest.raises(OSError, match="no connection"):
        cache.open(artifact.folder / "shards/0")
    assert free == [False]


def test_a_corpus_larger_than_the_cache_gives_the_same_rows(pair, tmp_path):
    tokenizer, rng, entries = tokenizer_for(TOKENIZER), np.random.default_rng(0), []
    a, b = pair
    folder = a.staging(key_of("x")) / "output" / "tokens"
    for number in range(12):
        packer = ConcatPacker(ROW)
        for _ in range(20):
            packer.add(np.array([*rng.integers(250, size=rng.integers(10, 60)), tokenizer.end_of_text], np.uint32))
        entries.append(write_shard(folder, number, "train", packer.finish(), tokenizer.vocabulary))
    index = ShardIndex(TOKENIZER, tokenizer.fingerprint, ROW, "web", tuple(entries))
    write_index(folder, index)
    artifact = absent(pair, {})
    b.fetch(artifact, without="shards/")
    assert {path.name for path in artifact.folder.iterdir()} >= {"index.json", "rows.u4", ABSENT}
    assert not (artifact.folder / "shards").exists()
    whole = a.get(artifact.id).path
    limit = 4 * max(entry.bytes for entry in entries)
    cache, most = FileCache(b, limit), 0
    phases = [PhaseConfig(name="one", tokens=30 * 8 * ROW, mixture={"web": 1.0})]

    def loader(path, **remote):
        return Loader({"web": path}, phases, 8, 0, TOKENIZER, **remote)

    local, remote = loader(whole), loader(artifact.folder, remote=cache)
    for step in range(local.steps):
        batch = remote.batch(step)
        for name, array in local.batch(step).items():
            np.testing.assert_array_equal(batch[name], array)
        most = max(most, sum(held(b).values()))
    assert sum(entry.bytes for entry in entries) < cache.fetched_bytes
    assert limit / 2 < most <= limit


@pytest.mark.heavy
def test_the_child_of_a_stage_opens_the_files_that_it_reads_on_demand(pair):
    artifact = absent(pair, {"index": "3", **{f"shards/{n}": str(n) for n in range(3)}})
    b = pair[1]
    numbers = b.get(run_stage(reader, {}, {"x": artifact.id}, RunContext("r1", str(b.root)))["numbers"])
    assert (numbers.path / "read.txt").read_text() == "012"
    assert not (artifact.folder / "shards").exists()
    assert sorted(held(b).values()) == [1, 1, 1]
    assert b.verify(numbers) == []
    b.fetch(artifact)  # the rest of it
    assert b.verify(artifact) == []
