"""Calls to a Prefect server's API without Prefect's client, whose import takes seconds.

A server with protection against forged requests (CSRF) takes changes only with a token that it gives to whoever may
read its answers: a page of another origin may not. The server of `nautile up` has none (docs/log.md); others may.

httpx is imported by the first call: `nautile status` makes none unless a run waits for an answer.
"""

import os
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from common.errors import ConfigError
from common.retry import Backoff, retry

if TYPE_CHECKING:
    import httpx

LOCKED = Backoff(give_up_s=30.0, first_s=0.2, longest_s=5.0)
_CLIENT_ID = str(uuid4())  # a token belongs to the client that asked for it


def call(method: str, api: str, path: str, **options: Any) -> "httpx.Response":
    """The server's response, after another try while its database is locked: then it answers 503.

    `api` ends in /api. A login is that of PREFECT_API_AUTH_STRING (user:password). Raises `httpx.HTTPError`.
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

    return retry(send, LOCKED, should_retry=lambda error: isinstance(error, httpx.HTTPStatusError))


def ask_server(api: str, run: str, action: str, body: dict[str, Any], refused: str, timeout_s: float) -> None:
    """Ask a server for a change of a run (`set_state`, `resume`); ConfigError, with `refused`, unless it accepts."""
    import httpx

    try:
        path = f"/flow_runs/{UUID(run)}/{action}"
    except ValueError:
        raise ConfigError(f"{run!r} is no id of a run") from None
    try:
        response = call("POST", api, path, json=body, timeout=timeout_s)
        result = response.json() if response.content else {}
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"run {run}: its server at {api} does not answer ({type(error).__name__})") from None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(f"run {run}: {wants_login(api)}")
    if result.get("status") != "ACCEPT":
        reason = (result.get("details") or {}).get("reason") or result.get("detail") or f"status {response.status_code}"
        raise ConfigError(f"run {run} {refused}: {reason}")


def wants_login(api: str) -> str:
    """What to tell the operator of a server that answers 401."""
    return (
        f"the server at {api} wants a login, and that in the environment variable PREFECT_API_AUTH_STRING "
        "(user:password) is not it or is not set"
    )
