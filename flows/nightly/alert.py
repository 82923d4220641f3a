"""Raise an alert about a regression: a Prefect event, the operator's webhook, and the tables as Prefect artifacts.

The webhook's URL is a secret: it comes from an environment variable and is in no log and no message.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from common.retry import Backoff, retry
from common.text import visible
from configs.schema import RunConfig
from evals.tables.results import ResultTable, to_markdown
from store.artifacts import Artifact

logger = logging.getLogger(__name__)

EVENT = "nautile.regression"
CONFIG_LABEL = "nautile.config"  # label of the event's resource, by which the automation of a configuration selects it
TIMEOUT_S = 10.0
BACKOFF = Backoff(attempts=3, first_s=1.0, factor=4.0, jitter=0.0)  # pauses of 1 s and 4 s
_RETRY_STATUSES = (408, 425, 429)  # and all of 5xx


def raise_regression(
    config: RunConfig, checkpoint: Artifact, evaluation: Artifact, regressions: list[dict[str, Any]], run_id: str
) -> list[str]:
    """Emit the event and call the webhook. Returns a sentence for each of the two that failed."""
    logger.warning(
        "%s of %s has regressed: %s", evaluation.id, checkpoint.id, [row["benchmark"] for row in regressions]
    )
    payload = {
        "config": config.name,
        "checkpoint": checkpoint.id,
        "after": evaluation.id,
        "before": regressions[0]["before"],
        "regressions": regressions,
    }
    problems = []
    resource = {
        "prefect.resource.id": f"nautile.{evaluation.kind}.{evaluation.key[:12]}",
        "prefect.resource.name": evaluation.id,
        CONFIG_LABEL: config.name,
    }
    related = [{"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.role": "flow-run"}]
    try:
        if emit_event(EVENT, resource, related=related, payload=payload) is None:
            problems.append("No event was sent: this Prefect client has events turned off.")
    except Exception as error:
        logger.error("the regression could not be sent as an event: %s", error)
        problems.append(f"The regression could not be sent as an event ({type(error).__name__}).")
    if config.schedule.webhook and (problem := post_webhook(config.schedule.webhook, {"event": EVENT, **payload})):
        problems.append(f"{problem[0].upper()}{problem[1:]}.")
    return problems


def post_webhook(variable: str, message: dict[str, Any], sleep: Callable[[float], object] = time.sleep) -> str | None:
    """POST `message` as JSON to the URL in environment variable `variable`; None if accepted (2xx), else what failed.

    Never raises: the evaluation that calls it is complete. Redirects are not followed.
    """
    url = os.environ.get(variable, "")
    if not url:
        return f"schedule.webhook: the environment variable {variable} is not set where the flow runs"
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every URL
    try:
        retry(
            lambda: httpx.post(url, json=message, timeout=TIMEOUT_S, follow_redirects=False).raise_for_status(),
            BACKOFF,
            should_retry=_should_retry,
            before_pause=lambda error, _, pause_s: logger.warning(
                "the webhook in %s failed (%s); retrying in %g s", variable, _describe(error), pause_s
            ),
            sleep=sleep,
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        problem = f"the webhook in {variable} failed: {_describe(error)}"
        logger.error(problem)
        return problem
    return None


def _should_retry(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _RETRY_STATUSES or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.UnsupportedProtocol)


def _describe(error: Exception) -> str:
    """What went wrong, without the error's own text: some errors quote the URL."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}"
    if isinstance(error, httpx.TransportError):
        return visible(type(error).__name__, 80)
    return f"{type(error).__name__}: is it a whole URL (https://…)?"


def publish(
    name: str, headline: str, tables: list[ResultTable], regressions: list[dict[str, Any]], notes: list[str]
) -> None:
    """Show the comparison in Prefect: a markdown artifact, and a table of the regressions, keyed by configuration."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    text = "\n\n".join([visible(headline), *notes, *(to_markdown(table) for table in tables)])
    columns = ("benchmark", "against", "n", "lead", "low", "high", "p")
    rows = [{column: regression[column] for column in columns} for regression in regressions]
    try:
        create_markdown_artifact(text, key=f"evaluation-{slug}", description=visible(headline, 200))
        if rows:
            create_table_artifact(rows, key=f"regressions-{slug}", description=visible(headline, 200))
    except Exception as error:
        # A server that is down for a moment must not fail an evaluation; the store has it all.
        logger.warning("Prefect did not accept the tables of the evaluation: %s", error)
