"""Tell a URL of the operator's. It is a secret: read from the environment, it stands in no log and no message."""

import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from common.text import visible
from configs.schema import RunConfig
from evals.tables.results import ResultTable, to_markdown
from store.artifacts import Artifact

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
PAUSES_S = (1.0, 4.0)  # between the attempts, of which there is one more
_AGAIN = (408, 425, 429)  # and all of 5xx: worth another attempt


def post(variable: str, message: dict[str, Any], sleep: Callable[[float], object] = time.sleep) -> str | None:
    """POST `message` as JSON to the URL in environment variable `variable`. None: it was taken (2xx); else why not.

    Never raises: whoever tells has done its work already. Redirects are not followed.
    """
    url = os.environ.get(variable, "")
    if not url:
        return f"schedule.webhook: the environment variable {variable} is not set where the flow runs"
    # httpx writes every URL it asks to the log, and this one is a secret.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    fault = ""
    for pause in (*PAUSES_S, None):
        fault, again = _attempt(url, message)
        if not fault:
            return None
        if not again or pause is None:
            break
        logger.warning("the webhook in %s was not taken (%s); once more in %g s", variable, fault, pause)
        sleep(pause)
    said = f"the webhook in {variable} was not taken: {fault}"
    logger.error(said)
    return said


def _attempt(url: str, message: dict[str, Any]) -> tuple[str, bool]:
    """What was wrong with it ("": nothing), and whether another attempt may go better."""
    try:
        status = httpx.post(url, json=message, timeout=TIMEOUT_S, follow_redirects=False).status_code
    except httpx.TransportError as error:
        # Of the error only its kind: some of them quote the URL.
        return visible(type(error).__name__, 80), not isinstance(error, httpx.UnsupportedProtocol)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"{type(error).__name__}: is it a whole URL (https://…)?", False
    return ("", False) if 200 <= status < 300 else (f"status {status}", status in _AGAIN or status >= 500)


EVENT = "nautile.regression"
CONFIG_LABEL = "nautile.config"  # on the event's resource: whose automation reacts


def raise_regression(
    config: RunConfig, checkpoint: Artifact, new: Artifact, lost: list[dict[str, Any]], run_id: str
) -> list[str]:
    """Emit the event and tell the webhook. Returns what could not be told, in words for people."""
    logger.warning("%s of %s has regressed: %s", new.id, checkpoint.id, [one["benchmark"] for one in lost])
    payload = {
        "config": config.name,
        "checkpoint": checkpoint.id,
        "after": new.id,
        "before": lost[0]["before"],
        "regressions": lost,
    }
    faults = []
    resource = {"prefect.resource.id": f"nautile.{new.kind}.{new.key[:12]}", "prefect.resource.name": new.id}
    related = [{"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.role": "flow-run"}]
    try:
        if emit_event(EVENT, resource | {CONFIG_LABEL: config.name}, related=related, payload=payload) is None:
            faults.append("No event was sent: this Prefect client sends none.")
    except Exception as error:
        logger.error("the regression could not be raised as an event: %s", error)
        faults.append(f"The regression could not be raised as an event ({type(error).__name__}).")
    if config.schedule.webhook and (fault := post(config.schedule.webhook, {"event": EVENT, **payload})):
        faults.append(f"{fault[0].upper()}{fault[1:]}.")
    return faults


def publish(name: str, headline: str, tables: list[ResultTable], lost: list[dict[str, Any]], notes: list[str]) -> None:
    """The comparison as a markdown artifact, and what has fallen as a table, under keys of the configuration."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    text = "\n\n".join([visible(headline), *notes, *(to_markdown(table) for table in tables)])
    rows = [
        {column: one[column] for column in ("benchmark", "against", "n", "lead", "low", "high", "p")} for one in lost
    ]
    try:
        create_markdown_artifact(text, key=f"evaluation-{slug}", description=visible(headline, 200))
        if rows:
            create_table_artifact(rows, key=f"regressions-{slug}", description=visible(headline, 200))
    except Exception as error:
        # A server that is down for a moment must not fail an evaluation; the store has it all.
        logger.warning("Prefect did not take the tables of the evaluation: %s", error)
