"""Calls to a Prefect server's API without Prefect's client, whose import takes seconds.

A server with CSRF protection accepts changes only with a token, which the client requests first. The server of
`nautile up` has no such protection (docs/decisions.md); other servers may have it.

httpx is imported at the first call: `nautile status` makes none unless a run waits for an approval.
"""

import os
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from nautile.common.errors import ConfigError
from nautile.common.retry import Backoff, retry

if TYPE_CHECKING:
    import httpx

# SQLite under load: Prefect answers 503 while a long transaction holds its database.
LOCKED = Backoff(give_up_s=30.0, first_s=0.2, longest_s=5.0)
_CLIENT_ID = str(uuid4())  # a CSRF token is valid only for the client that requested it


def call(method: str, api: str, path: str, **options: Any) -> "httpx.Response":
    """Send a request and return the response; retried while the server answers 503, as when its database is locked.

    `api` ends in /api. The login is PREFECT_API_AUTH_STRING (user:password), if set. Raises `httpx.HTTPError`, also for
    an address that is none.
    """
    import httpx

    user, separator, password = os.environ.get("PREFECT_API_AUTH_STRING", "").partition(":")
    auth = httpx.BasicAuth(user, password) if separator else None

    def send() -> "httpx.Response":
        with httpx.Client(base_url=api.rstrip("/"), auth=auth) as client:
            response = client.request(method, path, **options)
            if response.status_code == httpx.codes.FORBIDDEN and "CSRF" in response.text:
                token = client.get("/csrf-token", params={"client": _CLIENT_ID}).raise_for_status().json()["token"]
                headers = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": _CLIENT_ID}
                response = client.request(method, path, headers=headers, **options)
        return response.raise_for_status() if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else response

    try:
        return retry(send, LOCKED, should_retry=lambda error: isinstance(error, httpx.HTTPStatusError))
    except (httpx.InvalidURL, ValueError) as error:
        raise httpx.UnsupportedProtocol(f"{type(error).__name__}: {error}") from None


def ask_server(api: str, run: str, action: str, body: dict[str, Any], refused: str, timeout_s: float) -> None:
    """Request a change of a run (`action`: `set_state` or `resume`) from a server.

    Raises `ConfigError` unless the server accepts it; `refused` is the phrase for that message ("was not resumed").
    """
    import httpx

    try:
        path = f"/flow_runs/{UUID(run)}/{action}"
    except ValueError:
        raise ConfigError(f"{run!r} is not the id of a run") from None
    try:
        response = call("POST", api, path, json=body, timeout=timeout_s)
        result = response.json() if response.content else {}
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"run {run}: its server at {api} does not answer ({type(error).__name__})") from None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"run {run}: {wants_login(api)}")
    # Prefect answers 200 also when it rejects a state; the reason is in the body.
    if result.get("status") != "ACCEPT":
        reason = (result.get("details") or {}).get("reason") or result.get("detail") or f"status {response.status_code}"
        raise ConfigError(f"run {run} {refused}: {reason}")


def wants_login(api: str) -> str:
    """The message about a server that answers 401."""
    return (
        f"the server at {api} requires a login: the environment variable PREFECT_API_AUTH_STRING (user:password) is "
        "not set, or its login is wrong"
    )
