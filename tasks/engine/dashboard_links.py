"""Addresses of pages of the dashboard, for messages, pages in Prefect and the terminal."""

import os
from urllib.parse import urlencode

DASHBOARD_URL = "NAUTILE_DASHBOARD_URL"  # the environment variable; no links without it


def run_page(run: str) -> str:
    """Address of the dashboard's overview of a run; empty without a dashboard."""
    return _dashboard("", run=run)


def artifact_page(run: str, artifact: str) -> str:
    """Address of the dashboard's page of an artifact; empty without a dashboard."""
    return _dashboard("lineage", run=run, artifact=artifact)


def _dashboard(page: str, **query: str) -> str:
    base = os.environ.get(DASHBOARD_URL, "").rstrip("/")
    return f"{base}/{page}?{urlencode(query)}" if base else ""
