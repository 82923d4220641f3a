"""Cancel and retry runs of deployments through the API of a Prefect server, and where a page may do so.

Only the dashboard that `nautile up` started may: beside its own server, on loopback, in the process that is recorded.
"""

import os
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx

from common.errors import ConfigError
from flows.operate import services
from flows.operate.prefect_calls import call, wants_login
from store.artifacts import Store

TIMEOUT_S = 10.0


def server_beside(store: Store) -> str | None:
    """The API of the server that `up` started with this very process as its dashboard; None elsewhere."""
    started = {service.name: service for service in services.services(store)}
    dashboard, server = started.get("dashboard"), started.get("server")
    if not dashboard or not server or dashboard.pid != os.getpid() or not (dashboard.alive() and server.alive()):
        return None
    services.use_login(store)
    return server.url


def has_deployment(api: str, run: str) -> bool:
    """Whether the server knows the run as that of a deployment: it can stop and begin no other."""
    try:
        response = call("GET", api, f"/flow_runs/{UUID(run)}", timeout=TIMEOUT_S)
        return response.is_success and response.json().get("deployment_id") is not None
    except (httpx.HTTPError, ValueError):
        return False


def cancel(api: str, run: str) -> None:
    """Have the server cancel the run, which ends its processes. Raises `ConfigError` if it refuses."""
    _set_state(api, run, {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the dashboard"})


def retry(api: str, run: str) -> None:
    """Have the server start the run again, which reuses what is finished. Raises `ConfigError` if it refuses."""
    details = {"scheduled_time": datetime.now(UTC).isoformat()}
    state = {
        "type": "SCHEDULED",
        "name": "Scheduled",
        "message": "Retried from the dashboard",
        "state_details": details,
    }
    _set_state(api, run, state | {"state_details": details}, force=True)


def _set_state(api: str, run: str, state: dict[str, Any], force: bool = False) -> None:
    body = {"state": state, "force": force}
    try:
        response = call("POST", api, f"/flow_runs/{UUID(run)}/set_state", json=body, timeout=TIMEOUT_S)
        result = response.json() if response.content else {}
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"run {run}: its server at {api} does not answer ({type(error).__name__})") from None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"run {run}: {wants_login(api)}")
    if result.get("status") != "ACCEPT":
        reason = (result.get("details") or {}).get("reason") or result.get("detail") or f"status {response.status_code}"
        raise ConfigError(f"run {run}: the server refused: {reason}")
