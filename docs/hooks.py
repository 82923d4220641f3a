"""Pages of the site that lie outside `docs`: README is its first page, and the examples are pages (`mkdocs.yml`)."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, with links as they are within `docs`, and the files of the examples."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, its_page in PAGES.items():
            text = re.sub(rf"\]\({re.escape(other)}(#[\w-]+)?\)", rf"]({its_page}\1)", text)
        files.append(File.generated(config, page, content=text))
    for pattern in ("*.md", "*.toml", "*.ipynb", "*/[!_]*.py"):
        for path in sorted((ROOT / "examples").glob(pattern)):
            files.append(File.generated(config, str(path.relative_to(ROOT)), content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links from a page of `docs` to the examples, which lie beside it in the site."""
    return markdown.replace("](../examples/", "](examples/")
