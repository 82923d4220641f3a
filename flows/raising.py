"""How people hear of an evaluation: tables in Prefect's page, and for a regression an event and a webhook.

None of them may fail the evaluation: what goes wrong is logged, and told where the tables are.
"""

import logging
import re
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from configs.schema import RunConfig
from evals.tables import Table, to_markdown
from flows import webhook
from store.artifacts import Artifact
from tasks.wording import visible

logger = logging.getLogger(__name__)

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
    if config.schedule.webhook and (fault := webhook.post(config.schedule.webhook, {"event": EVENT, **payload})):
        faults.append(f"{fault[0].upper()}{fault[1:]}.")
    return faults


def publish(name: str, headline: str, tables: list[Table], lost: list[dict[str, Any]], notes: list[str]) -> None:
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
