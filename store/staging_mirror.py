"""Unfinished work at the remote: what another machine needs to go on from the last checkpoint of one that is lost.

    <url>/staging/<key>/<file>            the files of the staging folder
    <url>/staging/<key>/snapshot.json     last: {"step": of the newest checkpoint, "files": name -> bytes}

Work is sent once it has checkpoints (`checkpoints/steps/<n>/`), whenever there is a new one. Files beside them are sent
after the checkpoint was there and may be newer than it, as they may be after a crash on one machine; a stage that
resumes expects that. The files of a checkpoint never change, and it holds their digests.
"""

import json
import logging
import re
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError, Retryable
from common.files import parse_json, writing
from store.manifest import LARGEST_MANIFEST, is_safe_name
from store.remote import Remote

logger = logging.getLogger(__name__)

PUSH_EVERY_S = 20.0
SNAPSHOT = "snapshot.json"
_STEP = re.compile(r"(?:.*/)?checkpoints/steps/([0-9]+)/.*")
_UNFINISHED_STEP = re.compile(r"(?:.*/)?checkpoints/(?:damaged/|steps/[^/]*[^/0-9][^/]*/).*")
_OF_THIS_MACHINE = {"request.json", "live.json", "error.json"}


class StagingMirror:
    """Sends the staging folder of one key in a thread, and fetches it. The caller holds the key's lock and lease.

    `before`: called before each snapshot, to send what must not be older than it.
    """

    def __init__(self, remote: Remote, folder: Path, before: Callable[[], object] = lambda: None) -> None:
        self._remote, self._folder, self._before = remote, folder, before
        self._prefix = f"staging/{folder.name}"
        self._sent: int | None = None  # the step of the last snapshot
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push_often, name="staging-mirror", daemon=True)

    def start(self) -> None:
        """Send the folder from now on, whenever it has a new checkpoint."""
        self._thread.start()

    def stop(self, *, published: bool) -> None:
        """Send what is new for the last time, or remove everything at the remote if the work is `published` there."""
        self._stop.set()
        self._thread.join()
        try:
            if published:
                self.remove()
            elif self._folder.is_dir():
                self.push()
        except (ConfigError, Retryable, OSError) as error:
            logger.warning("the unfinished work at the remote cannot be changed: %s", error)

    def push(self) -> bool:
        """Send a snapshot if there is a newer checkpoint than in the last one; whether one was sent."""
        files = _files(self._folder)
        step = _newest_step(files)
        if step is None or step == self._sent:
            return False
        self._before()
        at_remote = self._remote.names(self._prefix)
        for is_step in (False, True):
            names = [name for name in files if bool(_STEP.fullmatch(name)) == is_step]
            if is_step:
                names = [name for name in names if name not in at_remote or at_remote[name].bytes != files[name]]
            self._remote.map(lambda name: self._remote.put(self._folder / name, f"{self._prefix}/{name}"), names)
        content = json.dumps({"step": step, "files": files}, sort_keys=True).encode()
        self._remote.write(f"{self._prefix}/{SNAPSHOT}", content)
        self._sent = step
        self._remote.delete(f"{self._prefix}/{name}" for name in at_remote.keys() - files.keys() - {SNAPSHOT})
        return True

    def pull(self) -> bool:
        """Replace the folder by the snapshot, if that has a newer checkpoint; whether it was replaced."""
        snapshot: Any = parse_json(self._remote.read(f"{self._prefix}/{SNAPSHOT}", LARGEST_MANIFEST) or b"null")
        if not _is_valid(snapshot):
            return False
        local = _newest_step(_files(self._folder)) if self._folder.is_dir() else None
        if local is not None and local >= snapshot["step"]:
            return False
        target = self._folder.with_name(f".pull-{uuid.uuid4().hex}")
        with writing(self._folder.parents[1]):
            for name in snapshot["files"]:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            fetched = self._remote.map(
                lambda name: self._remote.get(f"{self._prefix}/{name}", target / name), snapshot["files"]
            )
            if not all(fetched):
                logger.warning("%s/%s lacks files of its snapshot and is not used", self._remote.url, self._prefix)
                shutil.rmtree(target)
                return False
            shutil.rmtree(self._folder, ignore_errors=True)
            target.rename(self._folder)
        self._sent = snapshot["step"]
        return True

    def remove(self) -> None:
        """Remove the work from the remote, the snapshot first."""
        names = self._remote.names(self._prefix)
        if SNAPSHOT in names:
            self._remote.delete([f"{self._prefix}/{SNAPSHOT}"])
        self._remote.delete(f"{self._prefix}/{name}" for name in names if name != SNAPSHOT)

    def _push_often(self) -> None:
        while not self._stop.wait(PUSH_EVERY_S):
            try:
                self.push()
            except (ConfigError, Retryable, OSError) as error:
                # A checkpoint may have been removed meanwhile for a newer one.
                logger.info("unfinished work is sent later: %s", error)


def _files(folder: Path) -> dict[str, int]:
    """Name -> bytes of the files that another machine needs, without what is still being written."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        temporary = path.name.startswith(".") and path.name.endswith(".tmp")
        if temporary or name in _OF_THIS_MACHINE or _UNFINISHED_STEP.fullmatch(name) or path.is_symlink():
            continue
        if path.is_file():
            files[name] = path.stat().st_size
    return files


def _newest_step(files: dict[str, int]) -> int | None:
    return max((int(match[1]) for name in files if (match := _STEP.fullmatch(name))), default=None)


def _is_valid(snapshot: Any) -> bool:
    """Whether a snapshot that somebody wrote can be used; no name in it leads out of the folder."""
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("step"), int):
        return False
    return isinstance(files := snapshot.get("files"), dict) and all(map(is_safe_name, files))
