"""`Job`, the argument of a stage's function: its section, its inputs as folders, folders to write to, and `emit`.

The staging folder survives crashes and retries, so a stage continues from what an earlier attempt left in `scratch` and
`output`. The content of `output(kind)` when the function returns is published as the artifact of that kind.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from nautile.common.errors import ConfigError
from nautile.common.events import Emit
from nautile.common.files import RemoteFiles, read_json, write_json
from nautile.configs.base import Section, SeedName
from nautile.configs.endpoint import EndpointConfig
from nautile.configs.keys import FILES
from nautile.data.endpoints.reply_source import HostClaims, ReplySource
from nautile.store.layout import StagingFiles

SectionPart = TypeVar("SectionPart", bound=Section)


@dataclass(frozen=True)
class Job:
    """One execution of a stage, as its function sees it. The id `execution` is the same in every attempt."""

    stage: str
    key: str
    execution: str
    section: dict[str, Any]
    inputs: dict[str, Path]
    staging: Path
    emit: Emit
    replies: Path | None = None  # the store's folder of paid replies
    ask_again: bool = False  # pay again for replies that other executions have paid for
    claims: Callable[[str], HostClaims] | None = None  # of requests, among hosts that share only the store's remote
    remote_files: RemoteFiles | None = None  # opens files of inputs that are fetched only when they are read
    shared_disk: bool = True  # whether all processes of a multi-host stage see the same staging folder
    process: int = 0  # rank among the processes of a multi-host stage; only the output of process 0 is published

    def part(self, name: str, model: type[SectionPart]) -> SectionPart:
        """The part `name` of the section, validated. Raises `ConfigError` that names a bad field."""
        if name not in self.section:
            raise ConfigError(f"the section of stage {self.stage} has no `{name}`; it has {sorted(self.section)}")
        try:
            return model.model_validate(self.section[name])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join([name, *(str(part) for part in first["loc"])])
            raise ConfigError(f"stage {self.stage}: `{field}`: {first['msg']}") from None

    def seed(self, name: SeedName) -> int:
        """One of the seeds in the section's `seeds`; 0 if it has none of this name, and so the key has none."""
        return int(self.section.get("seeds", {}).get(name, 0))

    @property
    def file_digests(self) -> dict[str, str]:
        """The sha256 of each local file of the section, as it entered the key, by its path as configured."""
        return {path: sha256 for path, files in self.section.get(FILES, {}).items() for sha256 in files.values()}

    @property
    def endpoints(self) -> dict[str, EndpointConfig]:
        return {name: EndpointConfig.model_validate(fields) for name, fields in self.section["endpoints"].items()}

    @property
    def reply_source(self) -> ReplySource:
        """The cache of endpoint replies: in the store, shared by all runs and stages that send the same request."""
        return ReplySource(self.replies or self.scratch / "replies", self.execution, self.ask_again, self.claims)

    @property
    def scratch(self) -> Path:
        """A folder for checkpoints, ledgers and the like; it survives retries and is not published."""
        return _created(StagingFiles(self.staging).scratch)

    def output(self, kind: str) -> Path:
        """The folder whose content becomes the artifact `kind`; it survives retries."""
        return _created(StagingFiles(self.staging).output(_checked(kind), self.process))

    def describe(self, kind: str, **facts: Any) -> None:
        """Add facts (counts, stand-ins) to the manifest of the artifact `kind`. A later value replaces an earlier."""
        if self.process:
            return
        path = StagingFiles(self.staging).facts(_checked(kind))
        _created(path.parent)
        write_json(path, {**(read_json(path) or {}), **facts})

    def add_digests(self, kind: str, digests: Mapping[str, str]) -> None:
        """Record the sha256 of files of the artifact `kind`, by relative path, computed while they were written.

        Publication then does not read these files again.
        """
        if not self.process:
            path = StagingFiles(self.staging).digests(_checked(kind))
            _created(path.parent)
            write_json(path, {**(read_json(path) or {}), **digests})


def _created(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _checked(kind: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kind):
        raise ValueError(f"not a valid name of an output: {kind!r}")
    return kind
