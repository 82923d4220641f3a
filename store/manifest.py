"""The manifest: what an artifact is, which files it has by digest, and what it was made from.

It is written last, inside the folder that is then renamed into place, and carries a seal (a digest of itself), so
that a flipped byte in the manifest is noticed as one in any other file. It holds no secrets: a configuration names
the environment variables of keys, never their values.

Manifests and events may come from a shared folder or bucket, so they are read as untrusted data: bounded in size and
depth, every field checked, no file name that leads out of the artifact's folder.
"""

import hashlib
import logging
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator, model_validator

import configs
from common.errors import ConfigError
from common.files import read_json, sync_folder
from configs.base import fingerprint

logger = logging.getLogger(__name__)

FORMAT = 1
ADDED = "add"  # in place of a stage's name: `nautile store add` brought the artifact in
MANIFEST = "manifest.json"
MIRRORED = ".mirrored"  # files in an artifact's folder, holding its execution: the remote has this version too,
ABSENT = ".absent"  # or the remote alone has its files
RESERVED = frozenset({MANIFEST, MIRRORED, ABSENT})

LARGEST_MANIFEST = 32 * 2**20  # bytes
LARGEST_EVENT = 32 * 2**20  # bytes of one line
DEEPEST = 64  # levels of nested lists and objects

KEY = re.compile(r"[0-9a-f]{64}")
KIND = re.compile(r"[a-z][a-z0-9_]*")
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")

_Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def is_safe_name(name: str) -> bool:
    """True if `name` is a plain relative path in POSIX form, which cannot lead out of the folder it is put in."""
    parts = name.split("/")
    return name not in RESERVED and all(
        part not in ("", ".", "..") and len(part.encode(errors="replace")) <= 255 and part.isprintable()
        for part in parts
    )


def nests_too_deep(value: Any, limit: int = DEEPEST) -> bool:
    """True if JSON data nests more than `limit` levels. Works level by level: a recursion could exhaust the stack."""
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
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: NonNegativeInt
    sha256: _Digest


class _Manifest(BaseModel):
    """The fields of a manifest and their types; further fields are allowed."""

    model_config = ConfigDict(frozen=True, strict=True)

    format: Literal[1]
    kind: _Kind
    key: _Digest
    stage: str
    version: int
    config: dict[str, Any]
    inputs: dict[str, Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}/[0-9a-f]{64}$")]]
    input_executions: dict[str, str]
    outputs: list[_Kind]
    files: dict[str, _File]
    digest: _Digest
    facts: dict[str, Any]
    commit: str | None
    created: str
    execution: Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
    run: str
    label: str
    host: str

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, _File]) -> dict[str, _File]:
        for name in files:
            if not is_safe_name(name):
                raise ValueError(f"a file cannot be called {name!r}")
        return files

    @field_validator("created")
    @classmethod
    def _created_has_zone(cls, created: str) -> str:
        if datetime.fromisoformat(created).tzinfo is None:
            raise ValueError("the time has no zone")
        return created

    @model_validator(mode="after")
    def _inputs_agree(self) -> "_Manifest":
        if self.inputs.keys() != self.input_executions.keys():
            raise ValueError("inputs and input_executions have different names")
        return self


def schema_error(manifest: Any) -> str | None:
    """What is wrong with the fields of a manifest, in a line; None if nothing is."""
    if nests_too_deep(manifest):
        return f"nested deeper than {DEEPEST} levels"
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}"
    return None


def stage_key(stage: str, version: int, section: dict[str, Any], inputs: dict[str, str]) -> str:
    """The content key of a stage's outputs: 64 hexadecimal digits, the same on every machine and in every process.

    `section` is plain JSON data, `inputs` maps a name to `kind/<full key>`. Raises `ConfigError` on a short id: a key
    must not depend on how an id was abbreviated.
    """
    for name, full_id in inputs.items():
        kind, _, key = full_id.partition("/")
        if not (KIND.fullmatch(kind) and KEY.fullmatch(key)):
            raise ConfigError(f"stage {stage}: input {name!r} is {full_id!r}, but keys need `kind/<64 digits>`")
    return fingerprint({"stage": stage, "version": version, "section": section, "inputs": inputs})


def describe_files(source: Path, digests: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Relative path -> {bytes, sha256} of every file under `source` but the manifest, fsynced with its folders.

    `digests`: relative path -> sha256 of files that need not be read, because it was taken as they were written.

    Hidden `.*.tmp` files, left by a write that a crash cut short, are removed. Raises `ValueError` if there is no file,
    something that is neither a file nor a folder, or a name that a reader of the manifest would refuse.
    """
    paths = []
    for path in sorted(source.rglob("*")):
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

    def describe(path: str) -> dict[str, Any]:
        with (source / path).open("rb") as file:
            os.fsync(file.fileno())
            known = (digests or {}).get(path)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest() if known is None else known
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256}

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        described = dict(zip(paths, pool.map(describe, paths), strict=True))
    for folder, _, _ in os.walk(source):
        sync_folder(Path(folder))
    return described


def with_seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a digest of itself, by which `checked_manifest` notices any change."""
    return {**manifest, "seal": fingerprint(manifest)}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest in `folder`; None if it is missing, no plain file, or damaged (`checked_manifest`)."""
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        return None
    return checked_manifest(read_json(path, limit=LARGEST_MANIFEST), str(path))


def checked_manifest(manifest: Any, where: str) -> dict[str, Any] | None:
    """`manifest` if its seal fits and its fields are valid, else None; `where` names it in the log."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None
    try:
        if fingerprint({name: value for name, value in manifest.items() if name != "seal"}) != manifest.get("seal"):
            return None
    except (ValueError, RecursionError):
        return None
    if error := schema_error(manifest):
        logger.warning("%s is refused: %s", where, error)
        return None
    return manifest


def creation_order(manifest: Mapping[str, Any]) -> tuple[datetime, str]:
    """A sort key of the versions of one key, the same on every machine: when they were created, then by execution."""
    return datetime.fromisoformat(manifest["created"]), manifest["execution"]


def now() -> str:
    """This moment in UTC, to the microsecond, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


@cache
def host() -> str:
    """The name of this machine."""
    return socket.gethostname()


@cache
def code_commit() -> str | None:
    """The commit of the running code, with `-dirty` when tracked files differ from it; None outside a checkout."""
    root = Path(configs.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
