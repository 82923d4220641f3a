"""Verify the files of an artifact against its manifest, reading each file once per process.

A pipeline checks an artifact several times, for example when it is reused and as an input of two stages. A file that
was hashed before is recognised by its stamp (size, mtime, ctime, inode): any write through the file system changes
ctime, which no tool can set back. Stamps of files from 1 MiB on are also saved for other processes, in one file per
artifact under `<store>/verified/`, so that a run over terabytes of shards need not read them first. `nautile store
verify` ignores all stamps and reads everything.
"""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from nautile.common.files import read_json, sha256_of, write_json
from nautile.store.layout import Layout
from nautile.store.manifest import MANIFEST

LARGE = 2**20  # bytes; reading a smaller file is as fast as reading its saved stamp

_verified_stamps: dict[tuple[str, str], list[int]] = {}  # (path, sha256) -> stamp of the file that had this digest
_stamps_lock = threading.Lock()


def damaged_files(root: Path, folder: Path, files: dict[str, dict[str, Any]], *, trust: bool) -> list[str]:
    """Names of the files in `folder` that are missing, unexpected or differ from `files`, each with the reason.

    `trust`: do not read a file whose stamp is the same as when it was last verified.
    """
    # Unexpected files. Hidden ones are ignored: file browsers and NFS create them.
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    visible = (path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))
    damaged = [f"{name} (not in the manifest)" for name in sorted(visible) if name not in files and name != MANIFEST]
    # A file behind a symbolic link is not part of the artifact, whatever its bytes.
    links = [
        os.path.relpath(path, folder)
        for parent, folders, names in os.walk(folder)
        for path in (os.path.join(parent, name) for name in (*folders, *names))
        if os.path.islink(path)
    ]
    # Compare sizes, and collect the files that have to be read.
    record = _record_path(root, folder)
    recorded_stamps = read_json(record) or {}
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
            verified_stamp = _verified_stamps.get((str(folder / name), entry["sha256"])) or recorded_stamps.get(name)
            if not (trust and verified_stamp == stamp):
                unread.append(name)
    # The stamps are older than the digests: a file that changes while it is read has another stamp next time, and is
    # read again.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _digest(folder / name), unread))
    for name, digest in zip(unread, digests, strict=True):
        if digest != files[name]["sha256"]:
            damaged.append(f"{name} ({digest})" if digest.startswith("cannot") else f"{name} (its digest differs)")
            stamps.pop(name)
    _save_stamps(record, folder, files, stamps, recorded_stamps)
    return damaged


def trust_files(root: Path, folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Mark `files` in `folder` as verified, because they were hashed while they were written or fetched."""
    stamps = {name: stamp for name in files if (stamp := _stamp(folder / name))}
    _save_stamps(_record_path(root, folder), folder, files, stamps, {})


def _record_path(root: Path, folder: Path) -> Path:
    """The file with the stamps (name -> stamp) of the large files in `folder` that were verified."""
    return Layout(root).verified / f"{folder.parent.name}-{folder.name}.json"


def _save_stamps(
    record: Path, folder: Path, files: dict[str, dict[str, Any]], stamps: dict[str, list[int]], recorded: dict[str, Any]
) -> None:
    """Save the stamps of intact files, and forget those of all other `files`. `recorded`: the content of `record`."""
    with _stamps_lock:
        # All earlier stamps first: one of a file that is damaged now must not vouch for it.
        for name, entry in files.items():
            _verified_stamps.pop((str(folder / name), entry["sha256"]), None)
        _verified_stamps.update({(str(folder / name), files[name]["sha256"]): stamp for name, stamp in stamps.items()})
    large = {name: stamp for name, stamp in stamps.items() if stamp[0] >= LARGE}
    if large == recorded:
        return
    with suppress(OSError):  # the record only saves time: a read-only store can still be verified
        record.parent.mkdir(exist_ok=True)
        write_json(record, large)


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _stamp(path: Path) -> list[int] | None:
    """[size, mtime, ctime, inode] of a regular file; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
