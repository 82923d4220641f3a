"""Machines that share a bucket in memory: each runs attempts at steps and other work on a store, one request at a time.

The attempts are those of `tasks.engine.attempt`; only the child process is replaced. All processes but one stand still:
one goes on when the test says so, and stops before its next request or rename. There it can be killed (a kill unwinds
its stack, and it can no longer change anything), cut off, or left for longer than any lease.
"""

import json
import os
import random
import shutil
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import greenlet

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import parse_json
from nautile.common.retry import Backoff
from nautile.store import lease as leases
from nautile.store import locks, staging_mirror
from nautile.store import remote as remotes
from nautile.store.garbage import collect, find_garbage
from nautile.store.manifest import checked_manifest
from nautile.store.mirror import MirroredStore, payload_prefix
from nautile.tasks.engine import attempt
from nautile.tasks.engine.attempt import run_stage
from nautile.tasks.engine.attempt_log import AttemptLog
from nautile.tasks.engine.errors import StageCrash
from nautile.tasks.engine.stage import RunContext, Stage
from tests.support.servers.simulated_bucket import Bucket, BucketView, sha256

URL = "s3://simulated/run"
EPOCH = 1_790_000_000.0
KINDS = ("numbers", "notes")
MOST_TURNS = 1000  # far more than an attempt has
_here = SimpleNamespace(process=None)  # the process that goes on now; None: the test itself


class Killed(BaseException):
    """This process was killed."""


class Process:
    """A process of a machine, which goes on to its next request or rename at each `step`.

    It has a stack of its own, and no thread: switching threads takes most of the time of a history on a busy machine.
    """

    def __init__(self, machine: "Machine", body: Callable[[], Any]) -> None:
        self.machine, self.result, self.at, self.turns = machine, None, "start", 0
        self.error: BaseException | None = None
        self.is_killed, self.has_ended = False, False
        self._body, self._stack = body, greenlet(self._run)

    def step(self) -> None:
        if not self.has_ended:
            before, _here.process = _here.process, self
            try:
                self._stack.switch()
            finally:
                _here.process = before

    def go_to(self, stop: str, *, wait_s: float = 0.0) -> None:
        """Go on until it stands before a turn whose name begins with `stop`, or ends.

        It also stops where it waits for others; with `wait_s` so much time passes there, and it goes on.
        """
        for _ in range(MOST_TURNS):
            if wait_s and self.at == "wait":
                self.machine.world.time += wait_s
            self.step()
            if self.has_ended or self.at.startswith(stop) or (self.at == "wait" and not wait_s):
                return

    def kill(self) -> None:
        self.is_killed = True
        while not self.has_ended:
            self.step()

    def turn(self, at: str) -> None:
        """Stand still until the next `step`. Called in the process."""
        if self.is_killed:
            raise Killed
        self.at = at
        self.turns += 1
        self._stack.parent.switch()
        if self.is_killed:
            raise Killed

    def _run(self) -> None:
        try:
            self.result = self._body()
        except (Killed, Retryable, ConfigError, StageCrash) as error:
            self.error = error
        except BaseException as error:
            traceback.print_exc()
            self.error = error
            self.machine.world.faults.append(error)
        self.has_ended = True


class Machine:
    """A machine with its own disk and clocks, or a second process of the machine `host`."""

    def __init__(self, world: "World", name: str, host: "Machine | None" = None) -> None:
        self.world, self.name, self.host = world, name, host or self
        self.root = world.folder / self.host.name
        self.clock_ahead_s = 0.0
        self.stood_still_s = 0.0  # how long it was suspended in a way that its own clock does not know of
        self.view = BucketView(world.bucket, turn)
        self.process: Process | None = None
        self.mirror: staging_mirror.StagingMirror | None = None

    @property
    def is_busy(self) -> bool:
        return self.process is not None and not self.process.has_ended

    @property
    def store(self) -> MirroredStore:
        return MirroredStore(self.root, URL)

    @property
    def beside(self) -> "list[Machine]":
        """The other processes of this machine."""
        return [other for other in self.world.machines.values() if other.host is self.host and other is not self]

    def start(self, body: Callable[[], Any]) -> None:
        assert not self.is_busy
        self.process = Process(self, body)

    def begin(self, task: str) -> None:
        """Start to make what `up` or `down` makes (`again`: by a forced run), to push or to collect garbage.

        `refused` garbage: the bucket refuses the first deletion.
        """
        stage, _, again = task.partition(" ")
        if stage in STAGES:
            self.run(STAGES[stage], force=again == "again")
        elif task == "push":
            self.push()
        else:
            self.view.refused_deletes += task.endswith("refused")
            self.collect_garbage()

    def run(self, stage: Stage, *, force: bool = False) -> None:
        """Start an attempt at `stage` and, before it, at the stage that it reads."""

        def body() -> dict[str, str]:
            store = self.store
            store.prepare()
            inputs = {}
            if stage is DOWN:
                outputs = run_stage(UP, section(), {}, RunContext("r", str(self.root)))
                inputs = {"up": outputs["numbers"]}
            run = uuid.uuid4().hex
            outputs = run_stage(stage, section(), inputs, RunContext(run, str(self.root), force=force))
            artifacts = [store.get(name) for name in outputs.values()]
            # Another process of the machine may be replacing them.
            if not any(other.is_busy for other in self.beside):
                assert len({artifact.execution for artifact in artifacts}) == 1, "outputs of several executions"
            runs = {artifact.manifest["run"] for artifact in store.list(superseded=True)}
            assert not force or run in runs, "a forced run has made nothing"
            return outputs

        self.start(body)

    def collect_garbage(self) -> None:
        def body() -> None:
            store, refused = self.store, self.view.refused
            store.refresh()
            refused.clear()
            garbage = find_garbage(store, stale_days=0.0)
            # What only this machine has of a version is an item, and what the remote has without a manifest another.
            at_remote = [item.path for item in garbage if item.artifact and store.is_mirrored(item.artifact)]
            for item in collect(store, garbage):
                is_whole = item.artifact and item.path in at_remote
                prefix = f"simulated/run/{payload_prefix(item.artifact.manifest)}/" if is_whole else None
                names = {f"simulated/run/{name}" for name in item.remote}
                # Two items may hold the same files: what the first was refused, the second may have deleted.
                own = [path for path in refused if path in names or (prefix and path.startswith(prefix))]
                left = [path for path in own if path in self.world.bucket.objects]
                assert not left, f"{left} counts as removed"

        self.start(body)

    def push(self) -> None:
        self.start(lambda: self.store.push_all())


class World:
    """The bucket, the machines and the time. `patched` replaces what does not belong to the store's own logic."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.time = folder, 0.0
        self.bucket = Bucket(lambda: EPOCH + self.time, self._look)
        self.machines = {name: Machine(self, name) for name in "abc"}
        self.machines["d"] = Machine(self, "d", self.machines["a"])
        self.faults: list[BaseException] = []  # errors that no process may end with, and broken promises
        self.overtaken: dict[tuple[Process, str], int] = {}  # who has lost the lease of a key, after how many turns
        self.fences: dict[str, int] = {}  # the greatest of each key
        self.words: dict[tuple[str, str, str], str] = {}  # of all versions that were ever published
        self._outside: Machine | None = None  # the machine as which the test itself acts
        self._patch(patch)

    def _look(self, path: str) -> None:
        """Check the bucket after each change of what is published: a moment is enough for another machine."""
        folder, *names = path.removeprefix("simulated/run/").split("/")
        try:
            if folder == "leases":
                self._note_lease(names[0], int(Path(path).stem))
            elif folder == "manifests":
                self._check_lease(names[1], path)
            if folder in ("manifests", "payload"):
                check(self)
        except AssertionError as error:
            self.faults.append(error)

    def _note_lease(self, key: str, fence: int) -> None:
        """Remember after how many of its turns each holder of the lease was overtaken."""
        if fence <= self.fences.get(key, 0):
            return
        self.fences[key] = fence
        self.overtaken.pop((_here.process, key), None)
        for name, held in self.held.items():
            other = self.machines[name].process
            if other not in (None, _here.process) and any(lease._folder == f"leases/{key}" for lease in held):
                self.overtaken.setdefault((other, key), other.turns)

    def _check_lease(self, key: str, path: str) -> None:
        """Who has lost the lease of a key may only end what it was about to do: it asks before what others rely on."""
        process = _here.process
        since = self.overtaken.get((process, key))
        if since is not None and self.bucket.objects[path][0]:
            turns = process.turns - since
            assert turns <= LAST_TURNS, f"{path} is published {turns} turns after the lease was lost"

    def machine(self) -> Machine:
        process = _here.process
        machine = process.machine if process else self._outside
        assert machine is not None
        return machine

    @contextmanager
    def acting_as(self, machine: Machine) -> Iterator[None]:
        self._outside = machine
        yield
        self._outside = None

    def renew(self, machine: Machine) -> None:
        """What the thread of a lease does every 30 s."""
        for lease in self.held.get(machine.name, []):
            with self.acting_as(machine), suppress(Retryable, ConfigError):
                lease.renew()

    def copy(self, source: Machine, target: Machine) -> None:
        """Make the disk of `target` a copy of that of `source`, as a copied image does."""
        if any(machine.is_busy for end in (source, target) for machine in (end, *end.beside)):
            return
        if source.root.exists() and not target.root.exists():
            shutil.copytree(source.root, target.root, symlinks=True)

    def finish_all(self) -> None:
        """Let all machines go on until their processes end: one at a time, until it waits for another one."""
        while busy := [machine for machine in self.machines.values() if machine.is_busy]:
            for machine in busy:
                machine.process.go_to("its end")
            self.time += 60.0

    def finish(self, machine: Machine) -> Process:
        """Let a machine go on until its process ends, with nobody else at work: an hour passes between its turns."""
        process = machine.process
        assert process is not None
        turns = 0
        while not process.has_ended:
            turns += 1
            assert turns < 5000, f"{machine.name} never ends, at {process.at!r}"
            self.time += 1.0 if "wait" not in process.at else 60.0
            process.step()
        return process

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        self.held: dict[str, list[leases.Lease]] = {}
        world, draws = self, random.Random(0)

        def keep(lease: leases.Lease) -> None:
            world.held.setdefault(world.machine().name, []).append(lease)

        def release(lease: leases.Lease) -> None:
            held = world.held.get(world.machine().name, [])
            if lease in held:
                held.remove(lease)
            lease._give_back()

        def enter(lock: locks.KeyLock) -> locks.KeyLock:
            lock.acquire(lambda seconds: turn("wait"))
            return lock

        def stop(mirror: staging_mirror.StagingMirror, published: bool) -> None:
            world.machine().mirror = None
            mirror._end(published)

        def start(mirror: staging_mirror.StagingMirror) -> None:
            world.machine().mirror = mirror

        # Else a history would not be the same when it is played again.
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=draws.getrandbits(128), version=4))
        patch.setattr(leases, "clock", lambda: world.time - world.machine().host.stood_still_s)
        patch.setattr(locks.KeyLock, "__enter__", enter)
        patch.setattr(leases.Lease, "keep", keep)
        patch.setattr(leases.Lease, "release", release)
        patch.setattr(staging_mirror.StagingMirror, "start", start)
        patch.setattr(staging_mirror.StagingMirror, "stop", stop)
        patch.setattr(staging_mirror, "CLOCK_TICK_S", 0.0)
        patch.setattr(remotes, "BACKOFF", Backoff(attempts=2, first_s=0.0))
        patch.setattr(remotes, "DOWN_S", 0.0)
        patch.setattr(remotes.Remote, "_filesystem", property(lambda remote: (world.machine().view, "simulated/run")))
        patch.setattr(remotes.Remote, "map", lambda remote, function, items: [function(item) for item in items])
        # Locks between the threads of a process; here these are of several machines.
        patch.setattr("nautile.store.mirror._sending_events", nullcontext())
        patch.setattr("nautile.tasks.engine.attempt_log._uploading", nullcontext())
        patch.setattr("nautile.store.manifest.ThreadPoolExecutor", InOrder)
        patch.setattr("os.fsync", lambda descriptor: None)  # nothing here loses its power
        patch.setattr("nautile.store.artifacts.now", lambda: world.wall_clock())
        waiting = SimpleNamespace(monotonic=lambda: world.time, sleep=lambda seconds: turn("wait"))
        patch.setattr("nautile.store.artifacts.time", waiting)
        patch.setattr(attempt, "pause", lambda seconds: turn("wait"))
        patch.setattr(attempt._Attempt, "_work", work)
        patch.setattr(attempt._Attempt, "_trackers", lambda self, staging: [])
        patch.setattr(attempt._Attempt, "_end_telemetry", lambda self, staging, count: None)
        patch.setattr(AttemptLog, "ingest", lambda log, **options: None)
        patch.setattr(AttemptLog, "_write_failure_page", lambda log, staging, error: "")
        for name in ("rename", "replace"):
            patch.setattr(Path, name, stopping(getattr(Path, name)))

    def wall_clock(self) -> str:
        seconds = EPOCH + self.time + self.machine().host.clock_ahead_s
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


class InOrder:
    """What a pool of threads does, without threads: they would begin anew for each artifact of two small files."""

    def __init__(self, max_workers: int) -> None:
        self.map = map

    def __enter__(self) -> "InOrder":
        return self

    def __exit__(self, *error: object) -> None: ...


def turn(at: str) -> None:
    process = _here.process
    if process is not None:
        process.turn(at)


def stopping(function: Callable[[Path, Any], Any]) -> Callable[[Path, Any], Any]:
    """`function`, a rename, with a turn before it."""

    def stop_first(path: Path, target: Any) -> Any:
        if _here.process is not None:
            turn(f"rename to {os.path.relpath(target, _here.process.machine.root)}")
        return function(path, target)

    return stop_first


def section() -> dict[str, Any]:
    return {"seeds": {"data": 5}}


def work(self: attempt._Attempt, staging: Any, check_lease: Callable[[], None], trackers: Any) -> None:
    """The work of a stage: a checkpoint, then files that all hold the same random word, and what the input held.

    No two executions of it write the same, as no two machines train to the same last bit.
    """
    step = staging.path / "scratch/checkpoints/steps/1"
    if not step.is_dir():
        step.mkdir(parents=True)
        state = uuid.uuid4().hex
        for name in ("state", "optimizer"):
            (step / name).write_text(state)
    assert len({path.read_text() for path in step.iterdir()}) == 1, "a checkpoint of two executions"
    mirror = _here.process.machine.mirror
    if mirror is not None:
        with suppress(Retryable, ConfigError, OSError):
            mirror.push()
    check_lease()
    folders = {name: artifact.folder for name, artifact in self.inputs.items()}
    try:
        read = {name: json.loads((folder / "a.json").read_text()) for name, folder in folders.items()}
    except FileNotFoundError as error:
        raise StageCrash(str(error)) from None
    content = json.dumps({"word": uuid.uuid4().hex, "read": {name: value["word"] for name, value in read.items()}})
    for kind in KINDS:
        staging.files.output(kind).mkdir(parents=True, exist_ok=True)
        for name in ("a.json", "b.json"):
            (staging.files.output(kind) / name).write_text(content)
    turn("before the end of the work")
    attempt.check_inputs(staging.path, folders)
    (staging.path / "done.json").write_text(json.dumps({"outputs": list(KINDS)}))
    if mirror is not None:
        with suppress(Retryable, ConfigError, OSError):
            mirror.push()


def nothing(job: Any) -> None:
    """The function of the stages, which is not called."""


UP = Stage("up", 1, KINDS, nothing)
DOWN = Stage("down", 1, KINDS, nothing)
STAGES = {"up": UP, "down": DOWN}


# Of who has asked whether it holds the lease: renewed, answered, and what it was about to do, each once again after a
# response that was lost. Without asking it takes more.
LAST_TURNS = 6


@cache
def manifest_of(data: bytes) -> Any:
    return checked_manifest(parse_json(data), "")


digest_of, content_of = cache(sha256), cache(json.loads)


def published(world: World) -> dict[tuple[str, str, str], tuple[dict[str, Any], dict[str, Any]]]:
    """(kind, key, execution) -> (manifest, content of its files) of everything that machines can see as published."""
    bucket, prefix, versions = world.bucket, "simulated/run", {}
    for path in bucket.objects:
        if path.startswith(f"{prefix}/manifests/") and bucket.objects[path][0]:
            manifest = manifest_of(bucket.objects[path][0])
            assert manifest is not None, f"{path} is no manifest"
            version = manifest["kind"], manifest["key"], manifest["execution"]
            assert path == f"{prefix}/manifests/{'/'.join(version)}.json"
            contents = set()
            for name, entry in manifest["files"].items():
                data, _ = bucket.objects.get(f"{prefix}/payload/{'/'.join(version)}/{name}", (None, 0))
                assert data is not None, f"{path}: {name} is missing"
                assert digest_of(data) == entry["sha256"], f"{path}: {name} has other bytes"
                contents.add(data)
            assert len(contents) == 1, f"{path} has files of two executions"
            versions[version] = manifest, content_of(contents.pop())
    return versions


def check(world: World) -> None:
    """Every published artifact is whole, of one execution, and the one that the lineage of its readers names."""
    if world.faults:
        raise world.faults[0]
    versions = published(world)
    executions: dict[tuple[str, int], str] = {}
    for version, (manifest, content) in versions.items():
        kind, key, execution = version
        assert world.words.setdefault(version, content["word"]) == content["word"], f"{version} was written twice"
        first = executions.setdefault((key, manifest["fence"]), execution)
        assert first == execution, f"{key}: two executions were published with the fence {manifest['fence']}"
        for other in set(KINDS) - {kind}:
            word = world.words.get((other, key, execution), content["word"])
            assert word == content["word"], f"{key} {execution}: {kind} and {other} are of two executions"
        for name, full_id in manifest["inputs"].items():
            used_kind, used_key = full_id.split("/")
            read = content["read"][name]
            word = world.words.get((used_kind, used_key, manifest["input_executions"][name]), read)
            assert word == read, f"{key}: lineage names what was not read"
