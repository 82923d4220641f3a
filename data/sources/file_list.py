"""The list of a source's files, written once per ingest; every later step takes the files' numbers from it.

Each entry is one work item. Its number, and so the names of the files written from it, depends on the source alone.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nautile.common.files import write_atomically


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, or a range of the records of an offline package.

    bytes, digest: as listed by the Hub ("sha256:…", or "git:…" for a small file); a local file has only its size.
    first, rows: the first row to read and the number of rows; `rows` None: all that follow.
    """

    number: int
    path: str
    bytes: int | None = None
    digest: str = ""
    first: int = 0
    rows: int | None = None

    @property
    def item(self) -> str:
        """The name of its work item."""
        return f"{self.number:05d}"


def write_file_list(path: Path, files: Sequence[SourceFile]) -> None:
    """Write the list, one JSON object a line."""
    write_atomically(path, "".join(json.dumps(asdict(file), sort_keys=True) + "\n" for file in files).encode())


def read_file_list(path: Path) -> list[SourceFile]:
    """Read the list that `write_file_list` wrote."""
    return [SourceFile(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
