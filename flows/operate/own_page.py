"""What stands in front of Prefect's server: a browser gets in only for the server's own page.

The server takes any request that reaches it, and a browser sends some for every page that it shows. Allowed origins
(CORS) keep such a page from reading answers, and not from starting runs: a POST whose body has no content type is sent
without asking, and Prefect takes it for JSON. They do not hold for WebSockets at all, over which events are read.
Prefect's own protection writes a token for each client into its database (docs/log.md); this one reads headers.

The page itself may ask nobody else: its newer form starts Amplitude's client, which fetches a configuration from its
vendor whatever PREFECT_SERVER_ANALYTICS_ENABLED says. A content security policy keeps the browser from it.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from common.processes import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_READS = ("GET", "HEAD", "OPTIONS")


class OwnPageOnly:
    """An ASGI application around another, which refuses with status 403 what a browser sends for a foreign page.

    Other programs send none of the headers that it looks at. `host` and `port`: where the server listens. On loopback
    it answers to loopback's names alone: a foreign name may point to this machine, which makes its page the same
    origin. A request with a body must say that it is JSON (415).
    """

    def __init__(self, application: Application, host: str, port: int) -> None:
        self.application = application
        self.local = is_loopback(host)
        self.origins = {f"http://{name}:{port}" for name in _LOOPBACK} if self.local else set()
        # By one name of this machine the page may call its server by another; events come over WebSockets.
        # A policy cannot name an address of IPv6.
        names = sorted({f"{name}:{port}" for name in (*_LOOPBACK[: 2 * self.local], host) if ":" not in name})
        others = [f"{kind}://{name}" for kind in ("http", "ws") for name in names]
        # The page writes styles into itself, and its editor and its tables compile functions and start workers.
        own = "'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
        self.policy = f"default-src {own}; connect-src {' '.join([own, *others])}; form-action 'self'; base-uri 'self'"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:

            async def restricted(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)["Content-Security-Policy"] = self.policy
                await send(message)

            await self.application(scope, receive, restricted if scope["type"] == "http" else send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})  # the handshake gets 403
        else:
            await JSONResponse({"detail": refusal[1]}, refusal[0])(dict(scope), receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason with which a request is refused; None if it is not."""
        headers = Headers(scope=scope)
        host, origin, site = (headers.get(name) for name in ("host", "origin", "sec-fetch-site"))
        if self.local and not is_loopback(urlsplit(f"//{host or ''}").hostname or ""):
            return 403, "this server answers to names of this machine only, such as 127.0.0.1"
        if origin is not None:
            if origin not in {f"http://{host}", f"https://{host}", *self.origins}:
                return 403, "a page of another origin has no access to this server"
        elif site not in (None, "none", "same-origin"):
            opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
            if not (opened and scope.get("method") in _READS):  # a link from elsewhere to the server's page
                return 403, "a page of another origin has no access to this server"
        if scope["type"] == "http" and scope["method"] not in _READS:
            has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if has_body and media != "application/json":
                return 415, "the content type must be application/json"
        return None
