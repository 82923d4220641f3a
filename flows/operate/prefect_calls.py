"""Calls to a Prefect server's API without Prefect's client, whose import takes seconds.

A server with protection against forged requests (CSRF), as `nautile up` starts it, takes changes only with a token that
it gives to whoever may read its answers: a page of another origin may not.
"""

import os
from typing import Any
from uuid import uuid4

import httpx

from common.retry import Backoff, retry

LOCKED = Backoff(give_up_s=30.0, first_s=0.2, longest_s=5.0)
_CLIENT_ID = str(uuid4())  # a token belongs to the client that asked for it


def call(method: str, api: str, path: str, **options: Any) -> httpx.Response:
    """The server's response, after another try while its database is locked: then it answers 503.

    `api` ends in /api. A login is that of PREFECT_API_AUTH_STRING (user:password). Raises `httpx.HTTPError`.
    """
    user, separator, password = os.environ.get("PREFECT_API_AUTH_STRING", "").partition(":")
    auth = httpx.BasicAuth(user, password) if separator else None

    def send() -> httpx.Response:
        with httpx.Client(base_url=api.rstrip("/"), auth=auth) as client:
            headers = {}
            if method != "GET":
                token = refused_while_locked(client.get("/csrf-token", params={"client": _CLIENT_ID}))
                if token.status_code == httpx.codes.OK:  # else the server has no such protection
                    headers = {"Prefect-Csrf-Token": token.json()["token"], "Prefect-Csrf-Client": _CLIENT_ID}
            return refused_while_locked(client.request(method, path, headers=headers, **options))

    def refused_while_locked(response: httpx.Response) -> httpx.Response:
        return response.raise_for_status() if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else response

    return retry(send, LOCKED, should_retry=lambda error: isinstance(error, httpx.HTTPStatusError))
