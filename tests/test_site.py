"""The site of the documentation: its pages, its search and its reference of Python; a broken link fails the build."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MKDOCS = ROOT / ".venv" / "site" / "bin" / "mkdocs"
pytestmark = pytest.mark.heavy


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_site_has_every_page_and_a_broken_link_fails(tmp_path):
    if not MKDOCS.is_file():
        pytest.skip("`make docs` fetches mkdocs")
    for name in ("mkdocs.yml", *(page.name for page in ROOT.glob("*.md"))):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "src").symlink_to(ROOT / "src")
    built = build(tmp_path)
    assert built.returncode == 0, built.stderr
    site = tmp_path / "build" / "site"
    pages = {page.relative_to(tmp_path / "docs").with_suffix(".html") for page in (tmp_path / "docs").rglob("*.md")}
    assert all((site / page).is_file() for page in (*pages, "index.html", "contributing.html"))
    assert "nautile.configs.plugins.Registry" in (site / "reference/nautile/configs/plugins.html").read_text()
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert {"store.html", "reference/nautile/rl/objectives.html"} <= {entry["location"] for entry in found}
    (tmp_path / "docs" / "theory.md").write_text("[no page](missing.md), [no heading](store.md#missing-heading)\n")
    broken = build(tmp_path)
    assert broken.returncode
    assert "missing.md" in broken.stderr
    assert "#missing-heading" in broken.stderr
