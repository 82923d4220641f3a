"""`digests.json` of an export: the sha256 of each of its files, by which a reader notices a missing or changed one."""

import json
from collections.abc import Mapping
from pathlib import Path

from common.errors import ConfigError
from common.files import read_bounded_json, sha256_of, write_text

DIGESTS = "digests.json"


def write_digests(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """List every file that `folder` holds now; `known`: digests by file name, which are not computed again."""
    known = known or {}
    digests = {path.name: known.get(path.name) or sha256_of(path) for path in sorted(folder.iterdir())}
    write_text(folder / DIGESTS, json.dumps({"sha256": digests}, indent=1) + "\n")


def read_digests(folder: Path) -> dict[str, str]:
    """The listed files with their digests. Raises ConfigError for no such table, and for a name outside the folder."""
    path = folder / DIGESTS
    table = read_bounded_json(path)
    digests = table.get("sha256") if isinstance(table, dict) else None
    if not isinstance(digests, dict) or not digests:
        raise ConfigError(f"{path}: has no table `sha256` of files; export the checkpoint again")
    for name in digests:
        if Path(name).name != name:
            raise ConfigError(f"{path}: {name!r} is not the name of a file in this folder")
    return digests


def first_fault(folder: Path, digests: dict[str, str]) -> Path | None:
    """The first listed file that is missing or is not the one that was listed; None if all are whole."""
    for name, digest in digests.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            return folder / name
    return None
