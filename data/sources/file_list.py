"""The list of a source's files: made once, kept, and what every later step of an ingest counts from.

Each entry is one unit of work. Its number, and with it the name of all that is made from it, depends on the source
alone.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.files import write_atomically


@dataclass(frozen=True)
class SourceFile:
    """One file of a source, or a stretch of the records of an offline package.

    bytes, digest: what the Hub says of the file ("sha256:…", or "git:…" of a small one); a local file's size alone.
    first, rows: the rows to read; `rows` None is all that there are.
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
    """Keep the list: one JSON object a line."""
    write_atomically(path, "".join(json.dumps(asdict(file), sort_keys=True) + "\n" for file in files).encode())


def read_file_list(path: Path) -> list[SourceFile]:
    """What `write_file_list` kept."""
    return [SourceFile(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
