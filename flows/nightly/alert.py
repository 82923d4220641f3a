"""Raise an alert about a regression: a Prefect event, the operator's webhook, and the tables as Prefect artifacts."""

import logging
import re
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event

from nautile.common.commands import shell_command
from nautile.common.text import visible
from nautile.configs.schema import RunConfig
from nautile.evals.tables.results import ResultTable, to_markdown
from nautile.flows.operate.notifications import message, post_webhook
from nautile.store.artifacts import Artifact

logger = logging.getLogger(__name__)

EVENT = "nautile.regression"
CONFIG_LABEL = "nautile.config"  # label of the event's resource, by which a configuration's automation selects events


def raise_regression(
    config: RunConfig, checkpoint: Artifact, evaluation: Artifact, regressions: list[dict[str, Any]], run_id: str
) -> list[str]:
    """Emit the event and call the webhook. Returns a sentence for each that failed."""
    logger.warning(
        "%s of %s has regressed: %s", evaluation.id, checkpoint.id, [row["benchmark"] for row in regressions]
    )
    # The parameters of the regression flow come from this payload (`automations.on_regression`), so `after` and
    # `before` are ids.
    payload = {
        "config": config.name,
        "checkpoint": checkpoint.id,
        "after": evaluation.id,
        "before": regressions[0]["before"],
        "regressions": regressions,
    }
    # The two ways are independent: if Prefect's events are off, the webhook still goes out, and the other way round.
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
    variable = config.operation.notify
    if variable and (problem := post_webhook(variable, message("regression", _text(payload), **payload, run=run_id))):
        problems.append(f"{problem[0].upper()}{problem[1:]}.")
    return problems


def _text(payload: dict[str, Any]) -> str:
    """The webhook's text about a regression, with the command that shows more."""
    drops = ", ".join(f"{row['title']} by {-100 * row['lead']:.1f} points" for row in payload["regressions"])
    return (
        f"{payload['checkpoint']} of {payload['config']} has regressed against {payload['before']}: {drops}.\n"
        f"`{shell_command('nautile', 'compare', payload['before'], payload['after'])}` shows the samples that changed."
    )


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
        # A short outage of the server must not fail an evaluation; the store has the tables as well.
        logger.warning("Prefect did not accept the tables of the evaluation: %s", error)
