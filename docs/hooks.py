"""Pages of the site that are files of the repository's root: README is its first page (`mkdocs.yml`)."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links as they are within `docs`."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, its_page in PAGES.items():
            text = re.sub(rf"\]\({re.escape(other)}(#[\w-]+)?\)", rf"]({its_page}\1)", text)
        files.append(File.generated(config, page, content=text))
    return files
