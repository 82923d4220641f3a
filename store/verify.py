"""Which files of an artifact differ from its manifest, reading each byte once a process.

A pipeline looks at one artifact several times (reused, then the input of two stages). What was digested is remembered
by (size, mtime, ctime, inode); a write through the file system changes ctime, which no tool can set back. Files of
64 MiB and more are remembered across processes too, so that a run over terabytes of shards does not begin with
reading them; `nautile store verify` trusts nothing and reads everything.
"""

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.files import read_json, sha256_of, write_json
from store import manifest as manifests

LARGE = 64 * 2**20

_seen: dict[tuple[str, str], list[int]] = {}
_seen_lock = threading.Lock()


def damaged_files(root: Path, folder: Path, files: dict[str, dict[str, Any]], *, trust: bool) -> list[str]:
    """Names of the files in `folder` that are missing, unexpected, or not as `files` says, each with the reason.

    `trust`: believe an earlier digest of a file whose size, times and inode have not changed.
    """
    damaged = [f"{name} (not in the manifest)" for name in _unexpected(folder, files)]
    links = _links(folder)
    kept = _memory(root, folder)
    remembered = (read_json(kept) or {}) if trust else {}
    stamps: dict[str, list[int]] = {}
    doubtful: list[str] = []
    for name, told in sorted(files.items()):
        stamp = _stamp(folder / name)
        if any(name == link or name.startswith(f"{link}/") for link in links):
            damaged.append(f"{name} (reached by a link)")
        elif stamp is None:
            damaged.append(f"{name} (missing)")
        elif stamp[0] != told["bytes"]:
            damaged.append(f"{name} ({stamp[0]} bytes, not {told['bytes']})")
        else:
            stamps[name] = stamp
            known = _seen.get((str(folder / name), told["sha256"])) or remembered.get(name)
            if not (trust and known == stamp):
                doubtful.append(name)
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda name: _digest(folder / name), doubtful))
    for name, digest in zip(doubtful, digests, strict=True):
        if digest != files[name]["sha256"]:
            damaged.append(f"{name} ({digest})" if digest.startswith("cannot") else f"{name} (its digest differs)")
            stamps.pop(name)
    _remember(kept, folder, files, stamps, remembered)
    return damaged


def trust_files(root: Path, folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Take `files`, digested a moment ago by this process, as verified where they now lie."""
    stamps = {name: stamp for name in files if (stamp := _stamp(folder / name))}
    _remember(_memory(root, folder), folder, files, stamps, {})


def _memory(root: Path, folder: Path) -> Path:
    """Where what is known of the large files in `folder` is kept for other processes."""
    return root / "verified" / f"{folder.parent.name}-{folder.name}.json"


def _remember(
    kept: Path, folder: Path, files: dict[str, dict[str, Any]], stamps: dict[str, list[int]], before: dict[str, Any]
) -> None:
    with _seen_lock:
        _seen.update({(str(folder / name), files[name]["sha256"]): stamp for name, stamp in stamps.items()})
    large = {name: stamp for name, stamp in stamps.items() if stamp[0] >= LARGE}
    if large and large != before:
        try:
            kept.parent.mkdir(exist_ok=True)
            write_json(kept, large)
        except OSError:
            return  # only a saving of time; a store that can be read but not written still verifies


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _stamp(path: Path) -> list[int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _links(folder: Path) -> list[str]:
    """Symbolic links in `folder`: what lies behind one is not of the artifact, whatever its bytes."""
    found = []
    for parent, folders, files in os.walk(folder):
        found += [
            os.path.join(parent, name) for name in (*folders, *files) if os.path.islink(os.path.join(parent, name))
        ]
    return [os.path.relpath(path, folder) for path in found]


def _unexpected(folder: Path, files: dict[str, Any]) -> list[str]:
    """Files that the manifest does not know; hidden ones (left by a file browser or NFS) do not count."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    names = (path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))
    return sorted(name for name in names if name not in files and name != manifests.MANIFEST)
