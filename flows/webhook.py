"""Tell a URL of the operator's. It is a secret: read from the environment, it stands in no log and no message."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import httpx

from tasks.wording import visible

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
PAUSES_S = (1.0, 4.0)  # between the attempts, of which there is one more
_AGAIN = (408, 425, 429)  # and all of 5xx: worth another attempt


def post(variable: str, message: dict[str, Any], sleep: Callable[[float], object] = time.sleep) -> str | None:
    """POST `message` as JSON to the URL in environment variable `variable`. None: it was taken (2xx); else why not.

    Never raises: whoever tells has done its work already. Redirects are not followed.
    """
    url = os.environ.get(variable, "")
    if not url:
        return f"schedule.webhook: the environment variable {variable} is not set where the flow runs"
    # httpx writes every URL it asks to the log, and this one is a secret.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    fault = ""
    for pause in (*PAUSES_S, None):
        fault, again = _attempt(url, message)
        if not fault:
            return None
        if not again or pause is None:
            break
        logger.warning("the webhook in %s was not taken (%s); once more in %g s", variable, fault, pause)
        sleep(pause)
    said = f"the webhook in {variable} was not taken: {fault}"
    logger.error(said)
    return said


def _attempt(url: str, message: dict[str, Any]) -> tuple[str, bool]:
    """What was wrong with it ("": nothing), and whether another attempt may go better."""
    try:
        status = httpx.post(url, json=message, timeout=TIMEOUT_S, follow_redirects=False).status_code
    except httpx.TransportError as error:
        # Of the error only its kind: some of them quote the URL.
        return visible(type(error).__name__, 80), not isinstance(error, httpx.UnsupportedProtocol)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return f"{type(error).__name__}: is it a whole URL (https://…)?", False
    return ("", False) if 200 <= status < 300 else (f"status {status}", status in _AGAIN or status >= 500)
