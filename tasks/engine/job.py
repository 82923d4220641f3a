"""What a stage's work is given: its section, its inputs as folders, a place to work in, and a way to report.

The staging folder survives crashes and retries, so work looks into `scratch` and `output` for what an earlier attempt
finished, and goes on from there. What lies in `output(kind)` when the work returns is published as that artifact.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from common.errors import ConfigError
from common.events import Emit
from common.files import read_json, write_json
from configs.base import Section

Part = TypeVar("Part", bound=Section)


@dataclass(frozen=True)
class Job:
    """One execution of a stage, as seen from inside its process. `execution` is the same in every attempt at it."""

    stage: str
    key: str
    execution: str
    section: dict[str, Any]
    inputs: dict[str, Path]
    staging: Path
    emit: Emit
    process: int = 0  # of several that do one stage together; what the others write or describe is not published

    def part(self, name: str, model: type[Part]) -> Part:
        """The part `name` of the section, validated. Raises `ConfigError` naming the field."""
        if name not in self.section:
            raise ConfigError(f"stage {self.stage}: its section has no `{name}`; there are {sorted(self.section)}")
        try:
            return model.model_validate(self.section[name])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join([name, *(str(part) for part in first["loc"])])
            raise ConfigError(f"stage {self.stage}: `{where}`: {first['msg']}") from None

    @property
    def seed(self) -> int:
        """The run's seed, 0 for a section without one."""
        return int(self.section.get("seed", 0))

    @property
    def scratch(self) -> Path:
        """A folder for checkpoints, ledgers and the like; it survives retries and is not published."""
        return _made(self.staging / "scratch")

    def output(self, kind: str) -> Path:
        """The folder whose content becomes the artifact `kind`; it survives retries."""
        if self.process:
            return _made(self.staging / "others" / str(self.process) / _checked(kind))
        return _made(self.staging / "output" / _checked(kind))

    def describe(self, kind: str, **facts: Any) -> None:
        """Add facts (counts, stand-ins) to the manifest of the artifact `kind`; a later value replaces an earlier."""
        if self.process:
            return
        path = _made(self.staging / "facts") / f"{_checked(kind)}.json"
        write_json(path, {**(read_json(path) or {}), **facts})


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _checked(kind: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kind):
        raise ValueError(f"not the name of an output: {kind!r}")
    return kind
