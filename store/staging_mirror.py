"""Mirror of a staging folder at the remote, so that another machine can resume the work of one that is lost.

    <url>/staging/<key>/<fence>/<file>            the files of the staging folder
    <url>/staging/<key>/<fence>/snapshot.json     written last: {"id", "progress", "files": name -> bytes}

Each holder of the key's lease has a folder of its own, so that one that stood still and goes on mixes nothing into the
work of its successor. Who has sent a snapshot removes the folders of earlier holders. The hosts of a stage that share
no disk write without a `<fence>`.

A snapshot is sent whenever something is finished: a checkpoint (`checkpoints/steps/<n>/`) or a work item (its marker
under `fan_outs/`). Other changes are sent every few minutes. A snapshot lists the files that existed at one moment, so
a marker never lacks the results that it marks. Files that are appended to or rewritten may be newer than that moment;
stages expect the same after a crash on one machine. The files of a checkpoint never change, and it has their digests.
"""

import json
import logging
import os
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nautile.common.errors import ConfigError, Retryable
from nautile.common.files import read_json, sync_folder, write_json, writing
from nautile.common.text import duration
from nautile.store.layout import (
    CHECKPOINTS,
    DONE_ITEMS,
    FAN_OUTS,
    FINISHED,
    ITEM_LIST,
    LOG,
    RUNNING_ITEMS,
    STAGING,
    STEPS,
    StagingFiles,
)
from nautile.store.manifest import LARGEST_MANIFEST, is_safe_name
from nautile.store.remote import Remote

logger = logging.getLogger(__name__)

PUSH_EVERY_S = 20.0
PUSH_CHANGES_EVERY_S = 300.0
WARN_AFTER = 3  # pushes in a row that fail, of which the operator is told; of one that is refused at once
STOP_S = 30.0  # how long a cancelled step waits until its unfinished work is sent
CLOCK_TICK_S = 0.01  # resolution of file times: the kernel takes them from its last clock tick
LISTINGS = 20  # attempts to list a folder in which files keep being removed, until the next push tries again
SNAPSHOT = "snapshot.json"
_HERE = StagingFiles(Path())  # the names of its files
_SNAPSHOT = re.compile(rf"(?:[0-9]{{8,}}/)?{re.escape(SNAPSHOT)}")
_OF_HOLDER = re.compile(r"([0-9]{8,})/.*")
_STEP = re.compile(rf"(?:.*/)?{STEPS}/([0-9]+)/.*")
_UNFINISHED_STEP = re.compile(rf"(?:.*/)?(?:{CHECKPOINTS}/damaged|{STEPS}/[^/]*[^/0-9][^/]*)/.*")
_LISTS = "|".join(map(re.escape, (ITEM_LIST, FINISHED)))
_MARKER = re.compile(rf"{FAN_OUTS}/[^/]+/(?:{DONE_ITEMS}/[^/]+|{_LISTS})|{re.escape(_HERE.done.name)}")
_OF_PROCESS = (_HERE.request, _HERE.live, _HERE.error_path, _HERE.lease)
_OF_THIS_MACHINE = {str(path) for path in (*_OF_PROCESS, _HERE.publication, _HERE.uploads, _HERE.sent)}
# What an item is working on: another machine runs it from the beginning.
_OF_RUNNING_ITEM = re.compile(rf"{FAN_OUTS}/[^/]+/{RUNNING_ITEMS}/.*")

Stamps = dict[str, list[int]]  # name -> [bytes, ctime]
Progress = list[int]  # [finished steps and items, bytes]: of two states the greater one is more advanced


class StagingMirror:
    """Sends the staging folder of a key in a thread, and restores it. The caller holds the key's lock and lease.

    `before`: called before each snapshot, to send data that must not be older than the snapshot.
    """

    def __init__(
        self, remote: Remote, folder: Path, before: Callable[[], object] = lambda: None, *, fence: int = 0
    ) -> None:
        self._remote, self._folder, self._before, self._fence = remote, folder, before, fence
        self._files = StagingFiles(folder)
        self._all = f"{STAGING}/{folder.name}"
        self._prefix = f"{self._all}/{fence:08d}" if fence else self._all
        self._finished: int | None = None  # count of finished steps and items in the last snapshot, see `_finished`
        self._sent: Stamps = {}
        self._pushed_at = time.monotonic()
        self.patience_s: float | None = None
        self._failures = 0  # pushes that failed since the last snapshot was sent
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push_often, name="staging-mirror", daemon=True)

    def start(self) -> None:
        """Start the thread that sends a snapshot whenever something is finished."""
        self._thread.start()

    def stop(self, *, published: bool) -> None:
        """Stop the thread, and send a snapshot if more is finished; if `published`, remove everything at the remote.

        After `patience_s`, if set, the rest is left to a daemon thread: Ctrl-C must not wait for hours of uploads, or
        for a remote that does not answer.
        """
        self._stop.set()
        end = threading.Thread(target=self._end, args=(published,), name="staging-mirror-end", daemon=True)
        end.start()
        end.join(self.patience_s)
        if end.is_alive():
            logger.warning("the unfinished work was not sent to %s within %s s", self._remote.url, self.patience_s)

    def _end(self, published: bool) -> None:
        # A thread that was never started has no `ident`: then this process only reads the mirror.
        is_sender = self._thread.ident is not None
        if is_sender:
            self._thread.join()
        try:
            if published:
                self._before()  # which raises if another machine works on the key by now
                self.remove()
            elif is_sender and self._folder.is_dir():
                self.push()
        except (ConfigError, Retryable, OSError) as error:
            logger.warning("the unfinished work at the remote cannot be changed: %s", error)

    def push(self, *, changes: bool = False) -> bool:
        """Send a snapshot if more is finished than in the last one; with `changes` also if any file has changed.

        Returns whether a snapshot was sent.
        """
        files = _list_consistently(self._folder)
        if _finished(files) == self._finished and not (changes and files != self._sent):
            return False
        # Events first: a machine that resumes after this checkpoint would not emit those before it again.
        self._before()
        # Files that are at the remote already: unchanged ones, and those of checkpoints, which never change.
        remote_files = self._remote.names(self._prefix)
        sent = {name: stamp for name, stamp in self._last_sent().items() if name in remote_files}
        steps = {name: stamp for name, stamp in files.items() if _STEP.fullmatch(name) and name in remote_files}
        sent |= {name: stamp for name, stamp in steps.items() if remote_files[name].bytes == stamp[0]}
        while not self._send(files, sent):
            # An item removed a file that it had used, so it may have finished: the snapshot must include its result.
            files = _list_consistently(self._folder)
        snapshot = uuid.uuid4().hex
        content = {
            "id": snapshot,
            "progress": _progress(files),
            "files": {name: size for name, (size, _) in files.items()},
        }
        self._remote.write(f"{self._prefix}/{SNAPSHOT}", json.dumps(content, sort_keys=True).encode())
        self._pushed_at = time.monotonic()
        self._failures = 0
        self._record_sent(snapshot, files)
        self._note_upload(time.time(), "")
        # Only now: the snapshot before this one, which another machine may be reading, listed them.
        obsolete = {name for name in remote_files.keys() - files.keys() - {SNAPSHOT} if _fence_of(name) is None}
        self._remote.delete(f"{self._prefix}/{name}" for name in sorted(obsolete))
        if self._fence:
            names = self._remote.names(self._all)
            earlier = [name for name in names if (_fence_of(name) or self._fence) < self._fence]
            self._remote.delete(f"{self._all}/{name}" for name in earlier)
        return True

    def _send(self, files: Stamps, sent: Stamps) -> bool:
        """Send the files that are not in `sent`, checkpoints last; False if a file was removed in the meantime."""

        def put(name: str) -> None:
            try:
                self._remote.put(self._folder / name, f"{self._prefix}/{name}")
            except Retryable:
                if (self._folder / name).exists():
                    raise
            else:
                sent[name] = files[name]

        # Checkpoints last: what they refer to is at the remote before them.
        for is_step in (False, True):
            names = [name for name in files if bool(_STEP.fullmatch(name)) == is_step]
            self._remote.map(put, [name for name in names if sent.get(name) != files[name]])
        return all((self._folder / name).exists() for name in files)

    def pull(self) -> bool:
        """Replace the folder by the snapshot if that is more advanced; returns whether it was replaced."""
        most_advanced = self._most_advanced()
        if most_advanced is None:
            return False
        prefix, snapshot = most_advanced
        # This machine may be further along, for what is newer than the last snapshot is only here.
        if self._folder.is_dir() and _progress(_list_consistently(self._folder)) >= snapshot["progress"]:
            return False
        # Download into a new folder, then rename it.
        target = self._folder.with_name(f".pull-{uuid.uuid4().hex}")
        with writing(self._files.store_root):
            target.mkdir(parents=True)
            # Another version may have sent what concerns its machine alone, under which this one must not publish.
            names = [name for name in snapshot["files"] if _is_sent(name)]
            for name in names:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            # If one is missing, a sender that has lost the lease may have replaced the snapshot in the meantime.
            if not all(self._remote.map(lambda name: self._fetch(f"{prefix}/{name}", target / name), names)):
                logger.warning("%s/%s lacks files of its snapshot and is not used", self._remote.url, prefix)
                shutil.rmtree(target)
                return False
            if self._files.log.exists() and LOG not in names:
                self._files.log.rename(StagingFiles(target).log)  # a process may have the log open
            # A marker must not outlast, in a power cut, the results that it marks.
            for folder, _, _ in os.walk(target):
                sync_folder(Path(folder))
            # A crash between these two lines leaves no folder: the next start fetches the snapshot again.
            shutil.rmtree(self._folder, ignore_errors=True)
            target.rename(self._folder)
            sync_folder(self._folder.parent)
        self._record_sent(snapshot["id"], _stamps(self._folder))
        return True

    def _fetch(self, name: str, target: Path) -> bool:
        """Download a file of the snapshot and fsync it; False if it does not exist."""
        if not self._remote.get(name, target):
            return False
        with target.open("rb") as file:
            os.fsync(file.fileno())
        return True

    def remove(self) -> None:
        """Remove the key's unfinished work from the remote, the snapshots first."""
        names = self._remote.names(self._all)
        snapshots = {name for name in names if _SNAPSHOT.fullmatch(name)}
        self._remote.delete(f"{self._all}/{name}" for name in sorted(snapshots))
        self._remote.delete(f"{self._all}/{name}" for name in sorted(names.keys() - snapshots))
        self._remote.delete_folder(host_files(self._folder.name))

    def _snapshot(self, prefix: str) -> Any:
        return self._remote.read_json(f"{prefix}/{SNAPSHOT}", LARGEST_MANIFEST)

    def _most_advanced(self) -> tuple[str, Any] | None:
        """The most advanced of the snapshots that holders of the lease have sent, with the prefix of its files."""
        names = sorted(name for name in self._remote.names(self._all) if _SNAPSHOT.fullmatch(name))
        prefixes = [f"{self._all}/{name}".removesuffix(f"/{SNAPSHOT}") for name in names]
        snapshots = [(prefix, self._snapshot(prefix)) for prefix in prefixes]
        valid = [entry for entry in snapshots if _is_valid(entry[1])]
        return max(valid, key=lambda entry: entry[1]["progress"], default=None)

    def _last_sent(self) -> Stamps:
        """The files of the last snapshot that this machine sent; empty if another machine has sent one since."""
        sent, snapshot = read_json(self._files.sent), self._snapshot(self._prefix)
        if isinstance(sent, dict) and isinstance(snapshot, dict) and sent["snapshot"] == snapshot.get("id"):
            files: Stamps = sent["files"]
            return files
        return {}

    def _record_sent(self, snapshot: str, files: Stamps) -> None:
        self._finished, self._sent = _finished(files), files
        if self._folder.is_dir():
            write_json(self._files.sent, {"snapshot": snapshot, "files": files}, durable=False)

    def _push_often(self) -> None:
        while not self._stop.wait(PUSH_EVERY_S):
            try:
                self.push(changes=time.monotonic() - self._pushed_at > PUSH_CHANGES_EVERY_S)
            except (ConfigError, Retryable, OSError) as error:
                # Once may be chance: a checkpoint may have been removed meanwhile for a newer one.
                self._failures += 1
                refused = isinstance(error, ConfigError)
                first = self._failures == (1 if refused else WARN_AFTER)
                logger.log(logging.WARNING if first else logging.INFO, "unfinished work cannot be sent: %s", error)
                if refused or self._failures >= WARN_AFTER:
                    uploads = read_json(self._files.uploads)
                    self._note_upload(uploads.get("at") if isinstance(uploads, dict) else None, str(error))

    def _note_upload(self, at: float | None, error: str) -> None:
        with suppress(OSError):  # the folder may be gone, or its disk full
            write_json(self._files.uploads, {"at": at, "error": error}, durable=False)


def upload_note(folder: Path) -> str:
    """When the unfinished work in a staging folder was last sent to the remote, and why not since; "" without one."""
    uploads = read_json(StagingFiles(folder).uploads)
    if not isinstance(uploads, dict):
        return ""
    ago = f"{duration(max(0.0, time.time() - uploads['at']))} ago" if uploads.get("at") else "never"
    return f"NOT uploaded (last: {ago}): {uploads['error']}" if uploads.get("error") else f"uploaded {ago}"


def host_files(key: str) -> str:
    """The folder at the remote in which the hosts of a stage and the launching machine exchange messages."""
    return f"hosts/{key}"


def _fence_of(name: str) -> int | None:
    """The fence in the name of a file below `staging/<key>`; None if it is in no holder's folder."""
    match = _OF_HOLDER.fullmatch(name)
    return int(match[1]) if match else None


def _list_consistently(folder: Path) -> Stamps:
    """List the files that another machine needs, as they existed together at one moment.

    A file created after that moment is left out, so no marker is listed without what was written before it. If a file
    was removed after that moment (its item has used it), the listing is repeated.
    """
    for _ in range(LISTINGS):
        # Two listings with a pause: what the second lacks was removed meanwhile, and what it has in addition was
        # created.
        before = _stamps(folder)
        time.sleep(2 * CLOCK_TICK_S)
        # One tick earlier, because a file that is created now may get the time of the last tick.
        moment = time.time_ns() - int(CLOCK_TICK_S * 1e9)
        files = _stamps(folder)
        if before.keys() <= files.keys():
            return {name: stamp for name, stamp in files.items() if stamp[1] < moment or name in before}
    raise Retryable(f"{folder} changes too fast to be sent")


def _stamps(folder: Path) -> Stamps:
    """Size and ctime of all files in the folder except temporary ones and those that only concern this machine."""
    stamps = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not _is_sent(name):
            continue
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                stamps[name] = [status.st_size, status.st_ctime_ns]
    return stamps


def _is_sent(name: str) -> bool:
    """Whether other machines get the file: it is not temporary, and concerns not only this machine or one process."""
    hidden = "/." in f"/{name}" and not _STEP.fullmatch(name)
    own = name in _OF_THIS_MACHINE or _OF_RUNNING_ITEM.fullmatch(name) or _UNFINISHED_STEP.fullmatch(name)
    return not hidden and not own


def _finished(files: Stamps) -> int | None:
    """The step of the newest checkpoint plus the number of markers; None if there is neither."""
    step = max((int(match[1]) for name in files if (match := _STEP.fullmatch(name))), default=None)
    markers = sum(bool(_MARKER.fullmatch(name)) for name in files)
    return None if step is None and not markers else (step or 0) + markers


def _progress(files: Stamps) -> Progress:
    finished = _finished(files)
    return [-1 if finished is None else finished, sum(size for size, _ in files.values())]


def _is_valid(snapshot: Any) -> bool:
    """Whether an untrusted snapshot has the right fields, and no name in it leads out of the folder."""
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("id"), str):
        return False
    progress, files = snapshot.get("progress"), snapshot.get("files")
    numbers = isinstance(progress, list) and len(progress) == 2 and all(type(number) is int for number in progress)
    return numbers and isinstance(files, dict) and all(map(is_safe_name, files))
