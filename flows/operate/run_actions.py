"""Cancel and retry runs of deployments through the API of a Prefect server, and where a page may do so.

Only the dashboard that `nautile up` started may: beside its own server, on loopback, in the process that is recorded.
"""

import os
from datetime import UTC, datetime
from uuid import UUID

import httpx

from flows.operate import services
from flows.operate.prefect_calls import ask_server, call
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
    state = {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the dashboard"}
    ask_server(api, run, "set_state", {"state": state}, "was not cancelled", TIMEOUT_S)


def retry(api: str, run: str) -> None:
    """Have the server start the run again, which reuses what is finished. Raises `ConfigError` if it refuses."""
    details = {"scheduled_time": datetime.now(UTC).isoformat()}
    state = {
        "type": "SCHEDULED",
        "name": "Scheduled",
        "message": "Retried from the dashboard",
        "state_details": details,
    }
    ask_server(api, run, "set_state", {"state": state, "force": True}, "was not retried", TIMEOUT_S)
