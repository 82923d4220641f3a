"""Runs of deployments in a Prefect server: those that wait for a process; cancel and retry, for page and command.

Of the dashboards only the one that `nautile up` started may do so: with its own server, on loopback, in the recorded
process.
"""

import os
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx

from nautile.common.commands import shell_command
from nautile.common.errors import ConfigError
from nautile.flows.operate import services
from nautile.flows.operate.prefect_calls import ask_server, call, wants_login
from nautile.store.artifacts import Store

TIMEOUT_S = 10.0
QUEUE_TIMEOUT_S = 3.0  # a list and a page wait for it
MOST_QUEUED = 50


def server_beside(store: Store) -> str | None:
    """The API of the server that `up` started together with this process as its dashboard; None in other processes."""
    by_name = {service.name: service for service in services.services(store)}
    dashboard, server = by_name.get("dashboard"), by_name.get("server")
    # The page runs inside the recorded dashboard. A second one, perhaps on a public address, is another process.
    if not dashboard or not server or dashboard.pid != os.getpid() or not (dashboard.alive() and server.alive()):
        return None
    services.use_login(store)
    return server.url


def queued_runs(store: Store) -> list[dict[str, Any]] | None:
    """The due runs of the server of `nautile up` that no process has begun, oldest first: id, name, config, since, why.

    They have no record in the store. None if the server does not answer.
    """
    server = next((service for service in services.services(store) if service.name == "server"), None)
    if server is None or not server.alive():
        return []
    services.use_login(store)
    served = any(service.name == "deployments" and service.alive() for service in services.services(store))

    def why_queued(state: str) -> str:
        if not served:
            return "nothing serves the deployments: `nautile up` starts it again"
        if state == "AwaitingConcurrencySlot":
            return "as many runs work as may at once: it begins when one of them ends"
        return "it waits for a process, which the deployments start within some seconds"

    waits: dict[str, Any] = {
        "state": {"type": {"any_": ["SCHEDULED", "PENDING"]}},
        "expected_start_time": {"before_": datetime.now(UTC).isoformat()},  # without those of a schedule to come
    }
    body = {"flow_runs": waits, "sort": "EXPECTED_START_TIME_ASC", "limit": MOST_QUEUED}
    try:
        response = call("POST", server.url, "/flow_runs/filter", json=body, timeout=QUEUE_TIMEOUT_S)
        return [
            {
                "id": str(run["id"]),
                "name": str(run["name"]),
                "config": str(run["parameters"].get("config") or ""),
                "since": str(run["expected_start_time"]),
                "why": why_queued(str(run.get("state_name"))),
            }
            for run in response.raise_for_status().json()
        ]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return None


def has_deployment(api: str, run: str) -> bool:
    """Whether the run is a deployment's: the server can cancel and retry only those."""
    try:
        response = call("GET", api, f"/flow_runs/{UUID(run)}", timeout=TIMEOUT_S)
        return response.is_success and response.json().get("deployment_id") is not None
    except (httpx.HTTPError, ValueError):
        return False


def retry_ended(api: str, run: str) -> None:
    """Retry a deployment's run that did not end well.

    Raises `ConfigError` if the server does not know the run, cannot start it, or has it at work or completed.
    """
    try:
        path = f"/flow_runs/{UUID(run)}"
    except ValueError:
        raise ConfigError(f"{run!r} is not the id of a run of a Prefect server") from None
    try:
        response = call("GET", api, path, timeout=TIMEOUT_S)
        answer = response.json() if response.is_success else {}
        state, has_deployment = answer.get("state") or {}, answer.get("deployment_id") is not None
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise ConfigError(f"run {run[:8]}: no Prefect server answers at {api} ({type(error).__name__})") from None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(wants_login(api))
    if not response.is_success:
        raise ConfigError(
            f"the server at {api} does not know the run {run}: PREFECT_API_URL must name the one it ran on"
        )
    if not has_deployment:
        raise ConfigError(
            f"run {run[:8]} was started in a terminal: `{shell_command('nautile', 'status', run[:8])}` shows the "
            "command that continues it"
        )
    if state.get("type") not in ("FAILED", "CRASHED", "CANCELLED"):
        raise ConfigError(f"run {run[:8]} is {state.get('name')}: only one that has ended without success starts again")
    retry(api, run, "by `nautile retry`")


def cancel(api: str, run: str) -> None:
    """Cancel the run on the server, which ends its processes. Raises `ConfigError` if the server refuses."""
    state = {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the dashboard"}
    ask_server(api, run, "set_state", {"state": state}, "was not cancelled", TIMEOUT_S)


def retry(api: str, run: str, where: str = "from the dashboard") -> None:
    """Retry the run on the server; finished steps are reused. Raises `ConfigError` if the server refuses."""
    details = {"scheduled_time": datetime.now(UTC).isoformat()}
    state = {"type": "SCHEDULED", "name": "Scheduled", "message": f"Retried {where}", "state_details": details}
    ask_server(api, run, "set_state", {"state": state, "force": True}, "was not retried", TIMEOUT_S)
