"""The manifest of an artifact: its files with their digests, its configuration and inputs, and who made it when.

The manifest is the last file written into the folder that is then renamed into place. Its seal is a digest of itself,
so that damage to the manifest is detected like damage to any other file. It contains no secrets: configurations name
the environment variables of API keys, never their values.

Manifests and events may come from a shared folder or bucket, so they are read as untrusted data: size and nesting are
limited, every field is validated, and no file name may lead out of the artifact's folder.

A pipeline checks the files of an artifact several times, for example when it is reused and as an input of two stages;
each file is read once per process. One that was hashed before is recognised by its stamp (size, mtime, ctime, inode):
any write through the file system changes ctime, which no tool can set back. Stamps of files from 1 MiB on are also
saved for other processes, in one file per artifact under `<store>/verified/`, so that a run over terabytes of shards
need not read them first. `nautile store verify` ignores all stamps and reads everything.
"""

import hashlib
import logging
import os
import re
import socket
import stat
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from nautile import configs
from nautile.common.errors import ConfigError
from nautile.common.files import read_json, sha256_of, sync_folder, write_json
from nautile.common.text import one_line
from nautile.configs.base import fingerprint
from nautile.store.layout import VERIFIED

logger = logging.getLogger(__name__)

FORMAT = 1
ADDED = "add"  # the `stage` of artifacts that were added by `nautile store add`
MANIFEST = "manifest.json"
# Marker files in an artifact's folder that contain the id of its execution; hidden, so that `verify` ignores them.
MIRRORED = ".mirrored"  # the remote has this version too
ABSENT = ".absent"  # only the remote has the files
RESERVED = frozenset({MANIFEST, MIRRORED, ABSENT})

LARGEST_MANIFEST = 32 * 2**20  # bytes
LARGEST_EVENT = 32 * 2**20  # bytes of a line
EARLIEST, LATEST = datetime(1970, 1, 1), datetime(2200, 1, 1)  # times outside are those of no clock
MOST_BYTES = 2**63 - 1  # of an artifact: sizes are 64-bit integers in the catalog
DEEPEST = 64  # nesting levels of lists and objects

# These become names of files and objects and parts of URLs: no separators, no dots, nothing that a shell reads.
KEY = re.compile(r"[0-9a-f]{64}")
KIND = re.compile(r"[a-z][a-z0-9_]*")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
# Of manifests that this process has found valid. A seal is a digest of all fields, and a manifest is read many times.
_valid_seals: set[str] = set()
_TAKEN_OVER = re.compile(r"([0-9a-f]{32})-[0-9]+")

_Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _plain(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    text.encode()  # JSON can spell half of a surrogate pair, which no database stores; the error is a `ValueError`
    if text != one_line(text):  # a terminal shows it as a part of a line
        raise ValueError("has a line break or another control character")
    return text


_Text = Annotated[str, AfterValidator(_plain)]


def utc_time(text: Any) -> datetime:
    """An ISO 8601 time with a zone, as DuckDB's TIMESTAMP: in UTC, without the zone.

    Raises `ValueError` for anything else, and for a time that is not between `EARLIEST` and `LATEST`.
    """
    time = datetime.fromisoformat(text) if isinstance(text, str) else None
    if time is None or time.tzinfo is None:
        raise ValueError("not an ISO 8601 time with a zone")
    try:
        time = time.astimezone(UTC).replace(tzinfo=None)
    except OverflowError:
        time = datetime.min
    if not EARLIEST <= time < LATEST:
        raise ValueError(f"the time is not between the years {EARLIEST.year} and {LATEST.year}")
    return time


def is_safe_name(name: str) -> bool:
    """Whether `name` is a relative POSIX path that stays inside the folder it is joined to."""
    # A component has at most 255 bytes on all usual file systems; control characters could change a terminal.
    parts = name.split("/")
    return name not in RESERVED and all(
        part not in ("", ".", "..") and len(part.encode(errors="replace")) <= 255 and part.isprintable()
        for part in parts
    )


def nests_too_deep(value: Any, limit: int = DEEPEST) -> bool:
    """Whether JSON data has more than `limit` nesting levels. Iterative, because recursion could exhaust the stack."""
    # One list of containers for each level, breadth first.
    level = [value]
    for _ in range(limit):
        level = [
            item
            for parent in level
            if isinstance(parent, (dict, list))
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    bytes: Annotated[int, Field(ge=0, le=MOST_BYTES)]
    sha256: _Digest


class _Manifest(BaseModel):
    """The schema of a manifest; further fields are allowed."""

    # Built when a manifest is first read: a list of artifacts comes from the catalog.
    model_config = ConfigDict(frozen=True, strict=True, defer_build=True)

    format: Literal[1]
    kind: _Kind
    key: _Digest
    stage: _Text
    version: Annotated[int, Field(ge=0, lt=2**31)]
    config: dict[str, Any]
    inputs: dict[_Text, Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}/[0-9a-f]{64}$")]]
    input_executions: dict[_Text, _Text]
    outputs: list[_Kind]
    files: dict[str, _File]
    digest: _Digest
    facts: dict[str, Any]
    commit: _Text | None
    created: str
    execution: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
    fence: Annotated[int, Field(ge=0, lt=2**53)]  # of the lease under which it was published; 0: no lease
    run: _Text
    label: _Text
    host: _Text

    @field_validator("files")
    @classmethod
    def _files_are_plausible(cls, files: dict[str, _File]) -> dict[str, _File]:
        for name in files:
            if not is_safe_name(name):
                raise ValueError(f"a file cannot be called {name!r}")
        if sum(file.bytes for file in files.values()) > MOST_BYTES:
            raise ValueError("the files have more bytes than any disk")
        return files

    @field_validator("created")
    @classmethod
    def _created_is_a_time(cls, created: str) -> str:
        utc_time(created)
        return created

    @model_validator(mode="after")
    def _inputs_agree(self) -> "_Manifest":
        if self.inputs.keys() != self.input_executions.keys():
            raise ValueError("inputs and input_executions have different names")
        # A key is a digest of the inputs' keys, so none is its own.
        if any(full_id.partition("/")[2] == self.key for full_id in self.inputs.values()):
            raise ValueError("the artifact names itself as an input")
        return self


def schema_error(manifest: Any) -> str | None:
    """The first invalid field of a manifest as one line of text; None if all are valid."""
    if nests_too_deep(manifest):
        return f"nested deeper than {DEEPEST} levels"
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}"
    return None


def stage_key(stage: str, version: int | str, section: dict[str, Any], inputs: dict[str, str]) -> str:
    """The content key of a stage's outputs: 64 hexadecimal digits, the same on every machine and in every process.

    `section`: the stage's configuration as JSON data. `inputs`: name -> `kind/<full key>`; raises `ConfigError` for a
    short id, because a key must not depend on how an id was abbreviated.
    """
    for name, full_id in inputs.items():
        kind, _, key = full_id.partition("/")
        if not (KIND.fullmatch(kind) and KEY.fullmatch(key)):
            raise ConfigError(f"stage {stage}: input {name!r} is {full_id!r}, but keys need `kind/<64 digits>`")
    return fingerprint({"stage": stage, "version": version, "section": section, "inputs": inputs})


def describe_files(source: Path, digests: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file under `source` except the manifest; files and folders are fsynced.

    Returns relative path -> {bytes, sha256}. `digests`: known sha256 by relative path, for files that need not be read.
    Hidden `.*.tmp` files, which a crash left, are removed. Raises `ValueError` if there is no file, something that is
    neither a file nor a folder, or a name that readers of the manifest would refuse.
    """
    paths = []
    for path in sorted(source.rglob("*")):
        # A link could lead out of the artifact, and a socket or a pipe has no content to digest.
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path}: an artifact holds plain files only")
        if path.is_file() and path.name.startswith(".") and path.name.endswith(".tmp"):
            path.unlink()
        elif path.is_file() and path != source / MANIFEST:
            paths.append(path.relative_to(source).as_posix())
            if not is_safe_name(paths[-1]):
                raise ValueError(f"{source}: a file of an artifact cannot be called {paths[-1]!r}")
    if not paths:
        raise ValueError(f"{source}: nothing to publish, the folder holds no file")

    # Synced and digested through one descriptor, so that both are of the same file.
    def describe(path: str) -> dict[str, Any]:
        with (source / path).open("rb") as file:
            os.fsync(file.fileno())
            known_digest = (digests or {}).get(path)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest() if known_digest is None else known_digest
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256}

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        descriptions = dict(zip(paths, pool.map(describe, paths), strict=True))
    # Files are durable only once the folders that name them are.
    for folder, _, _ in os.walk(source):
        sync_folder(Path(folder))
    return descriptions


def with_seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """Add the seal to a manifest: a digest of itself, by which `checked_manifest` detects any change."""
    return {**manifest, "seal": fingerprint(manifest)}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest in `folder`; None if it is missing, not a regular file, or damaged (`checked_manifest`)."""
    path = folder / MANIFEST
    if _stamp(path) is None:
        return None
    return checked_manifest(read_json(path, limit=LARGEST_MANIFEST), str(path))


def checked_manifest(manifest: Any, where: str) -> dict[str, Any] | None:
    """`manifest` if its seal matches and its fields are valid, else None. `where`: its path for the log message."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None
    try:
        # The seal first: of a manifest that was damaged nothing else needs to be explained.
        seal = fingerprint({name: value for name, value in manifest.items() if name != "seal"})
        if seal != manifest.get("seal"):
            return None
    except (ValueError, RecursionError):
        return None
    if seal in _valid_seals:
        return manifest
    if error := schema_error(manifest):
        logger.warning("%s is refused: %s", where, error)
        return None
    _valid_seals.add(seal)
    return manifest


def version_order(manifest: Mapping[str, Any]) -> tuple[int, datetime, str]:
    """A sort key for the versions of a key, the same on every machine: by the fence of the lease.

    Clocks of machines differ, so the time counts only among versions that were published without a lease.
    """
    fence = manifest["fence"]
    created = datetime.min.replace(tzinfo=UTC) if fence else datetime.fromisoformat(manifest["created"])
    return fence, created, manifest["execution"]


def execution_after_takeover(execution: str, fence: int) -> str:
    """The id under which a machine publishes the work of `execution` that it has taken over with the lease `fence`.

    The machine that began it may have published it too, so each has an id of its own.
    """
    return f"{recorded_execution(execution)}-{fence}"


def recorded_execution(execution: str) -> str:
    """The id under which the events of an execution are recorded: the same before and after a takeover."""
    match = _TAKEN_OVER.fullmatch(execution)
    return match[1] if match else execution


def now() -> str:
    """The current time in UTC as ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@cache
def host() -> str:
    return socket.gethostname().encode("utf-8", "replace").decode()


@cache
def code_commit() -> str | None:
    """The git commit of the running code, with `-dirty` if tracked files differ from it; None outside a checkout."""
    root = Path(configs.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        # A checkout on a slow disk must not hold up a run: after ten seconds the commit stays unknown.
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def short_commit(commit: str) -> str:
    """The beginning of a commit, and whether the working tree differed from it."""
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


LARGE = 2**20  # bytes; reading a smaller file is as fast as reading its saved stamp

_verified_stamps: dict[tuple[str, str], list[int]] = {}  # (path, sha256) -> stamp of the file that had this digest
_stamps_lock = threading.Lock()


def damaged_files(root: Path, folder: Path, files: dict[str, dict[str, Any]], *, trust: bool) -> list[str]:
    """Names of the files in `folder` that are missing, unexpected or differ from `files`, each with the reason.

    `trust`: do not read a file whose stamp is the same as when it was last verified.
    """
    visible: list[str] = []
    links: list[str] = []
    pending = [""]
    while pending:
        inside = pending.pop()
        with suppress(OSError), os.scandir(f"{folder}/{inside}") as entries:
            for found in entries:
                name = inside + found.name
                links += [name] if found.is_symlink() else []
                if not found.is_dir():
                    visible.append(name)
                elif not found.is_symlink():
                    pending.append(f"{name}/")
    # Unexpected files. Hidden ones are ignored: file browsers and NFS create them.
    unexpected = {name for name in visible if not any(part.startswith(".") for part in name.split("/"))}
    damaged = [f"{name} (not in the manifest)" for name in sorted(unexpected - files.keys() - {MANIFEST})]
    # A file behind a symbolic link is not part of the artifact, whatever its bytes.
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
    if len(unread) > 1:
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            digests = list(pool.map(lambda name: _digest_of(folder / name), unread))
    else:  # to start threads takes longer than to read a small file
        digests = [_digest_of(folder / name) for name in unread]
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
    return root / VERIFIED / f"{folder.parent.name}-{folder.name}.json"


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


def _digest_of(path: Path) -> str:
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
