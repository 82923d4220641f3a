"""Cancel and retry runs of deployments through the API of a Prefect server, from the dashboard.

Only the dashboard that `nautile up` started may do so: with its own server, on loopback, in the recorded process.
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
    """The API of the server that `up` started together with this process as its dashboard; None in other processes."""
    by_name = {service.name: service for service in services.services(store)}
    dashboard, server = by_name.get("dashboard"), by_name.get("server")
    # `os.getpid()`: the page runs inside the recorded dashboard itself. A second dashboard, perhaps on a public
    # address, is another process.
    if not dashboard or not server or dashboard.pid != os.getpid() or not (dashboard.alive() and server.alive()):
        return None
    services.use_login(store)
    return server.url


def has_deployment(api: str, run: str) -> bool:
    """Whether the run is a deployment's: the server can cancel and retry only those."""
    try:
        response = call("GET", api, f"/flow_runs/{UUID(run)}", timeout=TIMEOUT_S)
        return response.is_success and response.json().get("deployment_id") is not None
    except (httpx.HTTPError, ValueError):
        return False


def cancel(api: str, run: str) -> None:
    """Cancel the run on the server, which ends its processes. Raises `ConfigError` if the server refuses."""
    state = {"type": "CANCELLING", "name": "Cancelling", "message": "Cancelled from the dashboard"}
    ask_server(api, run, "set_state", {"state": state}, "was not cancelled", TIMEOUT_S)


def retry(api: str, run: str) -> None:
    """Retry the run on the server; finished steps are reused. Raises `ConfigError` if the server refuses."""
    details = {"scheduled_time": datetime.now(UTC).isoformat()}
    state = {
        "type": "SCHEDULED",
        "name": "Scheduled",
        "message": "Retried from the dashboard",
        "state_details": details,
    }
    ask_server(api, run, "set_state", {"state": state, "force": True}, "was not retried", TIMEOUT_S)
