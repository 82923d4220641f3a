"""Which files of an artifact differ from its manifest, reading each byte once per process.

A pipeline checks one artifact several times (reused, then the input of two stages). A file that was digested is known
again by (size, mtime, ctime, inode); a write through the file system changes ctime, which no tool can set back. Files
of 1 MiB and more are remembered across processes too, in one file an artifact under `<store>/verified/`, so that a run
over terabytes of shards does not begin by reading them; `nautile store verify` trusts nothing and reads everything.
"""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.files import read_json, sha256_of, write_json
from store.manifest import MANIFEST

LARGE = 2**20  # bytes; a smaller file is read again sooner than its record

_seen: dict[tuple[str, str], list[int]] = {}  # (path, sha256) -> stamp of the file that had this digest
_seen_lock = threading.Lock()


def damaged_files(root: Path, folder: Path, files: dict[str, dict[str, Any]], *, trust: bool) -> list[str]:
    """Names of the files in `folder` that are missing, unexpected, or differ from `files`, each with the reason.

    `trust`: believe an earlier digest of a file whose size, times and inode have not changed.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    # File browsers and NFS leave hidden files behind.
    shown = (path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    damaged = [f"{name} (not in the manifest)" for name in sorted(shown) if name not in files and name != MANIFEST]
    # A file behind a symbolic link is not part of the artifact, whatever its bytes.
    links = [
        os.path.relpath(path, folder)
        for parent, folders, names in os.walk(folder)
        for path in (os.path.join(parent, name) for name in (*folders, *names))
        if os.path.islink(path)
    ]
    record = _record_path(root, folder)
    recorded = read_json(record) or {}
    stamps: dict[str, list[int]] = {}
    unread: list[str] = []
    for name, entry in sorted(files.items()):
        stamp = _stamp(folder / name)
        if any(name == link or name.startswith(f"{link}/") for link in links):
            damaged.append(f"{name} (reached by a link)")
        elif stamp is None:
            damaged.append(f"{name} (missing)")
        elif stamp[0] != entry["bytes"]:
            damaged.append(f"{name} ({stamp[0]} bytes, not {entry['bytes']})")
        else:
            stamps[name] = stamp
            known = _seen.get((str(folder / name), entry["sha256"])) or recorded.get(name)
            if not (trust and known == stamp):
                unread.append(name)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _digest(folder / name), unread))
    for name, digest in zip(unread, digests, strict=True):
        if digest != files[name]["sha256"]:
            damaged.append(f"{name} ({digest})" if digest.startswith("cannot") else f"{name} (its digest differs)")
            stamps.pop(name)
    _remember(record, folder, files, stamps, recorded)
    return damaged


def trust_files(root: Path, folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Count `files`, whose digests were taken as they were written or fetched, as verified in `folder`."""
    stamps = {name: stamp for name in files if (stamp := _stamp(folder / name))}
    _remember(_record_path(root, folder), folder, files, stamps, {})


def _record_path(root: Path, folder: Path) -> Path:
    """The record for other processes of the large files in `folder` that were digested: name -> stamp."""
    return root / "verified" / f"{folder.parent.name}-{folder.name}.json"


def _remember(
    record: Path, folder: Path, files: dict[str, dict[str, Any]], stamps: dict[str, list[int]], before: dict[str, Any]
) -> None:
    """Remember `stamps` as those of whole files, and of the other `files` nothing."""
    with _seen_lock:
        for name, entry in files.items():
            _seen.pop((str(folder / name), entry["sha256"]), None)
        _seen.update({(str(folder / name), files[name]["sha256"]): stamp for name, stamp in stamps.items()})
    large = {name: stamp for name, stamp in stamps.items() if stamp[0] >= LARGE}
    if large == before:
        return
    with suppress(OSError):  # it only saves time: a read-only store can still be verified
        record.parent.mkdir(exist_ok=True)
        write_json(record, large)


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _stamp(path: Path) -> list[int] | None:
    """[size, mtime, ctime, inode] of a plain file; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
