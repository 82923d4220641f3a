"""The child process of a stage that needs the store's remote: `python -m nautile.tasks.engine.remote_child`.

It replaces `tasks.engine.child_main`, which so need not import the clients of remotes. Its arguments:

    REQUEST.json    on the machine of the run: some input files are only at the remote, and are read through a cache, or
                    it sends requests to endpoints, of which other hosts may send the same
    URL KEY         on a host that shares no disk with that machine: one process of a multi-host stage

Such a host has its own folder for the store (`$NAUTILE_STORE_CACHE` there) and gets everything from the URL: the
request, the inputs, and on the first host the checkpoints so far. The first host sends its checkpoints while it works
and its outputs at the end; `tasks.engine.multihost` fetches them.

    <url>/hosts/<key>/request.json    from the launching machine to the hosts, without local paths
                      live.json       the progress, from the first host
                      error.json      the first error of any host
                      lease.json      the active attempt at a fan-out; without it every item ends
                      files/<name>    files of the staging folder that items read
                      items/<fan-out>/<item>/<name>     files that an item has written

Work items of a fan-out also run on such hosts, in the process of a Ray worker and each in its own staging folder, with
the files that `FanOut.reads` names. The run's machine fetches what the item has written into its staging folder, the
marker that it is done last. So the stage and a resume see the same files as with a shared disk.
"""

import json
import logging
import math
import os
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.file_locks import try_flock
from nautile.common.files import atomic_path, read_json, sha256_of, write_json, writing
from nautile.common.processes import ExitCode
from nautile.configs.operation import LaunchConfig
from nautile.store.layout import StagingFiles
from nautile.store.locks import flock_until
from nautile.store.manifest import LARGEST_MANIFEST, is_safe_name, read_manifest
from nautile.store.mirror import MirroredStore, open_store, payload_prefix
from nautile.store.request_claims import RequestClaims
from nautile.store.staging_mirror import StagingMirror, host_files
from nautile.tasks.engine.child_main import begin, failed, leave, load_stage, process_rank, work
from nautile.tasks.engine.child_process import check_same_plug_ins
from nautile.tasks.engine.errors import StageCancelled
from nautile.tasks.engine.fanout import (
    Executor,
    ExecutorFactory,
    FanOut,
    Future,
    ItemResult,
    Markers,
    WorkItem,
    run_once,
    with_retries,
)

logger = logging.getLogger("nautile.tasks.engine.remote_child")

BYTES_PER_GIGABYTE = 10**9
LIVE_EVERY_S = 10.0
CHECK_EVERY_S = 5.0
CACHE_POLL_S = 0.05
CACHE_LOCK = "lock"  # held briefly while a file is opened, added or evicted
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.([0-9]+)\.tmp")


def main(arguments: list[str]) -> int:
    """Do the work of the request and return the exit code."""
    if len(arguments) == 2:
        begin(0)
        return _work_on_own_disk(*arguments)
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    begin(request["parent"])
    return work(request, [], _access(open_remote(request["store"]), request))


def send_request(store: MirroredStore, request: dict[str, Any], execution: dict[str, Any]) -> None:
    """Write the request for the hosts to the remote, without paths of this machine.

    `execution`: the content of `execution.json`.
    """
    inputs = {name: store.artifact_name(Path(folder)) for name, folder in request["inputs"].items()}
    events = Path(request["events"]).name
    if execution["attempt"] == 1:
        StagingMirror(store.remote, Path(request["staging"])).remove()  # from an earlier execution of the key
    for_hosts = request | {"inputs": inputs, "events": events, "sys_path": [], "record": execution}
    folder = host_files(request["key"])
    # What an earlier attempt left there: its errors, and files of its items.
    store.remote.delete_folder(folder)
    store.remote.write(f"{folder}/request.json", json.dumps(for_hosts).encode())


def take_results(store: MirroredStore, request: dict[str, Any], code: int) -> None:
    """Fetch the outputs of the first host, or the error of the host that failed."""
    staging = Path(request["staging"])
    # Before anything else: whatever the exit code, this is what failed.
    error = store.remote.read_json(f"{host_files(request['key'])}/error.json", LARGEST_MANIFEST)
    if isinstance(error, dict):
        write_json(StagingFiles(staging).error_path, error)
    store.pull_events()
    if code == ExitCode.DONE and not StagingMirror(store.remote, staging).pull():
        raise Retryable(f"{store.url} does not have the outputs of the first host")


def watch_progress(store: MirroredStore, request: dict[str, Any], ended: threading.Event) -> None:
    """Fetch `live.json` and the events of the first host periodically, until `ended` is set."""

    def fetch() -> None:
        live = store.remote.read_json(f"{host_files(request['key'])}/live.json", LARGEST_MANIFEST)
        if live is not None:
            write_json(StagingFiles(Path(request["staging"])).live, live, durable=False)
        store.pull_events()

    _repeat(fetch, ended)


def _repeat(transfer: Callable[[], None], ended: threading.Event) -> None:
    """Transfer progress periodically, until `ended` is set."""
    while not ended.wait(LIVE_EVERY_S):
        try:
            transfer()
        except (OSError, ConfigError, Retryable) as error:
            logger.info("progress is not transferred; trying again: %s", error)


def _work_on_own_disk(url: str, key: str) -> int:
    """Work as one process of a multi-host stage on a host that shares no disk; return the exit code."""
    store, rank = open_remote(url), process_rank()
    folder = store.staging_files(key).folder
    mirror = StagingMirror(store.remote, folder, store.push_events)
    # Until `work` returns, whatever ends this process counts as a failure.
    code: int = ExitCode.FAILED
    try:
        request = _prepared_request(store, key, mirror if rank == 0 else None)
    except (ConfigError, Retryable) as error:
        store.staging(key)
        code = failed(folder, ExitCode.RETRY if isinstance(error, Retryable) else ExitCode.BAD_INPUT, error)
        _send_error(store, key)
        return code
    # Only the first host sends its staging folder and its progress; every host sends its error.
    ended = threading.Event()
    if rank == 0:
        mirror.start()
        threading.Thread(target=_send_progress, args=(store, key, ended), daemon=True).start()
    try:
        code = work(request, [], _access(store, request))
    finally:
        ended.set()
        if code:
            _send_error(store, key)
        if rank == 0:
            store.push_events()
            # Not published: the files stay at the remote, where the launching machine fetches them.
            mirror.stop(published=False)
    if rank == 0 and code == ExitCode.DONE:
        try:
            mirror.push()  # raises if files are still not sent
        except (ConfigError, Retryable) as error:
            return failed(folder, ExitCode.RETRY, error)
        store.discard(folder)
    return code


def request_of(store: MirroredStore, key: str) -> dict[str, Any]:
    """Read the request for hosts that share no disk, fetch its inputs, and fill in the paths of this host.

    The remote's artifacts are listed only if an input is not known here, because this runs once per work item.
    """
    store.prepare()
    request = store.remote.read_json(f"{host_files(key)}/request.json", LARGEST_MANIFEST)
    if not isinstance(request, dict):
        raise Retryable(f"{store.url}/{host_files(key)}/request.json does not exist: its run has ended")
    check_same_plug_ins(request)
    stage = load_stage(request["module"], request["attribute"])
    inputs = {}
    if not all(
        _is_known(store, artifact_id, request["record"]["inputs"][name])
        for name, artifact_id in request["inputs"].items()
    ):
        store.refresh()
    for name, artifact_id in request["inputs"].items():
        artifact = store.get(artifact_id)
        if not store.has_files(artifact):
            store.fetch(artifact, without=stage.on_demand.get(artifact.kind))
        inputs[name] = str(artifact.folder)
    events = str(store.events / request["events"])
    return request | {"inputs": inputs, "events": events, "store": str(store.root)}


def _is_known(store: MirroredStore, artifact_id: str, digest: str) -> bool:
    """Whether the artifact is known here with this content; it may have been written again since."""
    try:
        return bool(store.get(artifact_id).manifest["digest"] == digest)
    except ConfigError:
        return False


def _prepared_request(store: MirroredStore, key: str, mirror: StagingMirror | None) -> dict[str, Any]:
    """The request; with `mirror`, also fetch the work so far into the staging folder of this host."""
    request = request_of(store, key)
    folder = store.staging(key)
    if mirror:
        record = read_json(StagingFiles(folder).execution)
        # Work of an earlier execution on this host: another key's state would be mixed into this one's.
        if record is None or record["execution"] != request["execution"]:
            store.discard(folder)
        mirror.pull()
        store.staging(key)
        write_json(StagingFiles(folder).execution, request["record"])
    StagingFiles(folder).error_path.unlink(missing_ok=True)
    return request | {"staging": str(folder)}


def _send_error(store: MirroredStore, key: str) -> None:
    """Send this host's error, unless another host has sent one."""
    with suppress(OSError, ConfigError, Retryable):
        error = store.staging_files(key).error_path.read_bytes()
        # `create` fails if the object exists: the first error is the cause, later ones follow from it.
        store.remote.create(f"{host_files(key)}/error.json", error)


def _send_progress(store: MirroredStore, key: str, ended: threading.Event) -> None:
    """Send `live.json` and the events periodically, until `ended` is set."""

    def send() -> None:
        live = store.staging_files(key).live
        if live.is_file():
            store.remote.write(f"{host_files(key)}/live.json", live.read_bytes())
        store.push_events()

    _repeat(send, ended)


def open_remote(location: str) -> MirroredStore:
    """The store at a URL, or at a folder of this machine that mirrors one."""
    store = open_store(location)
    assert isinstance(store, MirroredStore)
    return store


def _access(store: MirroredStore, request: dict[str, Any]) -> dict[str, Any]:
    """The cache of this machine, of the size that the request names, and its claims on requests to endpoints."""
    files = FileCache(store, int(request["launch"]["cache_gigabytes"] * BYTES_PER_GIGABYTE))
    return {"remote_files": files, "claims": partial(RequestClaims, store)}


# On the host of an item


def run_item_on_own_disk(item: WorkItem) -> ItemResult:
    """As `fanout.run_item`, in a folder that is removed afterwards. The result names the files that were sent."""
    store = open_remote(item.url)
    check_lease = _lease_check(store, item, item.staging.name)
    return with_retries(item, lambda: _run_once(store, item, check_lease), check_lease)


def _run_once(store: MirroredStore, item: WorkItem, check_lease: Callable[[], None]) -> ItemResult:
    check_lease()
    staging = store.cache / "items" / f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
    _remove_leftovers(staging.parent)
    try:
        request = request_of(store, item.staging.name)
        events = Path(request["events"])
        # The store has one folder for the event files of all hosts, so their names must differ by host.
        request["events"] = str(events.with_name(f"{events.stem}-{store.machine[:8]}{events.suffix}"))
        # Only files that differ from these stamps after the run are sent back.
        _fetch(store, dict(item.files), staging)
        before = _stamps(staging)
        write_json(StagingFiles(staging).request, request | {"staging": str(staging)})
        result = run_once(replace(item, request=str(StagingFiles(staging).request)), check_lease)
        store.push_events()
        return replace(result, **_send_changes(store, item, staging, before))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _lease_check(store: MirroredStore, item: WorkItem, key: str) -> Callable[[], None]:
    """A function that raises `StageCancelled` once the item's attempt is over; it asks the remote every 5 s."""
    checked_at = -CHECK_EVERY_S

    def check() -> None:
        nonlocal checked_at
        if monotonic() - checked_at < CHECK_EVERY_S:
            return
        checked_at = monotonic()
        try:
            active = store.remote.read_json(f"{host_files(key)}/lease.json", 2**16)
        except Retryable as error:
            logger.warning("cannot check whether the attempt is still active: %s", error)
            return
        # Also None, after the run has ended and deleted the file.
        if active != {"attempt": item.attempt}:
            raise StageCancelled(f"{item}: its attempt is over")

    return check


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of items whose process was killed; folder names start with the process id."""
    for path in folder.glob("*-*"):
        try:
            # Signal 0 only asks whether the process exists.
            os.kill(int(path.name.partition("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except PermissionError:
            pass


def _stamps(staging: Path) -> dict[str, tuple[int, int]]:
    """Name -> (bytes, ctime) of the files of a staging folder, without those that control the process."""
    stamps, own = {}, StagingFiles(staging)
    control = {path.name for path in (own.request, own.live, own.error_path)}
    for path in staging.rglob("*"):
        name = path.relative_to(staging).as_posix()
        if path.is_file() and "/." not in f"/{name}" and path.name not in control:
            stamps[name] = _stamp(path)
    return stamps


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_ctime_ns


def _send_changes(
    store: MirroredStore, item: WorkItem, staging: Path, before: dict[str, tuple[int, int]]
) -> dict[str, Any]:
    """Send the files that the item has written. Returns the fields of `ItemResult` that name the changes."""
    after = _stamps(staging)
    prefix = f"{host_files(item.staging.name)}/items/{item.fan_out}/{item.item}"
    # New or changed files. Files are replaced by renames, which give them another ctime even at the same size.
    names = [name for name, stamp in after.items() if before.get(name) != stamp]
    store.remote.map(lambda name: store.remote.put(staging / name, f"{prefix}/{name}"), names)
    files = tuple((name, f"{prefix}/{name}") for name in names)
    return {"files": files, "removed": tuple(before.keys() - after.keys())}


def _fetch(store: MirroredStore, files: dict[str, str], staging: Path, *, durable: bool = False) -> None:
    """Fetch objects into the folder, each atomically. `files`: name in the folder -> object at the remote.

    `durable`: fsync them.
    """

    def fetch(name: str) -> None:
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target, durable=durable) as temporary:
            if not store.remote.get(files[name], temporary):
                raise Retryable(f"{store.url}/{files[name]} does not exist: the run has ended or was restarted")

    if unsafe := [name for name in files if not is_safe_name(name)]:
        raise ConfigError(f"unsafe name of a work item's file: {unsafe[0]!r}")
    staging.mkdir(parents=True, exist_ok=True)
    store.remote.map(fetch, files)


# On the run's machine


@dataclass
class _Items:
    """Submits items with their files to the executor, and fetches what they write."""

    store: MirroredStore
    staging: Path
    fan_outs: dict[str, FanOut]
    executor: Executor
    objects: dict[str, str] = field(default_factory=dict)  # files of the staging folder -> objects at the remote
    stamps: dict[str, tuple[int, int]] = field(default_factory=dict)  # of these files, when they were sent or fetched

    def submit(self, item: WorkItem) -> Future[Any]:
        """Send the files that the item reads, unless the remote has them, and submit the item."""
        names = sorted(
            file.relative_to(self.staging).as_posix()
            for path in map(self.staging.joinpath, self.fan_outs[item.fan_out].reads(item.item))
            for file in ([path] if path.is_file() else path.rglob("*"))
            if file.is_file() and not file.name.startswith(".")
        )
        changed = [
            name for name in names if name not in self.objects or self.stamps[name] != _stamp(self.staging / name)
        ]
        self.store.remote.map(self._send, changed)
        assert self.store.url
        files = tuple((name, self.objects[name]) for name in names)
        remote_item = replace(item, request=f"{self.staging.name}/request.json", url=self.store.url, files=files)
        return self.executor.submit(remote_item)

    def result(self, item: WorkItem, future: Future[Any]) -> ItemResult:
        """Fetch the files that an item has written, its marker last: with the marker the item counts as done."""
        result = self.executor.result(item, future)
        files = dict(result.files)
        own = Markers(self.staging, item.fan_out).marker(item.item).relative_to(self.staging).as_posix()
        marker = {name: files.pop(name) for name in list(files) if name == own}
        # The marker last: a crash or a power cut in between leaves an item that is not done, and runs again.
        for group in (files, marker):
            _fetch(self.store, group, self.staging, durable=True)
            self.objects |= group
            self.stamps |= {name: _stamp(self.staging / name) for name in group}
            if group is files:
                for name in filter(is_safe_name, result.removed):
                    (self.staging / name).unlink(missing_ok=True)
        return replace(result, files=(), removed=())

    def _send(self, name: str) -> None:
        self.objects[name] = f"{host_files(self.staging.name)}/files/{name}"
        self.stamps[name] = _stamp(self.staging / name)
        self.store.remote.put(self.staging / name, self.objects[name])


def through_remote(
    factory: ExecutorFactory, store: MirroredStore, staging: Path, attempt: int, fan_outs: tuple[FanOut, ...]
) -> ExecutorFactory:
    """Wrap an executor factory for hosts that share no disk with this one: files of items go through the remote."""

    @contextmanager
    def opened(launch: LaunchConfig) -> Iterator[Executor]:
        folder = host_files(staging.name)
        # The request before the attempt: an item that sees its attempt active can read what to do.
        files = StagingFiles(staging)
        send_request(store, read_json(files.request) or {}, read_json(files.execution) or {})
        store.remote.write(f"{folder}/lease.json", json.dumps({"attempt": attempt}).encode())
        try:
            with factory(launch) as executor:
                items = _Items(store, staging, {fan_out.name: fan_out for fan_out in fan_outs}, executor)
                try:
                    yield Executor(items.submit, executor.capacity, items.result)
                finally:
                    # Before the executor closes, which waits for running items: without this file they end soon.
                    store.remote.delete([f"{folder}/lease.json"])
        finally:
            with suppress(ConfigError, Retryable):
                store.remote.delete_folder(folder)
                store.pull_events()

    return opened


class FileCache:
    """Opens files of artifacts that only the remote has, with at most `limit` bytes of them on this machine.

        <root>/cache/files/<sha256>                   a complete file; its mtime is the time of its last use
        <root>/cache/files/.<sha256>.<bytes>.tmp      a file being downloaded; its size counts from the beginning

    A reader holds a shared flock on its file, a download an exclusive one. So a file in use by any process is never
    evicted, and the leftovers of a killed process can be. The least recently used files are evicted first. The limit is
    exceeded only while the files that are open need more. For any number of threads and processes.
    """

    def __init__(self, store: MirroredStore, limit: int) -> None:
        self.limit = limit
        self.fetched_bytes = 0
        self._store = store
        self._folder = store.cache / "files"
        with writing(store.root):
            self._folder.mkdir(parents=True, exist_ok=True)
        # Artifact folder -> file name -> (name of the object, bytes, sha256).
        self._files: dict[Path, dict[str, tuple[str, int, str]]] = {}

    def open(self, path: str | Path) -> int:
        """Open `path`, a file of an artifact, for reading; returns the descriptor.

        A file that is not on this machine is downloaded and verified first, and is not evicted while it is open. Raises
        `ConfigError` for a file that is damaged or in no manifest, `Retryable` for an outage.
        """
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            name, size, sha256 = self._entry(Path(path))
        while True:
            descriptor = self._open_cached(sha256)
            if descriptor is None:
                descriptor = self._fetch(name, size, sha256)
            if descriptor is not None:
                return descriptor
            sleep(CACHE_POLL_S)  # another process or thread is downloading it

    def _entry(self, path: Path) -> tuple[str, int, str]:
        """The object, size and sha256 of a file, from the manifest of its artifact."""
        kind, key, *name_parts = path.relative_to(self._store.artifacts).parts
        folder = self._store.artifacts / kind / key
        if folder not in self._files:
            manifest = read_manifest(folder)
            if manifest is None:
                raise ConfigError(f"{folder} is no longer an artifact: start the stage again")
            prefix = payload_prefix(manifest)
            self._files[folder] = {
                name: (f"{prefix}/{name}", entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
            }
        try:
            return self._files[folder]["/".join(name_parts)]
        except KeyError:
            raise ConfigError(f"{path} is not in the manifest of its artifact") from None

    def _open_cached(self, sha256: str) -> int | None:
        """Open a cached file and lock it against eviction; None if it is not in the cache."""
        with self._folder_lock():
            try:
                descriptor = os.open(self._folder / sha256, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try_flock(descriptor, self._folder / CACHE_LOCK, shared=True)
            # The time of its last use, by which `_make_room` sorts; access times are off on many mounts.
            os.utime(descriptor)
            return descriptor

    def _fetch(self, name: str, size: int, sha256: str) -> int | None:
        """Download an object and return its file's descriptor; None if another process has or is downloading it."""
        temporary = self._folder / f".{sha256}.{size}.tmp"
        # Reserve the space under the lock, then download without it.
        with self._folder_lock(), writing(self._store.root):
            # Another process has finished it between our look and this lock.
            if (self._folder / sha256).exists():
                return None
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not try_flock(descriptor, self._folder / CACHE_LOCK):
                os.close(descriptor)
                return None
            try:
                self._make_room(size, temporary)
            except BaseException:
                os.close(descriptor)  # and with it the lock, or every later reader would wait for this download
                raise
        url = f"{self._store.url}/{name}"
        try:
            with writing(self._store.root):
                if not self._store.remote.get(name, temporary):
                    raise ConfigError(f"{url} is missing: `nautile store verify` lists all such files")
                if sha256_of(temporary, sync=True) != sha256:
                    raise ConfigError(
                        f"{url} is damaged (its digest differs): `nautile store verify` lists all such files"
                    )
                with self._folder_lock():
                    temporary.rename(self._folder / sha256)
                    try_flock(descriptor, self._folder / CACHE_LOCK, shared=True)
        except BaseException:
            # Under the lock: else another process could open the file just before it is removed, and download to a new
            # file of that name while its descriptor is of the removed, empty one.
            with self._folder_lock():
                temporary.unlink(missing_ok=True)
                os.close(descriptor)
            raise
        self.fetched_bytes += size
        return descriptor

    def _folder_lock(self) -> AbstractContextManager[bool]:
        return flock_until(self._folder / CACHE_LOCK, math.inf, shared=False)

    def _make_room(self, size: int, own: Path) -> None:
        """Evict the least recently used files that are not open, until `size` more bytes fit. `own`: not to evict."""
        entries = []
        for entry in os.scandir(self._folder):
            if entry.name not in (own.name, CACHE_LOCK):
                partial, status = _PARTIAL.fullmatch(entry.name), entry.stat()
                used_at = 0 if partial else status.st_mtime_ns  # leftovers of killed downloads go first
                entries.append((used_at, entry.path, int(partial[1]) if partial else status.st_size))
        # Downloads that are under way count with their full size.
        used = sum(bytes_ for _, _, bytes_ in entries)
        for _, path, bytes_ in sorted(entries):
            if used + size <= self.limit:
                return
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if try_flock(descriptor, self._folder / CACHE_LOCK):
                os.unlink(path)
                used -= bytes_
            os.close(descriptor)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
