"""Calls to the API of a Prefect server. It answers 503 while its SQLite database is locked: those are repeated."""

from typing import Any

import httpx

from nautile.common.retry import Backoff, retry

BACKOFF = Backoff(give_up_s=300.0, first_s=0.2, longest_s=5.0)
TIMEOUT_S = 120.0  # a call that timed out may have had its effect, so it is not repeated
# Without a context for TLS, which takes 20 ms of processor time to make, for each call if each has a client of its own.
CLIENT = httpx.Client(verify=False, timeout=TIMEOUT_S, limits=httpx.Limits(max_keepalive_connections=0))

LOGINS: dict[str, str] = {}  # address of an API -> the login that its server wants, user:password


def request(url: str, body: dict[str, Any] | None = None, method: str = "") -> httpx.Response:
    """The response to a GET, to a POST of `body`, or to another method. Its status may be of an error, but not 503."""

    user, separator, password = next((LOGINS[api] for api in LOGINS if url.startswith(api)), "").partition(":")
    auth = httpx.BasicAuth(user, password) if separator else None

    def send() -> httpx.Response:
        response = CLIENT.request(method or ("GET" if body is None else "POST"), url, json=body, auth=auth)
        return response.raise_for_status() if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else response

    # A read has no effect, so it is also repeated after a connection that a killed server has broken.
    reads = body is None and not method
    passing = (httpx.HTTPStatusError, httpx.NetworkError if reads else httpx.ConnectError)
    return retry(send, BACKOFF, should_retry=lambda error: isinstance(error, passing))


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON data of a GET, or of a POST of `body`. Raises `httpx.HTTPStatusError`."""
    return request(url, body).raise_for_status().json()


def remove_limits(url: str) -> None:
    """Remove the server's concurrency limits: deployments of other tests have declared them, and runs would wait."""
    for limit in fetch(f"{url}/v2/concurrency_limits/filter", {}):
        request(f"{url}/v2/concurrency_limits/{limit['id']}", method="DELETE").raise_for_status()
