"""Chromium for tests: an installed browser, watched for requests to other machines and for dialogs.

NAUTILE_CHROMIUM names another one. Nothing is downloaded: without a browser, the tests that need one are skipped.
"""

import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nautile.common.processes import free_port, module_command
from nautile.flows.operate.prefect_server import STARTUP_S
from tests.support.stages.stage_parent import wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no test in a browser")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OUTPUT = Path(__file__).resolve().parents[3] / "test-output" / "browser"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WAIT_MS = 90_000


def executable() -> str:
    """The browser's path. Skips the test if there is none."""
    path = os.environ.get("NAUTILE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not path:
        pytest.skip(f"no browser on this machine: none of {', '.join(NAMES)} on PATH, and NAUTILE_CHROMIUM is not set")
    return path


@contextmanager
def chromium() -> Iterator[Any]:
    """A new window (a playwright `BrowserContext`), in English and large enough for a page."""
    path = executable()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        context = browser.new_context(viewport={"width": 1440, "height": 1100}, locale="en-GB")
        context.set_default_timeout(WAIT_MS)
        yield context
        browser.close()


@contextmanager
def dashboard(environment: Mapping[str, str]) -> Iterator[str]:
    """The address of a dashboard during the block, which shows the store that the environment names."""
    port = free_port()
    command = module_command("nautile.flows.cli.main", "dashboard", "--port", str(port))
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None, "the dashboard did not start: try `nautile dashboard` with the same store"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).close()
        except OSError:
            return False
        return True

    try:
        wait_for(answers, "the dashboard", STARTUP_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def watch(context: Any) -> list[str]:
    """A list that collects what must not happen: requests to other machines, and dialogs."""
    violations: list[str] = []

    def on_request(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            violations.append(f"request to {request.url}")

    context.on("request", on_request)
    context.on("dialog", lambda dialog: (violations.append(f"dialog {dialog.message}"), dialog.dismiss()))
    return violations


def save_screenshot(page: Any, name: str) -> None:
    """Save a screenshot in the test output folder."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=OUTPUT / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.png")


def table_text(page: Any) -> str:
    """The text of a dashboard page's grids, which are canvases that hold their text for screen readers."""
    return page.evaluate("[...document.querySelectorAll('canvas')].map(canvas => canvas.textContent).join(' ')")


def wait_for_page(page: Any, title: str) -> None:
    """Wait until the dashboard page of this title is shown; one that is not live (`live=off`) is then complete."""
    page.get_by_role("heading", name=title, exact=True, level=1).wait_for()
    if "live=off" in page.url:
        page.wait_for_function("!document.querySelector('[data-testid=stStatusWidget], [data-testid=stSkeleton]')")
