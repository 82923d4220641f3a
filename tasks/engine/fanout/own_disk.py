"""Run work items on hosts that share no disk with the run's machine: their files go through the store's remote.

    <url>/hosts/<key>/request.json      the request, without local paths (`tasks.engine.remote_child`)
                      lease.json        the active attempt; without it every item ends
                      files/<name>      files of the staging folder that items read
                      items/<fan-out>/<item>/<name>     files that an item has written

An item runs in its own staging folder, with the files that `FanOut.reads` names. The run's machine fetches what the
item has written into its staging folder, the marker that it is done last. So the stage and a resume see the same files
as with a shared disk.
"""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import atomic_path, read_json, write_json
from nautile.configs.operation import LaunchConfig
from nautile.store.layout import StagingFiles
from nautile.store.manifest import is_safe_name
from nautile.store.mirror import MirroredStore
from nautile.store.staging_mirror import host_files
from nautile.tasks.engine.errors import StageCancelled
from nautile.tasks.engine.fanout.executor import Executor, ExecutorFactory, Future
from nautile.tasks.engine.fanout.items import FanOut, Markers
from nautile.tasks.engine.fanout.work_item import ItemResult, WorkItem, run_once, with_retries
from nautile.tasks.engine.remote_child import open_remote, request_of, send_request

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0


# On the host of an item


def run_item(item: WorkItem) -> ItemResult:
    """As `work_item.run_item`, in a folder that is removed afterwards. The result names the files that were sent."""
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
        own = Markers.of(self.staging, item.fan_out).marker(item.item).relative_to(self.staging).as_posix()
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
