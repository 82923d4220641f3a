"""Stages on two machines with one remote: run on the first, reused on the second, inputs fetched when read."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import s3fs

from nautile.common.errors import ConfigError, Retryable
from nautile.common.retry import Backoff
from nautile.configs.operation import LaunchConfig
from nautile.flows.cli import inspect
from nautile.store import lease as leases
from nautile.store import remote as remotes
from nautile.store.catalog import Catalog
from nautile.store.manifest import MIRRORED, host
from nautile.store.staging_mirror import SNAPSHOT, StagingMirror
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.progress import subscribe
from nautile.tasks.engine.stage import RunContext
from tests.support.stages.stage_pieces import joined, pieces, start
from tests.support.stages.stage_pieces import section as pieces_section
from tests.support.stages.stage_sums import section, sums


def context(store, run="r1", **more):
    return RunContext(run, str(store.root), label="sums:a", **more)


def states(store):
    return [row["state"] for row in Catalog(store).query("SELECT state FROM attempts ORDER BY started, time")]


@pytest.mark.slow
def test_what_one_machine_made_the_other_reuses_and_builds_on(machine):
    a, b = machine("a"), machine("b")
    base = run_stage(sums, section(2), {}, context(a))
    updates = []
    unsubscribe = subscribe(updates.append)
    try:
        assert run_stage(sums, section(2), {}, context(b)) == base
        assert not (b.get(base["numbers"]).folder / "0.txt").exists()
        outputs = run_stage(sums, section(3), {"x": base["numbers"]}, context(b))
    finally:
        unsubscribe()
    assert [update.state for update in updates if update.state != "running"] == [
        "reused",
        "waiting",
        "publishing",
        "done",
    ]
    assert f" from {b.url}" in next(update.note for update in updates if update.state == "waiting")
    assert (b.get(base["numbers"]).folder / "0.txt").read_text() == "0"

    assert {row["id"]: row["at"] for row in inspect.artifacts(a)[0]} == {
        base["numbers"]: "both",
        outputs["numbers"]: "remote",
    }
    assert inspect.show(a, outputs["numbers"])["damaged"] == []
    assert inspect.verify(a, None) == {"artifacts": 2, "damaged": {}, "remedies": {}, "events_left_out": {}}
    assert {row["id"] for row in inspect.lineage(a, outputs["numbers"])} == {base["numbers"], outputs["numbers"]}
    rows = inspect.sql(a, "SELECT state, count(*) FROM attempts GROUP BY 1 ORDER BY 1")[1]
    assert rows == [("done", 2), ("reused", 1)]
    filesystem = s3fs.S3FileSystem()
    artifact = a.get(outputs["numbers"])
    prefix = f"{a.url.removeprefix('s3://')}/payload/numbers/{artifact.key}/{artifact.execution}"
    filesystem.pipe_file(f"{prefix}/0.txt", b"7")
    damage = {outputs["numbers"]: ["0.txt (its digest differs) at the remote"]}
    remedies = {outputs["numbers"]: "run its stage again: `nautile run CONFIG --only sums:a --force`"}
    assert inspect.verify(a, None) == {
        "artifacts": 2,
        "damaged": damage,
        "remedies": remedies,
        "events_left_out": {},
    }
    with pytest.raises(ConfigError, match=r"at s3://.* is damaged: 0\.txt"):
        run_stage(sums, section(1), {"x": outputs["numbers"]}, context(a))
    inspect.push(b, outputs["numbers"])
    assert inspect.fetch(a, outputs["numbers"])["at"] == "both"
    assert inspect.verify(a, None)["damaged"] == {}


@pytest.mark.slow
def test_what_another_machine_works_on_is_waited_for_and_reused(machine, tmp_path, monkeypatch):
    monkeypatch.setattr("nautile.store.lease.POLL_S", 0.05)
    a, b = machine("a"), machine("b")
    given = section(2, gate=str(tmp_path))
    waiting, notes = threading.Event(), []
    unsubscribe = subscribe(lambda update: update.state == "waiting" and (notes.append(update.note), waiting.set()))
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(run_stage, sums, given, {}, context(a))
            while not (tmp_path / "reached").exists() and not first.done():
                time.sleep(0.02)
            second = pool.submit(run_stage, sums, given, {}, context(b, "r2"))
            while not waiting.is_set() and not second.done():
                time.sleep(0.02)
            (tmp_path / "open").touch()
            assert first.result() == second.result()
    finally:
        unsubscribe()
    assert notes == [f"{host()} works on it"]
    assert b.get(first.result()["numbers"]).manifest["run"] == "r1"
    inspect.sql(b, "SELECT 1")  # which fetches the events
    assert states(b) == ["done", "reused"]


@pytest.mark.slow
def test_what_a_lost_machine_had_saved_is_taken_up_by_another(machine, tmp_path, monkeypatch):
    monkeypatch.setattr("nautile.store.staging_mirror.PUSH_EVERY_S", 0.1)
    a, b = machine("a"), machine("b")
    given = section(4, gate=str(tmp_path), gate_at=3, checkpoints=True)

    def saved_step():
        (name,) = [name for name in a.remote.names("staging") if name.endswith(SNAPSHOT)] or [None]
        return json.loads(a.remote.read(f"staging/{name}", 2**20))["progress"][0] if name else None

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        # The machine is gone: it sends nothing any more.
        patch.setattr(StagingMirror, "stop", lambda mirror, published: mirror._stop.set())
        lost = pool.submit(run_stage, sums, given, {}, context(a))
        while not ((tmp_path / "reached").exists() and saved_step() == 2) and not lost.done():
            time.sleep(0.05)
        os.kill(int((tmp_path / "reached").read_text()), signal.SIGKILL)
        with pytest.raises(StageCrash):
            lost.result()
    (tmp_path / "open").touch()
    outputs = run_stage(sums, given, {}, context(b, "r2"))
    artifact = b.get(outputs["numbers"])
    assert artifact.manifest["facts"]["written"] == 1  # three of the four were there
    # Its curves and calls go on under the id of the first machine; what is published has an id of its own.
    begun = {row[0] for row in inspect.sql(b, "SELECT execution FROM attempts WHERE run = 'r1'")[1]}
    assert begun == {artifact.recorded_execution}
    assert artifact.execution == f"{artifact.recorded_execution}-{artifact.manifest['fence']}"
    published = "SELECT a.published_as FROM artifacts a JOIN metrics m USING (execution) WHERE m.step = 0"
    assert inspect.sql(b, published)[1] == [(artifact.execution,)]
    assert a.remote.names("staging") == {}


@pytest.mark.slow
def test_no_call_is_lost_when_two_machines_make_an_attempt_of_the_same_number(machine, monkeypatch):
    a, b = machine("a"), machine("b")
    given = section(2, checkpoints=True, faults={"late": 2})
    with pytest.raises(Retryable):
        run_stage(sums, given, {}, context(a))
    with monkeypatch.context() as patch:
        # Lost before it has sent the number of its second attempt, but after the events.
        patch.setattr(StagingMirror, "push", lambda mirror, changes=False: False)
        with pytest.raises(Retryable):
            run_stage(sums, given, {}, context(a))
    with pytest.raises(Retryable):
        run_stage(sums, given, {}, context(b, "r2"))
    run_stage(sums, given, {}, context(b, "r2"))
    reader = machine("c")
    calls = inspect.sql(reader, "SELECT count(*) FROM calls")[1]
    attempts = inspect.sql(reader, "SELECT run, attempt FROM attempts ORDER BY started")[1]
    assert (calls, attempts) == ([(4,)], [("r1", 1), ("r1", 2), ("r2", 2), ("r2", 3)])


@pytest.mark.heavy
def test_a_machine_takes_over_from_a_killed_one_and_does_not_do_its_items_again(machine, tmp_path, monkeypatch):
    a, b = machine("a"), machine("b")
    given = pieces_section(5, gate=str(tmp_path), gated=("piece-3",))
    often = "import nautile.store.staging_mirror as mirror; mirror.PUSH_EVERY_S = 0.3"
    parent = start(a.root, given, 1, often)
    try:
        while len([name for name in a.remote.names("staging") if "/fan_outs/cut/done/" in name]) < 3:
            assert parent.poll() is None
            time.sleep(0.2)
        before = sorted(a.remote.names("staging"))
    finally:
        parent.kill()
        parent.communicate()
    assert not any("/fan_outs/cut/items/" in name or name.endswith("/fan_outs/lease.json") for name in before)
    (lease,) = a.remote.names("leases")  # which nobody has released
    (tmp_path / "open").touch()
    monkeypatch.setattr(leases, "POLL_S", 0.05)
    notes = []

    def expire_soon(update):
        if update.state in ("waiting", "running"):
            monkeypatch.setattr(leases, "EXPIRES_S", 0.5 if update.state == "waiting" else 300.0)
            notes.append(update.note)

    unsubscribe = subscribe(expire_soon)
    try:
        outputs = run_stage(pieces, given, {}, replace(context(b, "r2"), launch=LaunchConfig(workers=2)))
    finally:
        unsubscribe()
    assert notes[0] == f"{host()} works on it"
    artifact = b.get(outputs["numbers"])
    assert lease == f"{artifact.key}/00000001.json"
    assert list(b.remote.names("leases")) == [lease, f"{artifact.key}/00000002.json"]
    assert (artifact.path / "all.txt").read_text() == joined(5)
    runs = artifact.manifest["facts"]["runs"]
    assert {name: count for name, count in runs.items() if count > 1} in ({}, {"piece-3": 2})
    assert b.remote.names("staging") == {}


@pytest.mark.slow
def test_a_stage_whose_result_cannot_be_sent_is_tried_again_and_not_made_again(machine, monkeypatch):
    a = machine("a")
    monkeypatch.setattr(remotes, "BACKOFF", Backoff(attempts=1))
    real = remotes.Remote.put

    def cut(self, source, name):
        raise Retryable(f"the store {self.url} cannot be reached")

    monkeypatch.setattr(remotes.Remote, "put", cut)
    with pytest.raises(Retryable, match="the store s3://"):
        run_stage(sums, section(2), {}, context(a))
    monkeypatch.setattr(remotes.Remote, "put", real)
    (artifact,) = a.list("numbers")
    assert not (artifact.folder / MIRRORED).exists()
    assert run_stage(sums, section(2), {}, context(a)) == {"numbers": artifact.id}
    assert (a.get(artifact.id).folder / MIRRORED).exists()
    assert a.get(artifact.id).execution == artifact.execution
    other = machine("b")
    other.refresh(events=True)
    Catalog(other).ingest()
    assert "reused" in states(other)
    assert other.list()[0].execution == artifact.execution


@pytest.mark.slow
def test_without_the_remote_nothing_is_begun(machine, monkeypatch):
    a = machine("a")
    a.refresh()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(remotes, "BACKOFF", Backoff(attempts=1))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(Retryable, match=rf"the store {a.url} cannot be reached"):
        run_stage(sums, section(2), {}, context(a))
    assert list((a.root / "staging").iterdir()) == []
