"""`digests.json` of an export: the sha256 of each file, to detect missing and changed files."""

import json
from collections.abc import Mapping
from pathlib import Path

from nautile.common.errors import ConfigError
from nautile.common.files import read_bounded_json, sha256_of, write_text

DIGESTS = "digests.json"


def write_digests(folder: Path, computed: Mapping[str, str] | None = None) -> None:
    """Write the digests of all files in `folder`. `computed`: digests by file name that need not be computed."""
    computed = computed or {}
    digests = {path.name: computed.get(path.name) or sha256_of(path) for path in sorted(folder.iterdir())}
    write_text(folder / DIGESTS, json.dumps({"sha256": digests}, indent=1) + "\n")


def read_digests(folder: Path) -> dict[str, str]:
    """Read the digests by file name. Raises ConfigError for a malformed table, and for names outside the folder."""
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
    """The first listed file that is missing or does not match its digest; None if all match."""
    for name, digest in digests.items():
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            return folder / name
    return None
