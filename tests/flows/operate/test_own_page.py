"""Which requests get past the check of origins, as browsers and as other programs send them."""

import asyncio
import contextlib
import threading
from socketserver import StreamRequestHandler, ThreadingTCPServer

import httpx
import pytest
import uvicorn
from starlette.responses import JSONResponse

from nautile.common.processes import listen
from nautile.flows.operate.own_page import OwnPageOnly
from tests.support.pages.browser import chromium, playwright

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
        ("GET", {"host": "["}, ""),  # no address at all
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


def test_the_page_may_connect_to_its_own_server_alone():
    async def ask(listening: str, url: str) -> str:
        guarded = OwnPageOnly(application, listening, 4200)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded)) as client:
            return (await client.get(f"{url}/")).headers["content-security-policy"]

    local = asyncio.run(ask("127.0.0.1", OWN))
    connect = next(rule.split()[1:] for rule in local.split("; ") if rule.startswith("connect-src"))
    hosts = [f"{kind}://{name}:4200" for kind in ("http", "ws") for name in ("127.0.0.1", "localhost")]
    assert connect == ["'self'", "'unsafe-inline'", "'unsafe-eval'", "data:", "blob:", *hosts]
    elsewhere = asyncio.run(ask("192.0.2.7", "http://192.0.2.7:4200"))
    assert "http://192.0.2.7:4200 ws://192.0.2.7:4200" in elsewhere
    assert "localhost" not in elsewhere


@pytest.mark.heavy
def test_the_browser_asks_nobody_outside_for_either_form_of_the_page():
    """A proxy stands for the world: what is not for this machine would arrive there."""
    from prefect.server.api.server import create_ui_app

    asked = []

    class World(StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode())

    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(OwnPageOnly(create_ui_app(False), "127.0.0.1", port), log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    serving = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    serving.start()
    with ThreadingTCPServer(("127.0.0.1", 0), World) as world, chromium() as window:
        threading.Thread(target=world.serve_forever, daemon=True).start()
        proxy = {"server": f"http://127.0.0.1:{world.server_address[1]}", "bypass": "127.0.0.1"}
        page = window.browser.new_context(proxy=proxy).new_page()
        page.goto(f"http://127.0.0.1:{port}/dashboard", wait_until="networkidle")
        # The newer form tries, and the browser refuses.
        with page.expect_console_message(lambda message: "amplitude.com" in message.text, timeout=60_000):
            page.goto(f"http://127.0.0.1:{port}/v2/dashboard", wait_until="networkidle")
        assert asked == []
        with contextlib.suppress(playwright.Error):
            page.goto("http://elsewhere.example/")
        assert "elsewhere.example" in asked[0]
        world.shutdown()
    server.should_exit = True
    serving.join(30)
