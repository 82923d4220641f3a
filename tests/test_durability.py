"""What a power cut may not take, on a real disk: all other tests have their stores in memory, where fsync does nothing.

What the kernel was asked to write is recorded: the content of a file, and the names in a folder, at its last fsync.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nautile.common.events import silent
from nautile.common.files import append_durably, write_atomically, write_json
from nautile.data.endpoints.budget import Usage
from nautile.data.endpoints.chat_types import ChatReply
from nautile.data.endpoints.reply_cache import ReplyCache
from nautile.data.endpoints.reply_source import ReplySource
from nautile.store.artifacts import Store
from nautile.store.events import EventWriter

ROOT = Path(__file__).parents[1]
IN_MEMORY = {"tmpfs", "ramfs"}


@pytest.fixture
def disk():
    """A folder that is on a disk and not in memory."""
    for parent in (ROOT / "build", Path("/var/tmp")):
        parent.mkdir(exist_ok=True)
        described = subprocess.run(["stat", "-f", "-c", "%T", parent], capture_output=True, text=True, check=False)
        if described.returncode == 0 and described.stdout.strip() not in IN_MEMORY and os.access(parent, os.W_OK):
            folder = Path(tempfile.mkdtemp(dir=parent))
            yield folder
            shutil.rmtree(folder)
            return
    pytest.skip("neither build/ nor /var/tmp is known to be on a disk")


def state(path: Path | str | int) -> object:
    """What a sync of this file or folder makes durable."""
    path = Path(f"/proc/self/fd/{path}" if isinstance(path, int) else path).resolve()
    return sorted(os.listdir(path)) if path.is_dir() else path.read_bytes()


class Record:
    """In place of `os.fsync`: calls it, and reports what was renamed or left behind before it was synced."""

    def __init__(self) -> None:
        self.synced: dict[tuple[int, int], object] = {}
        self.renamed: list[str] = []
        self.early: list[str] = []
        self.fsync = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.fsync(descriptor)
        status = os.fstat(descriptor)
        self.synced[status.st_dev, status.st_ino] = state(descriptor)

    def lost(self, top: Path) -> list[str]:
        """The paths of a tree whose content or names a power cut would take."""
        paths = [top, *top.rglob("*")]
        return [str(p) for p in paths if state(p) and self.synced.get((p.stat().st_dev, p.stat().st_ino)) != state(p)]

    def watch_renames(self) -> None:
        def watched(rename):
            def call(source, target, **options):
                self.early += self.lost(Path(source))
                rename(source, target, **options)
                self.renamed.append(str(target))

            return call

        os.rename, os.replace = watched(os.rename), watched(os.replace)


def publish(folder: Path) -> Path:
    store = Store(folder / "store")
    store.prepare()
    for number in (1, 2):  # the second time the first version is moved aside
        staging = store.staging("a" * 64)
        (staging / "out" / "deep").mkdir(parents=True)
        (staging / "out" / "weights").write_bytes(b"1" * number)
        (staging / "out" / "deep" / "index.json").write_text("{}")
        store.publish(
            "tokens", "a" * 64, staging / "out", stage="ingest", version=1, config={}, inputs={}, facts={},
            supersede=True, digests={"weights": "0" * 64},
        )  # fmt: skip
    return store.artifacts / "tokens"


def one_file(folder: Path) -> Path:
    write_json(folder / "one.json", {"a": 1})
    write_json(folder / "one.json", {"a": 2})
    return folder


def new_folders(folder: Path) -> Path:
    write_atomically(folder / "new" / "newer" / "one.json", b"1")
    return folder


def appended(folder: Path) -> Path:
    append_durably(folder / "rows", b"1\n")
    append_durably(folder / "rows", b"2\n")
    return folder


def replies(folder: Path) -> Path:
    cache = ReplyCache(ReplySource(folder / "replies"), "model", silent)
    asyncio.run(cache.record(None, ChatReply("text", "stop", 3, 4, 0.5, False, "1" * 64), Usage(0.25, 7)))
    return cache.folder


def calls(folder: Path) -> Path:
    EventWriter(folder / "events.jsonl", "e" * 32)("call", endpoint="teacher", dollars=1.0)
    return folder


WRITERS = (publish, one_file, new_folders, appended, replies, calls)


def test_what_is_written_is_on_the_disk_before_it_gets_its_name_and_when_the_call_returns(disk):
    done = subprocess.run([sys.executable, __file__, disk], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)
    assert {name: report[:2] for name, report in reports.items()} == {writer.__name__: [[], []] for writer in WRITERS}
    assert [renames for _, _, renames in reports.values()] == [6, 2, 1, 0, 0, 0]


if __name__ == "__main__":
    record = os.fsync = Record()
    record.watch_renames()
    reports = {}
    for writer in WRITERS:
        record.early, record.renamed = [], []
        folder = Path(sys.argv[1]) / writer.__name__
        folder.mkdir()
        lost = record.lost(writer(folder))
        reports[writer.__name__] = (record.early, lost, len(record.renamed))
    sys.stdout.write(json.dumps(reports))
