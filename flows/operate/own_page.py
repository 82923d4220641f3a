"""ASGI middleware of Prefect's server that refuses cross-origin requests (CSRF, DNS rebinding).

Any page that a browser shows can send requests to the server. CORS prevents such a page from reading responses, but not
from starting runs: a POST whose body has no content type is sent without a preflight request, and Prefect parses it as
JSON. CORS does not apply to WebSockets at all, over which events are read. Prefect's own CSRF protection writes a token
for each client to its database (docs/decisions.md); this middleware only checks headers.

A content security policy keeps Prefect's page from connecting to other servers: its newer version loads Amplitude's
client, which contacts its vendor even with PREFECT_SERVER_ANALYTICS_ENABLED=false.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from nautile.common.processes import is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_READS = ("GET", "HEAD", "OPTIONS")


class OwnPageOnly:
    """Middleware that answers a browser's request for a page of another origin with status 403.

    Programs other than browsers do not send the headers that it checks. `host` and `port`: where the server listens. On
    loopback it accepts only loopback names as `Host`, because a foreign name that resolves to this machine makes its
    page the same origin (DNS rebinding). A request with a body must be JSON (else 415). `body_of`: the JSON of a
    refusal, from its status and reason.
    """

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        body_of: Callable[[int, str], Any] = lambda status, reason: {"detail": reason},
    ) -> None:
        self.application, self.body_of = application, body_of
        self.local = is_loopback(host)
        self.origins = {f"http://{name}:{port}" for name in _LOOPBACK} if self.local else set()
        # A page that was opened by one loopback name may call the server by another; events come over WebSockets.
        # A content security policy cannot contain IPv6 addresses.
        names = sorted({f"{name}:{port}" for name in (*_LOOPBACK[: 2 * self.local], host) if ":" not in name})
        others = [f"{kind}://{name}" for kind in ("http", "ws") for name in names]
        # Prefect's page uses inline styles; its editor and tables use eval and workers.
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
            await JSONResponse(self.body_of(*refusal), refusal[0])(dict(scope), receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason to refuse a request with; None if it is allowed."""
        headers = Headers(scope=scope)
        host, origin, site = (headers.get(name) for name in ("host", "origin", "sec-fetch-site"))
        # DNS rebinding: to the browser it is the same origin, so no other header gives it away.
        try:
            name = urlsplit(f"//{host or ''}").hostname or ""
        except ValueError:  # an unclosed bracket
            name = ""
        if self.local and not is_loopback(name):
            return 403, "this server answers to names of this machine only, such as 127.0.0.1"
        # Browsers send `Origin` with every POST and every WebSocket, and pages cannot change it.
        if origin is not None:
            if origin not in {f"http://{host}", f"https://{host}", *self.origins}:
                return 403, "a page of another origin has no access to this server"
        elif site not in (None, "none", "same-origin"):
            # Without `Origin`: a GET. `Sec-Fetch-Site` says whether a page of another site has caused it; older
            # browsers and programs send neither.
            navigation = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
            if not (navigation and scope.get("method") in _READS):
                return 403, "a page of another origin has no access to this server"
        if scope["type"] == "http" and scope["method"] not in _READS:
            # Only JSON makes a browser ask first (preflight), and that is refused above.
            has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
            media = headers.get("content-type", "").partition(";")[0].strip().lower()
            if has_body and media != "application/json":
                return 415, "the content type must be application/json"
        return None
