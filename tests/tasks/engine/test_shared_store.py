"""Attempts of several machines at one key, in the orders in which they have lost or mixed something."""

import pytest

from nautile.common.errors import Retryable
from nautile.store.garbage import collect, find_garbage
from nautile.store.manifest import recorded_execution
from tests.support.servers.simulated_bucket import BucketView
from tests.support.stages.simulated_machines import DOWN, UP, World, check, published


@pytest.fixture
def world(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        yield World(tmp_path, patch)


@pytest.fixture
def pair(world):
    return world.machines["a"], world.machines["b"]


def until(machine, at):
    """Let a machine go on until just before the first request that begins with `at`."""
    while not machine.process.at.startswith(at):
        assert not machine.is_busy or machine.process.step() is None
        assert machine.is_busy, f"it ended before {at!r}: {machine.process.error!r}"


def made(world, machine, **options):
    machine.run(UP, **options)
    process = world.finish(machine)
    assert process.error is None, process.error
    return process.result


def live(world, machine, kind="numbers"):
    with world.acting_as(machine):
        store = machine.store
        store.refresh()
        [artifact] = store.list(kind)
        assert artifact.path.is_dir()
        assert store.verify(artifact) == []
        return artifact


def executions(world):
    return {execution for _, _, execution in published(world)}


@pytest.mark.parametrize("is_cut_off", [True, False])
def test_a_machine_that_returns_after_its_lease_leaves_what_its_successor_has_published(world, pair, is_cut_off):
    a, b = pair
    a.run(UP)
    until(a, "put simulated/run/payload")  # published on its own disk
    if is_cut_off:
        a.view.cut_off = True
        assert isinstance(world.finish(a).error, Retryable)
    world.time += 1000
    made(world, b)
    successor = executions(world)
    assert len(successor) == 1
    a.view.cut_off = False
    if not is_cut_off:
        assert isinstance(world.finish(a).error, Retryable)  # it had only stood still
    assert executions(world) == successor
    made(world, a)
    check(world)
    assert executions(world) == successor == {live(world, a).execution} == {live(world, b).execution}
    with world.acting_as(a):
        own, theirs = sorted(a.store.list("numbers", superseded=True), key=lambda artifact: -artifact.superseded)
    assert own.superseded == 1
    assert own.execution == recorded_execution(theirs.execution) == theirs.recorded_execution
    assert own.execution != theirs.execution


def test_who_comes_first_of_two_is_decided_by_the_lease_and_not_by_their_clocks(world, pair):
    a, b = pair
    b.clock_ahead_s = 3 * 3600.0
    made(world, b)
    first = executions(world)
    world.time += 60
    made(world, a, force=True)
    assert live(world, a).execution == live(world, b).execution
    assert {live(world, b).execution} == executions(world) - first
    assert live(world, b).manifest["created"] < max(m["created"] for m, _ in published(world).values())
    for machine in (a, b):
        machine.collect_garbage()
        assert world.finish(machine).error is None
    assert executions(world) == {live(world, a).execution}, "the older one is what a collection removes"


@pytest.mark.parametrize("stop", ["put simulated/run/staging", "before the end of the work"])
def test_work_that_reads_what_a_second_process_replaces_becomes_no_artifact(world, stop):
    a, second = world.machines["a"], world.machines["d"]
    made(world, a)
    a.run(DOWN)
    until(a, stop)  # before it reads the input, or after it
    made(world, second, force=True)
    assert "replaced by another run" in str(world.finish(a).error)
    assert len(published(world)) == 4  # of the input alone
    a.run(DOWN)
    assert world.finish(a).error is None
    check(world)
    assert len(published(world)) == 6


def test_artifacts_of_several_machines_are_ordered_by_their_publication(world, pair):
    a, b = pair
    a.clock_ahead_s = 3 * 3600.0
    made(world, a)
    world.time += 60
    b.run(DOWN)
    assert world.finish(b).error is None
    with world.acting_as(b):
        store = b.store
        store.refresh()
        by_clock = [artifact.manifest["stage"] for artifact in store.list("numbers")]
        order = [artifact.manifest["stage"] for artifact in store.by_publication(store.list("numbers"))]
    assert by_clock == ["down", "up"]
    assert order == ["up", "down"]


def test_a_collection_leaves_an_upload_in_progress(world, pair):
    a, b = pair
    a.run(UP)
    until(a, "put simulated/run/manifests")
    world.time += 20
    world.renew(a)
    b.collect_garbage()
    assert world.finish(b).error is None
    assert world.finish(a).error is None
    check(world)
    assert len(published(world)) == 2


def test_a_collection_leaves_what_was_published_after_its_listing(world, pair):
    a, b = pair
    made(world, a)
    world.time += 1000
    b.collect_garbage()
    until(b, "find simulated/run/manifests")
    b.process.step()
    until(b, "find simulated/run/manifests")  # the listing of what is published, beside that of the payload
    b.view.listing_age = 100
    assert world.finish(b).error is None
    check(world)
    assert len(published(world)) == 2


def test_what_was_removed_while_a_machine_stood_still_before_its_manifest_is_not_published_without_files(world, pair):
    a, b = pair
    a.run(UP)
    until(a, "put simulated/run/manifests")
    world.time += 4000
    b.collect_garbage()
    assert world.finish(b).error is None
    assert not [path for path in world.bucket.objects if "/payload/" in path]
    assert isinstance(world.finish(a).error, Retryable)
    check(world)
    for _ in range(2):
        a.run(UP)
        error = world.finish(a).error
    assert error is None
    check(world)
    assert len(published(world)) == 2


def test_a_refused_deletion_removes_nothing_and_counts_as_nothing(world, pair):
    a, _ = pair
    made(world, a)
    made(world, a, force=True)
    a.view.refused_deletes = 10**6

    def body():
        store = a.store
        return collect(store, find_garbage(store))

    a.start(body)
    process = world.finish(a)
    assert process.error is None
    assert process.result == []
    a.view.refused_deletes = 0
    a.start(body)
    assert len(world.finish(a).result) == 2
    check(world)


def test_what_an_emptied_bucket_has_lost_is_sent_again_by_the_run_that_reuses_it(world, pair):
    a, b = pair
    outputs = made(world, a)
    before = published(world)
    for path in list(world.bucket.objects):
        world.bucket.delete(path)
    assert made(world, a) == outputs
    assert published(world) == before
    assert live(world, b).execution == live(world, a).execution
    made(world, b, force=True)
    assert live(world, a).execution == live(world, b).execution != next(iter(before))[2]


def test_what_a_collection_has_removed_comes_back_under_another_id_and_only_if_a_run_needs_it(world, pair):
    a, b = pair
    made(world, a)
    removed = executions(world)

    def remove():
        store = b.store
        store.refresh()
        for artifact in store.list():
            store.remove_from_remote(artifact)

    b.start(remove)
    assert world.finish(b).error is None
    a.push()
    assert world.finish(a).error is None
    assert published(world) == {}
    a.run(UP)
    assert isinstance(world.finish(a).error, Retryable)
    made(world, a)
    check(world)
    assert len(published(world)) == 2
    assert not executions(world) & removed


@pytest.mark.parametrize("answer", ["ignored", "unknown"])
def test_a_remote_without_conditional_creation_is_named_once_by_each_machine(world, pair, monkeypatch, caplog, answer):
    put = BucketView.pipe_file

    def put_always(view, path, data, mode="overwrite"):
        if mode == "create" and answer == "unknown":
            raise TypeError("pipe_file() got an unexpected keyword argument 'mode'")
        put(view, path, data)

    monkeypatch.setattr(BucketView, "pipe_file", put_always)
    for machine in pair:
        for _ in range(2):
            with world.acting_as(machine):
                machine.store.refresh()
    assert caplog.text.count("let only one machine at a time use this store") == 2


def test_a_remote_with_conditional_creation_is_not_named(world, pair, caplog):
    for machine in pair:
        with world.acting_as(machine):
            machine.store.refresh()
    assert "only one machine" not in caplog.text
    assert list(world.bucket.objects) == ["simulated/run/store.json"]
