"""Addresses of the dashboard's pages, where NAUTILE_DASHBOARD_URL says where it is; empty where it does not.

<base>/?run=RUN    <base>/training?run=RUN    <base>/lineage?run=RUN&artifact=KIND/KEY
"""

import os
from urllib.parse import urlencode

VARIABLE = "NAUTILE_DASHBOARD_URL"
_PAGES = {"pretrain": "training", "distill": "distillation", "evaluate": "evaluations"}
_PAGES |= dict.fromkeys(("align", "reason", "self_distill"), "reinforcement")


def run_page(run: str) -> str:
    """The overview of a run."""
    return _address("", run=run)


def stage_page(stage: str, run: str) -> str:
    """The page that shows what a stage does."""
    return _address(_PAGES.get(stage, ""), run=run)


def artifact_page(artifact_id: str, run: str) -> str:
    """The lineage of an artifact, with its facts and files."""
    return _address("lineage", run=run, artifact=artifact_id)


def _address(page: str, **asked: str) -> str:
    base = os.environ.get(VARIABLE, "").rstrip("/")
    return f"{base}/{page}?{urlencode(asked)}" if base else ""
