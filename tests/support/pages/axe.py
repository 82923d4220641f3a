"""axe-core, which checks a page for people with a screen reader or a keyboard: from the npm registry, and cached.

The archive is checked by its digest. Without npm the tests that need it are skipped.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

VERSION = "4.14.1"
INTEGRITY = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="  # sha512
FETCH_S = 120.0
# Left out is Streamlit's own navigation, which cannot be mended from here: rules `list` and `listitem`, because the
# headings of its sections are children of its list.
_RUN = """async () => (
  await axe.run({exclude: ['[data-testid=stSidebarNav]']}, {resultTypes: ['violations']})
).violations.filter(rule => ['serious', 'critical'].includes(rule.impact))
  .flatMap(rule => rule.nodes.map(node => ({rule: rule.id, element: node.html.slice(0, 300), at: node.target.flat()})))
"""


def axe_source() -> str:
    """The script. Skips the test where it is neither in the cache nor to be fetched."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nautile"
    archive = cache / f"axe-core-{VERSION}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("no npm to fetch axe-core with")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = [
                npm,
                "pack",
                f"axe-core@{VERSION}",
                "--ignore-scripts",
                "--silent",
                "--pack-destination",
                scratch,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False, cwd=scratch)
            if done.returncode:
                pytest.skip(f"npm could not fetch axe-core {VERSION}: {done.stderr.strip()[:200]}")
            (Path(scratch) / archive.name).replace(archive)
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert digest == INTEGRITY, f"{archive} is another file than axe-core {VERSION}: delete it"
    with tarfile.open(archive) as files:
        script = files.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def serious_violations(page: Any, script: str) -> list[dict[str, Any]]:
    """Serious and critical findings on the page that is shown: rule, the element's HTML, and where it is."""
    page.evaluate(script)
    return page.evaluate(_RUN)
