"""Work items on hosts that have neither the disk nor a path of the run's machine, only the store's remote."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from nautile.common.errors import ConfigError
from nautile.configs.operation import LaunchConfig
from nautile.configs.vendors import VENDORS
from nautile.store.catalog import Catalog
from nautile.store.mirror import MirroredStore
from nautile.store.staging_mirror import host_files
from nautile.tasks.engine import remote_child
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCancelled
from nautile.tasks.engine.fanout import Executor, ItemResult, WorkItem
from nautile.tasks.engine.stage import RunContext
from tests.support.plug_ins import add_plug_in
from tests.support.stages.stage_pieces import joined, pieces, section
from tests.support.stages.toy_cli import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.heavy
def test_items_on_other_hosts_get_and_leave_their_files_at_the_remote(machine, tmp_path, monkeypatch):
    driver, seen, listings = machine("driver"), [], []
    real = MirroredStore.refresh
    monkeypatch.setattr(
        MirroredStore, "refresh", lambda store, **how: listings.append(store.root) or real(store, **how)
    )
    monkeypatch.setenv("NAUTILE_STORE_CACHE", str(tmp_path / "host"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the host has the module of the stage
    items = tmp_path / "host" / "cache" / "items"
    (items / "999999999-left").mkdir(parents=True)

    def run(item):
        assert str(driver.root) not in repr(item)
        seen.append(item)
        return remote_child.run_item_on_own_disk(item)

    @contextmanager
    def other_host(launch):
        with ThreadPoolExecutor(2) as pool:
            yield Executor(lambda item: pool.submit(run, item), lambda: 2)

    given = section(3, faults={"piece-1": {"bad": 9}}, skippable=0.4)
    context = RunContext("r1", str(driver.root), launch=LaunchConfig(engine="ray"))
    numbers = driver.get(run_stage(pieces, given, {}, context, other_host)["numbers"])
    assert (numbers.path / "all.txt").read_text() == joined(3, without=(1,))
    assert numbers.manifest["facts"]["skipped"] == {"piece-1": "piece-1: not a text"}
    assert len(seen) == 5
    assert listings.count(tmp_path / "host") <= 1, "the manifests are not listed for every item"
    assert not any(items.iterdir())
    assert driver.remote.names("hosts") == driver.remote.names("staging") == {}
    assert "printed by piece-2" in next((driver.root / "logs").glob("pieces-*.txt")).read_text()
    Catalog(driver).ingest()
    (rows,) = Catalog(driver).query("SELECT count(*) AS n, sum(value) AS rows FROM metrics WHERE name = 'rows'")
    assert rows == {"n": 2, "rows": 10.0}


def test_an_item_is_not_skipped_where_a_plug_in_of_the_run_is_missing(machine, tmp_path, monkeypatch):
    """It is no fault of the item: the stage ends, and says what to install on that host."""
    driver = machine("driver")
    monkeypatch.setenv("NAUTILE_STORE_CACHE", str(tmp_path / "host"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = "from nautile.configs.vendors import Vendor\n\nacme = Vendor()\n"
    entry = add_plug_in(monkeypatch, tmp_path, VENDORS, "acme", source)  # on the path of this process alone
    tried = []

    @contextmanager
    def other_host(launch):
        with ThreadPoolExecutor(1) as pool:
            yield Executor(
                lambda item: tried.append(item) or pool.submit(remote_child.run_item_on_own_disk, item), lambda: 1
            )

    context = RunContext("r1", str(driver.root), launch=LaunchConfig(engine="ray"))
    refused = f"^host .* cannot import the module of the plug-in vendors={entry.reference}: install there the file"
    with pytest.raises(ConfigError, match=refused):
        run_stage(pieces, section(2, skippable=1.0), {}, context, other_host)
    assert len(tried) == 1


def test_an_item_whose_attempt_is_over_does_nothing_and_a_name_that_climbs_is_refused(machine, monkeypatch, tmp_path):
    store = machine("a")
    key = "0" * 64
    item = WorkItem(f"{key}/request.json", 2, "cut", "piece-0", 1, store.url)
    with pytest.raises(StageCancelled, match="its attempt is over"):
        remote_child.run_item_on_own_disk(item)
    store.remote.write(f"{host_files(key)}/lease.json", b'{"attempt": 1}')
    with pytest.raises(StageCancelled, match="its attempt is over"):
        remote_child.run_item_on_own_disk(item)
    with pytest.raises(ConfigError, match=r"file: '\.\./x'"):
        remote_child._fetch(store, {"../x": "y"}, tmp_path / "there")


def test_what_an_item_has_written_is_on_disk_before_its_marker_is(machine, monkeypatch, tmp_path):
    store, staging = machine("a"), tmp_path / "staging"
    names = ("output/rows", "fan_outs/cut/done/piece-0")
    for name in names:
        store.remote.write(name, name.encode())
    fsync, synced, unsynced = os.fsync, set(), []

    def record_sync(descriptor):
        if (staging / names[1]).exists() and (staging / names[0]).stat().st_ino not in synced:
            unsynced.append(names[0])
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    items = remote_child._Items(store, staging, {}, Executor(lambda item: None, lambda: 1))
    item = WorkItem(str(staging / "request.json"), 1, "cut", "piece-0", 1, store.url)
    future = Future()
    future.set_result(ItemResult(files=tuple((name, name) for name in names)))
    items.result(item, future)
    assert {(staging / name).stat().st_ino for name in names} <= synced
    assert unsynced == []
