"""Where Prefect's server differs from a configuration: limits, schedules, deployments and automations.

An operator changes these in Prefect's page, and a restart keeps the change (`flows.operate.deployments`). So that
nobody takes the configuration for what holds, `nautile up` and `nautile deploy` print each difference.
"""

from typing import Any

import httpx

from nautile.common.errors import ConfigError
from nautile.common.text import one_line
from nautile.configs.schema import RunConfig
from nautile.flows.operate.automations import TAG
from nautile.flows.operate.concurrency import PREFIX
from nautile.flows.operate.prefect_calls import call

SCHEDULE = "nautile"  # slug of the schedule that the configuration declares
TIMEOUT_S = 30.0
_MOST = 200  # entries of an answer


def kept_changes(api: str, config: RunConfig, limit: int | None = None) -> list[str]:
    """A line for each difference of the server at `api` from `config`.

    `limit`: that of `nautile deploy --limit`, in place of those of `[resources]`. Raises `ConfigError` if the server
    does not answer.
    """

    def ask(path: str, **body: Any) -> list[dict[str, Any]]:
        response = call("POST", api, path, json=body, timeout=TIMEOUT_S).raise_for_status()
        answer: list[dict[str, Any]] = response.json()
        return answer

    try:
        limits = ask("/v2/concurrency_limits/filter", limit=_MOST)
        deployments = ask(
            "/deployments/filter", deployments={"tags": {"all_": [TAG, config.name]}}, sort="NAME_ASC", limit=_MOST
        )
        automations = ask("/automations/filter", limit=_MOST)
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"the server at {api} does not say what was changed there ({type(error).__name__})") from None
    return [
        *_limits(config, limits, limit),
        *(line for deployment in deployments for line in _deployment(config, deployment)),
        *(
            f"the automation {one_line(entry['name'])!r} is switched off"
            for entry in automations
            if entry["name"].startswith(f"{TAG}: ") and not entry["enabled"]
        ),
    ]


def _limits(config: RunConfig, limits: list[dict[str, Any]], limit: int | None) -> list[str]:
    by_name = {entry["name"]: entry for entry in limits}
    lines = []
    for resource, configured in config.resources.limits().items():
        wanted = f"--limit is {limit}" if limit else f"resources.{resource} is {configured}"
        entry = by_name.get(f"{PREFIX}{resource}")
        if entry is None:
            lines.append(f"the limit {PREFIX}{resource} is gone: `nautile down` and `up` declare it again")
        elif not entry["active"]:
            lines.append(f"the limit {PREFIX}{resource} is switched off; {wanted}")
        elif entry["limit"] != (limit or configured):
            lines.append(f"the limit {PREFIX}{resource} is {entry['limit']}; {wanted}")
    return lines


def _deployment(config: RunConfig, deployment: dict[str, Any]) -> list[str]:
    name = f"the deployment {one_line(deployment['name'])}"
    lines = [f"{name} is paused"] if deployment["paused"] else []
    # The evaluation alone is scheduled by the configuration (`[schedule]`).
    is_scheduled = deployment["name"] == f"evaluation-{config.name}" and config.schedule.cron
    wanted = [f"{config.schedule.cron} {config.schedule.timezone}"] if is_scheduled else []
    for entry in deployment["schedules"]:
        time, active = _time(entry["schedule"]), "" if entry["active"] else ", which is paused"
        if time in wanted:
            wanted.remove(time)
            lines += [f"{name}: its schedule {time} is paused"] if active else []
        elif (entry.get("slug") or "").startswith(SCHEDULE):
            lines.append(f"{name} runs at {time}{active}; [schedule] says {wanted.pop() if wanted else 'nothing'}")
        else:
            lines.append(f"{name} has a schedule of its own, {time}{active}")
    return [*lines, *(f"{name} has no schedule; [schedule] says {time}" for time in wanted)]


def _time(schedule: dict[str, Any]) -> str:
    """A schedule in a few words, as Prefect's page has it."""
    every = f"every {schedule['interval']:g} s" if isinstance(schedule.get("interval"), (int, float)) else None
    what = schedule.get("cron") or every or schedule.get("rrule") or "at times of its own"
    return one_line(f"{what} {schedule.get('timezone') or 'UTC'}")
