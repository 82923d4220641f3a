"""Which requests get past the check of origins, as browsers and as other programs send them."""

import asyncio

import httpx
import pytest
from starlette.responses import JSONResponse

from flows.operate.own_page import OwnPageOnly

OWN, ELSEWHERE = "http://127.0.0.1:4200", "http://elsewhere.example"
JSON = {"content-type": "application/json"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}


async def application(scope, receive, send):
    await JSONResponse({"seen": scope["method"]})(scope, receive, send)


def status(method: str, headers: dict[str, str], body: str = "", listening: str = "127.0.0.1", url: str = OWN) -> int:
    async def ask() -> int:
        guarded = OwnPageOnly(application, listening, 4200)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded)) as client:
            return (await client.request(method, f"{url}/api/x", headers=headers, content=body)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("POST", JSON, "{}"),  # a program
        ("POST", {}, ""),
        ("GET", {}, ""),
        ("POST", {"origin": OWN, "sec-fetch-site": "same-origin", **JSON}, "{}"),  # the server's page
        ("GET", {"sec-fetch-site": "same-origin"}, ""),
        ("GET", {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, ""),  # an address that a person typed
        ("POST", {"origin": "http://localhost:4200", "sec-fetch-site": "cross-site", **JSON}, "{}"),
        ("GET", {**LINK, "sec-fetch-dest": "document"}, ""),  # a link, as the dashboard has them
        ("DELETE", {"origin": OWN}, ""),
    ],
)
def test_programs_and_the_servers_own_page_get_in(method, headers, body):
    assert status(method, headers, body) == 200


@pytest.mark.parametrize(
    ("method", "headers", "body"),
    [
        ("POST", {"origin": ELSEWHERE, "sec-fetch-site": "cross-site"}, "{}"),  # fetch with no-cors and a bare Blob
        ("POST", {"origin": ELSEWHERE, **JSON}, "{}"),
        ("POST", {"origin": "null", **JSON}, "{}"),  # a sandboxed frame
        ("POST", {"origin": "http://127.0.0.1:8501", "sec-fetch-site": "same-site", **JSON}, "{}"),
        ("POST", {"sec-fetch-site": "cross-site", **JSON}, "{}"),
        ("OPTIONS", {"origin": ELSEWHERE, "access-control-request-method": "POST"}, ""),
        ("GET", {"origin": ELSEWHERE}, ""),
        ("GET", {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, ""),
        ("GET", {**LINK, "sec-fetch-dest": "iframe"}, ""),
        ("POST", {**LINK, "sec-fetch-dest": "document"}, ""),  # a form that a page submits
        (
            "GET",
            {"host": "elsewhere.example:4200"},
            "",
        ),  # a name that points here: its page is then of this origin
        ("POST", {"host": "elsewhere.example:4200", "origin": "http://elsewhere.example:4200", **JSON}, "{}"),
    ],
)
def test_pages_of_other_origins_do_not(method, headers, body):
    assert status(method, headers, body) == 403


@pytest.mark.parametrize("media", [{}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data; x=y"}])
def test_a_body_must_say_that_it_is_json(media):
    assert status("POST", media, "{}") == 415


def test_beyond_loopback_the_own_origin_is_the_host_that_was_asked():
    url = "http://gpu-box:4200"
    assert status("POST", {"origin": url, **JSON}, "{}", "192.0.2.7", url) == 200
    assert status("POST", {"origin": OWN, **JSON}, "{}", "192.0.2.7", url) == 403


def test_a_websocket_of_another_origin_is_closed_before_it_opens():
    sent = []

    async def connect(origin: str) -> None:
        headers = [(b"host", b"127.0.0.1:4200"), (b"origin", origin.encode())]

        async def send(message):
            sent.append(message)

        async def accept(scope, receive, send):
            await send({"type": "websocket.accept"})

        scope = {"type": "websocket", "headers": headers, "path": "/api/events/out"}
        await OwnPageOnly(accept, "127.0.0.1", 4200)(scope, None, send)

    asyncio.run(connect(ELSEWHERE))
    asyncio.run(connect(OWN))
    assert [message["type"] for message in sent] == ["websocket.close", "websocket.accept"]
