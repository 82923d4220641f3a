"""Small files from outside (a configuration, a checkpoint's description, an index), read within bounds.

Nothing says what lies at a path that somebody was given: a device without an end, ten gigabytes, or brackets nested
deeper than a parser can go. Each is refused in one message, before it is in memory.
"""

import json
import stat
from pathlib import Path
from typing import Any

from configs.section import ConfigError

CONFIG_LIMIT = 4 * 2**20
INDEX_LIMIT = 256 * 2**20  # of some 800,000 shards


def read_text(path: Path, limit: int = CONFIG_LIMIT) -> str:
    """The whole of a plain file in UTF-8. Raises `ConfigError` if it is none, is over `limit` bytes, or unreadable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: is not a plain file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: is over {limit:,} bytes, far more than such a file can hold")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start})") from None


def read_json(path: Path, limit: int = CONFIG_LIMIT) -> Any:
    """The JSON in a plain file. Raises `ConfigError` as `read_text`, and if it is not JSON or nested too deep."""
    try:
        return json.loads(read_text(path, limit))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep") from None
