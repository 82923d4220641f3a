"""What a manifest or an event may say, whoever wrote it: names that stay inside their folder, bounded size and depth.

An artifact may come from another machine, so its manifest is looked at before any of its names touches the disk. The
bounds lie far above what a run writes: 32 MiB of manifest are a quarter of a million files, and no row of ours nests
deeper than a dozen levels.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator, model_validator

FORMAT = 1
MANIFEST = "manifest.json"
MIRRORED = ".mirrored"  # empty files beside a manifest: the remote has this making too,
ABSENT = ".absent"  # or it alone has the files
RESERVED = frozenset({MANIFEST, MIRRORED, ABSENT})

LARGEST_MANIFEST = 32 * 2**20
LARGEST_EVENT = 32 * 2**20
DEEPEST = 64

_Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def safe_name(name: str) -> bool:
    """True if `name` is a plain relative path in POSIX form, which cannot lead out of the folder it is put in."""
    parts = name.split("/")
    return name not in RESERVED and all(
        part not in ("", ".", "..") and len(part.encode(errors="replace")) <= 255 and part.isprintable()
        for part in parts
    )


def too_deep(value: Any, limit: int = DEEPEST) -> bool:
    """True if JSON data nests more than `limit` levels; without recursion, for Python's own stack is no deeper."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for one in level
            if isinstance(one, (dict, list))
            for item in (one.values() if isinstance(one, dict) else one)
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
    """The shape of a manifest; what else it may carry is left alone."""

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
            if not safe_name(name):
                raise ValueError(f"a file cannot be called {name!r}")
        return files

    @field_validator("created")
    @classmethod
    def _is_a_moment(cls, created: str) -> str:
        if datetime.fromisoformat(created).tzinfo is None:
            raise ValueError("a time without its zone")
        return created

    @model_validator(mode="after")
    def _makings_are_named(self) -> "_Manifest":
        if self.inputs.keys() != self.input_executions.keys():
            raise ValueError("inputs and input_executions name different things")
        return self


def fault_of(manifest: Any) -> str | None:
    """What is wrong with the shape of a manifest, in a line; None if nothing is."""
    if too_deep(manifest):
        return f"nested deeper than {DEEPEST} levels"
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))[:80]}: {first['msg']}"
    return None
