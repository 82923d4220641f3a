"""The reply cache's files, as tests read and write them."""

import json
from pathlib import Path
from typing import Any

from nautile.data.endpoints.reply_cache import SHARDS


def reply_rows(folder: Path, model: str = "fake") -> list[dict[str, Any]]:
    """The replies in all shards of a model under a folder of replies, without lines that a kill cut."""
    return [row for row in _rows(folder, model) if "digest" in row]


def unknown_rows(folder: Path, model: str = "fake") -> list[dict[str, Any]]:
    """The rows of attempts without a reply that may have cost money."""
    return [row for row in _rows(folder, model) if "unknown" in row]


def _rows(folder: Path, model: str) -> list[dict[str, Any]]:
    lines = [line for path in sorted((folder / model).glob(SHARDS)) for line in path.read_bytes().splitlines()]
    return [json.loads(line) for line in lines if line.endswith(b"}")]
