"""The way from a run in Prefect's page to the same run in the dashboard: a link among the run's artifacts."""

import logging
import os

from prefect.artifacts import create_link_artifact

from flows.services import DASHBOARD

log = logging.getLogger(__name__)


def link_to_dashboard(run_id: str) -> None:
    """Leave the link, if it is known where the dashboard is. A server that does not take it fails nothing."""
    base = os.environ.get(DASHBOARD, "").rstrip("/")
    if not base:
        return
    try:
        create_link_artifact(
            link=f"{base}/?run={run_id}",
            link_text="this run in the dashboard",
            key="dashboard",
            description="Stages, curves, rollouts, evaluations and lineage of this run.",
        )
    except Exception as error:
        log.warning("Prefect did not take the link to the dashboard: %s", error)
