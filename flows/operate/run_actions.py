"""Cancel and retry runs of deployments through the API of a Prefect server: from the dashboard, and `nautile retry`.

Of the dashboards only the one that `nautile up` started may do so: with its own server, on loopback, in the recorded
process.
"""

import os
from datetime import UTC, datetime
from uuid import UUID

import httpx

from common.commands import shell_command
from common.errors import ConfigError
from flows.operate import services
from flows.operate.prefect_calls import ask_server, call, wants_login
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
